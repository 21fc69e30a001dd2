"""What a checkpoint says beside its tensors."""

from dataclasses import replace

import pytest

from fuxi_torchrec.training.checkpoint.info import CheckpointError, Progress, named, point


def test_the_best_validation_is_kept_and_the_worse_ones_since_are_counted():
    first = Progress(step=10).validated(0.2, "mrr")
    assert (first.best_metric, first.best_step, first.validated_step, first.validations_since_best) == (0.2, 10, 10, 0)
    worse = replace(first, step=20).validated(0.1, "mrr")
    level = replace(worse, step=30).validated(0.2, "mrr")
    assert (level.best_metric, level.best_step, level.validated_step, level.validations_since_best) == (0.2, 10, 30, 2)
    better = replace(level, step=40).validated(0.3, "mrr")
    assert (better.best_metric, better.best_step, better.validations_since_best) == (0.3, 40, 0)
    other = replace(better, step=50).without_best().validated(0.1, "hr@10")
    assert (other.best_metric, other.best_step, other.best_of) == (0.1, 50, "hr@10")


@pytest.mark.parametrize("which", ["latest", "best"])
def test_a_flipped_bit_never_names_another_checkpoint(tmp_path, which):
    for step in range(10):
        (tmp_path / f"step-00000000{step}").mkdir()
    point(tmp_path, which, tmp_path / "step-000000006")
    assert named(tmp_path, which) == tmp_path / "step-000000006"
    written = (tmp_path / which).read_bytes()
    refused = 0
    for bit in range(8 * len(written)):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / which).write_bytes(damaged)
        try:
            assert named(tmp_path, which) == tmp_path / "step-000000006"  # white space became other white space
        except CheckpointError as error:
            refused += f"{which}: " in str(error) and "remove it" in str(error)
    assert refused > 7.8 * len(written)
