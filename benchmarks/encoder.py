"""The encoder's speed and memory on one thread: jagged, long, against softmax attention, decoding.

    python -m benchmarks.encoder [--quick]

Results are checked before any time is taken. Exit code 1 if a figure that must be reached is missed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Aim, compare, seconds
from benchmarks.softmax_encoder import SoftmaxEncoder
from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, geometric_periods

D, HEADS, SCALES, KERNEL = 256, 4, 8, 32
LENGTHS = [1024, 4096, 16384, 65536]
PREFILL = [1024, 2048, 4096, 8192, 16384, 32768]
DECODE_EVENTS, DECODE_BATCH, DECODE_REPEATS = 8192, 64, 10
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def make_encoder(layers: int) -> FuXiLinearEncoder:
    """The width and heads of all cases."""
    torch.manual_seed(0)
    config = FuXiLinearConfig(
        dim=D,
        num_layers=layers,
        num_heads=HEADS,
        max_positions=65536,
        temporal_periods=geometric_periods(1024, 8, SCALES),
        kernel_dim=KERNEL,
    )
    return FuXiLinearEncoder(config).eval()


def make_batch(lengths: list[int]) -> Batch:
    """Random rows with gaps from seconds to hours."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(int(offsets[-1]), D, generator=generator) * 0.1
    times = [1_700_000_000 + torch.randint(20_000, (n,), generator=generator).cumsum(0) for n in lengths]
    request = torch.stack([t[-1] + 3600 for t in times])
    return x, offsets, torch.cat(times), request


def skewed_lengths() -> list[int]:
    """24 users, 18,690 events, the longest 6,000: a geometric fall from long to short."""
    lengths = [6000]
    while len(lengths) < 24:
        lengths.append(max(16, int(lengths[-1] * 0.67)))
    lengths[-1] += 18_690 - sum(lengths)
    return lengths


def padded(batch: Batch) -> Batch:
    """The same batch with every user as long as the longest."""
    x, offsets, times, request = batch
    lengths = offsets.diff().tolist()
    longest, users = max(lengths), len(lengths)
    rows = x.new_zeros(users, longest, D)
    padded_times = request[:, None].repeat(1, longest)
    for user, n in enumerate(lengths):
        a = int(offsets[user])
        rows[user, :n], padded_times[user, :n] = x[a : a + n], times[a : a + n]
    return rows.flatten(0, 1), torch.arange(users + 1) * longest, padded_times.flatten(), request


def forward(encoder: FuXiLinearEncoder, batch: Batch) -> Tensor:
    """Without gradients."""
    with torch.no_grad():
        return encoder(*batch, validate=False)


def both(encoder: FuXiLinearEncoder, batch: Batch) -> None:
    """Forward and backward."""
    encoder.zero_grad(set_to_none=True)
    x = batch[0].requires_grad_()
    encoder(x, *batch[1:], validate=False).sum().backward()
    x.grad = None
    x.requires_grad_(False)


# --- checks ----------------------------------------------------------------------------------------------------------


def check() -> None:
    """The forms agree, the padded batch gives the same rows, states give the forward pass, caches likewise."""
    encoder = make_encoder(2)
    batch = make_batch([700, 1, 65, 130])
    y = forward(encoder, batch)
    with torch.no_grad():
        torch.testing.assert_close(encoder(*batch, form="parallel"), y, rtol=0, atol=2e-5)
    rows = forward(encoder, padded(batch)).view(4, 700, D)
    same = torch.cat([rows[user, :n] for user, n in enumerate(batch[1].diff().tolist())])
    torch.testing.assert_close(same, y, rtol=0, atol=2e-5)
    state = encoder.append(encoder.init_state(4), *batch[:3])
    torch.testing.assert_close(encoder.query(state, batch[3]), y[batch[1][1:] - 1], rtol=0, atol=2e-5)

    softmax = SoftmaxEncoder(D, 2, HEADS).eval()
    x = torch.randn(2, 40, D)
    with torch.no_grad():
        cache = softmax.cache(2, 40)
        steps = [softmax.decode(x[:, i : i + 1], cache, i) for i in range(40)]
        torch.testing.assert_close(torch.cat(steps, 1), softmax(x), rtol=0, atol=2e-5)
    print("results checked")


