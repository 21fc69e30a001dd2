"""Tables and figures of results."""

import pytest

from benchmarks import report
from benchmarks.rows import Row


@pytest.mark.parametrize(
    ("values", "digits", "expected"),
    [
        ([0.1234], 3, ".123"),
        ([1.5], 1, "1.5"),
        ([0.1, 0.2, 0.3], 2, ".20 (.10 to .30)"),
        ([0.5, 1.5], 1, "1.0 (.5 to 1.5)"),
    ],
)
def test_a_cell_is_a_mean_and_the_range_of_several(values, digits, expected):
    assert report.cell(values, digits) == expected


def test_a_marked_part_is_replaced_and_nothing_else():
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\nold\n<!-- end y -->\n"
    text = report.replaced(page, "x", r"new \1")
    assert text == page.replace("old", r"new \1", 1)
    assert report.replaced(text, "x", r"new \1") == text
    with pytest.raises(ValueError, match="no part 'z'"):
        report.replaced(page, "z", "new")


@pytest.mark.parametrize(
    ("names", "expected"), [(["b"], "`b`"), (["a-s1", "a-s0"], "`a-s[0-1]`"), (["a-s0", "a-s1", "a-s2"], "`a-s[0-2]`")]
)
def test_a_group_is_named_by_a_pattern(names, expected):
    assert report.runs([Row(name, "study", "gitlog", "what") for name in names]) == expected


def result(hr, seconds=60.0, speed=1000, validated=True):
    ranked = {**dict.fromkeys(report.RANKED, hr), "by_history_length": {}}
    return report.essence(
        {"seconds": seconds, "events_per_second": speed, "peak_memory_mb": 1000, "step": 10, "preempted": False},
        [{"step": step, "hr@10": hr / 2, "ndcg@10": hr / 4} for step in (5, 10) if validated],
        {"all": {"target": ranked, "last": ranked, "max_length": 50, "users": 7, "baselines": {}}},
    )


def test_a_page_has_tables_and_figures_of_what_was_run(tmp_path, monkeypatch, capsys):
    rows = [Row("l-1", "lengths", "gitlog", "1"), Row("l-2", "lengths", "gitlog", "2")]
    monkeypatch.setattr(report, "ROWS", rows)
    page = tmp_path / "page.md"
    page.write_text("\n".join(f"<!-- begin {study} -->\n<!-- end {study} -->" for study in report.TABLES))
    report.add(tmp_path, "l-1", result(0.25, validated=False))
    assert report.write(tmp_path, page) == 1
    assert "1 of 2 rows have no result yet: l-2" in capsys.readouterr().out
    assert not (tmp_path / "curves.png").exists()
    assert "| 1 | .250 | .250 | .250 | .250 | .250 | 1.0 | 1,000 | 1.05 | `l-1` |" in page.read_text()
    assert page.read_text().count("Not measured yet.") == len(report.TABLES) - 1
    report.add(tmp_path, "l-2", result(0.75))
    assert report.write(tmp_path, page) == 0
    assert "| 2 | .750 |" in page.read_text()
    for name in ("lengths.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
