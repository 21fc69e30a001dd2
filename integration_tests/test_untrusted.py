"""A checkpoint from elsewhere: whatever was put into its files, no command runs it."""

import contextlib
import json
import pickle
import resource
import shutil
import zlib
from pathlib import Path

import pytest

import fuxi_torchrec
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.export.bundle import ExportError
from fuxi_torchrec.schema import CHECKSUM, sealed
from fuxi_torchrec.training.checkpoint.info import CheckpointError, read_info
from fuxi_torchrec.training.checkpoint.reader import CheckpointReader
from pipelines import checkpoint as checkpoints
from pipelines import explain

pytestmark = pytest.mark.timeout(300)
SETTINGS = [
    *("model.dim=16", "model.num_layers=1", "model.max_positions=64", "model.temporal_periods=[3600, 86400]"),
    *("batch.max_length=64", "batch.events=512", "train.max_steps=2", "logging.tensorboard=false"),
    "distributed.device=cpu",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("untrusted")
    fuxi_torchrec.prepare(SyntheticConfig(users=40, median_length=20, items=400), place / "data")
    config = fuxi_torchrec.load_config(None, [f"data.path={place}/data", *SETTINGS])
    fuxi_torchrec.train(config, place / "run")
    return place / "run", config


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"


def replace_file(run, name, data):
    """Put other contents into a checkpoint, its checksums those of the new ones."""
    (path,) = (run / "checkpoints").glob("step-*")
    (path / name).write_bytes(data)
    plain = json.loads((path / "checkpoint.json").read_text())
    del plain[CHECKSUM]
    plain["files"][name] = [len(data), zlib.crc32(data)]
    (path / "checkpoint.json").write_text(sealed(plain))
    return path


class Touch:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def resumed(run, config, place):
    longer = fuxi_torchrec.load_config(run / "config.yaml", ["train.max_steps=3"])
    fuxi_torchrec.train(longer, run)


COMMANDS = {
    "unshard": lambda run, config, place: checkpoints.main(["unshard", str(run), str(place / "out")]),
    "explain": lambda run, config, place: explain.main(["--run-dir", str(run)]),
    "evaluate": lambda run, config, place: fuxi_torchrec.evaluate(run),
    "export": lambda run, config, place: fuxi_torchrec.export(run, place / "out"),
    "init-from": lambda run, config, place: fuxi_torchrec.train(config, place / "out", init_from=run),
    "resume": resumed,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_prepared_pickle_is_refused_and_not_run(trained, run, tmp_path, capsys, command):
    replace_file(run, ".metadata", pickle.dumps(Touch(tmp_path / "touched")))
    if command in ("unshard", "explain"):
        assert COMMANDS[command](run, trained[1], tmp_path) == 1
        assert "it asks for" in capsys.readouterr().err
    else:
        with pytest.raises(CheckpointError, match="it asks for"):
            COMMANDS[command](run, trained[1], tmp_path)
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "out" / "checkpoints").exists() and not (tmp_path / "out" / "manifest.json").exists()


def metadata(run):
    (path,) = (run / "checkpoints").glob("step-*")
    return pickle.loads((path / ".metadata").read_bytes())


def test_entries_that_are_pickles_of_their_own_are_refused(run):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    about = metadata(run)
    about.state_dict_metadata["extra"] = BytesStorageMetadata()
    path = replace_file(run, ".metadata", pickle.dumps(about))
    with pytest.raises(CheckpointError, match="BytesStorageMetadata, which no checkpoint needs"):
        CheckpointReader(path)


def test_files_outside_of_the_checkpoint_are_not_read(run):
    about = metadata(run)
    next(iter(about.storage_data.values())).relative_path = "../../config.yaml"
    path = replace_file(run, ".metadata", pickle.dumps(about))
    with pytest.raises(CheckpointError, match=r"'../../config.yaml', which is no file of the checkpoint"):
        CheckpointReader(path)
    plain = json.loads((path / "checkpoint.json").read_text())
    del plain[CHECKSUM]
    plain["files"]["../../config.yaml"] = [1, 1]
    (path / "checkpoint.json").write_text(sealed(plain))
    with pytest.raises(CheckpointError, match="is no file of a checkpoint"):
        read_info(path)


@pytest.mark.parametrize("name", ["latest", "checkpoint.json"])
def test_a_flipped_bit_in_a_description_is_refused(run, name, capsys):
    (path,) = (run / "checkpoints").glob(name if name == "latest" else f"step-*/{name}")
    original = path.read_bytes()
    for at in range(2, len(original) - 3, max(1, len(original) // 40)):
        damaged = bytearray(original)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        if damaged.translate(None, b" \n!\x0b") == original.translate(None, b" \n"):
            continue  # white space
        assert checkpoints.main(["list", str(run)]) == 1
        assert name in capsys.readouterr().err
    path.write_bytes(original)
    assert checkpoints.main(["list", str(run)]) == 0


@contextlib.contextmanager
def files_of_at_most(size):
    """As on a disk that is full from there on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_on_a_full_disk_leave_nothing_behind(run, tmp_path, capsys):
    with files_of_at_most(2**14):
        assert checkpoints.main(["unshard", str(run), str(tmp_path / "out")]) == 1
    assert str(tmp_path / "out") in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert checkpoints.main(["unshard", str(run), str(tmp_path / "out")]) == 0
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_an_export_on_a_full_disk_is_refused_whichever_file_does_not_fit(run, tmp_path):
    fuxi_torchrec.export(run, tmp_path / "whole")
    for name in ("items/part-00000.parquet", "encoder.safetensors", "programs/query.pt2"):
        with (
            files_of_at_most((tmp_path / "whole" / name).stat().st_size - 1),
            pytest.raises(ExportError, match=r"(out: cannot|index cannot) be written"),
        ):
            fuxi_torchrec.export(run, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"], "nothing is left"
