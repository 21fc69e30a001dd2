"""The comparison encoders: released weights against float64 tensors, and the contract that all encoders keep."""

import contextlib
import copy
import itertools

import pytest
import torch

from fuxi_torchrec import encoders
from fuxi_torchrec.encoders.released import POSITIONS
from fuxi_torchrec.encoders.tests import peers
from fuxi_torchrec.encoders.tests.test_peers_reference import load, params_of

KINDS = [kind for kind in encoders.kinds() if kind != "fuxi_linear"]
VARIANTS = {"fuxi_beta": ["fuxi_beta", "fuxi_beta_pow"], "ttt4rec": ["ttt4rec", "ttt4rec_linear"]}
FILES = [(kind, file) for kind in KINDS for file in VARIANTS.get(kind, [kind])]
HEADS = {kind: {"num_heads": 2} for kind in ("sasrec", "hstu", "fuxi_alpha", "fuxi_beta", "retnet", "ttt4rec")}
TIMED = ["hstu", "fuxi_alpha", "fuxi_beta", "tim4rec"]
DTYPES = [torch.float64, torch.float32]


@contextlib.contextmanager
def in_double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def released(kind, golden):
    return encoders.from_official(kind, params_of(golden), **HEADS.get(kind, {})).eval()


def inputs_of(golden, dtype, times="in"):
    x = golden["in.x"].to(dtype, copy=True)
    return x, golden["in.offsets"], golden[f"{times}.timestamps"], golden[f"{times}.request_timestamps"]


def assert_close(found, wanted, dtype, gradient=False):
    largest = float(wanted.abs().max()) if wanted.numel() else 1.0
    if dtype == torch.float64:
        atol = 1e-11 * max(largest, 1.0) if gradient else 1e-12
    else:
        atol = 1e-4 * largest if gradient else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "file"), FILES)
def test_the_original_models_blocks_outputs_and_all_gradients(kind, file, dtype):
    golden = load(file)
    encoder, seen = released(kind, golden).to(dtype), []
    for block in encoder.blocks:
        block.register_forward_hook(lambda _m, _i, out: seen.append(out[0] if isinstance(out, tuple) else out))
    x, *rest = inputs_of(golden, dtype)
    y = encoder(x.requires_grad_(), *rest)
    for number, out in enumerate(seen):
        assert_close(out, golden[f"mid.block{number}.out"], dtype)
    assert_close(y, golden["out"], dtype)
    (y * golden["in.R"].to(dtype)).sum().backward()
    assert_close(x.grad, golden["grad.x"], dtype, gradient=True)
    # released gradients, loaded like weights, stand where ours should be
    grads = {k.removeprefix("grad."): v for k, v in golden.items() if k.startswith("grad.") and k != "grad.x"}
    with in_double():
        wanted = dict(encoders.from_official(kind, grads, **HEADS.get(kind, {})).named_parameters())
    for name, parameter in encoder.named_parameters():
        assert_close(parameter.grad, wanted[name].detach(), dtype, gradient=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "file"), FILES)
