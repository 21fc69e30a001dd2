import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, geometric_periods
from fuxi_torchrec.encoders.fuxi_linear import encoder as encoder_module
from fuxi_torchrec.encoders.fuxi_linear import sequences as sequences_module
from fuxi_torchrec.encoders.fuxi_linear.channels import Channel
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.fuxi_linear.tiles import tiles
from fuxi_torchrec.encoders.tests.batches import CHUNK, make_batch, make_encoder

LENGTHS = st.lists(
    st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 2]), min_size=1, max_size=5
)
SEEDS = st.integers(0, 10_000)
PRESETS = ["paper", "official"]
ABLATIONS = [
    {"use_retention": False},
    {"use_temporal": False},
    {"use_positional": False},
    {"use_retention": False, "use_positional": False},
    {"temporal_phases": False},
    {"temporal_mix": False},
    {"learn_temporal_decay": False},
]


def outcome(encoder, batch, form):
    """Output and the gradients by the rows and all parameters."""
    encoder = copy.deepcopy(encoder)
    x = batch.x.clone().requires_grad_()
    y = encoder(x, batch.offsets, batch.timestamps, batch.request, form=form)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(y)
    leaves = [x, *encoder.parameters()]
    return [y, *torch.autograd.grad((y * weight).sum(), leaves, materialize_grads=True, allow_unused=True)]


def assert_all_close(found, wanted, tolerance=1e-10):
    for a, b in zip(found, wanted, strict=True):
        scale = max(1.0, float(b.detach().abs().max()) if b.numel() else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=25)
@given(lengths=LENGTHS, seed=SEEDS)
def test_the_three_forms_agree_on_values_and_all_gradients(preset, lengths, seed):
    encoder, batch = make_encoder(preset=preset, seed=seed), make_batch(lengths, seed)
    wanted = outcome(encoder, batch, "parallel")
    assert_all_close(outcome(encoder, batch, "chunkwise"), wanted)
    assert_all_close(outcome(encoder, batch, "recurrent"), wanted)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ablation", ABLATIONS, ids=str)
def test_ablations_agree_in_all_forms_and_in_serving(preset, ablation):
    encoder, batch = make_encoder(preset=preset, **ablation), make_batch([5, 0, 13, 1])
    wanted = outcome(encoder, batch, "parallel")
    assert_all_close(outcome(encoder, batch, "chunkwise"), wanted)
    state = encoder.append(encoder.init_state(4), batch.x, batch.offsets, batch.timestamps)
    last = wanted[0][batch.offsets[[1, 3, 4]] - 1]
    torch.testing.assert_close(encoder.query(state, batch.request)[[0, 2, 3]], last, rtol=0, atol=1e-10)


def test_periods_of_a_temporal_channel_that_is_off_cost_nothing(monkeypatch):
    encoder, batch = make_encoder(use_temporal=False, temporal_periods=(7, 60, 3600)), make_batch([6, 0, 1])
    monkeypatch.setattr(sequences_module, "phase_vectors", lambda *_: pytest.fail("phases are not needed"))
    y = encoder(*batch.inputs)
    state = encoder.append(encoder.init_state(3), *batch.inputs[:3])
    torch.testing.assert_close(encoder.query(state, batch.request)[[0, 2]], y[[5, 6]], rtol=0, atol=1e-12)


def test_second_derivatives_are_those_of_the_parallel_form_or_refused():
    encoder, batch = make_encoder(num_layers=1), make_batch([6])
    x = batch.x.requires_grad_()

    def slope(x, form="parallel"):
        return torch.autograd.grad(encoder(x, *batch.inputs[1:], form=form).square().sum(), x, create_graph=True)[0]

    (second,) = torch.autograd.grad(slope(x).sum(), x)
    step = 1e-6 * torch.ones_like(batch.x)
    torch.testing.assert_close(second, (slope(x + step) - slope(x - step)).detach() / 2e-6, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match='the chunkwise form has no second derivatives: use form="parallel"'):
        slope(x, "chunkwise")


def test_a_channel_without_all_methods_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Channel()


def test_without_phases_the_temporal_channel_only_decays():
    encoder, batch = make_encoder(temporal_phases=False), make_batch([6])
    y = encoder(*batch.inputs)
    later = encoder(batch.x, batch.offsets, batch.timestamps + 12345, batch.request + 12345)
    torch.testing.assert_close(y, later)
    assert not torch.allclose(make_encoder()(*batch.inputs), y)


@pytest.mark.parametrize("preset", PRESETS)
def test_gradcheck_of_the_whole_encoder(preset):
    encoder = make_encoder(preset=preset, dim=8, temporal_periods=(50, 1000), num_layers=2, ffn_dim=4)
    batch = make_batch([6, 0, 2], dim=8, gaps=[0, 3, 40, -2])

    def run(x, *_):
        return encoder(x, batch.offsets, batch.timestamps, batch.request)

    assert torch.autograd.gradcheck(run, (batch.x.requires_grad_(), *encoder.parameters()), atol=1e-6, fast_mode=True)


