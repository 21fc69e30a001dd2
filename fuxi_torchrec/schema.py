"""JSON files that we read, validated strictly: the schema is a dataclass.

A missing or unknown key, a value of another type, or one that the dataclass's own ``__post_init__`` refuses with a
ValueError is an error of the caller's class that names file, key and value.
"""

import json
from typing import Any, TypeVar

import pydantic

Schema = TypeVar("Schema")

FORBID_EXTRA = pydantic.ConfigDict(extra="forbid")
_LONGEST = 80  # characters of a value in a message
_MOST = 5  # problems in a message


class Record:
    """The base of dataclasses that are read from files: keys they do not have are refused."""

    __pydantic_config__ = FORBID_EXTRA


def read_json(
    schema: type[Schema],
    text: str | bytes,
    where: object,
    error: type[Exception],
    advice: str,
    *,
    version: tuple[str, int] | None = None,
) -> Schema:
    """Validate a JSON text.

    Args:
        schema: a dataclass, nested ones derive from :class:`Record` too.
        text: of the file.
        where: the file, for messages.
        error: raised with a message that names file, key and value.
        advice: what to do about it; ends every message.
        version: the key and the value of the format's version, checked before everything else.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Point(Record):
        ...     x: int
        ...     y: int = 0
        >>> read_json(Point, '{"x": 3}', "a.json", ValueError, "write it again")
        Point(x=3, y=0)
        >>> read_json(Point, '{"x": "3", "z": 1}', "a.json", ValueError, "write it again")
        Traceback (most recent call last):
        ...
        ValueError: a.json: x = '3': should be a valid integer; z = 1: unexpected key; write it again
    """
    if version is not None:
        key, wanted = version
        found = _version(text, key, where, error, advice)
        if found != wanted:
            raise error(f"{where}: {key} {found!r}, this software reads {key} {wanted}; {advice}")
    try:
        return pydantic.TypeAdapter(schema).validate_json(text, strict=True)
    except pydantic.ValidationError as problems:
        some = [_explain(problem) for problem in problems.errors(include_url=False)[:_MOST]]
        raise error(f"{where}: {'; '.join(some)}; {advice}") from None


def _version(text: str | bytes, key: str, where: object, error: type[Exception], advice: str) -> Any:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as problem:  # also a number of too many digits, and bytes that are no text
        raise error(f"{where}: not readable as JSON: {problem}; {advice}") from None
    if not isinstance(plain, dict) or key not in plain:
        raise error(f"{where}: no {key!r} in it; {advice}")
    return plain[key]


def told(problem: Any) -> str:
    """What pydantic found, in short."""
    return problem["msg"].removeprefix("Value error, ").removeprefix("Input ")


def shown(value: Any) -> str:
    """A value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    message = told(problem)
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        message = "unexpected key"
    if not key or (problem["type"] == "value_error" and isinstance(problem["input"], dict)):
        return f"{key}: {message}" if key else message  # of a dataclass as a whole
    return f"{key} = {shown(problem['input'])}: {message}"
