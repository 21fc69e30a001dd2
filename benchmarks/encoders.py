"""FuXi-Linear beside the encoders that attend to every event, all of them jagged and as quick as we can make them.

    python -m benchmarks.encoders [--quick]

One thread, torch's own kernels. Results are checked before any time is taken. Exit code 1 if a figure that must be
reached is missed.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import encoder as fuxi_linear
from benchmarks import harness
from benchmarks.encoder import Batch, make_batch, padded, skewed_lengths
from benchmarks.harness import Aim, compare, seconds
from fuxi_torchrec.encoders import config_class, make_encoder
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.time_maps import TimeMap

D, HEADS, LONGEST = fuxi_linear.D, 8, 16384
ATTENTION: dict[str, dict[str, Any]] = {
    "sasrec": {},
    "hstu": {"qk_dim": 32, "value_dim": 128},
    "fuxi_alpha": {"qk_dim": 32, "value_dim": 32},
    "fuxi_beta": {"value_dim": 32},
}
PREFILL = [1024, 2048, 4096, 8192, 16384]
DECODE = [(1024, 64), (2048, 64), (4096, 64), (8192, 64), (16384, 16)]  # events, users: what fits in memory
PAPER = {"fuxi_alpha": (10, 21), "fuxi_beta": (3.1, 4.2), "hstu": (7.8, 18)}  # prefill and decode at 8k, on a GPU
NAMES = {
    "fuxi_linear": "FuXi-Linear",
    "sasrec": "SASRec",
    "hstu": "HSTU",
    "fuxi_alpha": "FuXi-α",
    "fuxi_beta": "FuXi-β",
}


def make(kind: str, layers: int) -> SequenceEncoder:
    """Width and depth of all cases, feed-forward networks as wide as the model."""
    if kind == "fuxi_linear":
        return fuxi_linear.make_encoder(layers)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dim": D, "num_layers": layers, "num_heads": HEADS, "max_positions": LONGEST}
    if kind != "hstu":
        settings["ffn_dim"] = D
    return make_encoder(config_class(kind)(**settings, **ATTENTION[kind])).eval()


# --- the padded formulation ------------------------------------------------------------------------------------------


def _users(chunks: Chunks, *rows: Tensor) -> list[Tensor]:
    """(B, H, n, K) of rows (T, H, K); all users are equally long."""
    return [x.unflatten(0, (len(chunks.lengths_B), -1)).transpose(1, 2) for x in rows]


def _causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def _positions(position_P: Tensor, n: int) -> Tensor:
    apart = torch.arange(n)[:, None] - torch.arange(n)
    return position_P[apart.clamp(0, len(position_P) - 1)]


def _times(kind: Any, time_P: Tensor, clocks: tuple[Tensor, Tensor], users: int) -> Tensor:
    time, following = (x.view(users, -1) for x in clocks)
    gaps = following.unsqueeze(2) - time.unsqueeze(1)
    if kind != "buckets":
        a, b = time_P.unbind()
        return a * torch.exp(-torch.exp(b) * gaps.clamp(min=0).float())
    return time_P[TimeMap("buckets", torch.arange(129.0)).weights(gaps).long()]


def _packed(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(0, 1)


def _biased(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, time: Tensor, clocks: Any, chunks: Chunks) -> Tensor:
    q, k, v = _users(chunks, q, k, v)
    bias = _positions(pos, q.shape[2]) + _times("buckets", time, clocks, len(q))
    return _packed((F.silu(q @ k.mT + bias.unsqueeze(1)) * _causal(q.shape[2])) @ v)


def _content(q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
    q, k, v = _users(chunks, q, k, v)
    return _packed((F.silu(q @ k.mT) * _causal(q.shape[2])) @ v)


def _relative(v: Tensor, pos: Tensor, time: Tensor, kind: Any, clocks: Any, chunks: Chunks) -> tuple[Tensor, Tensor]:
    users = len(chunks.lengths_B)
    rows = v.view(users, -1, v.shape[1])
    causal = _causal(rows.shape[1])
    by_time = (_times(kind, time, clocks, users) * causal) @ rows
    return ((_positions(pos, rows.shape[1]) * causal) @ rows).flatten(0, 1), by_time.flatten(0, 1)


def _softmax(q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, dropout: float) -> tuple[Tensor, None]:
    q, k, v = _users(chunks, q, k, v)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~_causal(q.shape[2]), -torch.inf)
    return _packed(scores.softmax(3) @ v), None


@contextlib.contextmanager
def all_pairs() -> Iterator[None]:
    """The same models with tensors of all pairs; users must be equally long."""
    where = "fuxi_torchrec.encoders."
    with (
        mock.patch(where + "hstu.biased_attention", _biased),
        mock.patch(where + "fuxi_alpha.content_attention", _content),
        mock.patch(where + "fuxi_alpha.relative_maps", _relative),
        mock.patch(where + "fuxi_beta.relative_maps", _relative),
        mock.patch(where + "sasrec.softmax_attention", _softmax),
    ):
        yield


# --- cases -----------------------------------------------------------------------------------------------------------


def forward(encoder: SequenceEncoder, batch: Batch) -> Tensor:
    """Without gradients."""
    with torch.no_grad():
        return encoder(*batch, validate=False)


def both(encoder: SequenceEncoder, batch: Batch) -> None:
    """Forward and backward."""
    encoder.zero_grad(set_to_none=True)
    encoder(batch[0].clone().requires_grad_(), *batch[1:], validate=False).sum().backward()


def check() -> None:
    """Padded rows of all pairs and events one by one give the jagged rows."""
    batch = make_batch([300, 1, 65, 130])
    for kind in ATTENTION:
        encoder = make(kind, 2)
        y = forward(encoder, batch)
        with all_pairs():
            rows = forward(encoder, padded(batch)).view(4, 300, D)
        same = torch.cat([rows[user, :n] for user, n in enumerate(batch[1].diff().tolist())])
        torch.testing.assert_close(same, y, rtol=0, atol=5e-5)
        state = encoder.append(encoder.init_state(4), *batch[:3])
        torch.testing.assert_close(encoder.query(state, batch[3]), y[batch[1][1:] - 1], rtol=0, atol=5e-5)
    print("results checked")


def padded_case(kind: str, lengths: list[int]) -> dict[str, float]:
    """(a) A skewed batch against every user padded to the longest: all cost the same, one is run for each."""
    encoder, batch = make(kind, 1), make_batch(lengths)
    one = make_batch(lengths[:1])  # the longest, of no padding

    def dense(run: Callable[[SequenceEncoder, Batch], Any]) -> None:
        with all_pairs():
            run(encoder, one)

    ours, theirs = compare([lambda: forward(encoder, batch), lambda: dense(forward)], repeats=2)
    ours_both, theirs_both = compare([lambda: both(encoder, batch), lambda: dense(both)], repeats=2)
    result = {"ms": ours, "padded_ms": theirs * len(lengths), "both_ms": ours_both}
    result |= {"both_padded_ms": theirs_both * len(lengths)}
    result = {name: value * 1e3 for name, value in result.items()}
    ratios = {"ratio": result["padded_ms"] / result["ms"], "both_ratio": result["both_padded_ms"] / result["both_ms"]}
    return result | ratios


def tile_flops(kind: str, events: int) -> float:
    """Of the products over all pairs that a layer needs, j ≤ i alone."""
    per_pair = {"sasrec": 2 * D, "hstu": 5 * D, "fuxi_alpha": 4 * D, "fuxi_beta": 2 * D}[kind]
    return 2 * per_pair * events * (events + 1) / 2


def share_case(kind: str, events: int) -> dict[str, float]:
    """(b) The share of the sgemm peak that tiles reach: what a layer takes, less what it takes for its other parts."""
    encoder, batch = make(kind, 1), make_batch([events])
    short = make_batch([64] * (events // 64))  # the same rows, hardly any pairs
    peak = harness.sgemm_peak()
    whole, rest = compare([lambda: forward(encoder, batch), lambda: forward(encoder, short)])
    peak = max(peak, harness.sgemm_peak())
    return {"events": events, "peak_gflops": peak / 1e9, "share": tile_flops(kind, events) / (whole - rest) / peak}


def prefill_case(events: int) -> dict[str, float]:
    """(c) One history, two blocks, all encoders in turn; ms."""
    batch = make_batch([events])
    made = {kind: make(kind, 2) for kind in NAMES}
    runs = [lambda encoder=encoder: forward(encoder, batch) for encoder in made.values()]
    times = compare(runs, 3 if events <= 4096 else 2)
    return {"events": events, **{kind: 1e3 * each for kind, each in zip(made, times, strict=True)}}


def decode_case(kind: str, events: int, users: int) -> dict[str, float]:
    """(d) Users with so many events: one more for each, and a query; ms. Every user has a cache of its own."""
    encoder = make(kind, 2)
    x, offsets, times, _ = make_batch([events])
    alone = encoder.append(encoder.init_state(1), x, offsets, times)
    begun = [encoder.append(alone, x[:1], torch.tensor([0, 1]), times[-1:]) for _ in range(users)]
    state = alone.concatenate(begun)
    del alone, begun
    rows, one, now = x[:1].repeat(users, 1), torch.arange(users + 1), times[-1:].repeat(users)

    def step() -> None:
        """On from the last one: a state that had gone on before would be copied."""
        nonlocal state, now
        now = now + 60
        state = encoder.append(state, rows, one, now, validate=False)
        encoder.query(state, now + 60)

    both_ms = 1e3 * seconds(step, 3)
    return {"users": users, "events": events, "append_query_ms": both_ms, "bytes": state.nbytes / users}


# --- report ----------------------------------------------------------------------------------------------------------


def run(quick: bool) -> dict[str, Any]:
    """All cases, one line each as they end."""
    found: dict[str, Any] = {"machine": harness.machine()}

    def case(name: str, result: Any) -> None:
        found[name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)

    lengths = [n // 4 for n in skewed_lengths()] if quick else skewed_lengths()
    case("padded", {kind: padded_case(kind, lengths) for kind in ATTENTION})
    case("share", {kind: share_case(kind, 4096 if quick else 8192) for kind in ATTENTION})
    case("prefill", [prefill_case(events) for events in (PREFILL[:3] if quick else PREFILL)])
    sizes = [(events, 8) for events, _ in DECODE[:3]] if quick else DECODE
    case("decode", [{kind: decode_case(kind, *size) for kind in NAMES} for size in sizes])
    return found


def aims(found: dict[str, Any]) -> list[Aim]:
    """What must be reached."""
    wanted = []
    for kind, case in found["padded"].items():
        wanted.append(Aim(f"(a) {NAMES[kind]} against padded, forward", case["ratio"], 4))
        wanted.append(Aim(f"(a) {NAMES[kind]} against padded, forward and backward", case["both_ratio"], 4))
    for kind, case in found["share"].items():
        wanted.append(Aim(f"(b) {NAMES[kind]}: share of the sgemm peak", case["share"], 0.4))
    prefill = {case["events"]: case for case in found["prefill"]}
    decode = {case["hstu"]["events"]: case for case in found["decode"]}
    for kind, (first, then) in PAPER.items():
        if 16384 in prefill:
            ratio = prefill[16384][kind] / prefill[16384]["fuxi_linear"]
            wanted.append(Aim(f"(c) prefill at 16k, {NAMES[kind]} / FuXi-Linear", ratio, first))
        if 8192 in decode:
            times = {name: case["append_query_ms"] for name, case in decode[8192].items()}
            ratio = times[kind] / times["fuxi_linear"]
            wanted.append(Aim(f"(d) decode at 8k, {NAMES[kind]} / FuXi-Linear", ratio, then))
    return wanted


def report(found: dict[str, Any]) -> str:
    """The section of RESULTS.md."""

    def beside(times: dict[str, float]) -> list[str]:
        ours = times["fuxi_linear"]
        return [f"{ours:.0f}", *(f"{times[kind]:.0f} ({times[kind] / ours:.1f})" for kind in ATTENTION)]

    columns = ["events", "FuXi-Linear, ms", *(f"{NAMES[kind]}, ms (ratio)" for kind in ATTENTION)]
    names = ("ms", "padded_ms", "ratio", "both_ms", "both_padded_ms", "both_ratio")
    padded_rows = [
        [NAMES[kind], *(format(case[name], ".1f" if "ratio" in name else ".0f") for name in names)]
        for kind, case in found["padded"].items()
    ]
    shares = ", ".join(f"{NAMES[kind]} {100 * case['share']:.0f} %" for kind, case in found["share"].items())
    decode_rows = [
        [case["hstu"]["events"], case["hstu"]["users"], *beside({k: c["append_query_ms"] for k, c in case.items()})]
        for case in found["decode"]
    ]
    kept = found["decode"][-1]
    sizes = ", ".join(f"{NAMES[kind]} {each['bytes'] / 2**20:.1f} MiB" for kind, each in kept.items())
    parts = [
        f"`python -m benchmarks.encoders`, float32, one thread, torch's own kernels. {found['machine']}. d = {D}, "
        f"{HEADS} heads (FuXi-Linear 4), feed-forward networks of width d.",
        "(a) 18,690 events of 24 users, the longest 6,000, one block: jagged tiles against tensors of all pairs with "
        "every user padded to the longest. All padded users together do not fit in memory: one is run, its time "
        "multiplied.",
        harness.table(
            ["", "forward, ms", "padded, ms", "ratio", "and backward, ms", "padded, ms", "ratio"], padded_rows
        ),
        f"(b) Share of the sgemm peak that the products over pairs reach, everything between them counted: {shares}.",
        "(c) Prefill of one history, two blocks. The paper has ratios of 10, 3.1 and 7.8 (FuXi-α, β, HSTU) at 8k on a "
        "GPU.",
        harness.table(columns, [[case["events"], *beside(case)] for case in found["prefill"]]),
        "(d) One event more and a query, two blocks, every user with a state or cache of its own. The paper: 21, 4.2 "
        "and 18.",
        harness.table(["events", "users", *columns[1:]], decode_rows),
        f"State of a user with {kept['hstu']['events']} events, room to grow included: {sizes}.",
        "![prefill and decode](results/encoders.png)",
    ]
    return "\n\n".join(parts)


def plot(found: dict[str, Any]) -> None:
    """Prefill and decode against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for kind, name in NAMES.items():
        style = "o-" if kind == "fuxi_linear" else "s--"
        events = [case["events"] for case in found["prefill"]]
        left.plot(events, [case[kind] / 1e3 for case in found["prefill"]], style, label=name)
        cases = [case[kind] for case in found["decode"]]
        right.plot([c["events"] for c in cases], [c["append_query_ms"] / c["users"] for c in cases], style, label=name)
    left.set(xscale="log", yscale="log", xlabel="events", ylabel="s", title="Prefill of one history")
    right.set(xscale="log", yscale="log", xlabel="events", ylabel="ms a user", title="One event more and a query")
    left.legend()
    figure.tight_layout()
    harness.RAW.mkdir(exist_ok=True)
    figure.savefig(harness.RAW / "encoders.png", dpi=110)


def main() -> int:
    """Check, measure, write down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter sequences; nothing is written down")
    args = parser.parse_args()
    torch.set_num_threads(1)
    check()
    found = run(args.quick)
    if not args.quick:
        plot(found)
        harness.publish("encoders", "FuXi-Linear beside attention", report(found), found)
    return harness.conclude(aims(found))


if __name__ == "__main__":
    sys.exit(main())
