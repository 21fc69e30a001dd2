"""A Recommender over HTTP. Needs the extra [serve]."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from fuxi_torchrec import __version__
from fuxi_torchrec.events.times import now
from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving import requests
from fuxi_torchrec.serving.http import bodies
from fuxi_torchrec.serving.http.batching import Batcher, OverloadedError
from fuxi_torchrec.serving.http.guard import Guard, problem
from fuxi_torchrec.serving.http.metrics import ServiceMetrics
from fuxi_torchrec.serving.new_items import AddedItems
from fuxi_torchrec.serving.options import Limits
from fuxi_torchrec.serving.recommender import Recommender

logger = get_logger(__name__)

Answered = TypeVar("Answered")

PROBLEMS = {
    400: "The body cannot be read",
    401: "The bearer token is missing or wrong",
    404: "There is no such item",
    409: "An item is there twice, with other features",
    413: "The body is too large",
    415: "The body does not come as JSON",
    422: "The body is not as described",
    503: "Too many requests are waiting, or nothing can be written",
}


def create_app(recommender: Recommender, token: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The service around a Recommender, which it closes at the end.

    Args:
        token: that callers must show, if given; /health and the description are open.
    """
    limits = limits or Limits()
    service = Service(recommender, limits)
    app = FastAPI(title="fuxi_torchrec", version=__version__, lifespan=service.lifespan, docs_url=None, redoc_url=None)
    _add_routes(app, service, bodies.bodies_for(recommender, limits), token is not None)

    def description() -> dict[str, Any]:
        app.openapi_schema = None  # the latest time of an event goes with the clock
        return FastAPI.openapi(app)

    app.openapi = description  # type: ignore[method-assign]
    app.state.metrics = service.metrics
    _answer_problems(app)
    app.add_middleware(
        Guard,
        token=token,
        open_paths=frozenset(("/health", "/openapi.json")),
        paths=frozenset(route.path for route in app.routes),  # type: ignore[attr-defined]
        body_bytes=limits.max_body_kib * 1024,
        observe=service.metrics.observe,
    )
    return app


def _add_routes(app: FastAPI, service: "Service", models: bodies.Bodies, closed: bool) -> None:
    # for the description; the guard asks for the token, before there is a body
    asks = [Depends(HTTPBearer(auto_error=False))] if closed else []
    refused = (401,) if closed else ()

    def post(
        path: str, answer: Callable[[Any], Awaitable[Any]], body: type[BaseModel], result: type, *also: int
    ) -> None:
        async def route(body: Any) -> Any:
            return await answer(body)

        route.__annotations__["body"], route.__name__ = body, answer.__name__
        responses = _problems(400, 413, 415, 422, 503, *refused, *also)
        app.post(path, response_model=result, responses=responses, dependencies=[*asks, Depends(_as_json)])(route)

    post("/recommend", service.recommend, models.recommend, models.recommendations)
    post("/recommend-history", service.recommend_history, models.recommend_history, models.recommendations)
    post("/append", service.append, models.append, requests.Appended)
    post("/forget", service.forget, models.forget, bodies.Forgotten)
    if service.recommender.manifest.item_features:
        post("/items", service.add_items, models.items, AddedItems, 409)
    post("/similar-items", service.similar_items, models.similar, models.similar_items, 404)
    post("/similar-users", service.similar_users, models.neighbours, models.similar_users, 404)
    app.get("/health", responses=_problems(503))(service.health)
    text: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    responses = {**text, **_problems(*refused)}
    app.get("/metrics", response_class=Response, responses=responses, dependencies=asks)(service.prometheus)


