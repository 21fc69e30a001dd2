"""A Recommender over HTTP. Needs the extra [serve]."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException

from fuxi_torchrec import __version__
from fuxi_torchrec.events.times import NAMES, bounds, check_event_time, check_time, last_event, now
from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving import requests
from fuxi_torchrec.serving.http.batching import Batcher, OverloadedError
from fuxi_torchrec.serving.http.guard import Guard, problem
from fuxi_torchrec.serving.recommender import Recommender

logger = get_logger(__name__)

Answered = TypeVar("Answered")


@dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    Attributes:
        k: items of an answer.
        body_bytes: of a request.
        events: of a request, appended or of a history.
        batch: requests worked on together.
        batch_events: events appended together, unless one request has more.
        window_seconds: how long a request waits for others.
        waiting: requests of a kind that may wait; more are refused with 503.
        waiting_events: the same for the events that they have, or users to forget.
    """

    k: int = 1000
    body_bytes: int = 2**20
    events: int = 10_000
    batch: int = 64
    batch_events: int = 10_000
    window_seconds: float = 0.002
    waiting: int = 4096
    waiting_events: int = 100_000


class Problem(BaseModel):
    """What was wrong."""

    detail: str


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is an integer, as 5 is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
# almost 2^63: the description writes bounds as floats, and this one is the same number to everybody who reads it
_MOST = 2**63 // 128_000 * 128_000
Int64 = Annotated[int, Field(ge=-_MOST, le=_MOST), BeforeValidator(_whole)]
Text = Annotated[str, Field(min_length=1, max_length=2048)]


def _features(recommender: Recommender) -> type[BaseModel]:
    """Features of an event, by name; the fields have names of our own, since a class cannot have every one."""
    fields: dict[str, Any] = {}
    for number, feature in enumerate(recommender.manifest.features):
        rows = recommender.feature_rows(feature.name)
        kind: Any = Text | None
        if rows is not None:
            value = Annotated[int, Field(ge=0, le=rows - 1), BeforeValidator(_whole)]
            kind = list[value] if feature.multiple else value
        default: Any = None if rows is None else [] if feature.multiple else 0
        fields[f"feature_{number}"] = (kind, Field(default, alias=feature.name))
    return create_model("Features", __base__=_Strict, **fields)


def _problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    said = {
        400: "The body cannot be read",
        401: "The bearer token is missing or wrong",
        405: "Another method",
        413: "The body is too large",
        422: "The body is not as described",
        503: "Too many requests are waiting, or nothing can be written",
    }
    return {code: {"model": Problem, "description": said[code]} for code in codes}


class Metrics:
    """What Prometheus sees."""

    def __init__(self, recommender: Recommender) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("fuxi_requests", "Requests", ["path", "status"], **named)
        self.seconds = Histogram(
            "fuxi_request_seconds",
            "Time to answer",
            ["path"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
            **named,
        )
        self.batch = Histogram(
            "fuxi_batch_size", "Requests worked on together", ["what"], buckets=(1, 2, 4, 8, 16, 32, 64, 128), **named
        )
        self.events = Counter("fuxi_events", "Events received", ["outcome"], **named)
        self.forgotten = Counter("fuxi_forgotten_users", "Users forgotten", **named)
        self.unknown = Counter("fuxi_unknown_users", "Answers for unknown users", **named)
        version = Gauge("fuxi_export", "The export that answers", ["model_id", "as_of"], **named)
        version.labels(recommender.manifest.model_id, str(recommender.manifest.as_of)).set(1)
        for name, what in (
            ("cached_states", "States in memory"),
            ("recent_events", "Events since the export, in memory"),
            ("max_recent_events", "How many of them there may be"),
            ("damaged_states", "States found damaged and encoded again"),
            ("log_bytes", "Size of the append log"),
            ("log_failed", "Whether nothing can be appended any more"),
        ):
            gauge = Gauge(f"fuxi_{name}", what, **named)
            gauge.set_function(partial(_read, recommender, name))

    def observe(self, path: str, status: int, seconds: float) -> None:
        """One request."""
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)


def _read(recommender: Recommender, name: str) -> float:
    return float(recommender.info()[name])


class Appended(BaseModel):
    """What became of events."""

    accepted: int = Field(description="events that are on disk now")
    late: int = Field(description="events older than their user's last one, left out")
    unknown_items: int = Field(description="events of items that the model does not know")
    rare_items: int = Field(description="events of items that the dataset would not have, left out")
    filtered: int = Field(description="events that the condition of the dataset's log leaves out")


class Forgotten(BaseModel):
    """What became of users."""

    forgotten: int = Field(description="users that were known")


class Health(BaseModel):
    """What is served."""

    status: str
    version: str
    model_id: str
    as_of: int
    time_unit: str
    items: int
    users: int


