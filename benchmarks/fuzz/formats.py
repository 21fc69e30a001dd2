"""A format under test: which files of which fixture are damaged, and how everything in it is read."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

import yaml

from benchmarks.fuzz import mutations, outcomes
from benchmarks.fuzz.mutations import Mutation
from benchmarks.fuzz.outcomes import Outcome

Span = Callable[[bytes], tuple[int, int]]
_STRUCTURED = 0.6  # share of the cases of JSON and YAML that edit keys and values, not bytes


class Fuzzed(Protocol):
    """What is damaged: a kind of files, or of requests."""

    @property
    def name(self) -> str:
        """As the command line and the table call it."""

    def answers(self, fixtures: Path, place: Path) -> Any:
        """Of the untouched original; ``place`` is a directory that does not exist yet."""

    def draw(self, fixtures: Path, random: Random) -> tuple[str, Mutation]:
        """What is damaged, and how: a function of ``random`` and the fixtures."""

    def run(self, fixtures: Path, place: Path, random: Random, wanted: Any) -> Outcome:
        """Do what was drawn to a copy at ``place``, read everything, and say how that ended."""


@dataclass(frozen=True)
class Format:
    """Files that are damaged one at a time, in a copy of a fixture.

    Attributes:
        fixture: directory below the fixtures, copied for each case.
        files: patterns of the files that are damaged.
        read: everything in the copy, given it and the fixtures, as values that can be compared.
        syntax: of the files; JSON and YAML are edited too.
        span: which bytes are damaged; all by default.
    """

    name: str
    fixture: str
    files: tuple[str, ...]
    read: Callable[[Path, Path], Any]
    syntax: Literal["bytes", "json", "yaml"] = "bytes"
    span: Span | None = None

    def answers(self, fixtures: Path, place: Path) -> Any:
        """Of the untouched original."""
        shutil.copytree(fixtures / self.fixture, place, symlinks=True)
        return self.read(place, fixtures)

    def run(self, fixtures: Path, place: Path, random: Random, wanted: Any) -> Outcome:
        """Damage a file of a copy at ``place``, read everything, and say how that ended."""
        original, (target, mutation) = fixtures / self.fixture, self.draw(fixtures, random)
        shutil.copytree(original, place, symlinks=True)
        (place / target).write_bytes(mutation.data)
        damage = f"{target}: {mutation.what}"
        names = [str(path.relative_to(original)) for path in original.rglob("*") if path.is_file()]
        words = [*names, *([mutation.key] if mutation.key else [])]
        try:
            answers = self.read(place, fixtures)
        except BaseException as error:
            return outcomes.of_error(error, damage, place, words)
        return self.judge(answers, wanted, damage, mutation)

    def judge(self, answers: Any, wanted: Any, damage: str, mutation: Mutation) -> Outcome:
        """Of a case without an error."""
        return outcomes.of_answers(answers, wanted, damage)

    def draw(self, fixtures: Path, random: Random) -> tuple[str, Mutation]:
        """Which file, and what happens to it."""
        original = fixtures / self.fixture
        targets = sorted({path for pattern in self.files for path in original.glob(pattern)})
        target = random.choice(targets)
        return str(target.relative_to(original)), self._mutate(target.read_bytes(), random)

    def _mutate(self, data: bytes, random: Random) -> Mutation:
        if self.syntax == "bytes":
            return mutations.damage(data, random, *(self.span(data) if self.span is not None else ()))
        if random.random() < _STRUCTURED:
            return (mutations.edit_json if self.syntax == "json" else mutations.edit_yaml)(data, random)
        return mutations.damage_document(data, random, json.loads if self.syntax == "json" else yaml.safe_load)


def parquet_pages(data: bytes) -> tuple[int, int]:
    """Where a Parquet file's pages are."""
    return 4, _footer(data)


def parquet_footer(data: bytes) -> tuple[int, int]:
    """Where its metadata is, to the end."""
    return _footer(data), len(data)


def written(data: bytes) -> tuple[int, int]:
    """Without zeros at the end, of which a write-ahead log may have many."""
    return 0, len(data.rstrip(b"\0"))


def _footer(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")
