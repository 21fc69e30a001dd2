"""What is said of a dataset, against counting."""

from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.repeats import DISTANCES, SHARES
from fuxi_torchrec.data.tests.small import make_dataset, random_histories
from pipelines import inspect


def test_repeats_are_those_of_counting(tmp_path, capsys):
    histories = random_histories(3, 30, 60, 40)
    histories[4] = (histories[4][0][:1], histories[4][1][:1])  # nothing before its last event
    dataset = make_dataset(tmp_path / "set", histories, 40, block_users=7)
    shares, far = dict.fromkeys(SHARES, 0), dict.fromkeys(DISTANCES[:-1], 0)
    for items in (history[0].tolist() for history in histories if len(history[0]) > 1):
        *before, last = items
        share = 1 - len(set(before)) / len(before)
        shares[next(name for name in shares if share <= float(name.strip("<=")))] += 1
        back = before[::-1].index(last) + 1 if last in before else 0
        far["never" if not back else "1-10" if back <= 10 else "11-100"] += 1
    assert inspect.repeat_histograms(Reader(dataset)) == (shares, far)
    assert sum(count > 0 for count in far.values()) == 3 <= sum(count > 0 for count in shares.values())
    assert inspect.main([str(tmp_path / "set")]) == 0
    assert "users by share of repeats" in capsys.readouterr().out