def create_app(recommender: Recommender, token: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The service around a Recommender, which it closes at the end.

    Args:
        recommender: answers.
        token: that callers must show, if given; /health and the description are open.
        limits: of requests.
    """
    allowed = limits or Limits()
    manifest = recommender.manifest
    unit = NAMES[manifest.time_unit]
    metrics = Metrics(recommender)
    if TYPE_CHECKING:
        UserId: TypeAlias = int | str
        ItemId: TypeAlias = int | str
        Time: TypeAlias = int
        EventTime: TypeAlias = int
        Features: TypeAlias = BaseModel
    else:  # what the export has
        ids = {"int64": Int64, "string": Text}
        UserId, ItemId = ids[manifest.user_id_type], ids[manifest.item_id_type]
        first, last = bounds(manifest.as_of, manifest.time_unit)
        times = {"as_of": manifest.as_of, "unit": manifest.time_unit}
        Time = Annotated[
            Whole,
            AfterValidator(partial(check_time, **times)),
            Field(json_schema_extra={"minimum": first, "maximum": last}),
        ]
        EventTime = Annotated[
            Whole,
            AfterValidator(partial(check_event_time, **times)),
            Field(json_schema_extra=lambda schema: schema.update(minimum=first, maximum=last_event(**times))),
        ]
        Features = _features(recommender)

    class Recommend(_Strict):
        """Ask for a user."""

        user_id: UserId = Field(description="raw id; an unknown user is served as new")
        time: Time | None = Field(None, description=f"in {unit} since 1970; the server's clock by default")
        k: Whole = Field(10, ge=1, le=allowed.k, description="how many items")
        exclude_seen: bool = Field(False, description="leave out the items of the user's history")

    class PastEvent(_Strict):
        """One event of a history."""

        item_id: ItemId
        timestamp: EventTime = Field(description=f"in {unit} since 1970; not in the future")
        features: Features | None = Field(None, description="features")
        columns: dict[str, Any] | None = Field(None, description=f"of the log, for its condition: {manifest.log.where}")

    class RecommendHistory(_Strict):
        """Ask for a history that is not stored."""

        events: list[PastEvent] = Field(max_length=allowed.events, description="sorted by time if they are not")
        time: Time | None = Field(None, description=f"in {unit} since 1970; the server's clock by default")
        k: Whole = Field(10, ge=1, le=allowed.k)
        exclude_seen: bool = False

    class NewEvent(PastEvent):
        """One event of a user."""

        user_id: UserId

    class Append(_Strict):
        """Tell what happened."""

        events: list[NewEvent] = Field(min_length=1, max_length=allowed.events)

    class Forget(_Strict):
        """Remove users."""

        user_ids: list[UserId] = Field(min_length=1, max_length=allowed.events)

    class Item(BaseModel):
        """One item."""

        item_id: ItemId
        score: float

    class Recommendations(BaseModel):
        """Items, best first."""

        user: UserId | None
        as_of: int = Field(description="when the user was asked")
        items: list[Item]
        known: bool = Field(description="false: nothing is known of the user")
        events: int = Field(description="that the answer rests on")
        before_last_event: bool = Field(description="the time lies before the user's last event")
        unknown_items: int
        model_id: str
        export_as_of: int

    asking: Batcher[requests.Request, requests.Answer] = Batcher(
        recommender.answer,
        "recommend",
        allowed.batch,
        allowed.window_seconds,
        allowed.waiting,
        metrics.batch.labels("recommend").observe,
        repeat=True,
    )
    telling: Batcher[list[requests.Event], requests.Appended] = Batcher(
        partial(recommender.append_events, checked=True),  # by the description of NewEvent
        "append",
        allowed.batch,
        0.0,  # while one batch is being written, the next one gathers
        allowed.waiting,
        metrics.batch.labels("append").observe,
        cost=len,
        most_cost=allowed.batch_events,
        waiting_cost=allowed.waiting_events,
    )

    in_threads = held = 0

    async def in_thread(cost: int, work: Callable[..., Answered], *given: Any) -> Answered:
        """For what is not worked on together; the cost is in events or users."""
        nonlocal in_threads, held
        if in_threads >= allowed.waiting or (held and held + cost > allowed.waiting_events):
            raise OverloadedError("too many requests are waiting")
        in_threads, held = in_threads + 1, held + cost
        try:
            return await asyncio.to_thread(work, *given)
        finally:
            in_threads, held = in_threads - 1, held - cost

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(asking.close)
        await asyncio.to_thread(telling.close)
        recommender.close()
        logger.info("everything acknowledged is on disk; stopped")

    def selected(events: list[requests.Event]) -> list[requests.Event]:
        try:
            return recommender.select(events)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    def plain(features: BaseModel | None) -> dict[str, Any] | None:
        return (
            features.model_dump(by_alias=True, exclude_none=True, exclude_unset=True) if features is not None else None
        )

    app = FastAPI(title="fuxi_torchrec", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    # for the description; the guard asks for the token, before there is a body
    closed: dict[str, Any] = {"dependencies": [Depends(HTTPBearer(auto_error=False))]} if token is not None else {}
    errors = (400, 413, 422, 503, *([401] if token is not None else []))
    posts: dict[str, Any] = {**closed, "responses": _problems(*errors)}

    @app.post("/recommend", response_model=Recommendations, **posts)
    async def recommend(body: Recommend) -> Response:
        when = body.time if body.time is not None else now(manifest.time_unit)
        request = requests.Request(body.user_id, when, body.k, body.exclude_seen)
        recommender.check(request)
        answer = await asyncio.wrap_future(asking.submit(request))
        if not answer.known:
            metrics.unknown.inc()
        return JSONResponse(answer.to_dict())

    @app.post("/recommend-history", response_model=Recommendations, **posts)
    async def recommend_history(body: RecommendHistory) -> Response:
        when = body.time if body.time is not None else now(manifest.time_unit)
        events = sorted(body.events, key=lambda event: event.timestamp)
        answer = await in_thread(
            len(events),
            recommender.recommend_history,
            [event.item_id for event in events],
            [event.timestamp for event in events],
            when,
            body.k,
            body.exclude_seen,
            [plain(event.features) or {} for event in events],
            [event.columns or {} for event in events] if any(event.columns for event in events) else None,
        )
        return JSONResponse(answer.to_dict())

    @app.post("/append", **posts)
    async def append(body: Append) -> Appended:
        events = [requests.Event(e.user_id, e.item_id, e.timestamp, plain(e.features), e.columns) for e in body.events]
        kept = await in_thread(len(events), selected, events) if manifest.log.where else selected(events)
        done = replace(await asyncio.wrap_future(telling.submit(kept)), filtered=len(events) - len(kept))
        metrics.events.labels("accepted").inc(done.accepted)
        metrics.events.labels("late").inc(done.late)
        metrics.events.labels("unknown_item").inc(done.unknown_items)
        metrics.events.labels("rare_item").inc(done.rare_items)
        metrics.events.labels("filtered").inc(done.filtered)
        return Appended(**vars(done))

    @app.post("/forget", **posts)
    async def forget(body: Forget) -> Forgotten:
        count = await in_thread(len(body.user_ids), recommender.forget, body.user_ids)
        metrics.forgotten.inc(count)
        return Forgotten(forgotten=count)

    @app.get("/health", responses=_problems(503))
    async def health() -> Health:
        info = recommender.info()
        if info["log_failed"]:
            raise HTTPException(503, "the disk of the append log has failed: nothing can be appended until a restart")
        about = {name: info[name] for name in ("model_id", "as_of", "time_unit", "items", "users")}
        return Health(status="ok", version=__version__, **about)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_problems(*errors[4:])},
        **closed,
    )
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def description() -> dict[str, Any]:
        app.openapi_schema = None  # the latest time of an event goes with the clock
        return FastAPI.openapi(app)

    app.openapi = description  # type: ignore[method-assign]
    _answer_problems(app)
    app.add_middleware(
        Guard,
        token=token,
        open_paths=frozenset(("/health", "/openapi.json")),
        paths=frozenset(route.path for route in app.routes),  # type: ignore[attr-defined]
        body_bytes=allowed.body_bytes,
        observe=metrics.observe,
    )
    return app


def _answer_problems(app: FastAPI) -> None:
    """Every error is ``{"detail": text}``, and no text repeats what cannot be written as JSON."""

    @app.exception_handler(RequestValidationError)
    async def not_as_described(_: Request, error: RequestValidationError) -> Response:
        said = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()[:10]]
        text = "; ".join(said).encode("utf-8", "replace").decode()
        return problem(422, text)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(ExportError)
    async def cannot_write(_: Request, error: ExportError) -> Response:
        logger.error("%s", error)
        return problem(503, "the request cannot be served now; the log says why")

    @app.exception_handler(requests.FullError)
    async def full(_: Request, error: requests.FullError) -> Response:
        logger.error("%s", error)
        return problem(503, str(error))

    @app.exception_handler(OverloadedError)
    async def overloaded(_: Request, error: OverloadedError) -> Response:
        return problem(503, str(error), {"Retry-After": "1"})

    @app.exception_handler(ValueError)
    async def cannot_be_meant(_: Request, error: ValueError) -> Response:
        return problem(400, str(error).encode("utf-8", "replace").decode())
