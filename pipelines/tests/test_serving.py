"""The commands refresh, recommend and serve: what they print and refuse."""

import json

import pytest

from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export
from pipelines import recommend, refresh, serve


@pytest.fixture
def export(tmp_path):
    write_demo_export(tmp_path / "x", DemoExport(users=6, items=20))
    return tmp_path / "x"


def test_recommend_as_json_and_as_a_table(export, capsys):
    assert recommend.main(["--export", str(export), "--user", "3", "-k", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    manifest = Bundle.open(export).manifest
    assert (answer["user"], answer["as_of"], len(answer["items"])) == (3, manifest.as_of, 4)
    assert set(answer["items"][0]) == {"item_id", "score"}
    arguments = ["--export", str(export), "--user", "999", "--time", "2024-01-01", "-k", "2", "--exclude-seen"]
    assert recommend.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "for user 999 at 2024-01-01 00:00:00 UTC, after 0 events"
    assert "unknown" in lines[1] and lines[3].split() == ["1", "1001", "0.0000"]


def test_recommend_after_a_history(export, capsys):
    history = "1001@1700000000,5@2023-11-20T00:00:00"
    assert recommend.main(["--export", str(export), "--history", history, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["user"], answer["events"], answer["unknown_items"]) == (None, 2, 1)


def test_recommend_sees_what_a_running_service_was_told(export, capsys):
    as_of = Bundle.open(export).manifest.as_of
    with Recommender.load(export) as recommender:
        recommender.append([900], [1001], [as_of])
        assert recommend.main(["--export", str(export), "--user", "900", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["events"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--user", "x"], "--user 'x' is no integer"),
        (["--user", "1", "--time", "yesterday"], "'yesterday' is no time"),
        (["--user", "1", "--time", "1700000000000"], "looks like milliseconds"),
        (["--user", "1", "-k", "0"], "k must be a positive integer"),
        (["--history", "1001"], "'1001' is not ITEM@TIME"),
    ],
)
def test_recommend_refuses_with_one_line(export, capsys, arguments, message):
    assert recommend.main(["--export", str(export), *arguments]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("recommend: ") and message in said and "\n" not in said


def test_refresh_says_what_it_did(export, tmp_path, capsys):
    as_of = Bundle.open(export).manifest.as_of
    (tmp_path / "new.csv").write_text(f"who,what,when\n1,1001,{as_of + 1}\n50,3,{as_of + 2}\n2,1001,1600000000\n")
    (tmp_path / "gone.txt").write_text("4\n\n77\n")
    arguments = ["--export", str(export), "--events", str(tmp_path / "new.csv"), "--output", str(tmp_path / "y")]
    arguments += ["--user-column", "who", "--item-column", "what", "--time-column", "when"]
    assert refresh.main([*arguments, "--forget", str(tmp_path / "gone.txt"), "--as-of", str(as_of + 9)]) == 0
    said = capsys.readouterr().out
    for line in (
        f"as of {as_of + 9}, 3 events",
        "2 touched, 1 of them new",
        "1 late events left out",
        "1 events of items that the model does not know",
        "1 users forgotten",
        "1 users to forget that are not there",
    ):
        assert line in said
    assert refresh.main([*arguments, "--forget", str(tmp_path / "gone.txt"), "--as-of", str(as_of + 9)]) == 0
    assert "nothing was done" in capsys.readouterr().out
    assert refresh.main(arguments) == 1
    assert "exists and is not this refresh" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["bob", "--5", "9223372036854775808", "9" * 5000])
def test_refresh_refuses_with_one_line(export, tmp_path, capsys, wrong):
    (tmp_path / "gone.txt").write_text(f"4\n\n-9223372036854775808\n{wrong}\n")
    arguments = ["--export", str(export), "--events", "nowhere.csv", "--output", str(tmp_path / "y")]
    assert refresh.main(arguments) == 1
    assert "nowhere.csv: no such file" in capsys.readouterr().err
    assert refresh.main([*arguments, "--forget", str(tmp_path / "gone.txt")]) == 1
    said = capsys.readouterr().err.strip()
    assert "gone.txt: line 4 is no integer of 64 bits" in said and "\n" not in said


def test_serve_takes_its_token_from_a_file_or_the_environment(export, tmp_path, monkeypatch, capsys):
    (tmp_path / "token").write_text("sesame\n")
    base = ["--export", str(export)]
    assert serve.read_token(serve.parse([*base, "--token-file", str(tmp_path / "token")])) == "sesame"
    monkeypatch.setenv("TOKEN", "open")
    assert serve.read_token(serve.parse([*base, "--token-env", "TOKEN"])) == "open"
    assert serve.read_token(serve.parse(base)) is None
    assert serve.parse(base).host == "127.0.0.1"
    assert serve.main([*base, "--token-env", "NOTHING_HERE"]) == 1
    assert "holds no token" in capsys.readouterr().err
    assert serve.main(["--export", str(tmp_path)]) == 1
    assert "no export here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-k", "0"], "--max-k must be at least 1, not 0"),
        (["--cache-mib", "-5"], "--cache-mib must be at least 0, not -5"),
        (["--threads", "0"], "--threads must be at least 1, not 0"),
        (["--batch-window-ms", "nan"], "--batch-window-ms must be at least 0, not nan"),
    ],
)
def test_serve_refuses_implausible_numbers(export, capsys, arguments, message):
    assert serve.main(["--export", str(export), *arguments]) == 1
    assert capsys.readouterr().err.strip() == f"serve: {message}"
