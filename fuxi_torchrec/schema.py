"""JSON files that we read, validated strictly: the schema is a dataclass.

A missing or unknown key, a value of another type, or one that the dataclass's own ``__post_init__`` refuses with a
ValueError is an error of the caller's class that names file, key and value.
"""

import hashlib
import json
from typing import Any, TypeVar

import pydantic

Schema = TypeVar("Schema")

CHECKSUM = "checksum"  # the last key of a sealed file
FORBID_EXTRA = pydantic.ConfigDict(extra="forbid")
_LONGEST = 80  # characters of a value in a message
_MOST = 5  # problems in a message


class Record:
    """The base of dataclasses that are read from files: keys they do not have are refused."""

    __pydantic_config__ = FORBID_EXTRA


def sealed(plain: dict[str, Any]) -> str:
    """A JSON text with a checksum of what it says: :func:`read_json` tells a changed digit.

    Example:
        >>> print(sealed({"as_of": 1}))
        {
         "as_of": 1,
         "checksum": "7a3713a20a2bae3d"
        }
        <BLANKLINE>
    """
    return json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=1) + "\n"


def _checksum(plain: dict[str, Any]) -> str:
    """Of what a JSON text says, however it is laid out."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def read_json(
    schema: type[Schema],
    text: str | bytes,
    where: object,
    error: type[Exception],
    advice: str,
    *,
    version: tuple[str, int] | None = None,
    seal: bool = False,
) -> Schema:
    """Validate a JSON text.

    Args:
        schema: a dataclass, nested ones derive from :class:`Record` too.
        text: of the file.
        where: the file, for messages.
        error: raised with a message that names file, key and value.
        advice: what to do about it; ends every message.
        version: the key and the value of the format's version, checked before everything else.
        seal: whether the text is one of :func:`sealed`.

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
    if version is not None or seal:
        plain = _object(text, where, error, advice)
        if version is not None:
            key, wanted = version
            if (found := _take(plain, key, where, error, advice)) != wanted:
                raise error(f"{where}: {key} {found!r}, this software reads {key} {wanted}; {advice}")
        if seal:
            noted = _take(plain, CHECKSUM, where, error, advice)
            del plain[CHECKSUM]
            if noted != _checksum(plain):
                raise error(f"{where}: damaged, or changed since it was written: its checksum is wrong; {advice}")
            text = json.dumps(plain)
    try:
        return pydantic.TypeAdapter(schema).validate_json(text, strict=True)
    except pydantic.ValidationError as problems:
        some = [_explain(problem) for problem in problems.errors(include_url=False)[:_MOST]]
        raise error(f"{where}: {'; '.join(some)}; {advice}") from None


def _object(text: str | bytes, where: object, error: type[Exception], advice: str) -> dict[str, Any]:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as problem:  # also a number of too many digits, and bytes that are no text
        raise error(f"{where}: not readable as JSON: {problem}; {advice}") from None
    return plain if isinstance(plain, dict) else {}


def _take(plain: dict[str, Any], key: str, where: object, error: type[Exception], advice: str) -> Any:
    if key not in plain:
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
