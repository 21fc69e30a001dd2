"""What is shown of the comparison encoders, against what they compute."""

import math

import pytest
import torch
import torch.nn.functional as F

from fuxi_torchrec import encoders
from fuxi_torchrec.encoders.tests.test_peers import KINDS, small
from fuxi_torchrec.ops.time_maps import TimeMap


@pytest.mark.parametrize("kind", KINDS)
def test_everything_shown_is_finite_and_drawn_or_there_is_nothing(kind, tmp_path):
    found = small(kind).explain(1000)
    assert (found is None) == (kind in ("sasrec", "retnet"))
    if found is not None:
        assert len(found.blocks) == 2
        for curve in found.blocks[1]:
            assert len(curve.x) == len(curve.y) > 0 and all(map(math.isfinite, [*curve.x, *curve.y]))
            assert curve.title in found.text()
        found.draw("a title", tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["hstu", "fuxi_alpha", "fuxi_beta"])
def test_weights_over_time_are_those_of_the_map(kind):
    encoder = small(kind)
    block = encoder.blocks[1]
    if kind == "fuxi_beta":
        time = TimeMap("exp", torch.cat((block.time_scale, block.time_rate)).detach())
    else:
        time = TimeMap("buckets", block.relative.time_table.detach())
    curve, distances = encoder.explain(1000).blocks[1]
    gaps = torch.tensor([round(1000 * x) for x in curve.x])
    torch.testing.assert_close(torch.tensor(curve.y).double(), time.weights(gaps))
    assert distances.y[3] == pytest.approx(float(block.relative.position_table.detach()[160 - 1 - 3]))


def test_half_lives_are_those_of_the_decay():
    encoder = encoders.make_encoder(encoders.config_class("recblr")(dim=4, num_layers=1))
    (curve,) = encoder.explain(1).blocks[0]
    decay = torch.exp(-F.softplus(encoder.blocks[0].rate.double()) / 2).sort(descending=True).values
    assert (decay ** torch.tensor(curve.y)).tolist() == pytest.approx([0.5] * 4)
