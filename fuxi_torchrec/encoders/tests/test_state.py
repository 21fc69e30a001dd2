import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuxi_torchrec import EncoderState
from fuxi_torchrec.encoders.fuxi_linear import encoder as encoder_module
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder

PRESETS = ["paper", "official"]
PINNED = 3166476771464261275  # of make_encoder's configuration


def append_in_cuts(encoder, batch, cuts):
    """Append a batch in several calls; ``cuts`` gives, per call, the share of what is left that each user appends."""
    users = len(batch.offsets) - 1
    done = [0] * users
    state = encoder.init_state(users)
    lengths = batch.offsets.diff().tolist()
    for number, cut in enumerate([*cuts, None]):
        parts, sizes = [], []
        for u in range(users):
            left = lengths[u] - done[u]
            size = left if cut is None else min(left, (cut * (u + 1) + number) % 7)
            a = int(batch.offsets[u]) + done[u]
            parts.append(torch.arange(a, a + size))
            sizes.append(size)
            done[u] += size
        index = torch.cat(parts)
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        state = encoder.append(state, batch.x[index], offsets, batch.timestamps[index])
    return state


def last_rows(encoder, batch):
    """The forward pass's last row of each user, zero for users without events."""
    y = encoder(*batch.inputs).detach()
    out = y.new_zeros(len(batch.offsets) - 1, y.shape[1])
    has = batch.offsets.diff() > 0
    out[has] = y[batch.offsets[1:][has] - 1]
    return out


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4),  # past max_positions = 11
    cuts=st.lists(st.integers(0, 6), max_size=6),
    seed=st.integers(0, 1000),
    tile=st.integers(3, 40),
)
def test_append_then_query_equals_forward_however_events_are_cut(preset, lengths, cuts, seed, tile):
    encoder, batch = make_encoder(preset=preset, seed=seed), make_batch(lengths, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(encoder_module.TILE_ELEMENTS, "cpu", 16 * tile)
        state = append_in_cuts(encoder, batch, cuts)
    assert state.count.tolist() == lengths
    found = encoder.query(state, batch.request)
    torch.testing.assert_close(found, last_rows(encoder, batch), rtol=0, atol=1e-10)


@pytest.mark.parametrize("cuts", [[], [1, 1, 1]])
def test_append_never_computes_the_last_blocks_output(cuts, monkeypatch):
    encoder, batch = make_encoder(), make_batch([9, 4])
    monkeypatch.setattr(encoder.layers[-1], "merge", lambda *_: pytest.fail("the output is thrown away"))
    assert append_in_cuts(encoder, batch, cuts).count.tolist() == [9, 4]


def test_the_state_is_not_changed_by_query_or_append():
    encoder, batch = make_encoder(), make_batch([5, 0, 9])
    state = append_in_cuts(encoder, batch, [2])
    before = state.to_bytes()
    first = encoder.query(state, batch.request)
    encoder.append(state, batch.x[:4], torch.tensor([0, 1, 2, 4]), batch.timestamps[:4] + 10**10)
    encoder.append(state, batch.x[:2], torch.tensor([0, 0, 1, 2]), batch.timestamps[:2] + 10**10)
    assert torch.equal(state.to_bytes(), before)
    assert torch.equal(encoder.query(state, batch.request), first)


def test_an_append_of_nothing_is_the_same_state():
    encoder, batch = make_encoder(), make_batch([5, 0])
    state = append_in_cuts(encoder, batch, [])
    same = encoder.append(state, batch.x[:0], torch.tensor([0, 0, 0]), batch.timestamps[:0])
    assert torch.equal(same.to_bytes(), state.to_bytes())


def test_users_without_events_have_a_zero_vector():
    encoder = make_encoder()
    assert torch.equal(encoder.query(encoder.init_state(3), torch.tensor([1, 2, 3])), torch.zeros(3, 16).double())
    assert encoder.query(encoder.init_state(0), torch.zeros(0, dtype=torch.int64)).shape == (0, 16)


def test_select_put_and_concatenate_move_users():
    encoder, batch = make_encoder(), make_batch([5, 0, 9, 2])
    state = append_in_cuts(encoder, batch, [1])
    y = encoder.query(state, batch.request)
    picked = state.select([2, 0])
    torch.testing.assert_close(encoder.query(picked, batch.request[[2, 0]]), y[[2, 0]])
    again = EncoderState.concatenate([state.select([3]), state.select(torch.tensor([1, 2])), state.select([0])])
    torch.testing.assert_close(encoder.query(again, batch.request[[3, 1, 2, 0]]), y[[3, 1, 2, 0]])
    swapped = state.put([0, 2], state.select([2, 0]))
    torch.testing.assert_close(
        encoder.query(swapped, batch.request), encoder.query(state.select([2, 1, 0, 3]), batch.request)
    )
    assert len(state.to("cpu")) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes", [{}, {"use_temporal": False}, {"use_retention": False, "use_positional": False}], ids=str
)
def test_states_survive_bytes(dtype, changes):
    encoder, batch = make_encoder(dtype, **changes), make_batch([5, 0, 9], dtype=dtype)
    state = append_in_cuts(encoder, batch, [3])
    records = state.to_bytes()
    assert records.dtype == torch.uint8
    assert records.shape[0] == 3
    back = EncoderState.from_bytes(records, encoder.init_state(0))
    assert torch.equal(back.to_bytes(), records)
    assert torch.equal(encoder.query(back, batch.request), encoder.query(state, batch.request))
    some = EncoderState.from_bytes(records[[2]], encoder.init_state(1))
    assert torch.equal(encoder.query(some, batch.request[[2]]), encoder.query(state.select([2]), batch.request[[2]]))


