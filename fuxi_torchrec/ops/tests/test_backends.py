"""Which backend runs, and what becomes of a library that cannot be used."""

import shutil

import pytest
import torch

from fuxi_torchrec.encoders.tests.batches import make_batch, make_encoder
from fuxi_torchrec.ops import backends, native

needs_kernels = pytest.mark.skipif(
    bool(backends.found().missing), reason=f"no native kernels: {backends.found().missing}"
)


def test_torch_is_always_there_and_an_unknown_backend_is_refused_by_name():
    assert backends.available()[0] == "torch"
    with pytest.raises(ValueError, match="no backend 'cuda' here, only torch"), backends.use("cuda"):
        pass


@needs_kernels
def test_float32_on_the_cpu_is_native_and_everything_else_is_torch():
    assert backends.native_block(torch.zeros(1))
    assert not backends.native_block(torch.zeros(1, dtype=torch.float64))
    assert not backends.native_block(torch.zeros(1, device="meta"))
    with torch.autocast("cpu"):
        assert not backends.native_block(torch.zeros(1))
    with backends.use("torch"):
        assert not backends.native_block(torch.zeros(1))
        with backends.use("native"):
            assert backends.native_block(torch.zeros(1))
        assert not backends.native_block(torch.zeros(1))


@pytest.mark.parametrize("channel", ["use_retention", "use_positional", "use_temporal"])
def test_an_encoder_without_a_channel_gives_the_same_on_every_backend(channel):
    encoder, batch = make_encoder(torch.float32, **{channel: False}), make_batch([5, 40], dtype=torch.float32)
    with backends.use("torch"):
        wanted = encoder(*batch.inputs)
    torch.testing.assert_close(encoder(*batch.inputs), wanted, rtol=0, atol=0)


def test_a_missing_library_is_a_reason_in_a_line(tmp_path):
    reason = native.load(tmp_path / "kernels.so").missing
    assert reason.startswith("kernels.so was not built: ") and "\n" not in reason


def test_a_library_of_another_machine_or_torch_is_a_reason_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_loaded", None)
    (tmp_path / "kernels.so").write_bytes(b"\x7fELF of something else, " + native.digest().encode())
    reason = native.load(tmp_path / "kernels.so").missing
    assert reason.startswith("kernels.so cannot be loaded (") and "\n" not in reason


@needs_kernels
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch):
    shutil.copy(native.HERE / native.LIBRARY, tmp_path / "kernels.so")
    monkeypatch.setattr(native, "digest", lambda: "others")
    assert "was built from other sources" in native.load(tmp_path / "kernels.so").missing


@needs_kernels
def test_a_process_has_the_operators_of_one_library(tmp_path):
    shutil.copy(native.HERE / native.LIBRARY, tmp_path / "kernels.so")
    assert "cannot be loaded beside" in native.load(tmp_path / "kernels.so").missing
