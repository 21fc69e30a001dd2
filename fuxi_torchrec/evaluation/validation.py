"""What a training run's validation measures."""

from collections.abc import Callable

from fuxi_torchrec.evaluation.encoding import UserEncoder
from fuxi_torchrec.evaluation.held_out import HeldOut
from fuxi_torchrec.training.run import Run


def validate(run: Run, moved: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Metrics of the validation targets of the run's sample of users, each queried at the target's time.

    A collective; every rank gets the result of all. ``moved`` is called before every batch.
    """
    data, users, metrics = run.data, run.validations.users, run.module.task.metrics()
    encoder = UserEncoder(run.model, run.tables, run.world, data.lookups)
    held_out = HeldOut(encoder, data.maker, "valid", data.candidates, run.config, run.config.validation.filter_seen)
    was_training = run.model.training
    run.model.eval()
    try:
        for found in held_out.ranked(users, data.lengths[users], ["target"], moved=moved):
            metrics.add(found.ranks["target"])
        return metrics.result()
    finally:
        run.model.train(was_training)
