"""`python -m pipelines.plan`: plans for machines that are not here."""

import pytest

from fuxi_torchrec import encoders
from pipelines import plan


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(plan, "setup_logging", lambda level: None)

    def call(*arguments):
        code = plan.main(["--config", "configs/long_16k.yaml", "--items", "100000000", *arguments])
        return code, capsys.readouterr().out

    return call


MANY = ("--nodes", "8", "--procs-per-node", "8", "--device", "cuda")


def test_64_ranks_and_100_million_items_fit_80_gb(run):
    code, said = run(*MANY, "batch.streams=64")
    assert code == 0, said
    assert "FITS: 6.24 GB of 80 GB a rank (8%)" in said
    assert "item_table           row_wise       dense           64        1,562,501      128        800.0" in said
    assert "rows, reduce-scatter" in said
    assert "batch.streams" not in said


def test_a_table_on_one_device_is_refused_with_what_would_fit(run):
    code, said = run(*MANY, "tables.sharding=table_wise")
    assert code == 1
    assert "DOES NOT FIT: 207.27 GB of 80 GB" in said
    assert "tables.sharding=row_wise" in said.partition("What would fit")[2]
    assert "64 ranks need batch.streams=64" in said


def test_what_is_implausible_is_refused(capsys):
    for value in ("0", "-1", "inf"):
        assert plan.main(["--items", "10", "--memory-gb", value]) == 1
        assert "--memory-gb must be positive" in capsys.readouterr().err
    assert plan.main(["--items", "9" * 20]) == 1
    assert "--items must be at most 1000000000000, not 99999999999999999999" in capsys.readouterr().err
    assert plan.main(["--items", "10", "--feature-rows", "acton=5"]) == 1
    assert "features.event has no acton; there are none" in capsys.readouterr().err


def test_what_nothing_makes_fit_says_so(run):
    code, said = run(*MANY, "--memory-gb", "2", "loss.negatives=full")
    assert code == 1
    assert "No single change and no pair" in said


def test_a_sharding_that_cannot_be_is_no_plan(run):
    code, said = run("--nodes", "8", "--items", "6", "--device", "cpu")
    assert code == 1
    assert "no plan" in said and "tables.sharding=data_parallel" in said


@pytest.mark.parametrize("kind", [kind for kind in encoders.kinds() if kind != "fuxi_linear"])
def test_every_encoder_has_a_plan(kind, monkeypatch, capsys):
    monkeypatch.setattr(plan, "setup_logging", lambda level: None)

    def activations(*settings):
        config = ["--config", f"configs/peers/{kind}.yaml", "--items", "100000", "--memory-gb", "80"]
        assert plan.main([*config, *settings]) == 0
        said = capsys.readouterr().out
        assert "FITS" in said and "DOES NOT" not in said
        (line,) = [line for line in said.splitlines() if line.strip().startswith("activations")]
        return line

    few, many = (activations("batch.users=null", f"batch.events={events}") for events in (4096, 65536))
    assert few != many
