import signal

from fuxi_torchrec.artifacts import NewDirectory
from pipelines import inspect, prepare


def test_prepare_and_inspect_from_the_command_line(tmp_path, capsys):
    log = tmp_path / "log.csv"
    log.write_text(
        "user,item,time\n" + "".join(f"{u},{i},{1_600_000_000 + 60 * i}\n" for u in range(3) for i in range(5))
    )
    columns = ["--user-column", "user", "--item-column", "item", "--time-column", "time", "--time-unit", "s"]
    out = str(tmp_path / "set")
    assert prepare.main(["events", "--input", str(log), "--output", out, *columns]) == 0
    assert "3 users, 5 items, 15 events, 2020-09-13 12:26:40 to 2020-09-13 12:30:40" in capsys.readouterr().out
    assert inspect.main([out, "--user", "2"]) == 0
    report = capsys.readouterr().out
    assert "events per user: median 5, mean 5, longest 5" in report
    assert "<= 1 min           12 100.0 %" in report
    assert "user 2 (row 2): 5 events, the last 5:\n  2020-09-13 12:26:40  0" in report


def test_mistakes_end_in_one_line_and_exit_code_1(tmp_path, capsys):
    assert prepare.main(["ml-1m", "--input", str(tmp_path / "none"), "--output", str(tmp_path / "set")]) == 1
    assert capsys.readouterr().err.endswith("none: no such file or directory\n")
    assert prepare.main(["synthetic", "--users", "0", "--output", str(tmp_path / "set")]) == 1
    assert inspect.main([str(tmp_path)]) == 1
    assert "no dataset here" in capsys.readouterr().err


def test_a_signal_after_the_dataset_has_its_name(tmp_path, capsys, monkeypatch):
    arguments = ["synthetic", "--users", "5", "--output", str(tmp_path / "set")]
    with monkeypatch.context() as patched:
        patched.setattr(NewDirectory, "end", lambda _: signal.raise_signal(signal.SIGTERM))  # all is done
        assert prepare.main(arguments) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == f"prepare: stopped by SIGTERM; {tmp_path / 'set'} is complete\n"
    assert inspect.main([str(tmp_path / "set")]) == 0
    monkeypatch.setattr(prepare, "run", lambda *_: signal.raise_signal(signal.SIGTERM))  # one of before is not its
    assert prepare.main(arguments) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "prepare: stopped by SIGTERM; nothing was written\n"


def test_synthetic_with_its_oracle(tmp_path, capsys):
    out = str(tmp_path / "set")
    assert prepare.main(["synthetic", "--users", "20", "--seed", "1", "--output", out, "--oracle"]) == 0
    assert "best achievable HR@10: 0." in capsys.readouterr().out
    assert inspect.main([out, "--user", "99"]) == 1
    assert "--user must be 0 to 19, not 99" in capsys.readouterr().err
