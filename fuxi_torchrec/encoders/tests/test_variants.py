"""Other temporal and positional channels of FuXi-Linear's block."""

import itertools
import math

import pytest
import torch

from fuxi_torchrec import FuXiLinearConfig
from fuxi_torchrec.encoders.fuxi_linear.config import POSITIONAL, TEMPORAL
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder

VARIANTS = [*({"temporal": name} for name in TEMPORAL[1:]), *({"positional": name} for name in POSITIONAL[1:])]
GROWING = [{"temporal": name} for name in ("bucket", "exp", "pow", "hstu")] + [
    {"positional": "table"},
    {"positional": "t5"},
]
LENGTHS = [0, 1, 3, 4, 5, 13, 0]  # chunks of 4, and more events than positions

variants = pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "-".join(changes.values()))


def silu(x):
    return x / (1 + torch.exp(-x))


def bucket(gap):
    return min(128, int(math.log(max(1, abs(gap))) / 0.301))


def t5_bucket(distance):
    return distance if distance < 16 else min(31, 16 + int(math.log(distance / 16) / math.log(8) * 16))


def weights(channel, config, t, i, j):
    """Of event j for the output of event i, by the formulas: one number, or one of each column."""
    gap, apart, d = t[i + 1] - t[j], min(i - j, config.max_positions - 1), config.dim
    if config.temporal == "bucket":
        return channel.weights[bucket(gap)]
    if config.temporal == "exp":
        return channel.weights[0] * torch.exp(-torch.exp(channel.weights[1]) * max(0, gap))
    if config.temporal == "pow":
        return channel.weights[0] * (1 + max(0, gap)) ** -channel.weights[1]
    if config.positional == "table":
        return channel.weights[apart]
    if config.positional == "t5":
        return channel.weights[t5_bucket(apart)]
    if config.positional == "alibi":
        slopes = [2 ** (-8 * a / config.num_heads) for a in range(1, config.num_heads + 1)]
        return torch.tensor([math.exp(-m * (i - j)) for m in slopes], dtype=torch.float64).repeat_interleave(
            d // config.num_heads
        )
    assert config.temporal == "scaled"
    passed = sum(round(1024 * math.log1p(max(0, t[m + 1] - t[m]))) / 1024 for m in range(j, i + 1))
    sigmoid = torch.sigmoid(channel.decay) ** (2 * math.pi / math.log(2))
    rate = torch.stack([sigmoid[k] ** (passed * 2.0**-k) for k in range(config.num_scales)])
    width = d // (2 * config.num_scales)
    own = channel.beta if i == j else torch.zeros_like(channel.beta)
    return (channel.alpha * rate.repeat(2) + own).repeat_interleave(width)


def restated(channel, config, rows, times, request):
    """y_i of one user, pair by pair."""
    t, d, y = [*times.tolist(), int(request)], config.dim, []
    for i in range(len(rows)):
        if config.temporal == "absolute":
            angles = [2 * math.pi * (t[n] % p) / p for n in (i, i + 1) for p in config.temporal_periods]
            scales = config.num_scales
            now = [f(a) for a in angles[:scales] for f in (math.cos, math.sin)]
            then = [f(a) for a in angles[scales:] for f in (math.sin, lambda a: -math.cos(a))]
            y.append(rows[i] + torch.tensor(now + then, dtype=torch.float64) @ channel.embedding)
        elif config.temporal == "hstu":
            q, k, v = silu(rows).split(d, 1)
            found = []
            for head in torch.arange(d).chunk(config.num_heads):
                scores = [
                    silu(q[i, head] @ k[j, head] + channel.weights[bucket(t[i + 1] - t[j])]) for j in range(i + 1)
                ]
                found.append(sum(s * v[j, head] for j, s in enumerate(scores)) / config.max_positions)
            y.append(torch.cat(found))
        else:
            y.append(sum(weights(channel, config, t, i, j) * rows[j] for j in range(i + 1)))
    return torch.stack(y)


@pytest.mark.parametrize("changes", VARIANTS[:-1], ids=str)  # rope is no channel: see the next test
@torch.no_grad()
def test_a_channel_is_what_its_formula_says(changes):
    encoder, batch = make_encoder(**changes, max_positions=20), make_batch([23])
    config, block = encoder.config, encoder.layers[0]
    channel = block.temporal if "temporal" in changes else block.positional
    rows = torch.randn(23, channel.columns, dtype=torch.float64)
    sequences = Sequences(config, [0, 23], batch.timestamps, batch.request, torch.float64)
    expected = restated(channel, config, rows, batch.timestamps, batch.request[0])
    for form in ("chunkwise", "parallel"):
        found, _ = channel(rows, sequences, form)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_turned_queries_and_keys_see_their_distance_alone():
    encoder, batch = make_encoder(positional="rope", max_positions=64), make_batch([6])
    channel, config = encoder.layers[0].retention, encoder.config
    rows = torch.randn(6, channel.columns, dtype=torch.float64)
    q, k, v = silu(rows).unflatten(1, (3, config.num_heads, -1)).unbind(1)
    y = torch.zeros_like(v)
    for i in range(6):
        for j in range(i + 1):
            half = q.shape[2] // 2
            angle = torch.tensor([(i - j) * 10000.0 ** (-m / half) for m in range(half)], dtype=torch.float64)
            even, odd = k[j, :, ::2], k[j, :, 1::2]  # turned back by the distance
            turned = torch.stack((even * angle.cos() + odd * angle.sin(), odd * angle.cos() - even * angle.sin()), -1)
            score = (q[i] * turned.flatten(1)).sum(1)
            y[i] += (channel.log_decay().exp() ** (i - j) * score).unsqueeze(1) * v[j]
    for start in (0, 30):  # wherever the history stands
        places = Sequences(config, [0, 6], batch.timestamps, batch.request, torch.float64, torch.tensor([start]))
        found, _ = channel.attend(channel._heads(rows, places), places, "chunkwise", None, False)
        torch.testing.assert_close(found, y, atol=1e-9, rtol=1e-9)


