"""Outcomes for people."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.fuzz.outcomes import GOOD, OUTCOMES, TOLERANCE, UNCLEAR, Outcome
from benchmarks.fuzz.pool import Case

MOST_UNCLEAR = 0.005  # share of all cases
Found = Sequence[tuple[Case, Outcome]]

MEANING = f"""A case damages one file, or one request, in a copy, and reads everything that was made of it: flipped
bits, overwritten, zeroed, moved, repeated and missing bytes, and in JSON, YAML and bodies keys and values (extreme
numbers, other types, deep nesting, paths that lead out). *Refused*: an error of this package, or a 4xx, that names the
file or the key. *Correct*: all answers are those of the untouched original (floats to {TOLERANCE:g}), or, of a
configuration or a request that is a valid one of its own, those that it asks for. *Unclear*: any other error.
*Silent*: other answers. *Crashed*: a signal. *Hung*: past the time limit."""


def table(found: Found) -> str:
    """Cases by format and outcome."""
    counts: dict[str, Counter[str]] = {}
    for case, outcome in found:
        counts.setdefault(case.format, Counter())[outcome.kind] += 1
    rows = [[name, sum(count.values()), *(count[kind] for kind in OUTCOMES)] for name, count in counts.items()]
    total = Counter(outcome.kind for _, outcome in found)
    rows.append(["all", len(found), *(total[kind] for kind in OUTCOMES)])
    return harness.table(["format", "cases", *OUTCOMES], rows)


def passed(found: Found) -> bool:
    """Whether nothing was silent, crashed or hung, and few cases were unclear."""
    total = Counter(outcome.kind for _, outcome in found)
    bad = len(found) - sum(total[kind] for kind in (*GOOD, UNCLEAR))
    return not bad and total[UNCLEAR] <= MOST_UNCLEAR * len(found)


def show(found: Found, place: Path, most: int) -> None:
    """The first cases of each format and outcome, with how to run them again."""
    shown: Counter[tuple[str, str]] = Counter()
    for case, outcome in found:
        shown[case.format, outcome.kind] += 1
        if shown[case.format, outcome.kind] <= most:
            print(f"\n{outcome.kind}: {outcome.damage}\n  {outcome.message}\n  {replay(case, place)}")


def replay(case: Case, place: Path) -> str:
    """The command that runs a case again."""
    words = f"--fixtures {place} --seed {case.seed} --format {case.format} --case {case.number}"
    return f"python -m benchmarks.fuzz {words}"


def publish(found: Found, cases: int, seed: int) -> None:
    """The table into RESULTS.md."""
    command = f"`python -m benchmarks.fuzz --cases {cases} --seed {seed}`. {harness.machine()}."
    counts = Counter((case.format, outcome.kind) for case, outcome in found)
    raw = {"seed": seed, "cases": len(found), "outcomes": {f"{name} {kind}": n for (name, kind), n in counts.items()}}
    harness.publish("fuzz", "Damaged files and requests", f"{command}\n\n{MEANING}\n\n{table(found)}", raw)
