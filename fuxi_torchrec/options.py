"""Command-line flags from option dataclasses: a default is written once, in the class."""

import argparse
import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fuxi_torchrec.errors import FuxiError

Schema = TypeVar("Schema")


class OptionError(FuxiError, ValueError):
    """A flag whose value is out of bounds."""


def option(default: Any, help: str, *, metavar: str | None = None, **bounds: float) -> Any:
    """A field of an option dataclass.

    Args:
        default: MISSING for one that must be given.
        help: what ``--help`` says of it.
        metavar: for a value in ``--help``.
        bounds: of a number, see :func:`check_bounds`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, **bounds})


def add_encoder_option(parser: argparse.ArgumentParser) -> None:
    """``--encoder``: the module is imported as the command line is read."""

    def imported(kind: str) -> str:
        from fuxi_torchrec.encoders.registry import encoder_class

        try:
            encoder_class(kind)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return kind

    what = "an encoder of your own that the files may name: they are not followed to code by themselves"
    parser.add_argument("--encoder", type=imported, metavar="package.module:Class", help=what)


def check_bounds(record: Any, named: Callable[[str], str] | None = None) -> None:
    """For ``__post_init__``: a ValueError that names the flag if a number is out of the bounds in a field's metadata.

    ``least`` and ``most`` are the smallest and the largest allowed; ``above`` is not allowed itself, nor is what is not
    finite. None is no number.
    """
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), (named or _flag)(field.name)
        least, above, most = (field.metadata.get(bound) for bound in ("least", "above", "most"))
        if value is None:
            continue
        if least is not None and not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least}, not {value}")
        if most is not None and value > most:
            raise ValueError(f"{name} must be at most {most}, not {value}")
        if above is not None and not above < value < math.inf:
            raise ValueError(f"{name} must be {f'above {above}' if above else 'positive'}, not {value}")


def add_options(parser: argparse.ArgumentParser, schema: type[Any]) -> None:
    """A flag for every field of a dataclass that has a help text; ``--no-x`` for what is true by default.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Options:
        ...     users: int = option(5, "how many")
        ...     index: bool = option(True, "write an index")
        ...     kind: Literal["a", "b"] | None = option(None, "which one")
        >>> parser = argparse.ArgumentParser()
        >>> add_options(parser, Options)
        >>> options_from(parser.parse_args(["--no-index", "--kind", "b"]), Options)
        Options(users=5, index=False, kind='b')
    """
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        said = field.metadata.get("help")
        if said is None:
            continue
        kind, default = _plain(hints[field.name]), field.default
        if kind is bool:
            flag, text = (_flag(f"no_{field.name}"), f"do not {said}") if default else (_flag(field.name), said)
            action = "store_false" if default else "store_true"
            parser.add_argument(flag, dest=field.name, action=action, help=_text(text))
            continue
        choices = get_args(kind) if get_origin(kind) is Literal else None
        required = default is dataclasses.MISSING
        if not required and default is not None:
            said += f"; {default:,} by default" if type(default) is int else f"; {default} by default"
        parser.add_argument(
            _flag(field.name),
            type=type(choices[0]) if choices else kind,
            choices=choices,
            required=required,
            default=None if required else default,
            metavar=field.metadata.get("metavar"),
            help=_text(said),
        )


def options_from(namespace: argparse.Namespace, schema: type[Schema]) -> Schema:
    """What the flags of a dataclass were given."""
    fields = dataclasses.fields(schema)  # type: ignore[arg-type]
    given = {field.name: getattr(namespace, field.name) for field in fields if hasattr(namespace, field.name)}
    try:
        return schema(**given)
    except ValueError as error:
        raise OptionError(str(error)) from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(help: str) -> str:
    return help.replace("%", "%%")


def _plain(kind: Any) -> Any:
    """A type without its None."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    return kind
