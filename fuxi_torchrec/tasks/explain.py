"""What a bias for items that come back has learned, as curves: its tables, each alone."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fuxi_torchrec.encoders.explain import Curve, Curves, readable
from fuxi_torchrec.tasks.repeats import PARTS, PHASES, RepeatBias, edges

_OTHERS = ("mix", "user", "items")  # parts that are no tables
_Over = Literal["time", "events", "items", "count"]
_TABLES: dict[str, tuple[str, _Over]] = {
    "events_ago": ("by events ago", "events"),
    "items_ago": ("by distinct items ago", "items"),
    "count": ("by times it occurred", "count"),
    "gap": ("by events between its last two", "events"),
    "since": ("by time since", "time"),
}


def bias_curves(bias: RepeatBias, per_second: int) -> Curves | None:
    """Curves of its tables over the lower bounds of their buckets, up to the last that was ever used; None without any.

    Args:
        per_second: ticks of a second in the data's time unit.
    """
    left_out = set(bias.config.without)
    bounds = [0.0, *map(float, edges())]
    tables = {name: _used(bias.part(name)) for name in _TABLES if name not in left_out}
    curves = []
    for name, values in tables.items():
        title, over = _TABLES[name]
        unit = per_second if over == "time" else 1
        curves.append(Curve(title, [bound / unit for bound in bounds[: len(values)]], values, over))
    if "lead" not in left_out:
        curves.append(_lead(bias.part("lead"), bounds))
    rows = [curves[n : n + 3] for n in range(0, len(curves), 3)]
    if "phase" not in left_out and bias.config.periods:
        phases = bias.part("phase").detach().view(-1, PHASES).tolist()
        rows.append(
            [
                Curve(f"by phase of {readable(period, per_second)}", [n / PHASES for n in range(PHASES)], each, "phase")
                for period, each in zip(bias.config.periods, phases, strict=True)
            ]
        )
    if not rows:
        return None
    return Curves(rows, ["bias of items that come back"] + ["bias, continued"] * (len(rows) - 1), _sizes(bias))


def _used(table: Tensor) -> list[float]:
    """Without the zeros at its end: buckets that no item was in."""
    values: list[float] = table.detach().tolist()
    while len(values) > 1 and values[-1] == 0:
        values.pop()
    return values


def _lead(table: Tensor, bounds: Sequence[float]) -> Curve:
    """Over both signs: positive leads have the table's second half."""
    before, after = (_used(half) for half in table.detach().chunk(2))
    x = [*(-bound for bound in bounds[len(before) - 1 : 0 : -1]), *bounds[: len(after)]]
    return Curve("by events after what the last item followed before", x, [*before[::-1], *after[1:]], "events")


def _sizes(bias: RepeatBias) -> str:
    """Of what depends on the user and on several of these together."""
    there = [name for name in PARTS if name in _OTHERS and name not in bias.config.without]
    sizes = ", ".join(f"{name} {bias.part(name).detach().norm():.3g}" for name in there)
    return f"  beside these tables, norms of what depends on the user or on several at once: {sizes or 'none'}"
