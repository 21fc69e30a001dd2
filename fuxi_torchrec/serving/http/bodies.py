"""What callers send and get, as pydantic models: the fields in general, and narrowed to one export."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from fuxi_torchrec.events.times import NAMES, bounds, check_event_time, check_time, last_event, now
from fuxi_torchrec.serving import requests
from fuxi_torchrec.serving.options import Limits
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.requests import ItemId, UserId

Model = TypeVar("Model", bound=BaseModel)


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is an integer, as 5 is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
# almost 2^63: the description writes bounds as floats, and this one is the same number to everybody who reads it
_MOST = 2**63 // 128_000 * 128_000
Int64 = Annotated[int, Field(ge=-_MOST, le=_MOST), BeforeValidator(_whole)]
Text = Annotated[str, Field(min_length=1, max_length=2048)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Question(_Strict):
    time: int | None = Field(None, description="of the request; the server's clock by default")
    k: int = Field(10, description="how many items")
    exclude_seen: bool = Field(False, description="leave out the items of the history")

    def request(self, user_id: UserId, unit: str) -> requests.Request:
        return requests.Request(user_id, self.time if self.time is not None else now(unit), self.k, self.exclude_seen)


class Recommend(_Question):
    """Ask for a user."""

    user_id: UserId = Field(description="raw id; an unknown user is served as new")


class PastEvent(_Strict):
    """One event of a history."""

    item_id: ItemId
    timestamp: int
    features: BaseModel | None = Field(None, description="features")
    columns: dict[str, Any] | None = None

    def event(self, user_id: UserId = "") -> requests.Event:
        features = None
        if self.features is not None:
            features = self.features.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
        return requests.Event(user_id, self.item_id, self.timestamp, features, self.columns)


class NewEvent(PastEvent):
    """One event of a user."""

    user_id: UserId


class RecommendHistory(_Question):
    """Ask for a history that is not stored."""

    events: list[PastEvent] = Field(description="sorted by time if they are not")


class Append(_Strict):
    """Tell what happened."""

    events: list[NewEvent]


class Forget(_Strict):
    """Remove users."""

    user_ids: list[UserId]


class Item(BaseModel):
    """One item."""

    item_id: ItemId
    score: float


class Recommendations(BaseModel):
    """Items, best first."""

    user: UserId | None
    as_of: int = Field(description="the request's time")
    items: list[Item]
    known: bool = Field(description="false: nothing is known of the user")
    events: int = Field(description="that the answer rests on")
    before_last_event: bool = Field(description="the time lies before the user's last event")
    unknown_items: int
    model_id: str
    export_as_of: int


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


class Problem(BaseModel):
    """What was wrong."""

    detail: str


@dataclass(frozen=True)
class Bodies:
    """The models of requests and answers for one export: its types of ids, its time unit, its features."""

    recommend: type[Recommend]
    recommend_history: type[RecommendHistory]
    append: type[Append]
    forget: type[Forget]
    recommendations: type[Recommendations]


def bodies_for(recommender: Recommender, limits: Limits) -> Bodies:
    """Models that refuse what the export, or the limits, do not allow."""
    manifest, unit = recommender.manifest, recommender.manifest.time_unit
    ids: dict[str, Any] = {"int64": Int64, "string": Text}
    user, item = ids[manifest.user_id_type], ids[manifest.item_id_type]
    first, last = bounds(manifest.as_of, unit)
    times: dict[str, Any] = {"as_of": manifest.as_of, "unit": unit}
    since = f"in {NAMES[unit]} since 1970"
    time: Any = Annotated[
        Whole,
        AfterValidator(partial(check_time, **times)),
        Field(description=since, json_schema_extra={"minimum": first, "maximum": last}),
    ]
    event_time: Any = Annotated[
        Whole,
        AfterValidator(partial(check_event_time, **times)),
        Field(
            description=f"{since}; not in the future",
            json_schema_extra=lambda schema: schema.update(minimum=first, maximum=last_event(**times)),
        ),
    ]
    question: dict[str, Any] = {
        "time": time | None,
        "k": Annotated[int, Field(ge=1, le=limits.max_k), BeforeValidator(_whole)],
    }
    event: dict[str, Any] = {"item_id": item, "timestamp": event_time, "features": _features(recommender) | None}
    event["columns"] = Annotated[
        dict[str, Any] | None, Field(description=f"of the log, for its condition: {manifest.log.where}")
    ]
    past, new = _narrowed(PastEvent, **event), _narrowed(NewEvent, **event, user_id=user)
    return Bodies(
        _narrowed(Recommend, **question, user_id=user),
        _narrowed(RecommendHistory, **question, events=_list(past, limits.max_events)),
        _narrowed(Append, events=_list(new, limits.max_events, least=1)),
        _narrowed(Forget, user_ids=_list(user, limits.max_events, least=1)),
        _narrowed(Recommendations, user=user | None, items=list[_narrowed(Item, item_id=item)]),  # type: ignore[misc]
    )


def _list(kind: Any, most: int, least: int = 0) -> Any:
    return Annotated[list[kind], Field(min_length=least, max_length=most)]


def _narrowed(model: type[Model], **types: Any) -> type[Model]:
    """The same model, some of its fields of other types; what these do not say is as it was."""
    was = {name: model.model_fields[name] for name in types}
    said = {name for name, field in was.items() if field.description or not field.is_required()}
    fields: dict[str, Any] = {name: (kind, was[name] if name in said else ...) for name, kind in types.items()}
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


def _features(recommender: Recommender) -> Any:
    """Features of an event, by name; the fields have names of our own, since a class cannot have every one."""
    fields: dict[str, Any] = {}
    for number, feature in enumerate(recommender.manifest.features):
        rows = recommender.feature_rows.get(feature.name)
        kind: Any = Text | None
        if rows is not None:
            value = Annotated[int, Field(ge=0, le=rows - 1), BeforeValidator(_whole)]
            kind = list[value] if feature.multiple else value
        default: Any = None if rows is None else [] if feature.multiple else 0
        fields[f"feature_{number}"] = (kind, Field(default, alias=feature.name))
    return create_model("Features", __base__=_Strict, **fields)
