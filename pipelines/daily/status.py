"""How the days stand, and what the next one would run, for people."""

from fuxi_torchrec.artifacts import is_locked
from pipelines.daily.jobs import LOCAL
from pipelines.daily.loop import Daily
from pipelines.daily.stages import WITHOUT_JOB
from pipelines.daily.state import LOCK, Day

STAGES = ("prepare", "train", "evaluate", "compare", "gate", "refresh", "export", "publish")


def status(daily: Daily) -> str:
    """Every day with its stages, as a table."""
    current, pending, gate = daily.releases.current(), daily.pending(), daily.config.gate
    running = is_locked(daily.layout.root / LOCK)
    days = {day: state for day, state in daily.standings().items() if state != "waiting" or day in pending}
    if not days:
        return f"{daily.layout.root}: no day yet, and no log at {daily.config.logs.path}"
    used = [stage for stage in STAGES if any(stage in daily.state.look(day).stages for day in days)]
    rows, notes = [["", "day", "state", "from", *used, gate.metric]], []
    for day, state in days.items():
        record = daily.state.look(day)
        evaluation = record.evaluation
        if state in ("published", "rolled back"):
            evaluation = daily.releases.read(day).evaluation
        value = getattr(evaluation, gate.request_time, {}).get(gate.metric)
        mark = "*" if current is not None and current.day == day else ""
        state = "stopped" if state == "running" and not running else state
        cells = [mark, day, state, record.base or "-", *(_cell(record, stage, running) for stage in used)]
        rows.append([*cells, "-" if value is None else f"{value:.4f}"])
        if record.reason and state != "published":
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
        return found.took()
    return "stopped" if found.status == "running" and not running else found.status


def dry_run(daily: Daily, day: str | None) -> None:
    """Show every stage's job, by default of the next day to do, and submit none."""
    daily.check_names()
    day = day if day is not None else next(iter(daily.pending()), None)
    if day is None:
        print("nothing to do")
        return
    record = daily.state.look(day)
    record = record if record.stages else daily.planned(day)
    for stage in daily.stages.of(record):
        if stage in WITHOUT_JOB:
            print(f"{stage}: in this process")
            continue
        job = daily.stages.job(stage, day, record)
        print(f"{stage}: {job.command(daily.config.jobs.ranks)}")
        request = daily.jobs.request(job)
        if daily.jobs.scheduler not in LOCAL:
            print(request)
