from pathlib import Path

import pytest
import torch

from fuxi_torchrec import FuXiLinearConfig, FuXiLinearEncoder
from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.export.states import HEADER_BYTES, StateFile


def some_records(count, size=40, seed=0):
    return torch.randint(256, (count, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.fixture
def states(tmp_path):
    with StateFile.create(tmp_path / "part-00000.bin", "model-a", 40) as file:
        file.append(some_records(5))
        yield file


def test_records_come_back_by_row_in_the_order_wanted(states, tmp_path):
    assert states.append(some_records(3, seed=1)).tolist() == [5, 6, 7]
    again = StateFile.open(tmp_path / "part-00000.bin", "model-a", 40)
    expected = torch.cat([some_records(5), some_records(3, seed=1)])
    found, valid = again.get([7, 6, 1, 0, 0])
    assert torch.equal(found, expected[[7, 6, 1, 0, 0]])
    assert valid.all()
    assert len(again) == 8
    assert again.path.stat().st_size == HEADER_BYTES + 8 * again.slot_bytes


def test_an_encoders_states_survive(tmp_path):
    config = FuXiLinearConfig(dim=8, num_layers=2, num_heads=2, max_positions=16, temporal_periods=(60, 3600))
    encoder = FuXiLinearEncoder(config).eval()
    state = encoder.append(
        encoder.init_state(2), torch.randn(5, 8), torch.tensor([0, 3, 5]), torch.tensor([1, 2, 3, 5, 9])
    )
    records = state.to_bytes()
    with StateFile.create(tmp_path / "s.bin", "m", records.shape[1]) as file:
        file.append(records)
        again = type(state).from_bytes(file.get([1, 0])[0], encoder.init_state(0))
    now = torch.tensor([20, 20])
    assert torch.equal(encoder.query(again, now), encoder.query(state, now).flip(0))


def test_a_torn_record_is_told_apart_from_whole_ones(states, tmp_path):
    with (tmp_path / "part-00000.bin").open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * states.slot_bytes + 17)
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))
    assert states.get(range(5))[1].tolist() == [True, True, False, True, True]


def test_a_stopped_append_leaves_no_half_record(states, tmp_path):
    with (tmp_path / "part-00000.bin").open("ab") as file:
        file.write(b"half a record")
    again = StateFile.open(tmp_path / "part-00000.bin")
    assert len(again) == 5
    assert again.append(some_records(1, seed=3)).tolist() == [5]
    assert again.get(range(6))[1].all()


def test_a_full_disk_is_an_error_that_names_the_file(states, monkeypatch):
    really = Path.open
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda self, mode: really(Path("/dev/full"), mode))
        with pytest.raises(OSError, match=r"No space left on device: .*part-00000.bin"):
            states.append(some_records(3, seed=1))
    assert len(states) == 5
    assert states.append(some_records(2, seed=2)).tolist() == [5, 6]
    assert states.get(range(7))[1].all()


def test_an_empty_file_and_empty_batches_are_legal(tmp_path):
    with StateFile.create(tmp_path / "s.bin", "m", 40) as file:
        assert len(file) == 0
        assert file.append(some_records(0)).tolist() == []
        found, valid = file.get([])
        assert found.shape == (0, 40) and valid.shape == (0,)
    assert len(StateFile.open(tmp_path / "s.bin")) == 0


def test_what_does_not_fit_is_refused(states, tmp_path):
    path = tmp_path / "part-00000.bin"
    with pytest.raises(ExportError, match="exists"):
        StateFile.create(path, "m", 40)
    with pytest.raises(ExportError, match="states of model model-a, not of model-b"):
        StateFile.open(path, "model-b")
    with pytest.raises(ExportError, match="states of 40 bytes, this encoder's have 41"):
        StateFile.open(path, "model-a", 41)
    with pytest.raises(ExportError, match="cannot be read: No such file"):
        StateFile.open(tmp_path / "other")
    (tmp_path / "short").write_bytes(b"FUXISTAT")
    with pytest.raises(ExportError, match="not a file of states"):
        StateFile.open(tmp_path / "short")
    with pytest.raises(ValueError, match="rows must be 0 to 4, not 0 to 5"):
        states.get([0, 5])
    with pytest.raises(ValueError, match=r"shape \(2, 40\), not torch.uint8 of \(2, 39\)"):
        states.append(some_records(2, 39))
