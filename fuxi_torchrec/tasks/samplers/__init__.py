"""Ways to choose what targets are compared with, by the name that ``loss.negatives`` gives them."""

from fuxi_torchrec.tasks.samplers.base import Candidates, Draw, Sampler
from fuxi_torchrec.tasks.samplers.full import Full
from fuxi_torchrec.tasks.samplers.in_batch import InBatch
from fuxi_torchrec.tasks.samplers.shared import Shared
from fuxi_torchrec.tasks.samplers.uniform import Uniform

SAMPLERS: dict[str, type[Sampler]] = {"shared": Shared, "uniform": Uniform, "full": Full, "in_batch": InBatch}

__all__ = ["SAMPLERS", "Candidates", "Draw", "Sampler"]
