"""How the days stand, and what the next one would run, for people."""

from fuxi_torchrec.artifacts import is_locked
from pipelines.daily.jobs import LOCAL
from pipelines.daily.logs import check_names, order
from pipelines.daily.loop import Daily
from pipelines.daily.stages import WITHOUT_JOB
from pipelines.daily.state import LOCK, Day

STAGES = ("prepare", "train", "evaluate", "compare", "gate", "refresh", "export", "publish")


def status(daily: Daily) -> str:
    """Every day with its stages, as a table."""
    current, line, ever = daily.releases.current(), daily.releases.line(), daily.releases.ever()
    running, gate = is_locked(daily.layout.root / LOCK), daily.config.gate
    days = sorted({*daily.state.days, *ever, *daily.pending()}, key=order)
    if not days:
        return f"{daily.layout.root}: no day yet, and no log at {daily.config.logs.path}"
    used = [stage for stage in STAGES if any(stage in daily.state.look(day).stages for day in days)]
    rows = [["", "day", "state", "from", *used, gate.metric]]
    notes = []
    for day in days:
        record = daily.state.look(day)
        state: str = record.status
        if (day in ever or state == "published") and day not in line:
            state = "rolled back"
        elif state == "running" and not running:
            state = "stopped"
        value = (record.metrics or {}).get(gate.request_time, {}).get(gate.metric)
        mark = "*" if current is not None and current.day == day else ""
        cells = [mark, day, state, record.base or "-", *(_cell(record, stage, running) for stage in used)]
        rows.append([*cells, "-" if value is None else f"{value:.4f}"])
        if record.reason and record.status != "published":
            notes.append(f"{day}: {record.reason}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    standing = f"* published: {daily.releases.pointer} -> day {current.day}" if current else "nothing is published yet"
    return "\n".join([*lines, "", standing, *notes])


def _cell(record: Day, stage: str, running: bool) -> str:
    found = record.stages.get(stage)
    if found is None:
        return "-"
    if found.status == "finished":
        return f"{found.seconds:.0f} s" if found.seconds is not None else "done"
    return "stopped" if found.status == "running" and not running else found.status


def dry_run(daily: Daily, day: str | None) -> None:
    """Show every stage's job, by default of the next day to do, and submit none."""
    check_names(daily.counted())
    if day is None:
        day = next(iter(daily.pending()), None)
        if day is None:
            print("nothing to do")
            return
    record = daily.state.look(day)
    if not record.stages:
        record = daily.planned(day)
    for stage in daily.stages.of(record):
        if stage in WITHOUT_JOB:
            print(f"{stage}: in this process")
            continue
        job = daily.stages.job(stage, day, record)
        print(f"{stage}: {daily.stages.shown(job)}")
        request = daily.jobs.request(job)
        if daily.jobs.scheduler not in LOCAL:
            print(request)
