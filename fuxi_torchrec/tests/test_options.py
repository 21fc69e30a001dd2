import argparse
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from fuxi_torchrec.data.prepare import PrepareOptions
from fuxi_torchrec.evaluation.options import EvaluateOptions, RunOptions
from fuxi_torchrec.export.options import ExportOptions
from fuxi_torchrec.options import add_options, check_bounds, option, options_from
from fuxi_torchrec.serving.options import Limits, RecommenderOptions

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Options:
    users: int = option(MISSING, "how many")
    where: Path | None = option(None, "in this 100 % real place")
    rate: float = option(0.5, "how fast", least=0)
    kind: Literal["a", "b"] = option("a", "which one")
    index: bool = option(True, "write an index")
    dry: bool = option(False, "write nothing")
    inner: int = 3

    def __post_init__(self):
        check_bounds(self)


def parsed(*arguments, schema=Options):
    parser = argparse.ArgumentParser()
    add_options(parser, schema)
    return options_from(parser.parse_args(arguments), schema)


def test_flags_give_the_types_of_the_fields_and_their_defaults():
    assert parsed("--users", "3") == Options(3)
    given = parsed("--users", "3", "--where", "x", "--rate", "2", "--kind", "b", "--no-index", "--dry")
    assert given == Options(3, Path("x"), 2.0, "b", index=False, dry=True)


@pytest.mark.parametrize("arguments", [(), ("--users", "x"), ("--users", "3", "--kind", "c"), ("--inner", "4")])
def test_what_does_not_fit_is_refused(arguments):
    with pytest.raises(SystemExit):
        parsed(*arguments)


def test_a_number_that_is_too_small_is_refused_by_the_name_of_its_flag():
    with pytest.raises(ValueError, match=r"--rate must be at least 0, not -1\.0"):
        parsed("--users", "3", "--rate", "-1")
    with pytest.raises(ValueError, match="--rate must be at least 0, not nan"):
        Options(3, rate=float("nan"))


def test_help_shows_defaults():
    parser = argparse.ArgumentParser()
    add_options(parser, Options)
    said = " ".join(parser.format_help().split())
    assert "100 % real" in said and "how fast; 0.5 by default" in said and "--no-index do not write an index" in said


@pytest.mark.parametrize(
    "schema", [PrepareOptions, RunOptions, EvaluateOptions, ExportOptions, RecommenderOptions, Limits]
)
def test_no_flags_are_the_defaults_of_every_option_class(schema):
    assert parsed(schema=schema) == schema()
    assert any(field.metadata.get("help") for field in fields(schema))


@pytest.mark.parametrize("pipeline", ["train", "evaluate", "export", "prepare", "refresh", "serve", "recommend"])
def test_help_does_not_wait_for_torchrec(pipeline):
    code = (
        "import atexit, sys, runpy; sys.argv = ['x', '--help']\n"
        "atexit.register(lambda: print({'torchrec', 'fbgemm_gpu'} & set(sys.modules)))\n"
        f"runpy.run_module('pipelines.{pipeline}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip().endswith("set()"), done.stdout + done.stderr
