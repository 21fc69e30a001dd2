"""The plain restatements of the comparison encoders against float64 tensors of the original code."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fuxi_torchrec.encoders.tests import peers
from fuxi_torchrec.encoders.tests.reference import GOLDENS

HEADS = 2
FILES = [*peers.PEERS, "fuxi_beta_pow", "ttt4rec_linear"]


def load(name):
    return load_file(GOLDENS / "peers" / f"{name}.safetensors")


def params_of(golden):
    return {k.removeprefix("param."): v for k, v in golden.items() if k.startswith("param.")}


def run(name, golden, params, x, times="in", **options):
    """Outputs of all users, after every block and at the end."""
    peer = peers.PEERS[name.removesuffix("_pow").removesuffix("_linear")]
    offsets, stamps = golden["in.offsets"].tolist(), golden[f"{times}.timestamps"]
    requests = golden[f"{times}.request_timestamps"]
    each = [
        peer(params, HEADS, x[a:b], stamps[a:b], request, **options)
        for (a, b), request in zip(itertools.pairwise(offsets), requests, strict=True)
    ]
    return [torch.cat(rows) for rows in zip(*(outs for outs, _ in each), strict=True)], torch.cat([y for _, y in each])


@pytest.mark.parametrize("name", FILES)
def test_blocks_outputs_and_all_gradients(name):
    golden = load(name)
    params = {k: v.requires_grad_() for k, v in params_of(golden).items()}
    x = golden["in.x"].clone().requires_grad_()
    outs, y = run(name, golden, params, x)
    for number, out in enumerate(outs):
        torch.testing.assert_close(out, golden[f"mid.block{number}.out"], rtol=0, atol=1e-12)
    torch.testing.assert_close(y, golden["out"], rtol=0, atol=1e-12)
    (y * golden["in.R"]).sum().backward()
    for key, wanted in golden.items():
        if key.startswith("grad."):
            found = x.grad if key == "grad.x" else params[key.removeprefix("grad.")].grad
            found = torch.zeros_like(wanted) if found is None else found
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11 * float(wanted.abs().max().clamp(min=1)))


@pytest.mark.parametrize("name", FILES)
def test_prefixes_asked_at_other_times(name):
    golden = load(name)
    begin = int(golden["in.offsets"][2])
    peer = peers.PEERS[name.removesuffix("_pow").removesuffix("_linear")]
    cases = zip(golden["decode.prefix_lengths"].tolist(), golden["decode.query_timestamps"], strict=True)
    rows = []
    for length, asked in cases:
        part = slice(begin, begin + length)
        _, y = peer(params_of(golden), HEADS, golden["in.x"][part], golden["in.timestamps"][part], asked)
        rows.append(y[-1])
    torch.testing.assert_close(torch.stack(rows), golden["decode.out"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "times"),
    [
        *itertools.product(("hstu", "fuxi_alpha", "fuxi_beta", "fuxi_beta_pow", "tim4rec"), ("unsorted", "ms")),
        ("tim4rec", "rel"),
    ],
)
def test_other_times(name, times):
    golden = load(name)
    _, y = run(name, golden, params_of(golden), golden["in.x"], times)
    torch.testing.assert_close(y, golden[f"{times}.out"], rtol=0, atol=1e-12)


def test_variants_of_the_original_code():
    golden = load("recblr")
    _, y = run("recblr", golden, params_of(golden), golden["in.x"], padded=5)
    torch.testing.assert_close(y, golden["out.left_pad5"], rtol=0, atol=1e-12)
    golden = load("tim4rec")
    _, y = run("tim4rec", golden, params_of(golden), golden["in.x"], conv_activation=F.hardswish)
    torch.testing.assert_close(y, golden["out.hardswish_conv"], rtol=0, atol=1e-12)


def test_bucket_thresholds_are_exact():
    assert torch.equal(peers.bucket_thresholds(), load("bucket_thresholds")["thresholds"])
