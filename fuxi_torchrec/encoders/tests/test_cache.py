"""States with keys and values: they share their past, never change, and grow without being copied."""

import threading

import pytest
import torch

from fuxi_torchrec import encoders
from fuxi_torchrec.encoders.tests.test_peers import histories, small

KINDS = ["sasrec", "hstu", "fuxi_alpha", "fuxi_beta"]


def users(encoder, lengths, seed=0):
    x, offsets, times, request = histories(lengths, seed)
    return encoder.append(encoder.init_state(len(lengths)), x, offsets, times), request


def one_more(encoder, state, seed):
    """Every user's state with one more event, which the seed decides."""
    x, _, _, _ = histories([len(state)], seed)
    return encoder.append(state, x, torch.arange(len(state) + 1), state.last_time + 1 + seed)


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_share_their_past_go_on_differently(kind):
    encoder = small(kind)
    state, request = users(encoder, [40, 0, 3])
    before = encoder.query(state, request)
    forks = [one_more(encoder, one_more(encoder, state, seed), seed + 5) for seed in (1, 2)]
    for seed, fork in zip((1, 2), forks, strict=True):
        fresh, _ = users(encoder, [40, 0, 3])  # a past of its own
        alone = one_more(encoder, one_more(encoder, fresh, seed), seed + 5)
        assert torch.equal(encoder.query(fork, request), encoder.query(alone, request))
    assert torch.equal(encoder.query(state, request), before)
    assert state.count.tolist() == [40, 0, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_more_copies_no_history(kind):
    encoder = small(kind)
    state, _ = users(encoder, [100])
    places, copies = [], 0
    for step in range(300):
        places.append(state.histories[0].buffers)
        state = one_more(encoder, state, step)
        copies += state.histories[0].buffers is not places[-1]
    assert copies <= 8
    assert state.nbytes < 2 * (state.nbytes * 400 / state.histories[0].buffers.capacity)


@pytest.mark.parametrize("kind", KINDS)
def test_one_user_twice_in_a_batch_is_two_users(kind):
    encoder = small(kind)
    state, request = users(encoder, [30])
    twice = one_more(encoder, state.select([0, 0]), 3)
    x, _, _, _ = histories([2], 3)
    for user in (0, 1):
        alone = encoder.append(state, x[user : user + 1], torch.tensor([0, 1]), state.last_time + 4)
        torch.testing.assert_close(encoder.query(twice, request.repeat(2))[user], encoder.query(alone, request)[0])


def test_threads_that_append_to_one_state_do_not_meet():
    encoder = small("hstu")
    state, request = users(encoder, [50])
    found = {}

    def go_on(seed):
        own = state
        for step in range(10):
            own = one_more(encoder, own, 100 * seed + step)
        found[seed] = encoder.query(own, request)

    threads = [threading.Thread(target=go_on, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        own, _ = users(encoder, [50])
        for step in range(10):
            own = one_more(encoder, own, 100 * seed + step)
        assert torch.equal(found[seed], encoder.query(own, request))


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_selected_joined_and_moved(kind):
    encoder = small(kind)
    state, request = users(encoder, [5, 0, 17])
    whole = encoder.query(state, request)
    for chosen in ([2, 0, 2], torch.tensor([True, False, True]), []):
        index = torch.arange(3)[chosen] if torch.is_tensor(chosen) else torch.tensor(chosen).long()
        some = state.select(chosen)
        torch.testing.assert_close(encoder.query(some, request[index]), whole[index])
        assert some.last_time.tolist() == state.last_time[index].tolist()
    joined = state.concatenate([encoder.init_state(1), state.to("cpu"), state.select([2])])
    found = encoder.query(joined, torch.cat((request[:1], request, request[2:])))
    torch.testing.assert_close(found[1:], torch.cat((whole, whole[2:])))
    moved = one_more(encoder, state.to("cpu"), 1)
    torch.testing.assert_close(encoder.query(moved, request), encoder.query(one_more(encoder, state, 1), request))
    with pytest.raises(ValueError, match="users must be 0 to 2, not 3 to 3"):
        state.select([3])
    with pytest.raises(ValueError, match="states of different configurations"):
        state.concatenate([state, small(kind, num_heads=4).init_state(1)])


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_and_none_may_take_turns(kind):
    encoder = small(kind)
    with torch.inference_mode():
        state, request = users(encoder, [7])
    state = one_more(encoder, state, 1)
    with torch.inference_mode():
        found = encoder.query(one_more(encoder, state, 2), request)
    plain, _ = users(encoder, [7])
    assert torch.equal(found, encoder.query(one_more(encoder, one_more(encoder, plain, 1), 2), request))


@pytest.mark.parametrize("kind", KINDS)
def test_many_new_events_behind_a_long_history_in_blocks(kind, monkeypatch):
    monkeypatch.setattr("fuxi_torchrec.ops.cached._BLOCK_ELEMENTS", 700)
    encoder = small(kind)
    x, offsets, times, request = histories([90])
    state = encoder.append(encoder.init_state(1), x[:50], torch.tensor([0, 50]), times[:50])
    state = encoder.append(state, x[50:], torch.tensor([0, 40]), times[50:])
    torch.testing.assert_close(encoder.query(state, request), encoder(x, offsets, times, request)[-1:])


@pytest.mark.parametrize("kind", encoders.kinds())
def test_a_state_of_another_encoder_is_refused(kind):
    encoder = small(kind) if kind != "fuxi_linear" else encoders.make_encoder(encoders.config_class(kind)(dim=16))
    for other in ("sasrec", "retnet", "tim4rec"):
        if other != kind:
            state = small(other).init_state(1)
            with pytest.raises(ValueError, match="state is of another configuration"):
                encoder.query(state, torch.tensor([1]))
            with pytest.raises(ValueError, match="state is of another configuration"):
                encoder.append(state, torch.zeros(1, 16), torch.tensor([0, 1]), torch.tensor([1]))
