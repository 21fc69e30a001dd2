"""What the comparison encoders refuse, and what they accept and ignore."""

import itertools

import pytest
import torch

from fuxi_torchrec import encoders
from fuxi_torchrec.encoders.tests.test_peers import HEADS, KINDS, TIMED, histories, small
from fuxi_torchrec.encoders.tests.test_peers_reference import load, params_of

TOLD = [kind for kind in KINDS if kind not in HEADS or kind == "ttt4rec"]  # heads, by shapes, or that there are none


@pytest.mark.parametrize(("kind", "other"), itertools.permutations(KINDS, 2))
def test_keys_of_another_kind_are_refused(kind, other):
    with pytest.raises(
        ValueError, match=r"params has (no '.*': not the parameters of this model|'.*', which this model)"
    ):
        encoders.from_official(kind, params_of(load(other)), **HEADS.get(kind, {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_too_many_is_refused(kind):
    params = params_of(load(kind))
    another = next(name for name in params if "layers.1." in name) + "extra"
    with pytest.raises(ValueError, match=r"params has '.*extra', which this model does not have"):
        encoders.from_official(kind, {**params, another: torch.zeros(1)}, **HEADS.get(kind, {}))


@pytest.mark.parametrize("kind", sorted(set(HEADS) - set(TOLD)))
def test_heads_that_nothing_tells_must_be_given_and_divide(kind):
    params = params_of(load(kind))
    with pytest.raises(ValueError, match="num_heads must be given: names and shapes of the parameters do not tell it"):
        encoders.from_official(kind, params)
    with pytest.raises(ValueError, match=r"not divisible by num_heads = 3|not a multiple of 3 heads"):
        encoders.from_official(kind, params, num_heads=3)


@pytest.mark.parametrize("kind", TOLD)
def test_heads_that_shapes_tell_need_not_be_given(kind):
    params = params_of(load(kind))
    encoders.from_official(kind, params)
    told = "2 heads" if kind == "ttt4rec" else "no heads"
    with pytest.raises(ValueError, match=f"num_heads is 3, but the parameters are those of a model with {told}"):
        encoders.from_official(kind, params, num_heads=3)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        *(
            (kind, {"num_heads": 3}, "dim = 128 is not divisible by num_heads = 3")
            for kind in ("sasrec", "retnet", "ttt4rec")
        ),
        *((kind, {"num_heads": 0}, "num_heads must be a positive integer") for kind in sorted(HEADS)),
        ("retnet", {"num_heads": 128}, "dim / num_heads = 1 must be even"),
        ("tim4rec", {"head_dim": 3}, "expand x dim = 256 is not divisible by head_dim = 3"),
        ("tim4rec", {"conv_activation": "relu"}, "conv_activation must be 'silu' or 'hardswish', not 'relu'"),
        ("fuxi_beta", {"time_function": "log"}, "time_function must be 'exp' or 'pow', not 'log'"),
        *((kind, {"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0") for kind in KINDS),
    ],
)
def test_sizes_that_cannot_be_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        encoders.config_class(kind)(**settings)


def test_tim4rec_says_what_to_do_beyond_its_slots():
    encoder = small("tim4rec", max_positions=10)
    encoder(*histories([9]))
    message = r"a user with 10 events, tim4rec of max_positions = 10 takes at most 9: .*latest events.*max_positions"
    x, offsets, times, request = histories([3, 10])
    with pytest.raises(ValueError, match=message):
        encoder(x, offsets, times, request)
    state = encoder.append(encoder.init_state(2), x, offsets, times)
    with pytest.raises(ValueError, match=message):
        encoder.query(state, request)


@pytest.mark.parametrize(("kind", "other"), zip(KINDS, [*KINDS[1:], KINDS[0]], strict=True))
def test_a_state_of_another_encoder_is_refused(kind, other):
    encoder, state = small(kind), small(other).init_state(2)
    x, offsets, times, request = histories([3, 1])
    message = "state is of another configuration: fingerprint"
    with pytest.raises(ValueError, match=message):
        encoder.append(state, x, offsets, times)
    with pytest.raises(ValueError, match=message):
        encoder.query(state, request)
    wider = small(kind, max_positions=170)  # of one kind, and not the same
    with pytest.raises(ValueError, match=message):
        wider.query(encoder.init_state(2), request)


@pytest.mark.parametrize("kind", KINDS)
def test_request_times_are_taken_also_where_time_is_ignored(kind):
    encoder = small(kind)
    x, offsets, times, _ = histories([5, 40])
    request = times[offsets[1:] - 1] + 1
    later, state = request + 10**6, encoder.append(encoder.init_state(2), x, offsets, times)
    for outputs in (lambda asked: encoder(x, offsets, times, asked), lambda asked: encoder.query(state, asked)):
        assert torch.equal(outputs(request), outputs(later)) == (kind not in TIMED)
    with pytest.raises(ValueError, match=r"request_timestamps must be of shape \(2,\)"):
        encoder.query(state, request[:1])
