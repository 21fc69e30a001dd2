"""Portable programs of a model that reads features of users."""

import torch

from fuxi_torchrec import FuXiLinearConfig
from fuxi_torchrec.encoders import make_encoder
from fuxi_torchrec.export.programs import QUERY, example, write_programs


def test_a_query_takes_what_features_of_users_add(tmp_path):
    config = FuXiLinearConfig(dim=16, num_layers=1, num_heads=2, max_positions=32)
    encoder = make_encoder(config).eval().requires_grad_(False)
    assert write_programs(encoder, "cosine", tmp_path, with_user_rows=True) < 1e-5
    program = torch.export.load(tmp_path / QUERY).module()
    state, rows, times = example(encoder, 3, seed=7)
    expected = torch.nn.functional.normalize(encoder.query(state, times) + rows, dim=1)
    torch.testing.assert_close(program(state.flat(), times, rows), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(program(state.flat(), times, torch.zeros_like(rows)), expected, atol=1e-3)
