"""From a budget to steps, and from a grid to a choice: pure functions."""

from collections.abc import Mapping, Sequence

from benchmarks.paper.rows import CHOOSING, FINAL, GRID, SHARE, Timed

LEAST = 20  # steps of a training, whatever the budget
_WARMUP, _MOST_WARMUP = 0.05, 200


def steps(minutes: float, seconds_per_step: float) -> int:
    """What a budget of processor time allows.

    Example:
        >>> steps(6.0, 0.03), steps(0.001, 1.0)
        (12000, 20)
    """
    return max(LEAST, int(minutes * 60 / seconds_per_step))


def for_a_point(whole: int) -> int:
    """Steps of a training for a choice."""
    return max(LEAST, int(whole * SHARE))


def schedule(count: int) -> tuple[str, ...]:
    """Settings of a training of so many steps: warm-up at its begin, the end of the schedule at its end.

    Example:
        >>> schedule(1000)[:2]
        ('train.max_steps=1000', 'optimizer.warmup_steps=50')
    """
    warmup = min(_MOST_WARMUP, int(count * _WARMUP))
    saves = max(LEAST, count // 8)  # a killed training loses an eighth at most
    return (
        f"train.max_steps={count}",
        f"optimizer.warmup_steps={warmup}",
        "train.epochs=10000",
        f"checkpoint.every_steps={saves}",
    )


def point(number: int) -> tuple[str, ...]:
    """Settings of a point of the grid."""
    lr, dropout = GRID[number]
    return f"optimizer.lr={lr}", f"model.dropout={dropout}"


def best(found: Mapping[int, float]) -> int:
    """The point with the best metric; the first of equal ones.

    Example:
        >>> best({0: 0.1, 1: 0.3, 2: 0.3, 3: 0.2})
        1
    """
    if set(found) != set(range(len(GRID))):
        raise ValueError(f"points {sorted(found)} of {len(GRID)} are measured: a choice needs all")
    return max(sorted(found), key=lambda number: found[number])


def choosing(row: Timed, number: int, whole: int) -> tuple[str, ...]:
    """Settings of the training of a point."""
    return (*row.settings, *CHOOSING.get(row.set, ()), *point(number), *schedule(for_a_point(whole)))


def final(row: Timed, number: int | None, whole: int) -> tuple[str, ...]:
    """Settings of the training that is ranked."""
    chosen: Sequence[str] = () if number is None else point(number)
    split = FINAL.get(row.set, ()) if row.split == "test" else CHOOSING.get(row.set, ())
    return (*row.settings, *split, *chosen, *schedule(whole))
