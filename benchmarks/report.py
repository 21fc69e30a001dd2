"""docs/results.md's tables and figures, from what the experiments wrote."""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.rows import ROWS, Row
from fuxi_torchrec.artifacts import write_atomically

Found = dict[str, Any]  # what came out of one run
RESULTS = "results.json"
RANKED = ("hr@10", "ndcg@10", "hr@50", "ndcg@50", "mrr")
LONG = (*RANKED, "hr@200")
TRAINING = ("step", "seconds", "events_per_second", "peak_memory_mb")
CURVE = ("step", "hr@10", "ndcg@10")
MIB = 2**20 / 1e9


def write(results: Path, page: Path, figures: Path | None = None) -> int:
    """Put every study's table into the page, and draw the figures beside the results; 1 if rows have none yet."""
    found = read(results)
    text, missing = page.read_text(), [row.name for row in ROWS if row.name not in found]
    for study, make in TABLES.items():
        done = [row for row in ROWS if row.study == study and row.name in found]
        text = replaced(text, study, make(done, found) if done else "Not measured yet.")
    page.write_text(text)
    lengths(found, (figures or results) / "lengths.png")
    curves(found, (figures or results) / "curves.png")
    if missing:
        print(f"{len(missing)} of {len(ROWS)} rows have no result yet: {', '.join(missing)}")
    return int(bool(missing))


def read(results: Path, name: str = RESULTS) -> dict[str, Found]:
    """What came out of every run so far, by name."""
    file = results / name
    found: dict[str, Found] = json.loads(file.read_text()) if file.exists() else {}
    return found


def add(results: Path, name: str, found: Found, file: str = RESULTS) -> None:
    """Write down what came out of a run: a line of the one file, which has what the page and its figures need."""
    everything = dict(sorted({**read(results, file), name: found}.items()))
    lines = [f"{json.dumps(each)}: {json.dumps(value, separators=(',', ':'))}" for each, value in everything.items()]
    results.mkdir(parents=True, exist_ok=True)
    write_atomically(results / file, "{\n" + ",\n".join(lines) + "\n}\n")


def essence(summary: Found, validations: Sequence[Found], evaluations: dict[str, Found]) -> Found:
    """Of a run's summary, its validations and its evaluations, what the page needs.

    Args:
        summary: of training.
        validations: ``step`` and metrics.
        evaluations: by the candidates, ``all`` or ``unseen``.
    """
    found: Found = {"training": {name: summary[name] for name in TRAINING}}
    found["curve"] = [{name: round(point[name], 5) for name in CURVE} for point in validations]
    for kind, measured in evaluations.items():
        times = {each: ranked(measured[each]) for each in ("target", "last")}
        baselines = {name: ranked(each) for name, each in measured["baselines"].items()}
        if "by_target" in measured["target"]:
            times["warm"] = ranked(measured["target"]["by_target"]["warm"])
        found[kind] = {"max_length": measured["max_length"], "users": measured["users"], **times}
        found[kind]["baselines"] = baselines
    return found


def ranked(metrics: Found) -> Found:
    """The metrics of a table."""
    return {name: round(metrics[name], 5) for name in LONG if name in metrics}