def _as_json(request: Request) -> None:
    """Only what says that it is JSON is read as such: no other page in a browser may send that unasked."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        sent = f"the body is sent as {kind}" if kind else "the request has no Content-Type"
        raise HTTPException(415, f"{sent}: send JSON, with the header Content-Type: application/json")


def _problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": bodies.Problem, "description": PROBLEMS[code]} for code in codes}


class Service:
    """What each path does. Requests for users, and events, of many callers are worked on together."""

    def __init__(self, recommender: Recommender, limits: Limits) -> None:
        self.recommender, self.limits, self.metrics = recommender, limits, ServiceMetrics(recommender)
        self._unit = recommender.manifest.time_unit
        self._in_threads = self._held = 0
        self._recommending: Batcher[requests.Request, requests.Answer] = Batcher(
            recommender.answer,
            "recommend",
            limits.max_batch,
            limits.batch_window_ms / 1000,
            limits.max_waiting,
            self.metrics.batch.labels("recommend").observe,
            repeat=True,
        )
        self._appending: Batcher[list[requests.Event], requests.Appended] = Batcher(
            partial(recommender.append_events, checked=True),  # by the description of NewEvent
            "append",
            limits.max_batch,
            0.0,  # while one batch is being written, the next one gathers
            limits.max_waiting,
            self.metrics.batch.labels("append").observe,
            cost=len,
            most_cost=limits.max_batch_events,
            waiting_cost=limits.max_waiting_events,
        )

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Everything acknowledged is on disk at the end."""
        yield
        await asyncio.to_thread(self._recommending.close)
        await asyncio.to_thread(self._appending.close)
        self.recommender.close()
        logger.info("everything acknowledged is on disk; stopped")

    async def recommend(self, body: Any) -> Response:
        request = self._request(body, body.user_id)
        self.recommender.check(request)
        answer = await asyncio.wrap_future(self._recommending.submit(request))
        if not answer.known:
            self.metrics.unknown.inc()
        return JSONResponse(answer.to_dict())

    async def recommend_history(self, body: Any) -> Response:
        events = sorted((_event(past) for past in body.events), key=lambda event: event.timestamp)
        select = any(event.columns for event in events)
        request = self._request(body, "")
        answer = await self._in_thread(len(events), self.recommender.answer_history, events, request, select)
        return JSONResponse(answer.to_dict())

    async def append(self, body: Any) -> requests.Appended:
        events = [_event(new, new.user_id) for new in body.events]
        filtering = bool(self.recommender.manifest.log.where)
        kept = await self._in_thread(len(events), self._selected, events) if filtering else self._selected(events)
        done = await asyncio.wrap_future(self._appending.submit(kept))
        done = replace(done, filtered=len(events) - len(kept))
        for outcome, count in vars(done).items():
            self.metrics.events.labels(outcome.removesuffix("s")).inc(count)
        return done

    async def forget(self, body: Any) -> bodies.Forgotten:
        count = await self._in_thread(len(body.user_ids), self.recommender.forget, body.user_ids)
        self.metrics.forgotten.inc(count)
        return bodies.Forgotten(forgotten=count)

    async def add_items(self, body: Any) -> AddedItems:
        items = [item.model_dump(by_alias=True, exclude_unset=True) for item in body.items]
        try:
            return await self._in_thread(len(items), self.recommender.add_items, items)
        except ValueError as error:  # an id twice, with other features
            raise error if isinstance(error, ExportError) else HTTPException(409, str(error)) from None

    async def similar_items(self, body: Any) -> Response:
        try:
            answer = await self._in_thread(1, self.recommender.similar_items, body.item_id, body.k)
        except ValueError as error:
            raise HTTPException(404, str(error)) from None
        return JSONResponse(answer.to_dict())

    async def similar_users(self, body: Any) -> Response:
        request = requests.Request(body.user_id, body.time if body.time is not None else now(self._unit), body.k)
        self.recommender.check(request)
        try:
            answer = await self._in_thread(1, self.recommender.similar_users, request.user_id, request.time, request.k)
        except ValueError as error:  # a user without events
            raise error if isinstance(error, ExportError) else HTTPException(404, str(error)) from None
        return JSONResponse(answer.to_dict())

    async def health(self) -> bodies.Health:
        """What is served, and whether events can be appended."""
        info = self.recommender.info()
        if info["log_failed"]:
            raise HTTPException(503, "the disk of the append log has failed: nothing can be appended until a restart")
        about = {name: info[name] for name in ("model_id", "as_of", "time_unit", "items", "users")}
        return bodies.Health(status="ok", version=__version__, **about)

    async def prometheus(self) -> Response:
        """ServiceMetrics in Prometheus' text format."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _request(self, body: Any, user_id: requests.UserId) -> requests.Request:
        time = body.time if body.time is not None else now(self._unit)
        return requests.Request(user_id, time, body.k, body.exclude_seen)

    def _selected(self, events: list[requests.Event]) -> list[requests.Event]:
        try:
            return self.recommender.select(events)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    async def _in_thread(self, cost: int, work: Callable[..., Answered], *given: Any) -> Answered:
        """For what is not worked on together; the cost is in events or users."""
        limits = self.limits
        if self._in_threads >= limits.max_waiting or (self._held and self._held + cost > limits.max_waiting_events):
            raise OverloadedError("too many requests are waiting")
        self._in_threads, self._held = self._in_threads + 1, self._held + cost
        try:
            return await asyncio.to_thread(work, *given)
        finally:
            self._in_threads, self._held = self._in_threads - 1, self._held - cost


def _event(given: Any, user_id: requests.UserId = "") -> requests.Event:
    features = given.features and given.features.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
    return requests.Event(user_id, given.item_id, given.timestamp, features, given.columns)


def _answer_problems(app: FastAPI) -> None:
    """Every error is ``{"detail": text}``, and no text repeats what cannot be written as JSON."""

    async def answer(_: Request, error: Exception) -> Response:
        match error:
            case RequestValidationError():
                said = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()[:10]]
                return problem(422, "; ".join(said))
            case HTTPException():
                return problem(error.status_code, str(error.detail), dict(error.headers or {}))
            case OverloadedError():
                return problem(503, str(error), {"Retry-After": "1"})
            case ExportError():
                logger.error("%s", error)
                full = isinstance(error, requests.FullError)
                return problem(503, str(error) if full else "the request cannot be served now; the log says why")
        return problem(400, str(error))

    for kind in (RequestValidationError, HTTPException, OverloadedError, ExportError, ValueError):
        app.add_exception_handler(kind, answer)
