"""All known items."""

from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.samplers.base import Candidates, Draw, Sampler


class Full(Sampler):
    """The softmax over the whole catalogue."""

    grows = True

    def draw(self, items: ItemSet, at: Draw) -> Candidates:
        return Candidates(items.ids)

    def lookups(self, events: int, items: int) -> int:
        return items
