"""What does not fit is refused with the argument's name and the numbers."""

import re

import pytest
import torch
from safetensors.torch import load_file

from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder
from fuxi_torchrec.encoders import checks
from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.encoders.tests.reference import GOLDENS

BASE = {"dim": 16, "num_layers": 1, "num_heads": 2, "max_positions": 8, "temporal_periods": (60, 3600)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim must be a positive integer, not 0"),
        ({"dim": 16.0}, "dim must be a positive integer, not 16.0"),
        ({"num_heads": 3}, "dim = 16 is not divisible by num_heads = 3"),
        ({"temporal_periods": (1, 2, 3)}, "dim = 16 is not divisible by 2 x 3"),
        ({"temporal_periods": ()}, "temporal_periods is empty"),
        ({"temporal_periods": (60, -1)}, "temporal_periods must be positive integers below 2^62, not -1"),
        ({"temporal_periods": (60, 1.5)}, "temporal_periods must be positive integers below 2^62, not 1.5"),
        (
            {"temporal_periods": (60, 2**63)},
            "temporal_periods must be positive integers below 2^62, not 9223372036854775808",
        ),
        ({"temporal_periods": 5}, "temporal_periods must be a sequence of integers, not 5"),
        (
            {"temporal_periods": (60, 0), "use_temporal": False},
            "temporal_periods must be positive integers below 2^62, not 0",
        ),
        ({"dropout": "a"}, "dropout must be at least 0 and below 1, not 'a'"),
        ({"kernel_dim": 5}, "kernel_dim = 5 must be even"),
        ({"ffn_dim": -1}, "ffn_dim must be a positive integer, not -1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ({"preset": "mine"}, "preset must be 'paper' or 'official', not 'mine'"),
        ({"temporal_half_life": float("inf")}, "temporal_half_life must be .01 to 1e6 periods, not inf"),
        ({"retention_chunk": 0}, "retention_chunk must be a positive integer, not 0"),
        ({"use_retention": False, "use_temporal": False, "use_positional": False}, "at least one channel is needed"),
    ],
)
def test_configurations(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FuXiLinearConfig(**{**BASE, **changes})


def change(name, value):
    return lambda inputs: {**inputs, name: value}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("x", torch.zeros(5, 3).double()), "x must be of shape (events, 16), not (5, 3)"),
        (change("x", torch.zeros(5).double()), "x must be of shape (events, 16), not (5,)"),
        (change("x", torch.zeros(5, 16, dtype=torch.int64)), "x must be of a floating dtype, not torch.int64"),
        (change("x", torch.zeros(5, 16)), "x is torch.float32, the encoder is torch.float64"),
        (change("x", torch.zeros(5, 16, device="meta").double()), "x is on meta, the encoder on cpu"),
        (change("offsets", torch.tensor([0, 3, 5], dtype=torch.int32)), "offsets must be int64, not torch.int32"),
        (change("offsets", torch.tensor([[0, 5]])), "offsets must be of shape (users + 1,), not (1, 2)"),
        (change("offsets", torch.zeros(0, dtype=torch.int64)), "offsets must be of shape (users + 1,), not (0,)"),
        (change("offsets", torch.tensor([1, 3, 5])), "offsets must start at 0, not 1"),
        (
            change("timestamps", torch.zeros(5, dtype=torch.int32)),
            "timestamps must be int64, not torch.int32: convert it with .long()",
        ),
        (
            change("timestamps", torch.tensor([1, 2, -(2**63), 4, 5])),
            "timestamps must be within 2^62 of 0, not -9223372036854775808 to 5: is a time missing?",
        ),
        (change("timestamps", torch.tensor([1, 2, 3, -(2**62), 5])), "timestamps must be within 2^62 of 0, not -46"),
        (
            change("timestamps", torch.tensor([0, 17 * 10**17, 0, -(10**18), 4 * 10**18])),
            "timestamps of user 1 go forth and back by more than 2^62 in all",
        ),
        (change("offsets", torch.tensor([0, 4, 3, 5])), "offsets[2] = 3 after offsets[1] = 4"),
        (change("offsets", torch.tensor([0, 3, 6])), "offsets must end at the number of rows, 5, not 6"),
        (change("timestamps", torch.zeros(5)), "timestamps must be int64, not torch.float32"),
        (change("timestamps", torch.zeros(4, dtype=torch.int64)), "timestamps must be of shape (5,), not (4,)"),
        (
            change("x", torch.full((5, 16), float("nan")).double()),
            "x holds non-finite values in 5 of 5 rows, the first is row 0",
        ),
    ],
)
@pytest.mark.parametrize("call", ["forward", "append"])
def test_inputs(edit, message, call):
    encoder, batch = make_encoder(), make_batch([3, 2])
    inputs = edit({"x": batch.x, "offsets": batch.offsets, "timestamps": batch.timestamps})
    calls = {
        "forward": lambda: encoder(**inputs, request_timestamps=batch.request),
        "append": lambda: encoder.append(encoder.init_state(2), **inputs),
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        calls[call]()


def test_values_are_not_looked_at_when_validation_is_off():
    encoder, batch = make_encoder(), make_batch([3, 2])
    batch.x[1, 1] = float("inf")
    with pytest.raises(ValueError, match="x holds non-finite values in 1 of 5 rows, the first is row 1"):
        encoder(*batch.inputs)
    assert encoder(*batch.inputs, validate=False).shape == (5, 16)


@pytest.mark.parametrize(
    ("request_timestamps", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "request_timestamps must be of shape (2,), not (3,)"),
        (torch.zeros(2), "request_timestamps must be int64, not torch.float32"),
        (
            torch.tensor([5, -(2**63)]),
            "request_timestamps must be within 2^62 of 0, not -9223372036854775808 to 5: is a time missing?",
        ),
        (
            torch.tensor([2**63 - 1, 7]),
            "request_timestamps must be within 2^62 of 0, not 7 to 9223372036854775807: is a time missing?",
        ),
        (torch.tensor([2**62, 7]), "request_timestamps must be within 2^62 of 0, not 7 to 4611686018427387904"),
    ],
)
def test_request_times(request_timestamps, message):
    encoder, batch = make_encoder(), make_batch([3, 2])
    with pytest.raises(ValueError, match=re.escape(message)):
        encoder(batch.x, batch.offsets, batch.timestamps, request_timestamps)
    with pytest.raises(ValueError, match=re.escape(message)):
        encoder.query(encoder.init_state(2), request_timestamps)