@settings(max_examples=25)
@given(lengths=LENGTHS, seed=SEEDS)
def test_a_user_does_not_depend_on_the_others(lengths, seed):
    encoder, batch = make_encoder(seed=seed), make_batch(lengths, seed)
    y = encoder(*batch.inputs)
    for u in range(len(lengths)):
        alone = encoder(*batch.user(u).inputs)
        torch.testing.assert_close(y[batch.offsets[u] : batch.offsets[u + 1]], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", ["chunkwise", "parallel", "recurrent"])
def test_nothing_of_another_user_leaks_even_if_it_is_broken(form):
    encoder, batch = make_encoder(), make_batch([6, 9, 3])
    y = encoder(*batch.inputs, form=form)
    batch.x[6:15] = float("nan")
    broken = encoder(*batch.inputs, form=form, validate=False)
    keep = [*range(6), *range(15, 18)]
    torch.testing.assert_close(broken[keep], y[keep], rtol=0, atol=0)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 12])
def test_no_output_depends_on_a_later_event(cut):
    encoder, batch = make_encoder(), make_batch([13])
    y = encoder(*batch.inputs)
    batch.x[cut:] = torch.randn_like(batch.x[cut:])
    batch.timestamps[cut + 1 :] += 77_777  # t_{cut+1} itself is known to event cut: it is its request time
    other = encoder(*batch.inputs)
    torch.testing.assert_close(other[:cut], y[:cut], rtol=0, atol=1e-12)
    assert not torch.allclose(other[cut:], y[cut:])


def test_the_request_time_matters_and_earlier_than_the_last_event_is_a_gap_of_zero():
    encoder, batch = make_encoder(), make_batch([5], gaps=[100])
    last = int(batch.timestamps[-1])
    ask = lambda t: encoder(batch.x, batch.offsets, batch.timestamps, torch.tensor([t]))[-1]  # noqa: E731
    assert not torch.allclose(ask(last + 10), ask(last + 50_000))
    assert torch.isfinite(ask(last - 5_000)).all()
    # the phase is that of the true time, the decay that of no time at all: only the decay differs from a later request
    encoder = make_encoder(temporal_phases=False)
    torch.testing.assert_close(ask(last - 5_000), ask(last))


