"""What is said of an encoder, against what it computes."""

import math

import pytest
import torch

from fuxi_torchrec.encoders.fuxi_linear.config import FuXiLinearConfig
from fuxi_torchrec.encoders.fuxi_linear.encoder import FuXiLinearEncoder
from fuxi_torchrec.encoders.fuxi_linear.explain import learned, readable
from fuxi_torchrec.encoders.fuxi_linear.sequences import Sequences

PERIODS = (600, 86400)


def encoder_of(**changes):
    torch.manual_seed(0)
    settings = {"dim": 16, "num_layers": 2, "num_heads": 2, "max_positions": 12, "temporal_periods": PERIODS}
    return FuXiLinearEncoder(FuXiLinearConfig(**{**settings, **changes}))


def test_half_lives_are_those_of_the_decays():
    encoder = encoder_of(temporal_half_life=3.0)
    for block, layer in zip(learned(encoder), encoder.layers, strict=True):
        for scale, decay in zip(block.scales, layer.temporal.log_decay().tolist(), strict=True):
            assert scale.half_life == pytest.approx(3 * scale.period, rel=1e-4)  # as it starts
            assert math.exp(decay * scale.half_life) == pytest.approx(0.5, rel=1e-4)


def test_weights_belong_to_their_scale():
    encoder = encoder_of()
    channel = encoder.layers[1].temporal
    with torch.no_grad():
        channel.alpha.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        channel.beta.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    block = learned(encoder)[1]
    assert [(s.sin, s.cos, s.sin_skip, s.cos_skip) for s in block.scales] == [(1, 3, 5, 7), (2, 4, 6, 8)]


def test_the_kernel_weighs_events_as_the_channel_does():
    encoder = encoder_of()
    channel = encoder.layers[0].positional
    events = torch.eye(12, 16)  # what comes out in column j is the weight of event j
    offsets, times = torch.tensor([0, 12]), torch.arange(12)
    sequences = Sequences(encoder.config, offsets.tolist(), times, times[-1:], torch.float32)
    block = learned(encoder)[0]
    for form in ("parallel", "chunkwise"):
        found, _ = channel(events, sequences, form)
        assert torch.allclose(found[:, :12], block.kernel + block.kernel_skip * torch.eye(12), atol=1e-6)
    assert learned(encoder, 5)[0].kernel.shape == (5, 5)


def test_what_never_fades_has_no_half_life():
    encoder = encoder_of()
    with torch.no_grad():
        encoder.layers[0].temporal.decay.fill_(200.0)
    assert learned(encoder)[0].scales[0].half_life == math.inf
    assert readable(math.inf, 1) == "for ever"


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_retention_starts_where_the_model_says(preset):
    for block in learned(encoder_of(preset=preset)):
        assert block.retention == pytest.approx([math.exp(-(2.0**-a)) for a in (1, 2)], abs=0.02)


def test_a_channel_that_is_off_has_nothing_to_say():
    block = learned(encoder_of(use_temporal=False, use_positional=False))[0]
    assert block.scales is None and block.kernel is None and block.kernel_skip is None
    assert learned(encoder_of(use_retention=False))[0].retention is None
    assert learned(encoder_of(temporal_mix=False))[0].scales[0].sin == 1.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (60, "1 min"), (86400, "1 d"), (604800, "7 d"), (3e9, "95.1 y")]
)
def test_durations_are_readable(seconds, text):
    assert readable(seconds * 1000, 1000) == text