def test_a_request_so_late_that_the_clock_would_wrap():
    encoder, batch = make_encoder(), make_batch([0, 3])
    times, late = torch.tensor([0, 2**61, -(2**61)]), torch.tensor([0, 2**62 - 1])
    with pytest.raises(ValueError, match=re.escape("timestamps of user 1 go forth and back by more than 2^62 in all")):
        encoder(batch.x, batch.offsets, times, late)
    assert torch.isfinite(encoder(batch.x, batch.offsets, times, late * 0)).all()


def test_request_times_are_not_looked_at_when_validation_is_off_or_a_program_is_exported():
    encoder, batch = make_encoder(), make_batch([3, 2])
    missing = torch.full((2,), -(2**63))
    assert encoder(*batch.inputs[:3], missing, validate=False).shape == (5, 16)
    state = encoder.append(encoder.init_state(2), *batch.inputs[:3])
    assert encoder.query(state, missing, validate=False).shape == (2, 16)

    class Query(torch.nn.Module):
        def forward(self, times):
            return encoder.query(state, times)

    program = torch.export.export(Query(), (batch.request,), strict=False)
    torch.testing.assert_close(program.module()(batch.request), encoder.query(state, batch.request))


def test_devices_without_float64():
    with pytest.raises(ValueError, match="the encoder is on mps, which has no float64"):
        checks.precision(torch.device("mps"))


def test_forms_users_and_modes():
    encoder, batch = make_encoder(dropout=0.1), make_batch([3, 2])
    with pytest.raises(ValueError, match="form must be 'chunkwise', 'parallel' or 'recurrent', not 'fast'"):
        encoder(*batch.inputs, form="fast")
    with pytest.raises(ValueError, match="offsets describes 2 users, the state has 3"):
        encoder.append(encoder.init_state(3), batch.x, batch.offsets, batch.timestamps)
    encoder.train()
    with pytest.raises(ValueError, match=r"append and query are for evaluation: call encoder.eval\(\) first"):
        encoder.query(encoder.init_state(2), batch.request)


def test_unsorted_times_give_numbers():
    encoder = make_encoder()
    batch = make_batch([12, 5], gaps=[-90_000, 50, -3, 0])
    for form in ("chunkwise", "parallel", "recurrent"):
        assert torch.isfinite(encoder(*batch.inputs, form=form)).all()
    state = encoder.append(encoder.init_state(2), batch.x, batch.offsets, batch.timestamps)
    assert torch.isfinite(encoder.query(state, batch.request - 10**9)).all()


def released():
    golden = load_file(GOLDENS / "encoder_c32_f64.safetensors")
    return {k.removeprefix("param."): v for k, v in golden.items() if k.startswith("param.")}


def test_released_parameters_that_do_not_fit():
    periods = tuple(16 * 8**k for k in range(8))
    with pytest.raises(
        ValueError, match=r"temporal_periods names 4 scales, but .*_gamma has 8 values where 4 are wanted"
    ):
        FuXiLinearEncoder.from_official(released(), periods[:4])
    params = released()
    del params["_fuxi._attention_layers.1._mffn.lin2.weight"]
    with pytest.raises(ValueError, match=re.escape("params has no '_fuxi._attention_layers.1._mffn.lin2.weight'")):
        FuXiLinearEncoder.from_official(params, periods)
    params = released()
    params["_fuxi._attention_layers.1._mffn.lin2.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=re.escape("lin2.weight has shape (3, 3) where (32, 32) is wanted")):
        FuXiLinearEncoder.from_official(params, periods)
    with pytest.raises(ValueError, match="not the parameters of the released model"):
        FuXiLinearEncoder.from_official({}, periods)


def test_optional_parts_of_released_parameters_are_inferred():
    periods = tuple(16 * 8**k for k in range(8))
    encoder = FuXiLinearEncoder.from_official(released(), periods)
    config = encoder.config
    assert (config.dim, config.num_layers, config.num_heads, config.kernel_dim, config.max_positions) == (
        32,
        2,
        4,
        16,
        141,
    )
    assert (config.temporal_mix, config.learn_temporal_decay) == (True, True)
    bare = {
        k: v
        for k, v in released().items()
        if not k.endswith(("_channel_t.alpha", "_channel_t.beta", "_channel_t._gamma"))
    }
    encoder = FuXiLinearEncoder.from_official(bare, periods)
    assert (encoder.config.temporal_mix, encoder.config.learn_temporal_decay) == (False, False)
    assert torch.equal(encoder.layers[0].temporal.decay, torch.zeros(8))
    assert "blocks.0.temporal.decay" not in dict(encoder.named_parameters())
