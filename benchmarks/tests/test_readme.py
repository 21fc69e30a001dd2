"""README tells what was measured: its ratios are those of the benchmark's own file."""

import json
import re

from benchmarks.encoders import NAMES
from benchmarks.harness import HERE, RAW

ORDER = ("hstu", "fuxi_alpha", "sasrec", "fuxi_beta")


def ratios(times):
    return [f"{times[kind] / times['fuxi_linear']:.2g}" for kind in ORDER]


def test_ratios_of_encoders_are_the_measured_ones():
    found = json.loads((RAW / "encoders-efficiency.json").read_text())
    (prefill,) = (case for case in found["prefill"] if case["events"] == 16384)
    (decode,) = (case for case in found["decode"] if case["hstu"]["events"] == 8192)
    text = " ".join((HERE.parent / "README.md").read_text().split())
    said = re.search(r"At 16,384 events (.*?) times;.* after 8,192 events cost ([^.]*) times as much", text)
    assert said is not None
    assert [NAMES[kind] for kind in ORDER] == re.findall(r"HSTU|FuXi-α|SASRec|FuXi-β", said[1])
    assert re.findall(r"\d[\d.]*", said[1]) == ratios(prefill)
    assert re.findall(r"\d+", said[2]) == ratios({kind: case["append_query_ms"] for kind, case in decode.items()})
