"""What is said of a bias, against the bias that it gives to entries."""

import torch

from fuxi_torchrec.tasks.explain import bias_curves
from fuxi_torchrec.tasks.next_item import LossConfig, NextItem
from fuxi_torchrec.tasks.repeats import PARTS, Entries, RepeatBias, RepeatsConfig

PERIODS = (86_400_000, 604_800_000)


def bias_of(*learned, **config):
    """With random values in the first 9 buckets of the parts named, 0 elsewhere."""
    bias = RepeatBias(RepeatsConfig(64, PERIODS, **config), 4)
    torch.manual_seed(0)
    with torch.no_grad():
        for name in learned:
            values = bias.part(name)
            values.view(len(PERIODS) if name == "phase" else 2 if name == "lead" else 1, -1)[:, :9].normal_()
    return bias


def given(bias, events_ago=0, count=1, gap=0, since=0, first_gap=0, slot=1):
    """The bias of an entry, the others of the window having another count."""
    shape = (1, slot + 1)
    there = torch.ones(shape, dtype=torch.bool)
    ago, counts, gaps, sinces = (torch.zeros(shape, dtype=torch.int64) for _ in range(4))
    gaps[0, 0] = first_gap
    ago[0, -1], counts[0, -1], sinces[0, -1] = events_ago, count, since
    gaps[0, -1] = gap if slot else first_gap
    return bias(torch.zeros(1, 4), Entries(there, ago, counts, gaps, sinces))[0, -1].item()


def test_each_curve_is_what_an_entry_is_given():
    asked = {
        "events_ago": lambda x: {"events_ago": x},
        "items_ago": lambda x: {"slot": x},
        "count": lambda x: {"count": x},
        "gap": lambda x: {"gap": x, "slot": 1},
        "since": lambda x: {"since": 1000 * x},  # the unit is a millisecond
    }
    for place, (name, arguments) in enumerate(asked.items()):
        bias = bias_of(name)
        blocks = bias_curves(bias, 1000).blocks
        curve = blocks[place // 3][place % 3]
        wanted = [given(bias, **{key: round(x) for key, x in arguments(x).items()}) for x in curve.x]
        torch.testing.assert_close(torch.tensor(curve.y), torch.tensor(wanted))
        assert len(curve.x) == 9  # no bucket that was never used
        others = [each for row in blocks for each in row if each is not curve]
        assert not any(value for each in others for value in each.y)


def test_leads_of_both_signs_and_phases_are_what_an_entry_is_given():
    bias = bias_of("lead")
    curve = bias_curves(bias, 1000).blocks[1][2]
    assert curve.x == sorted(curve.x) and min(curve.x) == -max(curve.x) < 0
    # the last item occurred 100 events before its last time: an item 100 − x events ago leads by x
    wanted = [given(bias, events_ago=100 - int(x), first_gap=100) for x in curve.x]
    torch.testing.assert_close(torch.tensor(curve.y), torch.tensor(wanted))
    bias = bias_of("phase")
    for number, (curve, period) in enumerate(zip(bias_curves(bias, 1000).blocks[2], PERIODS, strict=True)):
        assert curve.title == ("by phase of 1 d", "by phase of 7 d")[number]
        with torch.no_grad():  # the other period's phase is not asked about
            bias.phase.zero_().view(2, -1)[number] = torch.tensor(curve.y)
        wanted = [given(bias, since=int(x * period)) for x in curve.x]
        torch.testing.assert_close(torch.tensor(curve.y), torch.tensor(wanted))
        bias = bias_of("phase")


def test_text_and_figure_show_what_is_there(tmp_path):
    found = bias_curves(bias_of("count", without=("lead", "gap", "user")), 1000)
    assert [len(row) for row in found.blocks] == [3, 1, 2]
    text = found.text()
    assert "by times it occurred" in text and "mix 0, items 0" in text and "between its last two" not in text
    found.draw("a run", tmp_path / "bias.png")
    assert (tmp_path / "bias.png").read_bytes().startswith(b"\x89PNG")


def test_a_task_without_tables_has_nothing_to_show():
    assert NextItem(LossConfig()).explain(1) is None
    assert NextItem(LossConfig(), RepeatsConfig(8), 4).explain(1) is not None
    assert NextItem(LossConfig(), RepeatsConfig(8, without=PARTS), 4).explain(1) is None
