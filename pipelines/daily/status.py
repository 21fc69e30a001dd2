"""How the days stand, and what the next one would run, for people."""

from fuxi_torchrec.artifacts import is_locked
from pipelines.daily.config import DailyConfig
from pipelines.daily.jobs import LOCAL, TorchXJobs
from pipelines.daily.logs import order
from pipelines.daily.loop import Daily
from pipelines.daily.state import Day

STAGES = ("prepare", "train", "evaluate", "compare", "gate", "refresh", "export", "publish")


def status(config: DailyConfig) -> str:
    """Every day with its stages, as a table."""
    daily = Daily(config)
    current, line, ever = daily.releases.current(), daily.releases.line(), daily.releases.ever()
    running = is_locked(daily.layout.lock)
    days = sorted({*daily.state.days, *ever, *daily.pending()}, key=order)
    if not days:
        return f"{daily.layout.root}: no day yet, and no log at {config.logs.path}"
    used = [stage for stage in STAGES if any(stage in daily._record(day).stages for day in days)]
    rows = [["", "day", "state", "from", *used, config.gate.metric]]
    notes = []
    for day in days:
        record = daily._record(day)
        state: str = record.status
        if (day in ever or state == "published") and day not in line:
            state = "rolled back"
        elif state == "running" and not running:
            state = "stopped"
        cells = [_cell(record, stage, running) for stage in used]
        value = (record.metrics or {}).get(config.gate.request_time, {}).get(config.gate.metric)
        mark = "*" if current is not None and current.day == day else ""
        rows.append([mark, day, state, record.base or "-", *cells, "-" if value is None else f"{value:.4f}"])
        if record.reason and record.status != "published":
            notes.append(f"{day}: {record.reason}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    standing = f"* published: {daily.releases.pointer} -> day {current.day}" if current else "nothing is published yet"
    return "\n".join([*lines, "", standing, *notes])


def _cell(record: Day, stage: str, running: bool) -> str:
    found = record.stages.get(stage)
    if found is None or found.status == "waiting":
        return "-"
    if found.status == "finished":
        return f"{found.seconds:.0f} s" if found.seconds is not None else "done"
    return "stopped" if found.status == "running" and not running else found.status


def dry_run(daily: Daily, jobs: TorchXJobs, day: str) -> None:
    """Show every stage's job, and submit none."""
    daily.check_names()
    current, record = daily.releases.current(), daily._record(day)
    if not record.stages:
        record = Day(base=current.day if current else None, kind=daily._kind(day, current))
    for stage in daily.stages.of(record):
        if stage in ("gate", "publish"):
            print(f"{stage}: in this process")
            continue
        job = daily.stages.job(stage, day, record)
        print(f"{stage}: {daily.stages.shown(job)}")
        request = jobs.request(job)
        if jobs.scheduler not in LOCAL:
            print(request)