@variants
def test_every_gradient_of_the_tiled_form_is_the_definitions(changes):
    encoder, found = make_encoder(**changes), {}
    for form in ("chunkwise", "parallel"):
        batch = make_batch(LENGTHS)
        batch.x.requires_grad_()
        encoder.zero_grad()
        y = encoder(*batch.inputs, form=form)
        (y * torch.sin(torch.arange(y.numel()).view_as(y))).sum().backward()
        found[form] = {"y": y.detach(), "x": batch.x.grad, **{n: p.grad for n, p in encoder.named_parameters()}}
    for name, expected in found["parallel"].items():
        torch.testing.assert_close(found["chunkwise"][name], expected, atol=1e-9, rtol=1e-7, msg=name)


@variants
@torch.no_grad()
def test_append_and_query_give_the_last_row_however_events_were_cut(changes):
    encoder, batch = make_encoder(**changes), make_batch(LENGTHS)
    growing = changes in GROWING
    assert encoder.state_kind == ("growing" if growing else "constant")
    assert (encoder.state_bytes == 0) == growing
    y, bounds = encoder(*batch.inputs), batch.offsets.tolist()
    for cut in (1, 2, 100):
        state = encoder.init_state(len(LENGTHS))
        for begin in range(0, max(LENGTHS), cut):
            rows = [list(range(min(a + begin, b), min(a + begin + cut, b))) for a, b in itertools.pairwise(bounds)]
            offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
            every = torch.tensor(list(itertools.chain(*rows)))
            state = encoder.append(state, batch.x[every], offsets, batch.timestamps[every])
        found = encoder.query(state, batch.request)
        for user, n in enumerate(LENGTHS):
            expected = y[bounds[user + 1] - 1] if n else torch.zeros(16, dtype=torch.float64)
            torch.testing.assert_close(found[user], expected, atol=1e-9, rtol=1e-9)


@variants
def test_a_batch_without_events_is_connected_to_every_parameter(changes):
    encoder = make_encoder(**changes)
    encoder(*make_batch([0, 0]).inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_variants_have_fingerprints_of_their_own_and_the_usual_one_stays():
    usual = FuXiLinearConfig()
    assert not {"temporal", "positional"} & usual.decisive().keys()
    prints = {FuXiLinearConfig(**changes).fingerprint() for changes in VARIANTS}
    assert len(prints | {usual.fingerprint()}) == len(VARIANTS) + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temporal": "alpha"}, "temporal must be one of retention, bucket"),
        ({"positional": "none"}, "positional must be one of kernel, table"),
        ({"temporal": "bucket", "use_temporal": False}, "temporal is bucket, and use_temporal is false"),
        ({"positional": "rope", "use_retention": False}, "rope turns pairs of the retention channel's columns"),
        ({"positional": "rope", "num_heads": 128}, "to be even"),
        ({"temporal": "scaled", "temporal_phases": False}, "temporal_phases=False belongs to temporal: retention"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FuXiLinearConfig(**changes)


def test_a_growing_variant_has_no_recurrent_form():
    with pytest.raises(ValueError, match="no recurrent form: its state grows"):
        make_encoder(temporal="bucket")(*make_batch([3]).inputs, form="recurrent")


def test_tables_are_trained_like_embeddings():
    encoder = make_encoder(temporal="bucket", positional="t5")
    names = {id(p): n for n, p in encoder.named_parameters()}
    assert [names[id(p)] for p in encoder.optimizer_groups().tables] == [
        "positions",
        *(f"blocks.{layer}.{name}.weights" for layer in range(2) for name in ("temporal", "positional")),
    ]


@variants
def test_what_the_backward_pass_keeps_grows_with_events_and_not_with_pairs(changes):
    encoder, kept = make_encoder(**changes), []
    for events in (256, 1024):
        sizes = {}

        def note(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
            return tensor

        batch = make_batch([events])
        batch.x.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            encoder(*batch.inputs)
        kept.append(sum(size for size, _ in sizes.values()))
    assert kept[1] < 4.5 * kept[0]
