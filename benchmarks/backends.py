"""The native CPU kernels beside torch, in one run, measured in turn on one thread.

    python -m benchmarks.backends [--quick]

Results are compared before any time is taken. Exit code 1 if a figure that must be reached is missed.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Aim, compare
from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, geometric_periods
from fuxi_torchrec.ops import backends

# width, heads, users, events each; how often faster: forward, forward and backward
PASSES = [(64, 2, 86, 160, 2.0, 2.2), (128, 4, 8, 1024, 1.5, 1.6), (256, 4, 4, 1024, 1.25, 1.25)]
TOGETHER = 20  # calls of a round of decoding
USERS = [(1, 10.0), (64, 1.5)]  # of a query at d = 256; how often faster


def make_encoder(dim: int, heads: int) -> FuXiLinearEncoder:
    """Two blocks, eight temporal scales."""
    torch.manual_seed(0)
    periods = geometric_periods(1024, 8, 8)
    return FuXiLinearEncoder(
        FuXiLinearConfig(dim=dim, num_layers=2, num_heads=heads, max_positions=4096, temporal_periods=periods)
    ).eval()


def by(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """The function with one backend."""

    def run() -> Any:
        with backends.use(name):
            return function()

    return run


def beside(function: Callable[[], Any], repeats: int, together: int = 1) -> tuple[float, float]:
    """Seconds in torch and in native kernels, the best of rounds in turn, each of so many calls one after another."""

    def several() -> None:
        for _ in range(together):
            function()

    one, other = compare([by("torch", several), by("native", several)], repeats)
    return one / together, other / together


def pass_case(dim: int, heads: int, users: int, events: int, repeats: int) -> dict[str, float]:
    """Forward, and forward and backward, of a batch of equal histories."""
    encoder, generator = make_encoder(dim, heads), torch.Generator().manual_seed(0)
    x = torch.randn(users * events, dim, generator=generator) * 0.1
    times = torch.randint(20_000, (users, events), generator=generator).cumsum(1)
    batch = (torch.arange(users + 1) * events, times.flatten(), times[:, -1] + 60)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return encoder(x, *batch, validate=False)

    def both() -> None:
        encoder.zero_grad(set_to_none=True)
        encoder(x.requires_grad_(), *batch, validate=False).sum().backward()
        x.grad = None
        x.requires_grad_(False)

    torch.testing.assert_close(by("native", forward)(), by("torch", forward)(), rtol=0, atol=2e-5)
    result: dict[str, float] = {"dim": dim, "users": users, "events": events}
    for name, function in (("forward", forward), ("both", both)):
        before, after = (1e6 * s / len(x) for s in beside(function, repeats))
        result |= {f"{name}_torch_us": before, f"{name}_native_us": after, f"{name}_ratio": before / after}
    return result


def decode_case(users: int, repeats: int) -> dict[str, float]:
    """A query, and an append of one event, of so many users at d = 256: one after another, and in turn with torch's."""
    encoder, generator = make_encoder(256, 4), torch.Generator().manual_seed(0)
    x = torch.randn(100, 256, generator=generator) * 0.1
    times = torch.randint(20_000, (100,), generator=generator).cumsum(0)
    state = encoder.append(encoder.init_state(1), x, torch.tensor([0, 100]), times).select([0] * users)
    rows, now, one = x[:1].repeat(users, 1), times[-1:].repeat(users) + 60, torch.arange(users + 1)

    def query() -> torch.Tensor:
        return encoder.query(state, now)

    def append() -> None:
        encoder.append(state, rows, one, now)

    torch.testing.assert_close(by("native", query)(), by("torch", query)(), rtol=0, atol=2e-5)
    result: dict[str, float] = {"users": users}
    for name, function in (("query", query), ("append", append)):
        before, after = (1e3 * s for s in beside(function, 3 * repeats, TOGETHER))
        result |= {f"{name}_torch_ms": before, f"{name}_native_ms": after, f"{name}_ratio": before / after}
    before, after = (1e3 * s for s in beside(query, 10 * repeats))
    return result | {"turn_torch_ms": before, "turn_native_ms": after, "turn_ratio": before / after}


def report(found: dict[str, Any]) -> str:
    """The section of RESULTS.md."""

    def rows(cases: list[dict[str, float]], names: tuple[str, ...], *kinds: str) -> list[list[str]]:
        parts = [f"{kind}_{part}" for kind in kinds for part in names]
        return [
            [*(str(v) for v in list(case.values())[: -len(parts)]), *(f"{case[p]:.2f}" for p in parts)]
            for case in cases
        ]

    heads = ["torch", "native", "ratio"]
    return "\n\n".join(
        [
            f"`python -m benchmarks.backends`, float32, one thread, the best of rounds in turn. {found['machine']}. "
            f"Kernels: {found['kernels']}. Two blocks, eight temporal scales, kernel width 32, preset `paper`.",
            "Forward, then forward and backward, µs an event:",
            harness.table(
                ["d", "users", "events each", *heads, *heads],
                rows(found["passes"], ("torch_us", "native_us", "ratio"), "forward", "both"),
            ),
            f"A query, then an append of one event, at d = 256, ms, in rounds of {TOGETHER} calls one after another; "
            "then a query that follows one of torch each time, and finds the caches as that left them:",
            harness.table(
                ["users", *heads, *heads, *heads],
                rows(found["decode"], ("torch_ms", "native_ms", "ratio"), "query", "append", "turn"),
            ),
        ]
    )


def main() -> int:
    """Compare, measure, write down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backends", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written down")
    quick = parser.parse_args().quick
    kernels = backends.found()
    if kernels.missing:
        print(f"nothing to compare: {kernels.missing}")
        return 0
    torch.set_num_threads(1)
    repeats = 3 if quick else 8
    found: dict[str, Any] = {
        "machine": harness.machine(),
        "kernels": kernels.instruction_sets[0] + (", products by oneDNN" if kernels.onednn else ""),
        "passes": [pass_case(*case[:4], repeats) for case in PASSES],
        "decode": [decode_case(users, repeats) for users, _ in USERS],
    }
    text = report(found)
    print(text)
    if not quick:
        harness.publish("backends", "Native CPU kernels", text, found)
    aims = []
    for case, (dim, *_, forward, both) in zip(found["passes"], PASSES, strict=True):
        aims += [
            Aim(f"forward, d = {dim}", case["forward_ratio"], forward),
            Aim(f"both, d = {dim}", case["both_ratio"], both),
        ]
    aims += [
        Aim(f"query of {users} at d = 256", case["query_ratio"], ratio)
        for case, (users, ratio) in zip(found["decode"], USERS, strict=True)
    ]
    return harness.conclude(aims)


if __name__ == "__main__":
    sys.exit(main())
