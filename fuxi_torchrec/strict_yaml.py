"""YAML to frozen dataclasses and back, strictly.

The schema is the dataclass. A key it does not have is an error that names the nearest one it has; a value of another
type is an error that names key, value, file and line; a key written twice is an error. Nothing is converted except an
integer where a float is wanted and a list where a tuple is wanted.

A top-level section may be a tagged union: its field's metadata has ``by_kind``, a function that takes the section's
``kind`` and gives the dataclass of its keys, or a ValueError that names the kinds there are. Without ``kind`` it is
that of the section's default.

YAML is read by version 1.2's rules for plain values, which is what people expect: ``1e-3`` is a number, ``no`` and
``12:30`` are strings.
"""

import argparse
import dataclasses
import difflib
import json
import math
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pydantic
import yaml

from fuxi_torchrec.errors import FuxiError
from fuxi_torchrec.schema import shown, told

Schema = TypeVar("Schema")

COMMAND_LINE = "command line"
_ANY = "*"
_LARGEST = 2**18  # bytes of a file
_DEEPEST = 20  # levels of mappings and lists
_LONGEST_NUMBER = 400  # characters
_MOST = 20  # problems in a message
_Key = tuple[str, ...]


class ConfigError(FuxiError, ValueError):
    """A configuration that does not fit its schema; the message lists every problem."""


class _Setting(NamedTuple):
    """A value as somebody wrote it, and where."""

    value: Any
    where: str


def load(schema: type[Schema], path: str | Path | None = None, overrides: Sequence[str] = ()) -> Schema:
    """Read a configuration: the schema's defaults, then the YAML file, then ``key.sub=value`` overrides.

    The schema is a dataclass, nested dataclasses allowed; the values of overrides are YAML.
    """
    settings: dict[_Key, _Setting] = {}
    if path is not None:
        settings.update(_read_file(Path(path)))
    for override in overrides:
        settings.update(_read_override(override))
    actual = _with_kinds(schema, settings)
    keys, problems = _keys(actual), list[str]()
    for key, setting in settings.items():
        if len(problems) > _MOST:  # more would only be counted
            break
        try:
            # a section whose every line is commented out reads as null and means its defaults
            if dataclasses.is_dataclass(_type_of(key, keys)) and setting.value is None:
                settings[key] = setting._replace(value={})
        except ConfigError as error:
            problems.append(f"{setting.where}: {error}")
    if problems:
        raise ConfigError(_listed(problems))
    # Strict JSON validation is the rule wanted here: a list may become a tuple and an int a float, nothing else.
    text = json.dumps(_nest(settings), default=str)
    try:
        found = pydantic.TypeAdapter(actual).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        found_wrong = error.errors(include_url=False)[: _MOST + 1]
        raise ConfigError(_listed([_explain(problem, settings) for problem in found_wrong])) from None
    return schema(**{field.name: getattr(found, field.name) for field in dataclasses.fields(schema)})  # type: ignore[arg-type]


def dump(config: Any) -> str:
    """The configuration as YAML that :func:`load` reads back to an equal one, with each key's help as a comment."""
    return "\n".join(_lines(config, indent="")) + "\n"


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


# --- reading ---------------------------------------------------------------------------------------------------------


def print_main(schema: type[Any], program: str, arguments: Sequence[str] | None = None) -> int:
    """The command line of a program that prints a configuration, every default included; the exit code."""
    parser = argparse.ArgumentParser(prog=program, description="Print a configuration, every default included.")
    parser.add_argument("settings", nargs="*", metavar="FILE | key=value", help="a YAML file, then overrides")
    settings = parser.parse_args(arguments).settings
    path = settings.pop(0) if settings and "=" not in settings[0] else None
    try:
        sys.stdout.write(dump(load(schema, path, settings)))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


