import shlex
from pathlib import Path

from pipelines import demo


def test_a_directory_that_is_no_demos_is_left_alone(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").touch()
    assert demo.main(["--directory", str(tmp_path / "run")]) == 1
    assert "exists and is not a demo's: name another --directory" in capsys.readouterr().err
    assert (tmp_path / "run" / "weights").exists()


def test_an_earlier_demo_is_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "synthetic_stages", lambda root, users: [demo.Stage("fail", "false")])
    for _ in range(2):
        assert demo.main(["--directory", str(tmp_path / "demo")]) == 1
        assert "the demo stopped: this command ended with exit code 1" in capsys.readouterr().err
        (tmp_path / "demo" / "left").mkdir()
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [".demo", "left", "logs"]


def test_commands_name_paths_as_the_repository_sees_them(tmp_path, monkeypatch):
    assert demo.in_repository(demo.ROOT / "runs" / "demo") == Path("runs/demo")
    monkeypatch.chdir(tmp_path)
    assert demo.in_repository(Path("here")) == tmp_path / "here"
    for stage in demo.synthetic_stages(Path("my demo"), 20):
        assert any(word.startswith(("my demo", "data.path=my demo")) for word in shlex.split(stage.command))


TRAINED = """torchx 2026-11-18 07:26:36 INFO     Tracker configurations: {}
local_cwd://torchx/train-w0s6rr3kj66g5
train/0 [0]:table                sharding       kernel
train/0 [0]:11-18 07:26:43 step 58: validation mrr 0.1
train/0 [0]:11-18 07:26:43 done: 58 steps in 2.7 s
torchx 2026-11-18 07:26:44 INFO     Job finished: SUCCEEDED
"""


def test_what_matters_is_shown_and_everything_is_in_the_log(tmp_path, capsys):
    (tmp_path / "said").write_text(TRAINED)
    stage = demo.Stage("train", f"cat {tmp_path}/said", "validation|done:")
    assert demo.run(stage, tmp_path / "log") == 0
    assert capsys.readouterr().out.splitlines() == ["    step 58: validation mrr 0.1", "    done: 58 steps in 2.7 s"]
    assert (tmp_path / "log").read_text() == TRAINED
    assert demo.run(demo.Stage("a table", f"cat {tmp_path}/said"), tmp_path / "log") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "without a pattern all but TorchX's lines"


def test_a_command_that_fails_is_shown_with_the_last_lines_of_its_log(tmp_path, monkeypatch, capsys):
    stage = demo.Stage("fail", "sh -c 'seq 100 >&2; exit 4'", "nothing")
    monkeypatch.setattr(demo, "synthetic_stages", lambda root, users: [stage])
    assert demo.main(["--directory", str(tmp_path / "demo")]) == 1
    said = capsys.readouterr()
    assert "$ sh -c" in said.out and "\n100" not in said.out
    assert "exit code 4; the last lines of" in said.err and said.err.splitlines()[-1] == "100"
    assert "\n81\n" in said.err and "\n80\n" not in said.err
    assert len((tmp_path / "demo" / "logs" / "1-sh.log").read_text().splitlines()) == 100