# --- cases -----------------------------------------------------------------------------------------------------------


def jagged_case() -> dict[str, float]:
    """(a) A skewed batch, jagged against padded."""
    encoder, batch = make_encoder(1), make_batch(skewed_lengths())
    wide = padded(batch)
    one, other = compare([lambda: forward(encoder, batch), lambda: forward(encoder, wide)])
    one_both, other_both = compare([lambda: both(encoder, batch), lambda: both(encoder, wide)], repeats=2)
    return {
        "events": len(batch[0]),
        "forward_ms": one * 1e3,
        "forward_padded_ms": other * 1e3,
        "forward_ratio": other / one,
        "both_ms": one_both * 1e3,
        "both_padded_ms": other_both * 1e3,
        "both_ratio": other_both / one_both,
    }


def length_case(events: int) -> dict[str, float]:
    """(b) One sequence: time per event, and the memory that a pass adds; run in a process of its own."""
    torch.set_num_threads(1)
    encoder, batch = make_encoder(2), make_batch([events])
    both(encoder, make_batch([64]))
    repeats = max(2, 32768 // events)
    extra = {}
    for name, run_once in (("forward", forward), ("both", both)):
        harness.forget_peak()
        before = harness.resident_bytes()
        run_once(encoder, batch)
        extra[name] = (harness.resident_bytes(peak=True) - before) / 2**20
    return {
        "events": events,
        "forward_us": seconds(lambda: forward(encoder, batch), repeats) / events * 1e6,
        "both_us": seconds(lambda: both(encoder, batch), repeats) / events * 1e6,
        "forward_mib": extra["forward"],
        "both_mib": extra["both"],
    }


def prefill_case(events: int) -> dict[str, float]:
    """(c) Prefill of one history against the softmax encoder, both of two blocks."""
    encoder, softmax = make_encoder(2), SoftmaxEncoder(D, 2, HEADS).eval()
    batch = make_batch([events])
    x = batch[0].unsqueeze(0)

    def attend() -> None:
        with torch.no_grad():
            softmax(x)

    repeats = 3 if events <= 8192 else 2
    ours, theirs = compare([lambda: forward(encoder, batch), attend], repeats)
    return {"events": events, "ms": ours * 1e3, "softmax_ms": theirs * 1e3, "ratio": theirs / ours}


def decode_case(users: int, with_cache: bool) -> dict[str, float]:
    """(d) After 8,192 events: a query, and an append of one event with a query, against a step of a key-value cache.

    The cache's step takes one event in and gives its output, as append and query together do; a query alone stores
    nothing.
    """
    encoder = make_encoder(2)
    x, offsets, times, _ = make_batch([DECODE_EVENTS])
    state = encoder.append(encoder.init_state(1), x, offsets, times).select([0] * users)
    now = times[-1:].repeat(users) + 60
    rows, one = x[:1].repeat(users, 1), torch.arange(users + 1)

    steps: list[Callable[[], Tensor]] = [
        lambda: encoder.query(state, now),
        lambda: encoder.query(encoder.append(state, rows, one, now, validate=False), now + 60),
    ]
    if with_cache:
        softmax = SoftmaxEncoder(D, 2, HEADS).eval()
        cache = softmax.cache(users, DECODE_EVENTS + 1)
        event = x[:1].repeat(users, 1).unsqueeze(1)
        steps.append(lambda: softmax.decode(event, cache, DECODE_EVENTS))
    with torch.no_grad():
        query, update, *cached = compare(steps, DECODE_REPEATS)
    result = {"users": users, "query_ms": query * 1e3, "append_query_ms": update * 1e3}
    for step in cached:
        result |= {"cache_ms": step * 1e3, "query_ratio": step / query, "append_query_ratio": step / update}
    return result


def peak_case() -> dict[str, float]:
    """(e) The share of the sgemm peak that a block's forward pass reaches."""
    encoder, batch = make_encoder(1), make_batch([16384])
    peak = harness.sgemm_peak()
    per_event = seconds(lambda: forward(encoder, batch), 4) / 16384
    peak = max(peak, harness.sgemm_peak())
    chunk = encoder.config.retention_chunk
    # multiply-adds of the projections, and of the channels' products inside and between chunks
    projections = 2 * (11 * D * D + 3 * D * D)
    retention = 2 * (2 * chunk * D + 2 * D * D // HEADS)
    positional = 2 * (encoder.config.positional_chunk * D + 2 * KERNEL * D)
    temporal = 2 * (encoder.config.temporal_chunk * D + 2 * 2 * D)
    flops = projections + retention + positional + temporal
    return {
        "peak_gflops": peak / 1e9,
        "us_per_event": per_event * 1e6,
        "flops_per_event": flops,
        "share": flops / per_event / peak,
        "share_projections_only": projections / per_event / peak,
    }


# --- report ----------------------------------------------------------------------------------------------------------


def run(quick: bool) -> dict[str, Any]:
    """All cases, one line each as they end."""
    found: dict[str, Any] = {"machine": harness.machine()}

    def case(name: str, result: Any) -> None:
        found[name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)

    case("jagged", jagged_case())
    case("peak", peak_case())
    lengths = LENGTHS[:3] if quick else LENGTHS
    case("length", [harness.in_child("benchmarks.encoder", "--length", str(n)) for n in lengths])
    case("prefill", [prefill_case(n) for n in (PREFILL[:4] if quick else PREFILL)])
    case("decode", [decode_case(1, True), decode_case(DECODE_BATCH, True), decode_case(1024, False)])
    return found


def aims(found: dict[str, Any]) -> list[Aim]:
    """What must be reached."""
    first, last = found["length"][0], found["length"][-1]
    quarter = found["length"][-2]
    memory = last["both_mib"] / last["events"] / (quarter["both_mib"] / quarter["events"])
    prefill = {case["events"]: case["ratio"] for case in found["prefill"]}
    alone, decode = found["decode"][:2]
    wanted = [
        Aim("(a) jagged against padded, forward", found["jagged"]["forward_ratio"], 5.5),
        Aim("(a) jagged against padded, forward and backward", found["jagged"]["both_ratio"], 4.5),
        Aim(
            f"(b) time per event at {last['events']} against 1,024, forward",
            last["forward_us"] / first["forward_us"],
            1.1,
            True,
        ),
        Aim("(b) the same, forward and backward", last["both_us"] / first["both_us"], 1.1, True),
        Aim("(b) memory per event at the longest against a quarter of it", memory, 1.25, True),
        Aim("(c) prefill against softmax at 8k", prefill[8192], 1.5),
        Aim("(d) query, which stores nothing, against a step of a key-value cache", decode["query_ratio"], 15),
        Aim("(d) append and query against a step of a key-value cache", decode["append_query_ratio"], 8),
        Aim("(d) the same for one user", alone["append_query_ratio"], 5),
        Aim("(e) share of the sgemm peak", found["peak"]["share"], 0.8),
    ]
    if 16384 in prefill:
        wanted.insert(6, Aim("(c) prefill against softmax at 16k", prefill[16384], 2.5))
    return wanted


def report(found: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    jagged, peak = found["jagged"], found["peak"]

    def cells(case: dict[str, float], form: str, *names: str) -> list[str]:
        return [format(case[name], form) if name in case else "does not fit" for name in names]

    jagged_rows = [
        [what, *cells(jagged, ".0f", f"{key}_ms", f"{key}_padded_ms"), *cells(jagged, ".2f", f"{key}_ratio")]
        for what, key in (("forward", "forward"), ("forward and backward", "both"))
    ]
    length_rows = [
        [n["events"], *cells(n, ".1f", "forward_us", "both_us"), *cells(n, ".0f", "forward_mib", "both_mib")]
        for n in found["length"]
    ]
    prefill_rows = [
        [p["events"], *cells(p, ".0f", "ms", "softmax_ms"), *cells(p, ".2f", "ratio")] for p in found["prefill"]
    ]
    decode_names = ("query_ms", "append_query_ms", "cache_ms", "query_ratio", "append_query_ratio")
    decode_rows = [[d["users"], *cells(d, ".1f", *decode_names)] for d in found["decode"]]
    parts = [
        f"`python -m benchmarks.encoder`, float32, one thread. {found['machine']}. d = {D}, {HEADS} retention heads, "
        f"{SCALES} temporal scales, kernel width {KERNEL}, preset `paper`; untested on GPUs.",
        f"(a) {jagged['events']} events of 24 users, the longest 6,000, one block: jagged against the same ops with "
        "every user padded to the longest.",
        harness.table(["", "jagged, ms", "padded, ms", "ratio"], jagged_rows),
        "(b) One sequence, two blocks: time per event, and what a pass adds to the process's peak memory.",
        harness.table(["events", "forward, µs", "forward and backward, µs", "forward, MiB", "both, MiB"], length_rows),
        "(c) Prefill of one history, two blocks, against a causal softmax encoder (scaled_dot_product_attention, "
        "feed-forward width 4d, same width and depth).",
        harness.table(["events", "FuXi-Linear, ms", "softmax, ms", "ratio"], prefill_rows),
        "(d) Decoding after 8,192 events, two blocks, against a step of that encoder with a key-value cache (32 MiB a "
        "user), measured in turn. The step takes one event in and gives its output: its like is append + query. A "
        "query alone asks for the user at a time and stores nothing; the cache has nothing cheaper for it than a step.",
        harness.table(
            ["users", "query, ms", "append + query, ms", "cache step, ms", "step / query", "step / (append + query)"],
            decode_rows,
        ),
        f"(e) A block's forward pass: {peak['us_per_event']:.1f} µs an event, {100 * peak['share']:.0f} % of the sgemm "
        f"peak measured in the same run ({peak['peak_gflops']:.0f} GFLOP/s); counting the projections alone, "
        f"{100 * peak['share_projections_only']:.0f} %.",
        "![time per event](results/encoder.png)",
    ]
    return "\n\n".join(parts)


def plot(found: dict[str, Any]) -> None:
    """Time per event against length: ours and softmax."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    events = [p["events"] for p in found["prefill"]]
    left.plot(events, [p["ms"] * 1e3 / p["events"] for p in found["prefill"]], "o-", label="FuXi-Linear")
    left.plot(events, [p["softmax_ms"] * 1e3 / p["events"] for p in found["prefill"]], "s--", label="softmax attention")
    left.set(
        xscale="log", xlabel="events", ylabel="µs per event", title="Prefill, d = 256, two blocks, one thread", ylim=0
    )
    left.legend()
    events = [n["events"] for n in found["length"]]
    right.plot(events, [n["forward_mib"] for n in found["length"]], "o-", label="forward")
    right.plot(events, [n["both_mib"] for n in found["length"]], "o-", label="forward and backward")
    right.set(xscale="log", yscale="log", xlabel="events", ylabel="MiB", title="Memory that a pass adds")
    right.legend()
    figure.tight_layout()
    harness.RAW.mkdir(exist_ok=True)
    figure.savefig(harness.RAW / "encoder.png", dpi=110)


def main() -> int:
    """Check, measure, write down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter sequences; nothing is written down")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.length:
        print(json.dumps(length_case(args.length)))
        return 0
    check()
    found = run(args.quick)
    if not args.quick:
        plot(found)
        harness.publish("encoder", "The encoder", report(found), found)
    return harness.conclude(aims(found))


if __name__ == "__main__":
    sys.exit(main())
