"""The fuzzer itself: what it does to data, how it sorts what happens, what it survives."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
import yaml

from benchmarks.fuzz import mutations, outcomes, pool, report
from benchmarks.fuzz.formats import parquet_footer, parquet_pages
from benchmarks.fuzz.http_formats import _unfinished
from benchmarks.fuzz.outcomes import Outcome
from fuxi_torchrec.errors import FuxiError

ROOT = Path(__file__).parents[2]
TEXT = json.dumps({"a": 1, "b": [1, {"c": "x"}], "d": {"e": None}}).encode()


def sizes(name, place):
    return len(name) or None


def misbehave(name, place):
    if name == "abort":
        os.abort()
    if name == "sleep":
        time.sleep(1000)
    if name == "raise":
        raise KeyError(name)
    return Outcome(outcomes.CORRECT, name)


# --- mutations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutate", [mutations.damage, mutations.edit_json, mutations.edit_yaml])
def test_a_mutation_is_a_function_of_seed_format_and_number(mutate):
    def drawn(seed, name):
        return [mutate(TEXT, pool.Case(name, number, seed).random()) for number in range(50)]

    assert drawn(1, "f") == drawn(1, "f")
    assert drawn(1, "f") != drawn(2, "f")
    assert drawn(1, "f") != drawn(1, "g")


def test_damaged_data_always_differs():
    for number in range(500):
        data = bytes(number % 5)  # zeroing changes nothing
        assert mutations.damage(data, Random(number)).data != data


def test_only_the_chosen_bytes_are_damaged():
    data = bytes(range(200))
    for number in range(300):
        found = mutations.damage(data, Random(number), 50, 60)
        if "flipped" in found.what or "overwrote" in found.what or "zeroed" in found.what:
            assert found.data[:50] + found.data[60:] == data[:50] + data[60:]


def test_every_edit_of_json_is_made():
    found = [mutations.edit_json(TEXT, Random(number)) for number in range(3000)]
    said = " ".join(each.what for each in found)
    for word in ("deleted", "renamed", "repeated", "added", *mutations.EXTREMES):
        assert word in said
    assert any(each.data.count(b'"a"') == 2 for each in found)  # a key twice
    assert any(b"9" * mutations.DIGITS in each.data for each in found)
    assert any(each.key == "c" for each in found)
    assert not any(b"@@" in each.data for each in found)


@pytest.mark.parametrize("load", [json.loads, yaml.safe_load])
def test_of_a_damaged_document_the_key_of_the_only_other_value_is_known(load):
    found = [mutations.damage_document(TEXT, Random(number), load) for number in range(3000)]
    assert {"a", "b", "c"} <= {each.key for each in found} <= {None, "a", "b", "c", "d", "e"}
    for each in found:
        if each.key == "a":
            assert {**load(each.data), "a": 1} == json.loads(TEXT) != load(each.data)


def test_edited_yaml_can_mostly_be_parsed():
    readable = 0
    for number in range(100):
        found = mutations.edit_yaml(TEXT, Random(number))
        assert b"@@" not in found.data
        try:
            yaml.safe_load(found.data)
            readable += 1
        except (yaml.YAMLError, RecursionError, ValueError):
            pass
    assert readable > 50


def test_pages_and_footer_are_the_whole_file_but_its_first_word(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (first, middle), (again, end) = parquet_pages(data), parquet_footer(data)
    assert (first, middle, end) == (4, again, len(data))
    assert 0 < first < middle < end


# --- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FuxiError("/copy/users/part.parquet: damaged"), "refused"),
        (FuxiError("manifest.json: damaged"), "refused"),
        (FuxiError("streams must be positive"), "refused"),
        (FuxiError("upstreams must be positive"), "unclear"),  # another key
        (FuxiError("/copy: damaged"), "unclear"),
        (FuxiError("damaged"), "unclear"),
        (KeyError("manifest.json"), "unclear"),
    ],
)
def test_an_error_is_clear_if_it_is_ours_and_names_a_file_or_the_key(error, expected):
    words = ["manifest.json", "streams"]
    assert outcomes.of_error(error, "damage", Path("/copy"), words).kind == expected


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ([1, {"a": 1.0}], [1, {"a": 1.0 + 1e-9}], True),
        ([1, {"a": 1.0}], [1, {"a": 1.1}], False),
        ({"a": 1}, {"b": 1}, False),
        ([1], [1, 2], False),
        (math.nan, math.nan, True),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array([1, 2]), np.array([1, 2], np.int32), False),
        (np.array([1.0, math.nan]), np.array([1.0 + 1e-9, math.nan]), True),
        (None, 0.0, False),
        ("a", "a", True),
    ],
)
def test_answers_are_compared_to_the_last_value(found, wanted, same):
    assert (outcomes.difference(found, wanted) is None) is same


@pytest.mark.parametrize(
    ("kinds", "passed"),
    [
        (["refused", "correct"], True),
        (["correct"] * 199 + ["unclear"], True),
        (["correct"] * 198 + ["unclear"] * 2, False),
        (["correct"] * 500 + ["silent"], False),
        (["correct"] * 500 + ["crashed"], False),
        (["correct"] * 500 + ["hung"], False),
    ],
)
def test_what_passes(kinds, passed):
    found = [(pool.Case("f", number, 0), Outcome(kind, "")) for number, kind in enumerate(kinds)]
    assert report.passed(found) is passed
    assert f"| all | {len(kinds)} |" in report.table(found)


@pytest.mark.parametrize(
    ("message", "unfinished"),
    [
        (b"POST / HTTP/1.1\r\nHost: x", True),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nab", True),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab", False),
        (b"POST / HTTP/1.1\r\n\r\nab", False),
    ],
)
def test_a_request_that_is_shorter_than_it_says_is_unfinished(message, unfinished):
    assert _unfinished(message) is unfinished


# --- processes -------------------------------------------------------------------------------------------------------


def test_what_processes_find_comes_back(tmp_path):
    words = ["a", "bb", "ccc", ""] * 20
    found = list(pool.run(sizes, words, tmp_path, 2, 30))
    assert sorted(word for word, _ in found) == sorted(words)
    assert all(answer == (len(word) or None) for word, answer in found)


def test_a_process_that_aborts_or_hangs_is_seen_and_stops_nobody(tmp_path):
    found = dict(pool.run(misbehave, ["one", "abort", "two", "sleep", "raise", "three"], tmp_path, 1, 2))
    assert found["abort"].kind == "crashed"
    assert "SIGABRT" in found["abort"].message
    assert found["sleep"].kind == "hung"
    assert "KeyError" in found["raise"].trace
    assert [found[name].kind for name in ("one", "two", "three")] == ["correct"] * 3
    assert not list(tmp_path.iterdir())


def test_processes_end_with_the_one_that_started_them(tmp_path):
    script = "\n".join(
        [
            "import os, pathlib, time",
            "from benchmarks.fuzz import pool",
            "def work(thing, place):",
            "    os.write(9, f'{os.getpid()}\\n'.encode())",
            "    time.sleep(1000)",
            "os.dup2(1, 9)",
            f"list(pool.run(work, ['a'], pathlib.Path({str(tmp_path)!r}), 1, 1000))",
        ]
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_a_case_can_be_run_again(tmp_path):
    def fuzz(*options):
        command = [sys.executable, "-m", "benchmarks.fuzz", "--fixtures", str(tmp_path / "fixtures"), *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    outcomes_file = tmp_path / "outcomes"
    names = ["dataset-pages", "config", "export-states", "http-bodies"]  # in the order of the table
    whole = fuzz("--cases", "2", "--seed", "7", "--jobs", "2", "--output", str(outcomes_file), "--formats", *names)
    assert "| all | 8 |" in whole.stdout, whole.stderr
    lines = [json.loads(line) for line in outcomes_file.read_text().splitlines()]  # as they came
    assert {(line["format"], line["number"]) for line in lines} == {(name, n) for name in names for n in (0, 1)}
    text = outcomes_file.read_text()
    stopped = "".join(text.splitlines(keepends=True)[:5])
    outcomes_file.write_text(stopped)
    fuzz("--cases", "2", "--seed", "7", "--jobs", "2", "--output", str(outcomes_file), "--formats", *names)
    assert outcomes_file.read_text().startswith(stopped), "those that it has are not run again"
    assert sorted(outcomes_file.read_text().splitlines()) == sorted(text.splitlines())
    last = lines[-1]
    again = fuzz("--seed", "7", "--format", last["format"], "--case", str(last["number"]))
    assert f"{last['kind']}: {last['damage']}" in again.stdout, again.stderr