class _Loader(yaml.SafeLoader):
    """YAML 1.2 core rules for plain scalars, PyYAML's own are those of 1.1; what a config has no use for is refused.

    That is anchors, which can refer to themselves or multiply without end, other types than those of JSON, and depth.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML fills a copy per class
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            raise _problem("anchors and aliases (& and *) are not read: write the value where it is used", event)
        if self._depth == _DEEPEST:
            raise _problem(f"nested more than {_DEEPEST} deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node.tag.removeprefix(_TAG) not in _PLAIN:
            raise _problem(f"the tag {node.tag} is not read: values are mappings, lists, strings and numbers", event)
        return node


_TAG, _PLAIN = "tag:yaml.org,2002:", ("map", "seq", "str", "int", "float", "bool", "null")


def _problem(what: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=where.start_mark)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """A leading zero is no octal sign."""
    if len(node.value) > _LONGEST_NUMBER:
        raise _problem(f"a number of {len(node.value)} digits", node)
    return int(node.value, 0 if node.value.startswith(("0x", "0o")) else 10)


_Loader.add_constructor(f"{_TAG}int", _integer)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """What YAML finds wrong, with its line."""
    try:
        yield
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def _parse(text: str, name: str) -> yaml.Node | None:
    with _reading(name):
        return yaml.compose(text, Loader=_Loader)


def _value(node: yaml.Node | None, name: str) -> Any:
    with _reading(name):
        try:
            return None if node is None else _Loader("").construct_document(node)
        except (ValueError, LookupError) as error:  # a tag that its value does not fit: !!int x
            assert node is not None
            raise _problem(str(error), node) from None


def _read_file(path: Path) -> dict[_Key, _Setting]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot read the config: it is not UTF-8 text") from None
    if len(text) > _LARGEST:
        raise ConfigError(f"{path}: more than {_LARGEST} characters: this is no config")
    node = _parse(text, str(path))
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        found = "list" if isinstance(node, yaml.SequenceNode) else "single value"
        raise ConfigError(f"{path}: a config is a mapping of keys to values, this is a {found}")
    return dict(_leaves(node, (), str(path)))


def _leaves(node: yaml.MappingNode, prefix: _Key, name: str) -> Iterable[tuple[_Key, _Setting]]:
    """Every value of a mapping under its dotted key; empty mappings count as values."""
    seen: set[str] = set()
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: a key is a word, not a list or a mapping")
        key = (*prefix, str(key_node.value))
        if key[-1] in seen:
            raise ConfigError(f"{where}: {'.'.join(key)} is given twice")
        seen.add(key[-1])
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, key, name)
        else:
            yield key, _Setting(_value(value_node, name), where)


def _read_override(override: str) -> dict[_Key, _Setting]:
    name, separator, text = override.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"{COMMAND_LINE}: {override!r} is not of the form key.sub=value")
    key = tuple(name.strip().split("."))
    node = _parse(text, f"{COMMAND_LINE}, {override}")
    if isinstance(node, yaml.MappingNode) and node.value:
        return {k: s._replace(where=COMMAND_LINE) for k, s in _leaves(node, key, COMMAND_LINE)}
    return {key: _Setting(_value(node, COMMAND_LINE), COMMAND_LINE)}


# --- checking --------------------------------------------------------------------------------------------------------


def _with_kinds(schema: type[Any], settings: Mapping[_Key, _Setting]) -> type[Any]:
    """The schema with the dataclass of its kind in place of every tagged union."""
    chosen = []
    for field in dataclasses.fields(schema):
        if "by_kind" not in field.metadata:
            continue
        section, given = field.default_factory, settings.get((field.name, "kind"))
        if given is not None:
            try:
                if not isinstance(given.value, str):
                    raise ValueError("should be a valid string")
                section = field.metadata["by_kind"](given.value)
            except ValueError as error:
                raise ConfigError(f"{given.where}: {field.name}.kind = {shown(given.value)}: {error}") from None
        chosen.append((field.name, section, dataclasses.field(default_factory=section)))
    return dataclasses.make_dataclass(schema.__name__, chosen, bases=(schema,), frozen=True) if chosen else schema


def _keys(kind: Any, prefix: _Key = ()) -> dict[_Key, Any]:
    """Every key below a type, sections included, and its own type; ``*`` is any name in a mapping."""
    if dataclasses.is_dataclass(kind):
        inner = {field.name: typing.get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}
    elif typing.get_origin(kind) is dict:
        inner = {_ANY: typing.get_args(kind)[1]}
    else:  # ``Section | None`` has the keys of the section
        return {key: each for option in typing.get_args(kind) for key, each in _keys(option, prefix).items()}
    found: dict[_Key, Any] = {}
    for name, each in inner.items():
        found |= {(*prefix, name): each, **_keys(each, (*prefix, name))}
    return found


def _type_of(key: _Key, keys: Mapping[_Key, Any]) -> Any:
    """The type of a key's value; a ConfigError if there is no such key."""
    known: _Key = ()
    for depth, name in enumerate(key):
        here = [each[-1] for each in keys if each[:-1] == known]
        if not here:
            raise ConfigError(f"{'.'.join(key)} is set, but {'.'.join(key[:depth])} is no section")
        if name not in here and _ANY not in here:
            raise ConfigError(_unknown(key[: depth + 1], here, [".".join(each) for each in keys]))
        known = (*known, name if name in here else _ANY)
    return keys[known]


