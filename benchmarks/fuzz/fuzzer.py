"""Fixtures, the answers of the untouched originals, and cases on them."""

import dataclasses
import json
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz import data_formats, export_formats, fixtures, forged_formats, http_formats, training_formats
from benchmarks.fuzz.formats import Fuzzed
from benchmarks.fuzz.outcomes import GOOD, Outcome, difference
from benchmarks.fuzz.pool import Broken, Case, Work, run

_MODULES = (data_formats, training_formats, forged_formats, export_formats, http_formats)
FORMATS: dict[str, Fuzzed] = {each.name: each for module in _MODULES for each in module.FORMATS}
_PROGRESS = 15.0  # seconds between lines


class Fuzzer:
    """Runs cases in processes that are forked from this one, which has everything imported and nothing begun.

    Args:
        place: of the fixtures.
        scratch: for copies.
        jobs: processes.
        seconds: until a case counts as hung.
    """

    def __init__(self, place: Path, scratch: Path, jobs: int, seconds: float) -> None:
        self.place, self.scratch, self.jobs, self.seconds = place, scratch, jobs, seconds
        self.wanted: dict[str, Any] = {}
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        torch.set_num_threads(1)  # a thread would be lost in a fork

    def prepare(self, names: Sequence[str]) -> None:
        """Make the fixtures unless they are there, and read the originals, twice: answers must not vary."""
        if not (self.place / fixtures.LAST).exists():
            self._all(lambda *_: fixtures.make(self.place), ["fixtures"])
        for name, answers in self._all(lambda name, place: FORMATS[name].answers(self.place, place), [*names, *names]):
            if name in self.wanted and (told := difference(answers, self.wanted[name])):
                raise RuntimeError(f"{name}: two readings of the untouched original differ: {told}")
            self.wanted[name] = answers

    def _all(self, work: Work, things: Sequence[str]) -> list[tuple[str, Any]]:
        found = list(run(work, things, self.scratch, 1, 600))
        for thing, answer in found:
            if isinstance(answer, Broken | Outcome):
                raise RuntimeError(f"{thing}: {answer.trace if isinstance(answer, Broken) else answer.message}")
        return found

    def run(self, cases: Sequence[Case], output: Path | None = None) -> list[tuple[Case, Outcome]]:
        """All outcomes, by format. One that ended badly is run again in a new process, which decides.

        Args:
            output: outcomes as they come; those of an earlier run, which was stopped, count.
        """
        began = shown = time.monotonic()
        found = _read(output) if output is not None and output.exists() else {}
        for case, outcome in self._outcomes([case for case in cases if case not in found], self.jobs):
            found[case] = outcome
            if output is not None:
                with output.open("a") as file:
                    file.write(json.dumps({**vars(case), **vars(outcome)}) + "\n")
            if time.monotonic() - shown > _PROGRESS:
                shown = time.monotonic()
                bad = sum(each.kind not in GOOD for each in found.values())
                print(f"{len(found):,} of {len(cases):,} cases, {bad} bad, {shown - began:.0f} s", flush=True)
        for case in [case for case in cases if found[case].kind not in GOOD]:
            first = found[case]
            found.update(self._outcomes([case], 1))
            if found[case].kind in GOOD:
                print(f"{case}: {first.kind} at first ({first.message[:300]}), then {found[case].kind}", flush=True)
        return [
            (case, found[case])
            for case in sorted(cases, key=lambda case: (list(FORMATS).index(case.format), case.number))
        ]

    def _outcomes(self, cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, Outcome]]:
        for case, outcome in run(self._one, cases, self.scratch, jobs, self.seconds):
            if isinstance(outcome, Broken):
                raise RuntimeError(f"{case}: {outcome.trace}")
            if not outcome.damage:  # of a process that is gone
                target, mutation = FORMATS[case.format].draw(self.place, case.random())
                outcome = dataclasses.replace(outcome, damage=f"{target}: {mutation.what}")
            yield case, outcome

    def _one(self, case: Case, place: Path) -> Outcome:
        return FORMATS[case.format].run(self.place, place, case.random(), self.wanted[case.format])


def _read(output: Path) -> dict[Case, Outcome]:
    found = {}
    for line in output.read_text().splitlines():
        plain = json.loads(line)
        case = Case(plain["format"], plain["number"], plain["seed"])
        found[case] = Outcome(plain["kind"], plain["damage"], plain["message"])
    return found
