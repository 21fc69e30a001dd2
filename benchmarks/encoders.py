"""Ten encoders side by side, all of them jagged and as quick as we can make them.

    python -m benchmarks.encoders [--only padded,linear,efficiency,memory]

One thread; torch's own operators decide, FuXi-Linear's native kernels are a line more. Results are checked before any
time is taken. Exit code 1 if a figure that must be reached is missed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import encoder as fuxi_linear
from benchmarks import harness
from benchmarks.encoder import Batch, make_batch, padded, skewed_lengths
from benchmarks.harness import Aim, compare, seconds
from benchmarks.plain_encoders import plain
from fuxi_torchrec.encoders import config_class, kinds, make_encoder
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.ops import backends

D, HEADS, LONGEST = fuxi_linear.D, 8, 16384
ATTENTION: dict[str, dict[str, Any]] = {
    "sasrec": {},
    "hstu": {"qk_dim": 32, "value_dim": 128},
    "fuxi_alpha": {"qk_dim": 32, "value_dim": 32},
    "fuxi_beta": {"value_dim": 32},
}
# of the linear ones: padded users that are run at once, and by how much histories are shorter; what fits in memory
LINEAR = {"retnet": (1, 1), "mamba4rec": (2, 1), "recblr": (24, 1), "ttt4rec": (4, 1)}
LINEAR |= {"fuxi_linear": (1, 2), "tim4rec": (1, 2)}
SLOTS = 6016  # positions of the linear ones: TiM4Rec has matrices over them
PREFILL = [1024, 2048, 4096, 8192, 16384]
DECODE = [(1024, 64), (2048, 64), (4096, 64), (8192, 64), (16384, 16)]  # events, users: what fits in memory
PAPER = {"fuxi_alpha": (10, 21), "fuxi_beta": (3.1, 4.2), "hstu": (7.8, 18)}  # prefill and decode at 8k, on a GPU
KEPT = {"sasrec": 2 * D, "hstu": 5 * D, "fuxi_alpha": 2 * D, "fuxi_beta": D}  # elements of an event, in every block
# blocks of the two that read their cache in an append and in a query
READS = {"sasrec": 2 + 0, "hstu": 1 + 2, "fuxi_alpha": 1 + 2, "fuxi_beta": 1 + 2}
NATIVE = "fuxi_linear_native"
NAMES = {
    "fuxi_linear": "FuXi-Linear",
    NATIVE: "FuXi-Linear, native",
    "sasrec": "SASRec",
    "hstu": "HSTU",
    "fuxi_alpha": "FuXi-α",
    "fuxi_beta": "FuXi-β",
    "retnet": "RetNet",
    "mamba4rec": "Mamba4Rec",
    "tim4rec": "TiM4Rec",
    "recblr": "RecBLR",
    "ttt4rec": "TTT4Rec",
}
TRAINED, GIGABYTES = 16384, 6.0


def make(kind: str, layers: int) -> SequenceEncoder:
    """Width and depth of all cases, feed-forward networks as wide as the model."""
    if kind in ("fuxi_linear", NATIVE):
        return fuxi_linear.make_encoder(layers)
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dim": D, "num_layers": layers, **ATTENTION.get(kind, {})}
    settings["max_positions"] = LONGEST if kind in ATTENTION else SLOTS
    if kind != "hstu":
        settings["ffn_dim"] = D
    if kind in (*ATTENTION, "retnet", "ttt4rec"):
        settings["num_heads"] = HEADS
    return make_encoder(config_class(kind)(**settings)).eval()


def compared() -> list[str]:
    """Of the figure: FuXi-Linear, with native kernels too where they are built, and attention."""
    native = [NATIVE] if "native" in backends.available() else []
    return ["fuxi_linear", *native, *ATTENTION]


# --- cases -----------------------------------------------------------------------------------------------------------


def forward(encoder: SequenceEncoder, batch: Batch, **form: str) -> Tensor:
    """Without gradients."""
    with torch.no_grad():
        return encoder(*batch, validate=False, **form)


def both(encoder: SequenceEncoder, batch: Batch, **form: str) -> None:
    """Forward and backward."""
    encoder.zero_grad(set_to_none=True)
    encoder(batch[0].clone().requires_grad_(), *batch[1:], validate=False, **form).sum().backward()


def check() -> None:
    """Plain padded forms and states give the jagged rows, for all ten."""
    batch = make_batch([300, 1, 65, 130])
    for kind in kinds():
        encoder = make(kind, 2)
        y = forward(encoder, batch)
        with plain():
            rows = forward(encoder, padded(batch), **_form(kind)).view(4, 300, D)
        same = torch.cat([rows[user, :n] for user, n in enumerate(batch[1].diff().tolist())])
        if kind != "tim4rec":  # whose rows depend on all times, those of the padding too
            torch.testing.assert_close(same, y, rtol=0, atol=5e-5)
        torch.testing.assert_close(rows[0], y[:300], rtol=0, atol=5e-5)
        state = encoder.append(encoder.init_state(4), *batch[:3])
        torch.testing.assert_close(encoder.query(state, batch[3]), y[batch[1][1:] - 1], rtol=0, atol=5e-5)
    print("results checked", flush=True)


def _form(kind: str) -> dict[str, str]:
    """FuXi-Linear has its form over all pairs itself."""
    return {"form": "parallel"} if kind == "fuxi_linear" else {}


def padded_case(kind: str, lengths: list[int], together: int) -> dict[str, float]:
    """A skewed batch against every user padded to the longest; of the padded ones so many are run at once."""
    encoder, batch, form = make(kind, 1), make_batch(lengths), _form(kind)
    long = make_batch(lengths[:1] * together)  # no padding at all
    found: dict[str, float] = {}

    def dense(run: Callable[..., Any]) -> None:
        with plain():
            run(encoder, long, **form)

    for name, run in (("forward", forward), ("both", both)):
        ours, theirs = compare([partial(run, encoder, batch), partial(dense, run)], repeats=2)
        theirs *= len(lengths) / together
        found |= {f"{name}_ms": ours * 1e3, f"{name}_padded_ms": theirs * 1e3, f"{name}_ratio": theirs / ours}
    print(kind, json.dumps(found), flush=True)
    return {"longest": lengths[0], **found}


def tile_flops(kind: str, events: int) -> float:
    """Of the products over all pairs that a layer needs, j ≤ i alone."""
    per_pair = {"sasrec": 2 * D, "hstu": 5 * D, "fuxi_alpha": 4 * D, "fuxi_beta": 2 * D}[kind]
    return 2 * per_pair * events * (events + 1) / 2


def share_case(kind: str, events: int) -> dict[str, float]:
    """The share of the sgemm peak that tiles reach: what a layer takes, less what it takes for its other parts."""
    encoder, batch = make(kind, 1), make_batch([events])
    short = make_batch([64] * (events // 64))  # the same rows, hardly any pairs
    peak = harness.sgemm_peak()
    whole, rest = compare([lambda: forward(encoder, batch), lambda: forward(encoder, short)], 2)
    peak = max(peak, harness.sgemm_peak())
    return {"events": events, "peak_gflops": peak / 1e9, "share": tile_flops(kind, events) / (whole - rest) / peak}


def prefill_case(events: int) -> dict[str, float]:
    """One history, two blocks, all encoders in turn; ms."""
    batch = make_batch([events])
    made = {kind: make(kind, 2) for kind in compared()}

    def run(kind: str) -> None:
        with backends.use("native" if kind == NATIVE else "torch"):
            forward(made[kind], batch)

    times = compare([partial(run, kind) for kind in made], 3 if events <= 4096 else 2)
    return {"events": events, **{kind: 1e3 * each for kind, each in zip(made, times, strict=True)}}


def decode_case(kind: str, events: int, users: int) -> dict[str, float]:
    """Users with so many events: one more for each, and a query; ms. Every user has a cache of its own."""
    with backends.use("native" if kind == NATIVE else "torch"):
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

        both_ms = 1e3 * seconds(step, 5)
    found = {"users": users, "events": events, "append_query_ms": both_ms, "bytes": state.nbytes / users}
    if kind in ATTENTION:
        found["cache_gb_s"] = READS[kind] * KEPT[kind] * 4 * events * users / both_ms / 1e6
    return found


def decode_cases(events: int, users: int) -> dict[str, Any]:
    """The same of all that are compared."""
    return {kind: decode_case(kind, events, users) for kind in compared()}


def train_one(kind: str) -> dict[str, float]:
    """Peak memory of a process that takes a step over one long history with the published sizes; run in a child."""
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"dim": 128, "num_layers": 4, "max_positions": TRAINED, "dropout": 0.2}
    encoder = make_encoder(config_class(kind)(**settings))
    optimizer = torch.optim.AdamW(encoder.parameters())
    x, *rest = make_batch([TRAINED])
    with backends.use("torch"):
        encoder(x[:, :128].clone().requires_grad_(), *rest).square().mean().backward()
    optimizer.step()
    return {"bytes": harness.resident_bytes(peak=True)}


# --- sections --------------------------------------------------------------------------------------------------------


def _padded_table(found: dict[str, Any]) -> str:
    names = [f"{name}_{what}" for name in ("forward", "both") for what in ("ms", "padded_ms", "ratio")]
    rows = [
        [NAMES[kind], case["longest"], *(format(case[name], ".1f" if "ratio" in name else ",.0f") for name in names)]
        for kind, case in found.items()
    ]
    header = ["", "longest", "forward, ms", "padded, ms", "ratio", "and backward, ms", "padded, ms", "ratio"]
    return harness.table(header, rows)


def padded_section(_: Path) -> tuple[str, list[Aim], Any]:
    """Attention on the skewed batch."""
    with backends.use("torch"):
        check()
        found = {kind: padded_case(kind, skewed_lengths(), 1) for kind in ATTENTION}
    what = (
        "18,690 events of 24 users, the longest 6,000, one block: jagged tiles against tensors of all pairs with every "
        "user padded to the longest. All padded users together do not fit in memory: one is run, its time multiplied."
    )
    aims = [
        Aim(f"{NAMES[kind]} against padded, {name}", case[f"{key}_ratio"], 4)
        for kind, case in found.items()
        for key, name in (("forward", "forward"), ("both", "forward and backward"))
    ]
    return f"{what}\n\n{_padded_table(found)}", aims, found


def linear_section(_: Path) -> tuple[str, list[Aim], Any]:
    """The linear ones on the skewed batch."""
    found = {}
    with backends.use("torch"):
        check()
        for kind, (together, shorter) in LINEAR.items():
            found[kind] = padded_case(kind, [n // shorter for n in skewed_lengths()], together)
    what = (
        "The same for linear encoders. The plain form of FuXi-Linear, RetNet and TiM4Rec has tensors of all pairs, one "
        "padded user at a time (of FuXi-Linear and TiM4Rec with histories half as long: they would not fit otherwise); "
        "Mamba4Rec (2 users at a time) and RecBLR (24) loop over events, as a recurrence is written; TTT4Rec (4) has "
        "one form, so that its ratio is that of padding alone."
    )
    return f"{what}\n\n{_padded_table(found)}", [], found


def efficiency_section(_: Path) -> tuple[str, list[Aim], Any]:
    """Tiles, prefill and decode."""
    with backends.use("torch"):
        found: dict[str, Any] = {"share": {kind: share_case(kind, 8192) for kind in ATTENTION}}
        print(json.dumps(found), flush=True)
        found["stream_gb_s"] = harness.stream_peak() / 1e9
        for name, cases in (
            ("prefill", [partial(prefill_case, events) for events in PREFILL]),
            ("decode", [partial(decode_cases, *size) for size in DECODE]),
        ):
            found[name] = []
            for case in cases:
                found[name].append(case())
                print(name, json.dumps(found[name][-1]), flush=True)
    plot(found)
    return _efficiency_text(found), _efficiency_aims(found), found


def memory_section(_: Path) -> tuple[str, list[Aim], Any]:
    """Peak memory of training a long history."""
    chosen = [kind for kind in kinds() if kind != "tim4rec"]
    found = {kind: harness.in_child("benchmarks.encoders", "--train-one", kind) for kind in chosen}
    rows = [[NAMES[kind], f"{case['bytes'] / 1e9:.2f}"] for kind, case in found.items()]
    what = (
        f"Peak memory of a process that takes a step over one history of {TRAINED:,} events, d = 128, L = 4, published "
        "sizes, Adam, the process itself included. TiM4Rec is left out: its matrices over the slots alone "
        f"have {4 * 2 * TRAINED**2 / 1e9:.1f} billion elements at that length."
    )
    aims = [
        Aim(
            f"GB of a process training a {TRAINED:,}-event history, {NAMES[kind]}", case["bytes"] / 1e9, GIGABYTES, True
        )
        for kind, case in found.items()
    ]
    return f"{what}\n\n{harness.table(['', 'GB'], rows)}", aims, found


def _efficiency_aims(found: dict[str, Any]) -> list[Aim]:
    wanted = [
        Aim(f"{NAMES[kind]}: share of the sgemm peak", case["share"], 0.4) for kind, case in found["share"].items()
    ]
    prefill = {case["events"]: case for case in found["prefill"]}[16384]
    decode = {case["hstu"]["events"]: case for case in found["decode"]}[8192]
    for kind, (first, then) in PAPER.items():
        wanted.append(
            Aim(f"prefill at 16k, {NAMES[kind]} / FuXi-Linear", prefill[kind] / prefill["fuxi_linear"], first)
        )
        ratio = decode[kind]["append_query_ms"] / decode["fuxi_linear"]["append_query_ms"]
        wanted.append(Aim(f"decode at 8k, {NAMES[kind]} / FuXi-Linear", ratio, then))
    return wanted


def _efficiency_text(found: dict[str, Any]) -> str:
    shown = [kind for kind in NAMES if kind in found["prefill"][0]]

    def beside(times: dict[str, float]) -> list[str]:
        ours = times["fuxi_linear"]
        return [f"{times[kind]:,.0f}" + f" ({times[kind] / ours:.1f})" * (kind in ATTENTION) for kind in shown]

    columns = [f"{NAMES[kind]}, ms" + " (ratio)" * (kind in ATTENTION) for kind in shown]
    shares = ", ".join(f"{NAMES[kind]} {100 * case['share']:.0f} %" for kind, case in found["share"].items())
    decode_rows = [
        [case["hstu"]["events"], case["hstu"]["users"], *beside({k: c["append_query_ms"] for k, c in case.items()})]
        for case in found["decode"]
    ]
    kept = found["decode"][-1]
    read = {case["hstu"]["events"]: case for case in found["decode"]}[8192]
    speeds = ", ".join(f"{NAMES[kind]} {read[kind]['cache_gb_s']:.1f}" for kind in ATTENTION)
    sizes = ", ".join(f"{NAMES[kind]} {kept[kind]['bytes'] / 2**20:.1f} MiB" for kind in shown if kind != NATIVE)
    parts = [
        f"Share of the sgemm peak that the products over pairs reach, everything between them counted: {shares}.",
        "Prefill of one history, two blocks; ratios are to FuXi-Linear with torch's operators. The paper has 10, 3.1 "
        "and 7.8 (FuXi-α, β, HSTU) at 8k on a GPU.",
        harness.table(["events", *columns], [[case["events"], *beside(case)] for case in found["prefill"]]),
        "One event more and a query, two blocks, every user with a state or cache of its own. The paper: 21, 4.2 and "
        "18 at 8k.",
        harness.table(["events", "users", *columns], decode_rows),
        f"GB/s at which caches are read after 8,192 events, all else counted: {speeds}; adding up a large tensor reads "
        f"{found['stream_gb_s']:.1f}.",
        f"State of a user with {kept['hstu']['events']} events, room to grow included: {sizes}.",
        "![prefill and decode](results/encoders.png)",
    ]
    return "\n\n".join(parts)


def plot(found: dict[str, Any]) -> None:
    """Prefill and decode against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    colours = dict(zip(NAMES, ["C3", "C3", "C7", "C0", "C1", "C2"], strict=False))
    for kind in [kind for kind in NAMES if kind in found["prefill"][0]]:
        style = {"fuxi_linear": "o-", NATIVE: "o:"}.get(kind, "s--")
        drawn = {"color": colours[kind], "label": NAMES[kind], "markersize": 4}
        events = [case["events"] for case in found["prefill"]]
        left.plot(events, [case[kind] / 1e3 for case in found["prefill"]], style, **drawn)
        cases = [case[kind] for case in found["decode"]]
        right.plot([c["events"] for c in cases], [c["append_query_ms"] / c["users"] for c in cases], style, **drawn)
    left.set(title="Encoding one history", ylabel="seconds")
    right.set(title="One event more and a query (64 users, 16 at 16k)", ylabel="ms a user")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="events of the history")
        axes.set_xticks(PREFILL, [f"{n // 1024}k" for n in PREFILL], minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle("d = 256, 2 blocks, float32, one CPU thread", fontsize=9)
    figure.tight_layout()
    harness.RAW.mkdir(exist_ok=True)
    figure.savefig(harness.RAW / "encoders.png", dpi=110)
    pyplot.close(figure)


SECTIONS: dict[str, harness.Section] = {
    "padded": padded_section,
    "linear": linear_section,
    "efficiency": efficiency_section,
    "memory": memory_section,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, publish it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--train-one", metavar="KIND", help=argparse.SUPPRESS)  # of the memory section
    args = parser.parse_args(arguments)
    if args.train_one:
        print(json.dumps(train_one(args.train_one)))
        return 0
    torch.set_num_threads(1)
    about = f"d = {D}, {HEADS} heads (FuXi-Linear 4), feed-forward networks of width d, torch's own operators."
    return harness.run_sections("encoders", SECTIONS, args.only.split(","), about)


if __name__ == "__main__":
    sys.exit(main())
