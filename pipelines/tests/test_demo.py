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
    monkeypatch.setattr(demo, "synthetic_stages", lambda root: [demo.Stage("fail", "false")])
    for _ in range(2):
        assert demo.main(["--directory", str(tmp_path / "demo")]) == 1
        assert "the demo stopped: this command ended with exit code 1" in capsys.readouterr().err
        (tmp_path / "demo" / "left").mkdir()
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [".demo", "left"]


def test_commands_name_paths_as_the_repository_sees_them(tmp_path, monkeypatch):
    assert demo.in_repository(demo.ROOT / "runs" / "demo") == Path("runs/demo")
    monkeypatch.chdir(tmp_path)
    assert demo.in_repository(Path("here")) == tmp_path / "here"
    for stage in demo.synthetic_stages(Path("my demo")):
        assert any(word.startswith(("my demo", "data.path=my demo")) for word in shlex.split(stage.command))