@pytest.mark.parametrize("checkpointing", [False, True])
@settings(max_examples=20)
@given(lengths=LENGTHS, seed=SEEDS, tile=st.integers(1, 20))
def test_tiles_and_checkpointing_change_nothing(checkpointing, lengths, seed, tile):
    batch = make_batch(lengths, seed)
    wanted = outcome(make_encoder(seed=seed), batch, "chunkwise")
    encoder = make_encoder(seed=seed, activation_checkpointing=checkpointing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(encoder_module.TILE_ELEMENTS, "cpu", 16 * tile)
        assert_all_close(outcome(encoder, batch, "chunkwise"), wanted)
        with torch.no_grad():
            torch.testing.assert_close(encoder(*batch.inputs), wanted[0].detach(), rtol=0, atol=1e-11)


def test_short_histories_are_not_cut_by_tiles():
    """The users beside one that goes on would have states to start from, and the backward pass would keep them."""
    offsets = list(range(0, 301, 3))
    for size in (12, 16, 100):
        cut = list(tiles(offsets, size))
        assert not any(tile.cut or tile.goes_on for tile in cut)
        assert sum(tile.offsets[-1] for tile in cut) == 300
        assert max(tile.offsets[-1] for tile in cut) <= size


def test_dropout_acts_in_training_only():
    encoder, batch = make_encoder(dropout=0.5), make_batch([7])
    y = encoder(*batch.inputs)
    torch.testing.assert_close(encoder(*batch.inputs), y)
    encoder.train()
    assert not torch.allclose(encoder(*batch.inputs), y)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_batches_without_events(lengths):
    encoder, batch = make_encoder(), make_batch(lengths)
    for form in ("chunkwise", "parallel", "recurrent"):
        assert encoder(*batch.inputs, form=form).shape == (0, 16)


def test_short_histories_beside_a_long_one_are_not_padded_to_it():
    encoder = make_encoder(retention_chunk=64, positional_chunk=64, temporal_chunk=64)
    batch = make_batch([2] * 50 + [64])
    times = (batch.timestamps, batch.request)
    sequences = Sequences(encoder.config, batch.offsets.tolist(), *times, torch.float64)
    assert sequences.chunks(64) is sequences.chunks(4)
    alone = Sequences(encoder.config, [0, 64], batch.timestamps[100:], batch.request[50:], torch.float64)
    assert alone.chunks(64) is not alone.chunks(32)
    expected = encoder(*batch.inputs, form="parallel")
    torch.testing.assert_close(encoder(*batch.inputs), expected, rtol=0, atol=1e-12)


class NoFloatCumsum(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.cumsum.default or not args[0].is_floating_point(), "not deterministic on CUDA"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_used_that_deterministic_mode_refuses_on_gpus(preset):
    encoder, batch = make_encoder(preset=preset), make_batch([5, 0, 9])
    with NoFloatCumsum():
        encoder(*batch.inputs, validate=False).sum().backward()
        state = encoder.append(encoder.init_state(3), *batch.inputs[:3], validate=False)
        encoder.query(state, batch.request)


def count(config):
    encoder = FuXiLinearEncoder(config)
    tables = {"positions", *(name for name, _ in encoder.named_parameters() if name.endswith("positional.kernel"))}
    return sum(p.numel() for name, p in encoder.named_parameters() if name not in tables)


@pytest.mark.parametrize(
    ("preset", "shape", "wanted"),
    [
        ("official", (128, 4, 4), 917_664),
        ("paper", (128, 4, 4), 917_688),
        ("official", (256, 8, 8), 7_340_376),
        ("paper", (256, 8, 8), 7_340_432),
    ],
)
def test_parameter_counts(preset, shape, wanted):
    dim, layers, heads = shape
    periods = geometric_periods(1024, 8, 8)
    config = FuXiLinearConfig(
        dim=dim, num_layers=layers, num_heads=heads, max_positions=16, temporal_periods=periods, preset=preset
    )
    assert count(config) == wanted


def test_parameters_start_where_the_specification_says():
    torch.manual_seed(0)
    periods = geometric_periods(1024, 8, 8)
    encoder = FuXiLinearEncoder(
        FuXiLinearConfig(dim=128, num_layers=2, num_heads=4, max_positions=512, temporal_periods=periods)
    )
    block = encoder.layers[1]
    d = 128
    assert block.in_proj[:, : 6 * d].std().item() == pytest.approx(0.02, rel=0.02)
    assert block.in_proj[:, 6 * d :].abs().max().item() == pytest.approx(d**-0.5, rel=0.01)
    assert encoder.positions.std().item() == pytest.approx((2 / (512 + d)) ** 0.5, rel=0.02)
    decays = block.retention.log_decay().exp().tolist()
    assert decays == pytest.approx([2.718281828 ** -(2**-a) for a in (1, 2, 3, 4)], rel=0.03)
    r = block.temporal.log_decay().exp().tolist()
    assert r == pytest.approx([2 ** (-1 / p) for p in periods], rel=1e-6)
    kernel = block.positional.kernel
    assert torch.equal(kernel[0], torch.tensor([0.0] * 16 + [1.0] * 16))
    assert kernel[3, 0].item() == pytest.approx(0.14112, abs=1e-5)
    assert block.positional.beta.item() == 1
    assert block.temporal.beta.tolist() == [1.0] * 16


def test_the_official_preset_shares_block_zeros_decays():
    encoder = make_encoder(preset="official", num_layers=3)
    names = [name for name in encoder.state_dict() if name.endswith("temporal.decay")]
    assert names == ["blocks.0.temporal.decay"]
    clone = copy.deepcopy(encoder)
    with torch.no_grad():
        clone.layers[0].temporal.decay += 1
    assert torch.equal(clone.layers[2].temporal.log_decay(), clone.layers[0].temporal.log_decay())
    assert not torch.equal(clone.layers[2].temporal.log_decay(), encoder.layers[2].temporal.log_decay())


def sum_gradients_with_an_empty_rank():
    encoder = make_encoder(torch.float32)
    wrapped = torch.nn.parallel.DistributedDataParallel(encoder)
    batch = make_batch([0, 0] if torch.distributed.get_rank() else [3, 5], dtype=torch.float32)
    wrapped(*batch.inputs).sum().backward()
    return float(encoder.positions.grad.abs().sum())


def test_a_rank_without_events_takes_part_in_the_reduction(workers):
    first, second = workers(2).run(sum_gradients_with_an_empty_rank)
    assert first == second > 0


def test_an_encoder_made_on_the_meta_device_can_be_brought_to_life():
    encoder = make_encoder()
    with torch.device("meta"):
        other = FuXiLinearEncoder(encoder.config)
    other = other.to_empty(device="cpu").double()
    other.load_state_dict(encoder.state_dict())
    batch = make_batch([5, 2])
    torch.testing.assert_close(other(*batch.inputs), encoder(*batch.inputs))


def test_the_encoder_runs_with_torch_alone():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numpy", "torchrec", "fbgemm_gpu", "pyarrow", "yaml", "pydantic", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import torch
from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder, EncoderState
e = FuXiLinearEncoder(FuXiLinearConfig(dim=16, num_layers=1, num_heads=2, max_positions=8, temporal_periods=(60, 3600)))
offsets, times, now = torch.tensor([0, 3]), torch.tensor([1, 2, 3]), torch.tensor([9])
e(torch.randn(3, 16), offsets, times, now).sum().backward()
state = e.append(e.init_state(1), torch.randn(3, 16), offsets, times)
e.query(EncoderState.from_bytes(state.to_bytes(), e.init_state(0)), now)
assert not {"numpy", "torchrec"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