def test_prefixes_asked_at_other_times(kind, file, dtype):
    golden = load(file)
    encoder = released(kind, golden).to(dtype)
    begin = int(golden["in.offsets"][2])
    x, times = golden["in.x"][begin:].to(dtype), golden["in.timestamps"][begin:]
    state, done, rows = encoder.init_state(1), 0, []
    order = golden["decode.prefix_lengths"].argsort()
    for case in order.tolist():
        length, asked = int(golden["decode.prefix_lengths"][case]), golden["decode.query_timestamps"][case : case + 1]
        state = encoder.append(state, x[done:length], torch.tensor([0, length - done]), times[done:length])
        done = length
        rows.append(encoder.query(state, asked))
    assert_close(torch.cat(rows), golden["decode.out"][order], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "file", "times"),
    [
        *((k, f, t) for (k, f), t in itertools.product(FILES, ("unsorted", "ms")) if k in TIMED),
        *((k, f, "rel") for k, f in FILES if k == "tim4rec"),
    ],
)
def test_times_that_go_back_and_milliseconds(kind, file, times, dtype):
    golden = load(file)
    y = released(kind, golden).to(dtype)(*inputs_of(golden, dtype, times))
    assert_close(y, golden[f"{times}.out"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hardswish_as_the_original_has_it_without_causal_conv1d(dtype):
    golden = load("tim4rec")
    encoder = encoders.from_official("tim4rec", params_of(golden), conv_activation="hardswish").to(dtype)
    assert_close(encoder(*inputs_of(golden, dtype)), golden["out.hardswish_conv"], dtype)


# --- the contract ----------------------------------------------------------------------------------------------------

LENGTHS = [0, 1, 31, 32, 33, 63, 64, 65, 130, 0, 5]


SMALL = {"tim4rec": {"head_dim": 4, "state_dim": 5}, "mamba4rec": {"state_dim": 3}, "ttt4rec": {"mini_batch": 16}}


def small(kind, **settings):
    """A small encoder of a kind, every parameter away from its start."""
    torch.manual_seed(0)
    settings = {**HEADS.get(kind, {}), **SMALL.get(kind, {}), **settings}
    config = encoders.config_class(kind)(**{"dim": 16, "num_layers": 2, "max_positions": 160, **settings})
    encoder = encoders.make_encoder(config).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return encoder.double()


def histories(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor(list(itertools.accumulate(lengths, initial=0)))
    gaps = torch.randint(0, 5000, (int(offsets[-1]),), generator=generator)
    gaps[torch.rand(len(gaps), generator=generator) < 0.2] = 0
    times = 1_600_000_000 + torch.cat([gaps[a:b].cumsum(0) for a, b in itertools.pairwise(offsets.tolist())])
    request = 1_700_000_000 + torch.randint(0, 10_000, (len(lengths),), generator=generator)
    x = torch.randn(int(offsets[-1]), 16, generator=generator, dtype=torch.float64)
    return x, offsets, times, request


@pytest.mark.parametrize("kind", KINDS)
def test_jagged_equals_one_user_at_a_time(kind):
    encoder = small(kind)
    x, offsets, times, request = histories(LENGTHS)
    y = encoder(x, offsets, times, request)
    for user, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
        if b > a:
            alone = encoder(x[a:b], torch.tensor([0, b - a]), times[a:b], request[user : user + 1])
            torch.testing.assert_close(y[a:b], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_append_and_query_equal_forward_however_events_are_cut(kind, seed):
    # some histories are longer than max_positions, where a model can
    encoder = small(kind, **({"max_positions": 60} if seed and kind != "tim4rec" else {}))
    x, offsets, times, request = histories(LENGTHS, seed)
    y = encoder(x, offsets, times, request)
    generator = torch.Generator().manual_seed(seed)
    lengths, state = offsets.diff(), encoder.init_state(len(LENGTHS))
    done = torch.zeros_like(lengths)
    while (done < lengths).any():
        most = [1, 40, 200][int(torch.randint(3, (1,), generator=generator))]
        new = torch.minimum(torch.randint(0, most + 1, lengths.shape, generator=generator), lengths - done)
        rows = torch.cat([torch.arange(a + d, a + d + n) for a, d, n in zip(offsets.tolist(), done, new, strict=False)])
        state = encoder.append(state, x[rows], torch.cat((new.new_zeros(1), new.cumsum(0))), times[rows])
        done = done + new
    some = lengths > 0
    found = encoder.query(state, request)
    torch.testing.assert_close(found[some], y[offsets[1:][some] - 1], rtol=0, atol=1e-10)
    assert not found[~some].any()
    assert state.count.tolist() == lengths.tolist()


def in_released_names(encoder):
    """The encoder's parameters, or views of them, as released ones."""
    own = dict(encoder.named_parameters(recurse=False))
    params = {new: own[name] for name, new in {"positions": POSITIONS, **encoder.released_after}.items()}
    for number, block in enumerate(encoder.blocks):
        for name, parameter in block.named_parameters():
            given = encoder.released_names[name]
            given = (given,) if isinstance(given, str) else given
            for new, part in zip(given, parameter.chunk(len(given)), strict=True):
                if "conv1d" in new and part.ndim == 2:
                    part = part.unsqueeze(2 if "_conv1d" in new else 1)
                part = part.unsqueeze(1) if "ttt_lr" in new else part
                prefix = encoder.released_prefix
                if isinstance(prefix, tuple):  # attention and feed-forward layers
                    prefix = prefix["_conv1d" in new]
                params[f"{prefix}{number}.{new}"] = part
    return params


CHUNK = {"retnet": 64, "recblr": 64, "mamba4rec": 32, "tim4rec": 32, "ttt4rec": 16}  # events of one; of tiles 128


@pytest.mark.parametrize("kind", KINDS)
def test_all_gradients_equal_those_of_the_definition(kind):
    # beyond max_positions where a model can
    encoder = small(kind, **({"max_positions": 720} if kind == "tim4rec" else {}))
    plain, size = copy.deepcopy(encoder), CHUNK.get(kind, 128)
    x, offsets, times, request = histories([0, 1, size - 1, size, size + 1, 700])
    weights = torch.randn(len(x), 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own, heads = x.clone().requires_grad_(), HEADS.get(kind, {}).get("num_heads", 1)
    y = encoder(x.requires_grad_(), offsets, times, request)
    (y * weights).sum().backward()
    users = [(a, b, request[n]) for n, (a, b) in enumerate(itertools.pairwise(offsets.tolist())) if b > a]
    params = in_released_names(plain)
    wanted = torch.cat([peers.PEERS[kind](params, heads, own[a:b], times[a:b], asked)[1] for a, b, asked in users])
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-11)
    (wanted * weights).sum().backward()
    torch.testing.assert_close(x.grad, own.grad, rtol=0, atol=1e-9)
    for found, parameter in zip(encoder.parameters(), plain.parameters(), strict=True):
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(found.grad, wanted, torch.float64, gradient=True)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_no_gradient(kind):
    encoder, inputs = small(kind), histories([0, 1, 33, 130])
    again = small(kind, activation_checkpointing=True)
    for each in (encoder, again):
        each(*inputs).square().sum().backward()
    for one, other in zip(encoder.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-12 * float(one.grad.abs().max() + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_no_events_at_all_still_reach_every_parameter(kind):
    encoder = small(kind)
    y = encoder(*histories([0, 0]))
    assert y.shape == (0, 16)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    assert not encoder.query(encoder.init_state(2), torch.tensor([1, 2])).any()


# --- sizes -----------------------------------------------------------------------------------------------------------

SETS = {"kuairand": {}, "ml20m": {"dim": 256, "num_layers": 8, "max_positions": 211}}
COUNTS = {  # as published, without the table of positions
    "sasrec": (791_040, 6_309_888),
    "hstu": (926_808, 7_346_480),
    "fuxi_alpha": (992_344, 7_870_768),
    "fuxi_beta": (926_300, 7_345_464),
    "retnet": (918_656, 7_344_384),
    "mamba4rec": (1_043_968, 7_911_424),
    "tim4rec": (9_562_238, 8_283_190),
    "recblr": (860_672, 6_850_560),
    "ttt4rec": (991_120, 7_379_776),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_as_many_as_published(kind):
    for (name, sizes), wanted in zip(SETS.items(), COUNTS[kind], strict=True):
        heads = {"num_heads": 8} if name == "ml20m" and kind in HEADS else {}
        with torch.device("meta"):
            encoder = encoders.make_encoder(encoders.config_class(kind)(**sizes, **heads))
        counted = sum(p.numel() for p in encoder.parameters()) - encoder.positions.numel()
        assert counted == wanted
        if kind == "tim4rec":  # the paper's figure leaves out the matrices over the slots
            mixing = sum(p.numel() for n, p in encoder.named_parameters() if ".time_in." in n or ".time_out." in n)
            assert counted - mixing == {"kuairand": 984_158, "ml20m": 7_567_478}[name]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_scalars_are_not_decayed(kind):
    encoder = small(kind)
    groups = encoder.optimizer_groups()
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    assert sorted(id(p) for group in groups for p in group) == sorted(names)
    assert groups.tables[0] is encoder.positions
    assert all(p.ndim == 2 or "time_conv" in names[id(p)] or kind == "ttt4rec" for p in groups.matrices)
    assert not [names[id(p)] for p in groups.matrices if "table" in names[id(p)]]


@pytest.mark.parametrize("kind", KINDS)
def test_activation_memory_grows_with_events_and_shrinks_with_checkpointing(kind):
    plain, less = (small(kind, num_layers=6, activation_checkpointing=each) for each in (False, True))
    needed = plain.activation_bytes(1000)
    rows = 6 * 16 * 1000 * 4  # of every block's input alone
    assert needed > 4 * rows and rows < less.activation_bytes(1000) < needed / 1.5
    assert plain.activation_bytes(3000) == pytest.approx(3 * needed, rel=0.01)