def replaced(text: str, name: str, content: str) -> str:
    """The text with the content of a marked part."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no part {name!r} in the page")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in their seed alone, by what they are."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.what, []).append(row)
    return found


def cell(values: Sequence[float], digits: int = 3) -> str:
    """A mean, with the smallest and the largest where there are several."""
    short = [f"{value:.{digits}f}".removeprefix("0") for value in (statistics.mean(values), min(values), max(values))]
    return short[0] if len(values) == 1 else f"{short[0]} ({short[1]} to {short[2]})"


def cells(metrics: Sequence[Found], name: str) -> str:
    """Of one metric of several runs; empty if one lacks it."""
    return cell([each[name] for each in metrics]) if all(name in each for each in metrics) else ""


def cost(each: Sequence[Found]) -> list[str]:
    """Training time, speed and memory."""
    training = [found["training"] for found in each]
    return [
        cell([found["seconds"] / 60 for found in training], 1),
        f"{statistics.mean(found['events_per_second'] for found in training):,.0f}",
        cell([found["peak_memory_mb"] * MIB for found in training], 2),
    ]


def runs(rows: Sequence[Row]) -> str:
    """How to run a group of rows again."""
    names = sorted(row.name for row in rows)
    return f"`{names[0]}`" if len(names) == 1 else f"`{names[0][:-1]}[{names[0][-1]}-{names[-1][-1]}]`"


def ranking_table(
    kinds: Sequence[tuple[str, str, str]], baseline_kinds: Sequence[str] = (), columns: Sequence[str] = RANKED
) -> Callable[[Sequence[Row], dict[str, Found]], str]:
    """A table with the metrics of some ways to ask.

    Args:
        kinds: of each way its title, its name in benchmarks.rows and the request time (``warm``: the target's, of warm
            targets).
        baseline_kinds: those in which rules have rows of their own.
        columns: the metrics; a cell is empty where a run has no such metric.
    """

    def make(rows: Sequence[Row], found: dict[str, Found]) -> str:
        """Titles and tables."""
        parts = []
        for number, (title, kind, request_time) in enumerate(kinds):
            lines: list[list[str]] = []
            for what, group in groups(rows).items():
                each = [found[row.name] for row in group if request_time in found[row.name].get(kind, {})]
                if not each:
                    continue
                metrics = [cells([e[kind][request_time] for e in each], m) for m in columns]
                lines.append([what, *metrics, *([] if number else [*cost(each), runs(group)])])
            if kind in baseline_kinds and request_time == "target":
                having = [found[row.name][kind]["baselines"] for row in rows if kind in found[row.name]]
                simple = max(having, key=lambda each: sum(map(len, each.values())))  # of the row that has most of them
                # nothing of the user's own is left to recommend in "unseen"
                names = [name for name in simple if kind != "unseen" or name in ("popularity", "transitions")]
                lines += [[name, *(cells([simple[name]], m) for m in columns)] for name in names]
            # what a run cost and is called stands in the first table only
            header = ["", *(m.upper() for m in columns), *([] if number else ["minutes", "events/s", "GB", "run"])]
            lines = [[*line, *[""] * (len(header) - len(line))] for line in lines]
            parts.append(f"{title}\n\n{harness.table(header, lines)}")
        return "\n\n".join(parts)

    return make


ML_KINDS = [
    ("The user's history removed from the candidates, queried at the target's time:", "unseen", "target"),
    ("All candidates, queried at the target's time:", "all", "target"),
    ("History removed, queried at the last event's time:", "unseen", "last"),
    ("All candidates, queried at the last event's time:", "all", "last"),
]
GIT_KINDS = [
    ("Queried at the target's time:", "all", "target"),
    ("Queried at the last event's time:", "all", "last"),
]
JOURNEY_KINDS = [
    *GIT_KINDS,
    ("Targets that have training events, queried at the target's time:", "all", "warm"),
    ("Of each user the first product without a training event, among all products:", "cold", "target"),
    ("The same among such products alone:", "new", "target"),
]
TABLES: dict[str, Callable[[Sequence[Row], dict[str, Found]], str]] = {
    "movielens": ranking_table(ML_KINDS, ["unseen"]),
    "movielens-repeats": ranking_table(ML_KINDS[:2]),
    "gitlog": ranking_table(GIT_KINDS, ["all"], LONG),
    "gitlog-repeats": ranking_table(GIT_KINDS, ["all"], LONG),
    "gitlog-biases": ranking_table(GIT_KINDS),
    "movielens-ablations": ranking_table(ML_KINDS[:1]),
    "gitlog-ablations": ranking_table(GIT_KINDS[:1]),
    "lengths": ranking_table(GIT_KINDS[:1]),
    "journey-new": ranking_table(JOURNEY_KINDS, ["all", "new"], LONG),
    "journey": ranking_table(JOURNEY_KINDS, ["all", "new"], LONG),
}


# --- figures ---------------------------------------------------------------------------------------------------------


def lengths(found: dict[str, Found], output: Path) -> None:
    """Quality and cost against the longest history that is read."""
    rows = [row for row in ROWS if row.study == "lengths" and row.name in found]
    if not rows:
        return
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    places = [found[row.name]["all"]["max_length"] for row in rows]
    for metric in ("hr@10", "ndcg@10"):
        left.semilogx(places, [found[row.name]["all"]["target"][metric] for row in rows], "o-", label=metric)
    left.set(xlabel="max_length", title="quality, test targets", ylim=(0, None))
    left.legend()
    speed = [1e6 / found[row.name]["training"]["events_per_second"] for row in rows]
    right.semilogx(places, speed, "o-", color="tab:green", label="µs per event")
    right.set(xlabel="max_length", title="cost of training", ylim=(0, None), ylabel="µs per event")
    memory = right.twinx()
    peak = [found[row.name]["training"]["peak_memory_mb"] * MIB for row in rows]
    memory.semilogx(places, peak, "s--", color="tab:red", label="peak memory, GB")
    memory.set(ylim=(0, None), ylabel="GB a process")
    right.legend(loc="lower left")
    memory.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)


def curves(found: dict[str, Found], output: Path) -> None:
    """Validation over training time, of the rows that have it."""
    rows = [row for row in ROWS if row.name in found and found[row.name]["curve"]]
    if not rows:
        return
    plt = pyplot()
    figure, axes = plt.subplots(1, len(rows), figsize=(5.5 * len(rows), 4), squeeze=False)
    for row, axis in zip(rows, axes[0], strict=True):
        curve, training = found[row.name]["curve"], found[row.name]["training"]
        minutes = [training["seconds"] / 60 * point["step"] / training["step"] for point in curve]
        for metric in ("hr@10", "ndcg@10"):
            axis.plot(minutes, [point[metric] for point in curve], "o-", markersize=3, label=metric)
        axis.set(xlabel="minutes", title=row.what, ylim=(0, None))
        axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)


def pyplot() -> Any:
    """Matplotlib, which needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
