"""The contract's defaults, on an encoder that has ``forward`` alone; and the registry."""

import pytest
import torch

from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder
from fuxi_torchrec import encoders as registry
from fuxi_torchrec.encoders import base
from fuxi_torchrec.encoders.registry import config_from
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.encoders.tests.causal_mean import KIND, CausalMean, CausalMeanConfig

LENGTHS = [3, 0, 5, 1]


def small_encoder(dtype=torch.float64):
    torch.manual_seed(0)
    return CausalMean(CausalMeanConfig(dim=16)).to(dtype).eval()


def last_rows(encoder, batch):
    y, ends = encoder(*batch.inputs), batch.offsets[1:] - 1
    return torch.where((batch.offsets.diff() > 0)[:, None], y[ends], 0.0)


@pytest.mark.parametrize("at_once", [2**16, 4, 1])
def test_append_equals_forward_however_events_are_cut(monkeypatch, at_once):
    monkeypatch.setattr(base, "_QUERY_EVENTS", at_once)
    encoder, batch = small_encoder(), make_batch(LENGTHS)
    state = encoder.init_state(4)
    for cut in range(3):  # the first, second and further events of everybody
        a = (batch.offsets[:-1] + cut).minimum(batch.offsets[1:])
        b = batch.offsets[1:] if cut == 2 else (a + 1).minimum(batch.offsets[1:])
        rows = torch.cat([torch.arange(int(x), int(y)) for x, y in zip(a, b, strict=True)])
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), (b - a).cumsum(0)))
        before = state
        state = encoder.append(state, batch.x[rows], offsets, batch.timestamps[rows])
        assert before.count.sum() + len(rows) == state.count.sum()
    assert state.count.tolist() == LENGTHS
    users = [batch.user(n) for n in range(4)]
    assert state.last_time.tolist() == [int(user.timestamps[-1]) if len(user.x) else 0 for user in users]
    torch.testing.assert_close(encoder.query(state, batch.request), last_rows(encoder, batch))


def test_growing_states_are_selected_and_joined_as_constant_ones():
    batch = make_batch(LENGTHS)
    for encoder in (small_encoder(), make_encoder()):
        state = encoder.append(encoder.init_state(4), *batch.inputs[:3])
        whole = encoder.query(state, batch.request)
        for users in ([2, 0, 2], torch.tensor([False, True, True, False]), []):
            index = torch.as_tensor(users).nonzero().flatten() if torch.is_tensor(users) else torch.tensor(users).long()
            some = state.select(users)
            assert len(some) == len(index) and some.count.tolist() == [LENGTHS[n] for n in index]
            torch.testing.assert_close(encoder.query(some, batch.request[index]), whole[index])
        joined = state.concatenate([state.select([3]), encoder.init_state(1), state.to("cpu")])
        assert joined.count.tolist() == [LENGTHS[3], 0, *LENGTHS]
        assert joined.last_time.tolist() == [int(batch.timestamps[-1]), 0, *state.last_time.tolist()]
        times = torch.cat((batch.request[3:], batch.request[:1], batch.request))
        torch.testing.assert_close(encoder.query(joined, times)[2:], whole)
        assert state.select([2]).nbytes >= state.select([3]).nbytes > 0
        with pytest.raises(ValueError, match="users must be 0 to 3, not 4 to 4"):
            state.select([4])
    constant, growing = make_encoder(), small_encoder()
    for other in (constant.init_state(1), CausalMean(CausalMeanConfig(dim=16, per_day=0.0)).double().init_state(1)):
        with pytest.raises(ValueError, match="states of different configurations"):
            growing.init_state(1).concatenate([growing.init_state(1), other])


def test_what_does_not_fit_a_growing_state_is_refused():
    encoder, batch = small_encoder(), make_batch(LENGTHS)
    state = encoder.init_state(4)
    with pytest.raises(ValueError, match="offsets describes 4 users, the state has 3"):
        encoder.append(encoder.init_state(3), *batch.inputs[:3])
    with pytest.raises(ValueError, match="x must be of shape"):
        encoder.append(state, batch.x[:, :3], batch.offsets, batch.timestamps)
    with pytest.raises(ValueError, match="request_timestamps must be of shape"):
        encoder.query(state, batch.request[:2])
    with pytest.raises(ValueError, match="state is of another configuration"):
        CausalMean(CausalMeanConfig(dim=16, per_day=0.0)).double().query(state, batch.request)
    with pytest.raises(ValueError, match=r"state is torch\.float64"):
        small_encoder(torch.float32).query(state, batch.request)


def test_parameters_are_grouped_by_the_encoder():
    encoder = make_encoder()
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    matrices, tables, scalars = ([names[id(p)] for p in group] for group in encoder.optimizer_groups())
    assert tables == ["positions", "blocks.0.positional.kernel", "blocks.1.positional.kernel"]
    assert {name.rpartition(".")[2] for name in matrices} == {"in_proj", "out_proj", "ffn_in", "ffn_out"}
    assert {name.rpartition(".")[2] for name in scalars} == {"decay", "alpha", "beta"}
    assert len(matrices) + len(tables) + len(scalars) == len(names)
    assert [len(group) for group in small_encoder().optimizer_groups()] == [1, 0, 0]


def test_activations_without_a_formula_are_measured():
    encoder = small_encoder(torch.float32)
    kept = encoder.activation_bytes(1000)
    assert 1000 * 16 * 4 <= kept <= 1000 * 16 * 4 * 20
    assert encoder.activation_bytes(2000) == 2 * kept
    with torch.device("meta"):
        assert CausalMean(CausalMeanConfig(dim=16)).activation_bytes(1000) == kept


def test_a_formula_needs_no_parameters_in_memory():
    config = FuXiLinearConfig(dim=64)
    with torch.device("meta"):
        assert FuXiLinearEncoder(config).activation_bytes(100) == FuXiLinearEncoder(config).activation_bytes(200) // 2


def test_an_encoder_is_found_by_its_kind():
    assert type(registry.make_encoder(FuXiLinearConfig(dim=16, num_layers=1))) is FuXiLinearEncoder
    config = config_from({"kind": KIND, "dim": 8})
    assert config == CausalMeanConfig(dim=8)
    assert type(registry.make_encoder(config)) is CausalMean
    assert config_from({"kind": "fuxi_linear", "temporal_periods": [60, 3600]}).temporal_periods == (60, 3600)
    assert config.identity().startswith(KIND) and config.fingerprint() != CausalMeanConfig(dim=16).fingerprint()
    with pytest.raises(ValueError, match="takes a FuXiLinearConfig, not a CausalMeanConfig"):
        registry.make_encoder(CausalMeanConfig(kind="fuxi_linear"))
    with pytest.raises(ValueError, match="unknown encoder 'gru': known are fuxi_linear"):
        registry.config_class("gru")


def test_released_weights_are_loaded_by_kind():
    with pytest.raises(ValueError, match="not the parameters of the released model"):
        registry.from_official("fuxi_linear", {}, temporal_periods=(60,))
    with pytest.raises(ValueError, match="CausalMean: no released weights are known"):
        registry.from_official(KIND, {})


def test_an_encoder_with_nothing_to_show_says_so():
    assert small_encoder().explain(1) is None
    assert make_encoder().explain(1).text().startswith("block 0")
