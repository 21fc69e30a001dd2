"""The seeded mistakes of the GPU path can still be made; `python -m benchmarks.gpu_mutations` says who finds them."""

import pytest

from benchmarks import gpu_mutations
from benchmarks.gpu_mutations import MISTAKES, ROOT, TESTS


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_changes_one_place(mistake):
    text = (ROOT / "fuxi_torchrec" / mistake.file).read_text()
    changed = gpu_mutations.mistaken(mistake, text)
    assert changed != text and len(changed) - len(text) == len(mistake.new) - len(mistake.old)
    compile(changed, mistake.file, "exec")
    assert (ROOT / TESTS[mistake.found_by]).exists()


def test_a_place_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match="stands 0 times in"):
        gpu_mutations.mistaken(MISTAKES[0], "nothing")


def test_there_are_many_and_each_has_a_name():
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) >= 10