def _unknown(key: _Key, here: list[str], everywhere: list[str]) -> str:
    wrong, siblings = ".".join(key)[:200], [".".join((*key[:-1], name)) for name in here]
    near = difflib.get_close_matches(wrong, siblings, 1) or difflib.get_close_matches(wrong, everywhere, 1)
    near = near or [each for each in everywhere if each.rpartition(".")[2] == key[-1]]
    return f"unknown key {wrong}; " + (f"did you mean {near[0]}?" if near else f"known here: {', '.join(siblings)}")


def _nest(settings: Mapping[_Key, _Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        branch = tree
        for name in key[:-1]:
            inner = branch.setdefault(name, {})
            if not isinstance(inner, dict):  # a section set to a plain value: reported by the type check
                inner = branch[name] = {}
            branch = inner
        branch[key[-1]] = setting.value
    return tree


def _listed(problems: Sequence[str]) -> str:
    more = ["... and more"] if len(problems) > _MOST else []
    return "\n".join([*problems[:_MOST], *more])


def _explain(problem: Any, settings: Mapping[_Key, _Setting]) -> str:
    """One of pydantic's findings in terms of the key, the value and the place where it was written."""
    location = tuple(str(part) for part in problem["loc"])
    message = told(problem)
    for length in range(len(location), 0, -1):
        key = location[:length]
        if key in settings:
            inside = "".join(f"item {part}: " for part in location[length:] if part.isdigit())
            return f"{settings[key].where}: {'.'.join(key)} = {shown(settings[key].value)}: {inside}{message}"
    # a section's own check, over several keys
    files = {s.where.partition(":")[0] for k, s in settings.items() if k[: len(location)] == location}
    return f"{', '.join(sorted(files))}: {'.'.join(location) or 'the config'}: {message}"


# --- writing ---------------------------------------------------------------------------------------------------------


def _lines(config: Any, indent: str) -> Iterable[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        comment = f"  # {field.metadata['help']}" if "help" in field.metadata else ""
        if dataclasses.is_dataclass(value) and dataclasses.fields(value):
            yield f"{indent}{field.name}:{comment}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
            yield f"{indent}{field.name}:{comment}"
            for name, section in value.items():
                yield f"{indent}  {_scalar(name)}:"
                yield from _lines(section, indent + "    ")
        else:
            yield f"{indent}{field.name}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    """A value on one line; every string that could be taken for something else is quoted."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(k)}: {_scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_/.][\w/.-]*", value) and _value(_parse(value, ""), "") == value:
            return value
        return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    return json.dumps(value)
