"""What happens to files: bits, bytes and blocks of any, keys and values of JSON and YAML.

A mutation is drawn from a ``random.Random``, and is a function of it and of the data alone.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import yaml

BLOCK = 64  # the longest piece that is moved, overwritten or cleared
DEEP, DIGITS, LONG, MANY = 5_000, 5_000, 100_000, 20_000

# what takes the place of a value, as JSON; YAML reads it too
EXTREMES = {
    "0": "0",
    "-1": "-1",
    "1": "1",
    "1.5": "1.5",
    "2^31": str(2**31),
    "2^62": str(2**62),
    "2^63": str(2**63),
    "-2^63": str(-(2**63)),
    "10^24": "1" + "0" * 24,
    "1e308": "1e308",
    "1e999": "1e999",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    f"{DIGITS} digits": "9" * DIGITS,
    "true": "true",
    "null": "null",
    "empty text": '""',
    "a digit as text": '"1"',
    "long text": json.dumps("x" * LONG),
    "path out": '"../../outside"',
    "absolute path": '"/nonexistent/outside"',
    "NUL": '"a\\u0000b"',
    "unicode": json.dumps("ü😀\u202e", ensure_ascii=False),
    "surrogate": '"\\ud800"',
    "[]": "[]",
    "{}": "{}",
    "deep list": "[" * DEEP + "]" * DEEP,
    "deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
}
# what is put before a YAML document
YAML_PREFIXES = {
    "a list in itself": "extra: &a [*a]\n",
    "a mapping in itself": "extra: &a {b: *a}\n",
    "aliases of aliases": "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9)),
    "many unknown keys": "".join(f"unknown{n}: 1\n" for n in range(MANY)),
    "a tag": "extra: !!python/object/apply:os.getcwd []\n",
    "two documents": "seed: 1\n---\n",
    "deep block": "".join(" " * n + "a:\n" for n in range(500)),
    "a tab": "\tseed: 1\n",
}
_MARK = "@@here@@"


@dataclass(frozen=True)
class Mutation:
    """What was done, the data after it, and the key that was changed if there is one."""

    what: str
    data: bytes
    key: str | None = None


# --- bytes -----------------------------------------------------------------------------------------------------------


def damage(data: bytes, random: Random, first: int = 0, end: int | None = None) -> Mutation:
    """Damage some bytes of ``first .. end``; the result differs from the data."""
    end = len(data) if end is None else end
    names, weights = zip(*((name, weight) for name, (weight, _) in _BYTES.items()), strict=True)
    for _ in range(100):
        (name,) = random.choices(names, weights)
        found = _BYTES[name][1](data, random, first, end) if end > first else None
        if found is not None and found[1] != data:
            return Mutation(f"{name} {found[0]}", found[1])
    return Mutation("extended by a byte", data + b"\x01")  # nothing else was possible


def damage_document(data: bytes, random: Random, load: Callable[[bytes], Any]) -> Mutation:
    """The same of JSON or YAML; if one value is another one since, and all others as they were, its key is known."""
    found = damage(data, random)
    try:
        before, after = ({path: c[key] for c, key, path in _places(load(text))} for text in (data, found.data))
    except (ValueError, yaml.YAMLError, RecursionError):
        return found
    same = before.keys() == after.keys()
    changed = [path for path in before if same and before[path] != after[path]]
    return replace(found, key=_name(changed[-1])) if changed and len(set(map(len, changed))) == len(changed) else found


_Changed = tuple[str, bytes]


def _flip(data: bytes, random: Random, first: int, end: int) -> _Changed:
    at, bit = random.randrange(first, end), random.randrange(8)
    return f"{bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _overwrite(data: bytes, random: Random, first: int, end: int) -> _Changed:
    at, size = _piece(random, first, end)
    return f"bytes {at} to {at + size}", data[:at] + random.randbytes(size) + data[at + size :]


def _zero(data: bytes, random: Random, first: int, end: int) -> _Changed:
    at, size = _piece(random, first, end)
    return f"bytes {at} to {at + size}", data[:at] + bytes(size) + data[at + size :]


def _truncate(data: bytes, random: Random, first: int, end: int) -> _Changed:
    at = random.randrange(first, end)
    return f"to {at} bytes", data[:at]


def _extend(data: bytes, random: Random, first: int, end: int) -> _Changed:
    extra = random.randbytes(random.randint(1, BLOCK)) if random.random() < 0.5 else bytes(random.randint(1, BLOCK))
    return f"by {len(extra)} bytes", data + extra


def _duplicate(data: bytes, random: Random, first: int, end: int) -> _Changed:
    at, size = _piece(random, first, end)
    return f"bytes {at} to {at + size}", data[: at + size] + data[at : at + size] + data[at + size :]


def _swap(data: bytes, random: Random, first: int, end: int) -> _Changed:
    (a, m), (b, n) = sorted(_piece(random, first, end) for _ in range(2))
    m = min(m, b - a)
    return f"bytes {a} to {a + m} and {b} to {b + n}", (
        data[:a] + data[b : b + n] + data[a + m : b] + data[a : a + m] + data[b + n :]
    )


def _piece(random: Random, first: int, end: int) -> tuple[int, int]:
    at = random.randrange(first, end)
    return at, min(random.randint(1, BLOCK), end - at)


_BYTES: dict[str, tuple[int, Callable[[bytes, Random, int, int], _Changed]]] = {
    "flipped bit": (8, _flip),
    "overwrote": (3, _overwrite),
    "zeroed": (2, _zero),
    "truncated": (2, _truncate),
    "extended": (1, _extend),
    "duplicated": (1, _duplicate),
    "swapped": (2, _swap),
}


# --- JSON and YAML ---------------------------------------------------------------------------------------------------


def edit_json(data: bytes, random: Random) -> Mutation:
    """Delete, rename, duplicate a key, or change a value."""
    tree = json.loads(data)
    what, key, raw = _edit(tree, random)
    text = json.dumps(tree, indent=1)
    return Mutation(what, _insert(text, raw).encode(errors="surrogatepass"), key)


def edit_yaml(data: bytes, random: Random) -> Mutation:
    """The same in YAML, or something before the document."""
    if random.random() < 0.15:
        name = random.choice(sorted(YAML_PREFIXES))
        return Mutation(f"put {name} first", YAML_PREFIXES[name].encode() + data)
    tree = yaml.safe_load(data)
    what, key, raw = _edit(tree, random)
    text = json.dumps(tree, indent=1) if random.random() < 0.5 else yaml.safe_dump(tree, allow_unicode=True)
    text = text.replace(f"'{_MARK}'", _MARK)
    return Mutation(what, _insert(text.replace("\t", " "), raw).encode(errors="surrogatepass"), key)


def _insert(text: str, raw: str) -> str:
    """Put in what no tree can have: a key twice, numbers of many digits."""
    return text.replace(f'"{_MARK}"', raw).replace(_MARK, raw)


def _edit(tree: Any, random: Random) -> tuple[str, str, str]:
    """Change a place of a tree; what was done, the key, and what takes the place of the mark."""
    places = list(_places(tree))
    if not places:
        return "nothing to edit", "", ""
    container, key, path = random.choice(places)
    kind = random.choice(("value", "value", "value", "delete", "rename", "duplicate", "add"))
    name = _name(path)
    where = ".".join(map(str, path))
    if isinstance(container, list):
        if kind == "delete":
            del container[key]
            return f"deleted {where}", name, ""
        if kind in ("duplicate", "add"):
            container.append(container[key])
            return f"repeated {where}", name, ""
    elif kind == "delete":
        del container[key]
        return f"deleted {where}", str(key), ""
    elif kind == "rename":
        new = random.choice([key.upper(), key + "x", key[:-1], "", "ü", "__class__"])
        items = [(new if k == key else k, v) for k, v in container.items()]
        container.clear()
        container.update(items)
        return f"renamed {where} to {new!r}", str(key), ""
    elif kind == "duplicate":
        container[key + _MARK] = random.choice([container[key], 0, None])
        return f"repeated the key {where}", str(key), ""
    elif kind == "add":
        container["unexpected"] = 1
        return f"added unexpected beside {where}", "unexpected", ""
    extreme = random.choice(sorted(EXTREMES))
    container[key] = _MARK
    return f"{where} = {extreme}", name, EXTREMES[extreme]


def _name(path: tuple[Any, ...]) -> str:
    """The key that a place is called by: in a list, that of the list."""
    return str(next((part for part in reversed(path) if isinstance(part, str)), path[-1]))


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    """Every place of a tree: its container, its key, its path."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key, (*path, key)
        yield from _places(value, (*path, key))
