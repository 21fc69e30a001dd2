"""What callers send to the service of one export, and get, as pydantic models."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from fuxi_torchrec.events.times import NAMES, bounds, check_event_time, check_time, last_event
from fuxi_torchrec.serving.options import Limits
from fuxi_torchrec.serving.recommender import Recommender

Fields = dict[str, Any]  # types and defaults, as create_model takes them


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is an integer, as 5 is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _between(least: int, most: int) -> Any:
    return Annotated[int, Field(ge=least, le=most), BeforeValidator(_whole)]


# almost 2^63: the description writes bounds as floats, and this one is the same number to everybody who reads it
_MOST = 2**63 // 128_000 * 128_000
_LIST: Any = list  # of types that are known when the service starts, not to a type checker
_IDS: dict[str, Any] = {
    "int64": _between(-_MOST, _MOST),
    "string": Annotated[str, Field(min_length=1, max_length=2048)],
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Recommendations(BaseModel):
    """What an answer has beside the user and the items."""

    as_of: int = Field(description="the request's time")
    known: bool = Field(description="false: nothing is known of the user")
    events: int = Field(description="that the answer rests on")
    before_last_event: bool = Field(description="the time lies before the user's last event")
    unknown_items: int
    model_id: str
    export_as_of: int


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

    recommend: type[BaseModel]
    recommend_history: type[BaseModel]
    append: type[BaseModel]
    forget: type[BaseModel]
    recommendations: type[BaseModel]
    items: type[BaseModel]
    similar: type[BaseModel]
    similar_items: type[BaseModel]
    neighbours: type[BaseModel]
    similar_users: type[BaseModel]


def bodies_for(recommender: Recommender, limits: Limits) -> Bodies:
    """Models that refuse what the export, or the limits, do not allow."""
    manifest, unit = recommender.manifest, recommender.manifest.time_unit
    user, item = _IDS[manifest.user_id_type], _IDS[manifest.item_id_type]
    first, last = bounds(manifest.as_of, unit)
    times: dict[str, Any] = {"as_of": manifest.as_of, "unit": unit}
    since = f"in {NAMES[unit]} since 1970"
    time: Any = Annotated[
        int,
        BeforeValidator(_whole),
        AfterValidator(partial(check_time, **times)),
        Field(description=since, json_schema_extra={"minimum": first, "maximum": last}),
    ]
    event_time: Any = Annotated[
        int,
        BeforeValidator(_whole),
        AfterValidator(partial(check_event_time, **times)),
        Field(
            description=f"{since}; not in the future",
            json_schema_extra=lambda schema: schema.update(minimum=first, maximum=last_event(**times)),
        ),
    ]
    question: Fields = {
        "time": (time | None, Field(None, description="of the request; the server's clock by default")),
        "k": (_between(1, limits.max_k), Field(10, description="how many items")),
        "exclude_seen": (bool, Field(False, description="leave out the items of the history")),
    }
    columns = f"of the log, for its condition: {manifest.log.where or 'none'}"
    event: Fields = {
        "item_id": (item, ...),
        "timestamp": (event_time, ...),
        "features": (_features(recommender) | None, Field(None, description="features")),
        "columns": (dict[str, Any] | None, Field(None, description=columns)),
    }
    user_id = (user, Field(description="raw id; an unknown user is served as new"))
    past = _model("PastEvent", "One event of a history.", event)
    new = _model("NewEvent", "One event of a user.", event | {"user_id": (user, ...)})
    history = (_LIST[past], Field(max_length=limits.max_events, description="sorted by time if they are not"))
    most: dict[str, Any] = {"min_length": 1, "max_length": limits.max_events}
    one: Fields = {"item_id": (item, ...), "score": (float, ...)}
    if manifest.item_file.display:
        one["display"] = (dict[str, str | None], Field(description="what is shown of the item"))
    items = (_LIST[_model("Item", "One item.", one)], ...)
    answer: Fields = {"user": (user | None, ...), "items": items}
    near = (_LIST[_model("Neighbour", "One user.", {"user_id": (user, ...), "score": (float, ...)})], ...)
    whom: Fields = {"user_id": (user, ...), "time": question["time"], "k": question["k"]}
    given = (_LIST[_new_item(recommender, item)], Field(**most))
    return Bodies(
        _model("Recommend", "Ask for a user.", question | {"user_id": user_id}),
        _model("RecommendHistory", "Ask for a history that is not stored.", question | {"events": history}),
        _model("Append", "Tell what happened.", {"events": (_LIST[new], Field(**most))}),
        _model("Forget", "Remove users.", {"user_ids": (_LIST[user], Field(**most))}),
        _model("Recommendations", "Items, best first.", answer, Recommendations),
        _model("NewItems", "Make items recommendable by their features.", {"items": given}),
        _model("Similar", "Ask for items similar to one.", {"item_id": (item, ...), "k": question["k"]}),
        _model("SimilarItems", "Similar items, best first.", {"item": (item, ...), "items": items}, BaseModel),
        _model("Neighbours", "Ask for users similar to one.", whom),
        _model("SimilarUsers", "Similar users, best first.", {"user": (user, ...), "users": near}, BaseModel),
    )


def _model(name: str, doc: str | None, fields: Fields, base: type[BaseModel] = _Strict) -> Any:
    return create_model(name, __base__=base, __doc__=doc, **fields)


def _new_item(recommender: Recommender, item: Any) -> Any:
    """An item that the export does not have: its id and its features, by the names of the file's columns."""
    manifest = recommender.manifest
    about = {feature.name: feature for feature in manifest.item_features}
    text = Annotated[str, Field(max_length=2048)]
    fields: Fields = {"item_id": (item, Field(alias=manifest.item_file.id_column or "item_id"))}
    for count, spec in enumerate(manifest.item_file.columns):
        kind: Any = text
        if spec.kind in ("number", "bucket"):
            kind = _NUMBER
        elif spec.kind == "vector":
            kind = _vector(about[spec.name].width)
        elif spec.kind == "id" and about[spec.name].multiple:
            kind = text | _LIST[text]
        fields[f"feature_{count}"] = (kind | None, Field(None, alias=spec.name))
    return _model("NewItem", "One item.", fields)


# JSON has no infinity; a float32 must hold it
_NUMBER: Any = Annotated[float, Field(ge=-1e30, le=1e30), BeforeValidator(lambda v: float(v) if type(v) is int else v)]


def _vector(width: int) -> Any:
    return Annotated[_LIST[_NUMBER], Field(min_length=width, max_length=width)]


def _features(recommender: Recommender) -> Any:
    """Features of an event, by name, what requests.Checks takes, or null for one that is not given.

    The fields have names of our own, since a class cannot have every one.
    """
    fields: Fields = {}
    for number, feature in enumerate(recommender.manifest.features):
        rows = recommender.feature_rows.get(feature.name)
        kind = Annotated[str, Field(max_length=2048)] if rows is None else _between(0, rows - 1)
        if feature.kind != "id":
            kind = _vector(feature.width) if feature.kind == "vector" else _NUMBER
        if feature.multiple:
            kind = kind | _LIST[kind]
        fields[f"feature_{number}"] = (kind | None, Field(None, alias=feature.name))
    return _model("Features", None, fields)