def test_states_come_back_on_the_encoders_device():
    encoder, batch = make_encoder(), make_batch([5, 0, 9])
    state = append_in_cuts(encoder, batch, [3])
    like = encoder.to("meta").init_state(0)
    assert {x.device.type for x in EncoderState.from_bytes(state.to_bytes(), like)._tensors()} == {"meta"}


def test_the_record_has_the_size_that_was_promised():
    """d = 128, four blocks: 136 KiB, whatever the history's length; 4 of them since the temporal part is float64."""
    encoder = make_encoder(
        torch.float32,
        dim=128,
        num_layers=4,
        num_heads=4,
        kernel_dim=32,
        temporal_periods=tuple(2**k for k in range(4, 12)),
    )
    record = encoder.init_state(1).to_bytes()
    memory = 4 * (4 * (4 * 32 * 32) + 4 * (32 * 128) + 8 * (2 * 128))
    assert record.shape == (1, 8 * 4 + 4 * 128 + memory)
    assert memory == 136 * 1024


def test_states_of_other_configurations_and_versions_are_refused():
    encoder, other = make_encoder(), make_encoder(temporal_periods=(60, 3600))
    state = encoder.init_state(2)
    now = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="state is of another configuration: fingerprint"):
        other.query(state, now)
    with pytest.raises(ValueError, match="state of another configuration: fingerprint"):
        EncoderState.from_bytes(state.to_bytes(), other.init_state(0))
    with pytest.raises(ValueError, match="states of different configurations"):
        EncoderState.concatenate([state, other.init_state(1)])
    records = state.to_bytes()
    records[1, 0] = 9
    with pytest.raises(ValueError, match="state of version 9, this software reads version 1: encode the history again"):
        EncoderState.from_bytes(records, encoder.init_state(0))
    with pytest.raises(ValueError, match=r"records must be uint8 of shape \(users, \d+\)"):
        EncoderState.from_bytes(records[:, :-1], encoder.init_state(0))
    with pytest.raises(ValueError, match=r"states of different kinds: torch.float64 on cpu and torch.float32 on cpu"):
        EncoderState.concatenate([state, make_encoder(torch.float32).init_state(1)])
    with pytest.raises(ValueError, match="batch_size must not be negative, but is -1"):
        encoder.init_state(-1)
    with pytest.raises(ValueError, match="states is empty"):
        EncoderState.concatenate([])
    with pytest.raises(ValueError, match=r"state is torch.float64 on cpu, the encoder torch.float32"):
        make_encoder(torch.float32).query(state, now)


def test_users_are_named_by_index_or_mask():
    encoder, batch = make_encoder(), make_batch([1, 2, 3])
    state = append_in_cuts(encoder, batch, [])
    assert state.select(state.count > 1).count.tolist() == [2, 3]
    assert state.select([]).count.tolist() == []
    with pytest.raises(ValueError, match=r"users must be 0 to 2, not -1 to 3"):
        state.select([3, -1])
    with pytest.raises(ValueError, match=r"users must be indices or a mask of 3 users, not torch.float32"):
        state.select(torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"users must be indices or a mask of 3 users, not torch.bool"):
        state.select(torch.tensor([True]))
    with pytest.raises(ValueError, match="users names 1 users, other has 3"):
        state.put([0], state)


def test_states_own_their_tensors():
    encoder, batch = make_encoder(), make_batch([1, 1])
    state = encoder.append(encoder.init_state(2), batch.x, batch.offsets, batch.timestamps)
    before = state.pending_time.clone()
    batch.timestamps += 1000
    assert torch.equal(state.pending_time, before)
    empty = encoder.init_state(2)
    assert empty.count.data_ptr() != empty.pending_time.data_ptr()


@pytest.mark.parametrize("users", [1, 2])
def test_records_are_copied_wherever_they_lie(users):
    encoder, batch = make_encoder(), make_batch([3] * users)
    state = encoder.append(encoder.init_state(users), batch.x, batch.offsets, batch.timestamps)
    records = state.to_bytes()
    buffer = torch.zeros(users, 3 + records.shape[1], dtype=torch.uint8)
    buffer[:, 3:] = records  # a key before the value, so that nothing is aligned
    again = EncoderState.from_bytes(buffer[:, 3:], encoder.init_state(0))
    buffer.zero_()
    assert torch.equal(encoder.query(again, batch.request), encoder.query(state, batch.request))


def test_a_query_of_one_user_is_as_exact_as_one_of_many():
    """One row takes another path through the matrix library than many."""
    shape = {"dim": 256, "num_layers": 4, "num_heads": 4, "max_positions": 512, "kernel_dim": 32, "ffn_dim": 256}
    encoder = make_encoder(torch.float32, **shape, temporal_periods=(3_600, 86_400, 604_800, 31_536_000))
    encoder.reset_parameters()
    batch = make_batch([300], dim=256, dtype=torch.float32)
    state = append_in_cuts(encoder, batch, [3, 5, 1])
    torch.testing.assert_close(encoder.query(state, batch.request), last_rows(encoder, batch), rtol=0, atol=1e-5)


def test_speed_settings_do_not_change_the_fingerprint():
    config = make_encoder().config
    faster = dataclasses.replace(
        config, retention_chunk=128, temporal_chunk=32, dropout=0.5, activation_checkpointing=True
    )
    assert faster.fingerprint() == config.fingerprint()
    assert config.fingerprint() == PINNED, "stored states and checkpoints of this configuration are refused"
    assert dataclasses.replace(config, preset="official").fingerprint() != config.fingerprint()
