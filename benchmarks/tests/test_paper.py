"""The paper's experiments: sizes, budgets, the grid, rows, what is written down."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import report as shared
from benchmarks.paper import __main__ as command
from benchmarks.paper import plan, report, run, sizes
from benchmarks.paper.rows import CHOOSING, GRID, ROWS, SHAPES, Timed, fuxi_linear, model_of
from fuxi_torchrec.config import load_config
from fuxi_torchrec.encoders import kinds

ROOT = Path(__file__).parents[2]
TUNED = next(row for row in ROWS if row.tuned)


@pytest.mark.parametrize("set", SHAPES)
def test_encoders_of_the_comparison_have_as_many_parameters_within_a_tenth(set):
    wanted = sizes.parameters("fuxi_linear", fuxi_linear(set))
    for kind in kinds():
        settings = model_of(kind, set)
        assert abs(sizes.parameters(kind, settings) - wanted) <= 0.1 * wanted, kind
        assert settings["dim"] == SHAPES[set]["dim"] and settings["num_layers"] == SHAPES[set]["layers"]
        assert settings["max_positions"] >= SHAPES[set]["length"] + (kind != "fuxi_linear")


def test_what_grows_with_the_longest_history_is_not_counted():
    long, short = (fuxi_linear("gitlog", max_positions=n) for n in (8192, 64))
    assert sizes.parameters("fuxi_linear", long) == sizes.parameters("fuxi_linear", short)
    published = {"dim": 128, "num_layers": 4, "max_positions": 9, "temporal_periods": tuple(range(1, 9))}
    assert sizes.parameters("fuxi_linear", {**published, "preset": "official"}) == 917_664


def test_a_size_that_cannot_be_had_is_refused():
    with pytest.raises(ValueError, match=r"sasrec: no ffn_dim gives 100 parameters, the nearest"):
        sizes.comparable("sasrec", 64, 2, 4, 50, 100)


def test_rows_are_named_once_and_their_settings_are_known():
    assert len({row.name for row in ROWS}) == len(ROWS)
    names = {row.name for row in ROWS}
    assert {row.against for row in ROWS} <= names | {""}
    of_each = {(row.study, row.set): row for row in ROWS}  # the last of each; all encoders on one set
    for row in [*of_each.values(), *(row for row in ROWS if row.study == TUNED.study)]:
        config = load_config(ROOT / row.config, plan.final(row, 0 if row.tuned else None, 1000))
        assert config.train.max_steps == 1000 and config.optimizer.lr_schedule == "cosine"
        assert (config.data.fit_on_valid or config.data.split == "by_time") == (row.split == "test")
        if row.tuned:
            chosen = load_config(ROOT / row.config, plan.choosing(row, 3, 1000))
            assert (chosen.optimizer.lr, chosen.model.dropout) == GRID[3]
            assert chosen.train.max_steps == 250 and not chosen.data.fit_on_valid
            assert (chosen.data.valid_from is not None) == (row.set in CHOOSING)


def test_scaling_begins_at_the_papers_size_and_passes_three_million():
    found = [int(row.what.split()[-1].strip("K").replace(",", "")) for row in ROWS if row.study == "scaling"]
    assert found[0] == 188 and found[-1] > 3000 and found == sorted(found)


def test_a_choice_needs_every_point():
    with pytest.raises(ValueError, match=r"points \[0, 2\] of 4 are measured"):
        plan.best({0: 0.5, 2: 0.1})


def result(rank, minutes=5.0):
    metrics = dict.fromkeys(shared.RANKED, 1 / rank)
    return {
        "minutes": minutes,
        "plan": {"seconds_per_step": 0.5, "steps": 100},
        "metrics": metrics,
        "baselines": {"popularity": dict.fromkeys(shared.RANKED, 0.125)},
        "users": 3,
        "events": 5000,
        "peak_memory_mb": 1000,
        "parameters": 1234,
        "ranks": run.packed([rank, rank, None]),
    }


def test_a_table_has_results_their_differences_and_open_rows(tmp_path):
    first, second, third = [row for row in ROWS if row.study == TUNED.study][:3]
    found = {first.name: result(1), second.name: result(3)}
    lines = report.table([first, second, third], found).splitlines()
    assert lines[0] == "ml-1m, test events, 3 users:"
    assert lines[4].startswith(f"| {first.what} | 1.000 |") and "| 100 | 1.05 | 1,234 | 5 |" in lines[4]
    assert "| -0.333 [-0.500, +0.000] |" in lines[5]
    assert lines[6].count("open") == 5
    assert lines[7].startswith("| popularity | .125 |")


def test_the_page_has_a_place_for_every_study_and_agrees_with_the_results(tmp_path):
    page = tmp_path / "paper.md"
    page.write_text(report.PAGE.read_text())
    for file in (shared.RESULTS, run.FILE):
        if (report.RESULTS / file).exists():
            (tmp_path / file).write_text((report.RESULTS / file).read_text())
    assert report.write(tmp_path, page) == 0
    # benchmarks.encoders measures efficiency on its own: the page follows with the next report
    written, kept = (shared.replaced(each.read_text(), "efficiency", "") for each in (page, report.PAGE))
    assert written == kept, "python -m benchmarks.paper report"


def test_figures_are_drawn_of_what_is_known(tmp_path):
    found = {row.name: {**result(2), "parameters": 10**5 * n} for n, row in enumerate(ROWS, 1)}
    for draw in (report.scaling, report.hyper_parameters):
        assert not draw({}, tmp_path / "none.png") and draw(found, tmp_path / "some.png")
        assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "none.png").exists()


def test_the_state_of_a_row_is_what_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(run.experiments, "ROOT", tmp_path)
    place = run.Place(results=tmp_path)
    assert run.state(TUNED, 5.0, place) == "open"
    own = tmp_path / place.of(TUNED, 5.0)
    (own / "grid-0").mkdir(parents=True)
    (own / "plan.json").write_text(json.dumps({"seconds_per_step": 0.25, "steps": 1200}))
    (own / "grid-0" / "ranked.json").write_text("{}")
    assert run.state(TUNED, 5.0, place) == "started: 1 of 4 points of the grid"
    assert run.planned(TUNED, 5.0, place)["steps"] == 1200  # and nothing is measured again
    shared.add(tmp_path, TUNED.name, result(2), run.FILE)
    assert run.state(TUNED, 5.0, place) == "done"
    assert run.state(TUNED, 7.0, place) == "open; done with 5 minutes"


def test_a_rerun_takes_the_steps_that_were_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(run.experiments, "ROOT", tmp_path)
    place = run.Place(results=tmp_path)
    shared.add(tmp_path, TUNED.name, result(2), run.FILE)
    assert run.planned(TUNED, 5.0, place) == {"seconds_per_step": 0.5, "steps": 100}


def test_list_names_rows_budgets_and_states(capsys):
    assert command.main(["list", "scaling", "--budget", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == [
        [row.name, "3.0", "min"] for row in ROWS if row.study == "scaling"
    ]
    assert lines[-1] == "5 rows, 0.2 hours of processor time"
    with pytest.raises(SystemExit):
        command.main(["no-such-study"])
    assert "no study or row no-such-study" in capsys.readouterr().err


def test_a_tuned_row_costs_its_grid_too():
    assert TUNED.cost(6.0) == 12.0
    assert dataclasses.replace(TUNED, tuned=False).cost(6.0) == 6.0
    assert isinstance(TUNED, Timed)
