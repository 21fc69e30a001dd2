"""The published settings of the comparison encoders: they load, and give models of the published sizes."""

from pathlib import Path

import pytest
import torch

from fuxi_torchrec import config
from fuxi_torchrec.encoders import kinds, make_encoder
from fuxi_torchrec.encoders.tests.test_peers import COUNTS

FILES = sorted((Path(__file__).parents[2] / "configs/peers").glob("*.yaml"))


def parameters(loaded):
    with torch.device("meta"):
        encoder = make_encoder(loaded.model)
    return sum(p.numel() for p in encoder.parameters()) - encoder.positions.numel()


def overrides(path):
    """Of MovieLens-20M, as the file's comment has them."""
    text = path.read_text().partition("# MovieLens-20M: ")[2].partition("data:\n")[0]
    return [word for word in text.split() if word != "#"]


def test_every_comparison_encoder_has_a_file():
    assert [path.stem for path in FILES] == sorted(set(kinds()) - {"fuxi_linear"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_published_settings_give_published_sizes(path):
    kuairand, ml_20m = config.load_config(path), config.load_config(path, overrides(path))
    assert kuairand.model.kind == ml_20m.model.kind == path.stem
    assert (parameters(kuairand), parameters(ml_20m)) == COUNTS[path.stem]
    assert kuairand.model == type(kuairand.model)(dropout=0.5)  # the defaults are the published size
    assert (ml_20m.batch.max_length, ml_20m.model.max_positions, ml_20m.model.dropout) == (200, 211, 0.2)
    assert config.load_config(path, ["data.path=data/kuairec"]).data.path == "data/kuairec"
