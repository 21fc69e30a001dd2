import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from fuxi_torchrec.schema import Record, read_json, sealed


class BrokenFileError(Exception):
    pass


@dataclass(frozen=True)
class Part(Record):
    size: int


@dataclass(frozen=True)
class Description(Record):
    kind: Literal["a", "b"]
    parts: dict[str, Part] = field(default_factory=dict)
    rate: float = 1.0
    version: int = 2

    def __post_init__(self):
        if not 0 <= self.rate <= 1:
            raise ValueError("rate is a share between 0 and 1")


def read(text):
    return read_json(Description, text, "x.json", BrokenFileError, "write it again", version=("version", 2))


def test_a_valid_file_becomes_its_dataclass():
    text = '{"version": 2, "kind": "a", "parts": {"p": {"size": 3}}, "rate": 1}'
    assert read(text) == Description("a", {"p": Part(3)})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not readable as JSON"),
        (b"\xff\xfe{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"version": 2, "kind": ' + "9" * 5000 + "}", "not readable as JSON"),
        ("[]", "no 'version' in it"),
        ('{"version": 3}', "version 3, this software reads version 2"),
        ('{"version": 2}', "kind is missing"),
        ('{"version": 2, "kind": "c"}', "kind = 'c': should be 'a' or 'b'"),
        ('{"version": 2, "kind": "a", "kinds": 1}', "kinds = 1: unexpected key"),
        ('{"version": 2, "kind": "a", "parts": {"p": {"size": 1.5}}}', "parts.p.size = 1.5"),
        ('{"version": 2, "kind": "a", "parts": {"p": {"size": 1, "x": 2}}}', "parts.p.x = 2: unexpected key"),
        ('{"version": 2, "kind": "a", "rate": NaN}', "rate is a share"),
        ('{"version": 2, "kind": "a", "rate": "1"}', "rate = '1'"),
        ('{"version": 2, "kind": null}', "kind = None"),
    ],
)
def test_anything_else_is_an_error_that_names_file_key_and_value_and_says_what_to_do(text, told):
    with pytest.raises(BrokenFileError) as caught:
        read(text)
    message = str(caught.value)
    assert message.startswith("x.json: ") and told in message and message.endswith("; write it again")


def test_a_sealed_file_is_refused_with_any_bit_of_its_content_flipped():
    def read(text):
        return read_json(Description, text, "x.json", BrokenFileError, "do", version=("version", 2), seal=True)

    text = sealed({"kind": "a", "parts": {"p": {"size": 3}}, "rate": 0.25, "version": 2}).encode()
    expected = Description("a", {"p": Part(3)}, 0.25)
    assert read(text) == read(json.dumps(json.loads(text))) == expected
    refused = 0
    for bit in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert read(bytes(damaged)) == expected  # a space that became a line feed
        except BrokenFileError as error:
            refused += str(error).startswith("x.json: ")
    assert refused > 7 * len(text)
    with pytest.raises(BrokenFileError, match="no 'checksum' in it"):
        read('{"kind": "a", "version": 2}')
