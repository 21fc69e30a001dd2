"""The encoder against float64 tensors: those of the released code, and those of the restatement of the paper."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, geometric_periods
from fuxi_torchrec.encoders.fuxi_linear.channels import PositionalChannel, RetentionChannel, TemporalChannel
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.tests import reference
from fuxi_torchrec.encoders.tests.reference import GOLDENS
from fuxi_torchrec.ops import backends

PERIODS = geometric_periods(16, 8, 8)
FORMS = ["chunkwise", "parallel", "recurrent"]
DTYPES = [torch.float64, torch.float32]
LAYER = "_fuxi._attention_layers.{}."


@pytest.fixture(autouse=True, params=[name for name in backends.available() if name != "native"])
def backend(request):
    """Every golden by every backend; the native ones take part in float32."""
    with backends.use(request.param):
        yield


def load(name):
    return load_file(GOLDENS / f"{name}.safetensors")


def params_of(golden):
    return {k.removeprefix("param."): v for k, v in golden.items() if k.startswith("param.")}


def jagged(golden, name):
    return torch.cat([golden[name][b, :n] for b, n in enumerate(golden["in.past_lengths"].tolist())])


def with_chunks(encoder, chunk):
    """The same encoder with another chunk size in every channel."""
    config = dataclasses.replace(encoder.config, retention_chunk=chunk, positional_chunk=chunk, temporal_chunk=chunk)
    other = FuXiLinearEncoder(config)
    other.load_state_dict(encoder.state_dict())
    return other.to(encoder.positions.dtype)


def assert_close(found, wanted, dtype, gradient=False):
    if dtype == torch.float64:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    else:
        atol = 1e-4 * float(wanted.abs().max()) if gradient else 1e-5
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def official():
    return load("encoder_c32_f64")


def official_inputs(golden, dtype):
    lengths = golden["in.past_lengths"]
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    x = jagged(golden, "in.past_embeddings").to(dtype, copy=True)
    return x, offsets, jagged(golden, "in.timestamps"), golden["in.target_timestamps"]


def gradient_in_released_names(encoder, name):
    """The gradient of a released parameter, put together from ours."""
    if name == "_input_features_preproc._pos_emb.weight":
        return encoder.positions.grad
    layer, name = int(name.split(".")[2]), name.split(".", 3)[3]
    block, d = encoder.blocks[layer], encoder.config.dim
    w1, w2 = block.ffn_in.grad.chunk(2, dim=1)
    return {
        "_uvqk": block.in_proj.grad[:, : 6 * d],
        "_channel_t.proj_v.weight": block.in_proj.grad[:, 6 * d : 7 * d].T,
        "_channel_p._proj_p.weight": block.in_proj.grad[:, 7 * d :].T,
        "_retention._gamma": block.retention.decay.grad,
        "_channel_t._gamma": block.temporal.decay.grad if layer == 0 else None,
        "_channel_t.alpha": block.temporal.alpha.grad,
        "_channel_t.beta": block.temporal.beta.grad,
        "_channel_p._emb": block.positional.kernel.grad,
        "_channel_p._alpha": block.positional.alpha.grad.reshape(1),
        "_channel_p._beta": block.positional.beta.grad.reshape(1),
        "_mffn.lin0.weight": block.out_proj.grad.T,
        "_mffn.lin1.weight": w2.T,
        "_mffn.lin3.weight": w1.T,
        "_mffn.lin2.weight": block.ffn_out.grad.T,
    }[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "chunk"), [*(("chunkwise", c) for c in (1, 16, 24, 32, 256)), *((f, 32) for f in FORMS[1:])]
)
@pytest.mark.parametrize("loss", ["hidden", "l2"])
def test_the_released_models_outputs_and_all_gradients(official, dtype, form, chunk, loss):
    encoder = with_chunks(FuXiLinearEncoder.from_official(params_of(official), PERIODS).to(dtype), chunk)
    x, *rest = official_inputs(official, dtype)
    x.requires_grad_()
    y = encoder(x, *rest, form=form)
    if loss == "l2":
        y = y / y.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    assert_close(y, jagged(official, f"out.{loss}"), dtype)

    (y * jagged(official, "in.loss_weight_R").to(dtype)).sum().backward()
    checked = 0
    for key, wanted in official.items():
        kind, _, name = key.partition(".")
        if kind != f"grad_{loss}" or "_item_emb" in name:
            continue
        found = x.grad if name == "in.past_embeddings" else gradient_in_released_names(encoder, name)
        wanted = jagged(official, key) if name == "in.past_embeddings" else wanted
        assert_close(found, wanted[: len(found)], dtype, gradient=True)
        assert not wanted[len(found) :].any(), "only unused rows are left out"
        checked += 1
    assert checked == {"hidden": 29, "l2": 14}[loss]


def test_the_released_models_blocks_and_channels(official):
    encoder = FuXiLinearEncoder.from_official(params_of(official), PERIODS).double()
    seen = {}
    for number, block in enumerate(encoder.blocks):
        for name in ("retention", "temporal", "positional"):
            hook = lambda _m, _i, out, key=(number, name): seen.update({key: out[0]})  # noqa: E731
            getattr(block, name).register_forward_hook(hook)
        block.register_forward_hook(lambda _m, _i, out, key=(number, "out"): seen.update({key: out[0]}))
    encoder(*official_inputs(official, torch.float64))
    short = {"retention": "y_ret", "temporal": "y_t", "positional": "y_p", "out": "out"}
    for (number, name), found in seen.items():
        assert_close(found, official[f"mid.block{number}.{short[name]}_jagged"], torch.float64)
    assert len(seen) == 8


def test_the_released_models_other_forms(official):
    other = load("encoder_other_forms")
    encoder = FuXiLinearEncoder.from_official(params_of(official), PERIODS).double()
    inputs = official_inputs(official, torch.float64)
    assert_close(with_chunks(encoder, 16)(*inputs), other["out.hidden.c16_f64"], torch.float64)
    assert_close(encoder(*inputs, form="parallel"), other["out.hidden.par_f64"], torch.float64)


# --- each channel alone ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def channels():
    return load("channels_f64")


def channel_setup(golden, dtype):
    config = FuXiLinearConfig(
        dim=32, num_layers=1, num_heads=4, max_positions=160, kernel_dim=16, temporal_periods=PERIODS, preset="official"
    )
    lengths = golden["in.past_lengths"].tolist()
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    requests = torch.stack([golden["in.timestamps"][b, n] for b, n in enumerate(lengths)])
    return config, Sequences(config, offsets, jagged(golden, "in.timestamps"), requests, dtype)


def leaves(golden, dtype, *names):
    return [golden[name].to(dtype, copy=True).requires_grad_() for name in names]


def check_channel(golden, dtype, y, prefix, inputs):
    assert_close(y, golden[f"{prefix}.y"], dtype)
    (y * golden["loss_weight_R_jagged"].to(dtype)).sum().backward()
    for name, leaf in inputs.items():
        assert_close(
            leaf.grad.reshape(golden[f"{prefix}.grad_{name}"].shape), golden[f"{prefix}.grad_{name}"], dtype, True
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_retention_channel_alone(channels, dtype, form):
    config, sequences = channel_setup(channels, dtype)
    channel = RetentionChannel(config).to(dtype)
    channel.decay.data.copy_(channels["ret.gamma_raw"])
    torch.testing.assert_close(channel.log_decay().exp().double(), channels["ret.decay_per_head"], rtol=0, atol=1e-6)
    q, k, v = leaves(channels, dtype, "ret.q", "ret.k", "ret.v")
    heads = tuple(x.unflatten(-1, (4, 8)) for x in (q, k, v))
    y = channel.attend(heads, sequences, form, None, False)[0].flatten(-2)
    check_channel(channels, dtype, y, "ret", {"q": q, "k": k, "v": v, "gamma_raw": channel.decay})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_positional_channel_alone(channels, dtype, form):
    config, sequences = channel_setup(channels, dtype)
    channel = PositionalChannel(config).to(dtype)
    channel.kernel.data.copy_(channels["pos.E_p"])
    channel.alpha.data.copy_(channels["pos.alpha"][0])
    channel.beta.data.copy_(channels["pos.beta"][0])
    h, w = leaves(channels, dtype, "pos.h", "pos.W_p")
    y, _ = channel(h @ w.T, sequences, form)
    inputs = {"h": h, "W_p": w, "E_p": channel.kernel, "alpha": channel.alpha, "beta": channel.beta}
    check_channel(channels, dtype, y, "pos", inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_temporal_channel_alone(channels, dtype, form):
    config, sequences = channel_setup(channels, dtype)
    channel = TemporalChannel(config).to(dtype)
    channel.decay.data.copy_(channels["tmp.gamma_raw"])
    channel.alpha.data.copy_(channels["tmp.alpha"])
    channel.beta.data.copy_(channels["tmp.beta"])
    key, query = sequences.phases
    assert_close(key.repeat(1, 2, 1), channels["tmp.k"], dtype)
    assert_close(query, channels["tmp.q_nodecay"], dtype)
    h, w = leaves(channels, dtype, "tmp.h", "tmp.W_t")
    y, _ = channel(h @ w.T, sequences, form)
    inputs = {"h": h, "W_t": w, "gamma_raw": channel.decay, "alpha": channel.alpha, "beta": channel.beta}
    check_channel(channels, dtype, y, "tmp", inputs)


# --- serving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_through_append_and_query(dtype):
    golden = load("decode")
    params = params_of(golden)
    encoder = FuXiLinearEncoder.from_official(params, PERIODS).to(dtype)
    embed = params["_embedding_module._item_emb.weight"].to(dtype)
    ids, times, prefill = golden["in.event_ids"], golden["in.event_timestamps"], golden["in.prefill_lengths"].tolist()
    users = len(prefill)
    offsets = torch.tensor([0, *prefill]).cumsum(0)
    first_ids = torch.cat([ids[b, :n] for b, n in enumerate(prefill)])
    first_times = torch.cat([times[b, :n] for b, n in enumerate(prefill)])
    state = encoder.append(encoder.init_state(users), embed[first_ids], offsets, first_times)
    for step in range(13):
        if step:
            at = torch.tensor(prefill) + step - 1
            new = torch.arange(users)
            state = encoder.append(state, embed[ids[new, at]], torch.arange(users + 1), times[new, at])
        y = encoder.query(state, golden["in.query_timestamps"][:, step].contiguous())
        assert_close(y, golden["out.hidden.f64"][step], dtype)
        assert_close(y / y.norm(dim=-1, keepdim=True), golden["out.l2.f64"][step], dtype)


# --- the paper's preset ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper():
    return load("paper")


def paper_encoder(golden, dtype, chunk=32):
    config = FuXiLinearConfig(
        dim=32, num_layers=2, num_heads=4, max_positions=100, kernel_dim=16, temporal_periods=PERIODS
    )
    encoder = FuXiLinearEncoder(config)
    encoder.load_state_dict(params_of(golden))
    return with_chunks(encoder.to(dtype), chunk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "chunk"), [("chunkwise", 16), ("chunkwise", 64), ("parallel", 32), ("recurrent", 32)])
def test_the_papers_preset_outputs_and_all_gradients(paper, dtype, form, chunk):
    encoder = paper_encoder(paper, dtype, chunk)
    x = paper["in.x"].to(dtype, copy=True).requires_grad_()
    y = encoder(x, paper["in.offsets"], paper["in.timestamps"], paper["in.request_timestamps"], form=form)
    assert_close(y, paper["out"], dtype)
    (y * paper["in.weight"].to(dtype)).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert_close(parameter.grad, paper[f"grad.{name}"], dtype, gradient=True)
    assert_close(x.grad, paper["grad.x"], dtype, gradient=True)


def test_the_restatement_reproduces_the_released_model(official):
    """What the paper's goldens rest on."""
    encoder = FuXiLinearEncoder.from_official(params_of(official), PERIODS).double()
    x, offsets, times, requests = official_inputs(official, torch.float64)
    keep = int(offsets[3])  # three users: the restatement is slow
    with torch.no_grad():
        found = reference.batch_output(encoder, x[:keep], offsets[:4], times[:keep], requests[:3])
    assert_close(found, jagged(official, "out.hidden")[:keep], torch.float64)


def test_the_papers_goldens_are_those_of_the_restatement(paper):
    encoder = paper_encoder(paper, torch.float64)
    keep = int(paper["in.offsets"][3])
    with torch.no_grad():
        found = reference.batch_output(
            *(encoder, paper["in.x"][:keep], paper["in.offsets"][:4]),
            *(paper["in.timestamps"][:keep], paper["in.request_timestamps"][:3]),
        )
    assert_close(found, paper["out"][:keep], torch.float64)
