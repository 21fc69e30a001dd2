"""docs/paper.md's tables and figures, from what the rows wrote."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import harness, paired
from benchmarks import report as shared
from benchmarks.encoders import NAMES
from benchmarks.experiments import RESULTS, ROOT
from benchmarks.paper.rows import ROWS, Timed
from benchmarks.paper.run import FILE, METRIC, unpacked

PAGE = ROOT / "docs" / "paper.md"
Found = dict[str, Any]


def write(results: Path = RESULTS, page: Path = PAGE) -> int:
    """Every study's table into the page, figures beside the results; rows without a result are shown as open."""
    found, text = shared.read(results, FILE), page.read_text()
    tables = {study: table([row for row in ROWS if row.study == study], found) for study in studies()}
    tables["efficiency"] = efficiency(json.loads((harness.RAW / "encoders-efficiency.json").read_text()))
    for study, draw in (("scaling", scaling), ("hyper-parameters", hyper_parameters)):
        if draw(found, results / f"paper-{study}.png"):
            tables[study] += f"\n\n![{study}](results/paper-{study}.png)"
    for study, content in tables.items():
        text = shared.replaced(text, study, content)
    page.write_text(text)
    missing = [row.name for row in ROWS if row.name not in found]
    if missing:
        print(f"{len(missing)} of {len(ROWS)} rows are open")
    return 0


def studies() -> list[str]:
    """Those that have a table of their own, in order; what others are compared with stands in each."""
    return list(dict.fromkeys(row.study for row in ROWS if row.study != "reference"))


def table(rows: Sequence[Timed], found: dict[str, Found]) -> str:
    """A line a row, below the row it is compared with; of several sets one after another."""
    header = [
        "",
        *(name.upper() for name in shared.RANKED),
        "NDCG@10 against",
        "events/s",
        "GB",
        "parameters",
        "minutes",
    ]
    parts = []
    for set in dict.fromkeys(row.set for row in rows):
        those = [row for row in rows if row.set == set]
        known = {row.name for row in those}
        apart = {row.against for row in those if row.against} - known
        lines = [line(row, found) for row in [*(row for row in ROWS if row.name in apart), *those]]
        done = [found[row.name] for row in those if row.name in found]
        baselines = done[0]["baselines"] if done and those[0].split == "test" else {}
        lines += [
            [name, *(shared.cell([each[metric]]) for metric in shared.RANKED), *[""] * 5]
            for name, each in baselines.items()
        ]
        users = f", {done[0]['users']:,} users" if done else ""
        parts.append(f"{set}, {those[0].split} events{users}:\n\n{harness.table(header, lines)}")
    return "\n\n".join(parts)


def line(row: Timed, found: dict[str, Found]) -> list[str]:
    """A row's cells, or that it is open."""
    if row.name not in found:
        return [row.what, *["open"] * len(shared.RANKED), "", "", "", "", f"{row.minutes:g}"]
    own = found[row.name]
    speed = own["events"] / (own["plan"]["seconds_per_step"] * own["plan"]["steps"])
    return [
        row.what,
        *(shared.cell([own["metrics"][metric]]) for metric in shared.RANKED),
        difference(own, found[row.against]) if row.against in found else "",
        f"{speed:,.0f}",
        f"{own['peak_memory_mb'] * shared.MIB:.2f}",
        f"{own['parameters']:,}",
        f"{own['minutes']:g}",
    ]


def difference(own: Found, other: Found) -> str:
    """Of NDCG@10, user by user, with its interval of 95 %."""
    first, second = (paired.gains(pa.array(unpacked(each["ranks"]), pa.int64()), METRIC) for each in (own, other))
    if len(first) != len(second):
        return "other users"
    low, high = paired.compare(first, second, draws=2000).difference
    return f"{first.mean() - second.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def efficiency(raw: Found) -> str:
    """Prefill and decode of benchmarks/encoders.py, in milliseconds, and how many times FuXi-Linear's that is."""
    every = [kind for kind in NAMES if kind in raw["prefill"][0]]
    prefill = [
        [f"{case['events']:,}", "1", *(_times(case[kind], case["fuxi_linear"]) for kind in every)]
        for case in raw["prefill"]
    ]
    took = [{kind: case[kind]["append_query_ms"] for kind in every} for case in raw["decode"]]
    decode = [
        [f"{case[every[0]][n]:,}" for n in ("events", "users")]
        + [_times(ms[kind], ms["fuxi_linear"]) for kind in every]
        for case, ms in zip(raw["decode"], took, strict=True)
    ]
    header = ["events", "users", *(NAMES[kind] for kind in every)]
    return (
        f"Prefill, ms:\n\n{harness.table(header, prefill)}\n\n"
        f"One event and one query more of each user, ms:\n\n{harness.table(header, decode)}"
    )


def _times(value: float, own: float) -> str:
    return f"{value:,.1f} ({value / own:.1f}×)"


# --- figures ---------------------------------------------------------------------------------------------------------


def power_law(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """a and b of ``a·size^b``, by least squares of the logarithms.

    Example:
        >>> a, b = power_law([1e5, 1e6, 1e7], [0.1, 0.2, 0.4])
        >>> round(b, 4), round(a * 1e6**b, 4)
        (0.301, 0.2)
    """
    b, log_a = np.polyfit(np.log(sizes), np.log(values), 1)
    return math.exp(log_a), float(b)


def scaling(found: dict[str, Found], output: Path) -> bool:
    """Quality against parameters with the fitted power law, from three sizes on; whether there is a figure."""
    points = sorted(
        (found[row.name]["parameters"], found[row.name]["metrics"][METRIC])
        for row in ROWS
        if row.study == "scaling" and row.name in found
    )
    if len(points) < 3:
        return False
    sizes, values = ([point[n] for point in points] for n in range(2))
    a, b = power_law(sizes, values)
    plt = shared.pyplot()
    figure, axis = plt.subplots(figsize=(6, 4))
    axis.loglog(sizes, values, "o", label=METRIC)
    axis.loglog(sizes, [a * size**b for size in sizes], "--", label=f"{a:.3g} · parameters^{b:.3f}")
    axis.set(xlabel="parameters", title="git log, validation events")
    axis.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return True


def hyper_parameters(found: dict[str, Found], output: Path) -> bool:
    """Quality against scales, heads and the kernel's width, where two values are known; whether there is a figure."""
    usual = {"scales": 8, "heads": 4, "kernel": 32}
    reference, panels = found.get("reference-ml-1m"), {}
    for name, value in usual.items():
        prefix = f"hyper-parameters-ml-1m-{name}-"
        known = {int(row.removeprefix(prefix)): each for row, each in found.items() if row.startswith(prefix)}
        if reference is not None:
            known[value] = reference
        if len(known) > 1:
            panels[name] = sorted((number, each["metrics"][METRIC]) for number, each in known.items())
    if not panels:
        return False
    plt = shared.pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.5), squeeze=False)
    titles = {"scales": "H_t, temporal scales", "heads": "H, retention heads", "kernel": "d_p, positional kernel"}
    for axis, (name, points) in zip(axes[0], panels.items(), strict=True):
        axis.semilogx(*zip(*points, strict=True), "o-", base=2)
        axis.set(xlabel=titles[name], ylabel=METRIC)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return True
