"""Training through TorchX as a person launches it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuxi_torchrec.data.prepare import prepare_synthetic
from fuxi_torchrec.data.synthetic import SyntheticConfig
from fuxi_torchrec.training.checkpoint.info import named

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(300)
def test_histories_of_16384_events_train_through_torchx(tmp_path):
    """configs/long_16k.yaml as it stands, two ranks, with a process that reads ahead on each."""
    long = SyntheticConfig(users=8, items=1000, median_length=16_500, length_sigma=0.0, max_length=16_500)
    prepare_synthetic(long, tmp_path / "data")
    command = ["torchx", "run", "dist.ddp", "-j", "1x2", "-m", "pipelines.train", "--"]
    command += ["--config", "configs/long_16k.yaml", "--run-dir", str(tmp_path / "run")]
    command += [f"data.path={tmp_path / 'data'}", "train.max_steps=2", "logging.every_steps=1", "data.num_workers=1"]
    command += ["validation.every_epochs=null", "batch.events=33000"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2]
    assert all(entry["loss"] > 0 for entry in entries)
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        *("config.yaml", "items.parquet", "plan.json", "summary.json", "checkpoints", "tensorboard"),
    }
    assert named(tmp_path / "run" / "checkpoints", "latest").name == "step-000000002"


def test_a_checkpoint_unshards_to_tensors_that_load_without_torchrec(workers, tmp_path):
    from integration_tests import runs

    settings = [f"data.path={runs.small_dataset(tmp_path / 'set')}", "train.max_steps=2"]
    workers(2).run(runs.run, tmp_path / "run", settings)
    plain = [sys.executable, "-m", "pipelines.checkpoint", "unshard", str(tmp_path / "run"), str(tmp_path / "plain")]
    done = subprocess.run(plain, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    read = f"""
import sys
from safetensors.torch import load_file
from fuxi_torchrec import FuXiLinearEncoder
from fuxi_torchrec.config import load_config
config = load_config({str(tmp_path / "plain" / "config.yaml")!r})
weights = load_file({str(tmp_path / "plain" / "model.safetensors")!r})
encoder = FuXiLinearEncoder(config.model)
encoder.load_state_dict({{k.removeprefix("encoder."): v for k, v in weights.items() if k.startswith("encoder.")}})
assert weights["item_table"].shape == (501, 32) and weights["item_table"].abs().sum() > 0
assert not any(name.partition(".")[0] in ("torchrec", "fbgemm_gpu") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", read], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    again = subprocess.run(plain, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 1 and "exists" in again.stderr
    (part,) = (tmp_path / "run" / "checkpoints" / "step-000000002").glob("__0_0.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    plain[-1] = str(tmp_path / "other")
    damaged = subprocess.run(plain, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert damaged.returncode == 1 and "another checksum than when it was written" in damaged.stderr
    assert not (tmp_path / "other").exists()


def test_a_run_is_explained_in_a_table_and_a_figure(workers, tmp_path):
    from integration_tests import runs

    settings = [f"data.path={runs.small_dataset(tmp_path / 'set')}", "train.max_steps=2"]
    settings += ["task.repeats.window=8", "task.repeats.periods=[86400]"]
    workers(2).run(runs.run, tmp_path / "run", settings)
    explain = [sys.executable, "-m", "pipelines.explain", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(explain, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("block 0", "retention", "half-life", "period", "by distinct items ago", "by phase of 1 d"):
        assert words in done.stdout
    for name in ("explain.png", "explain-repeats.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")
    missing = [*explain, "--checkpoint", "7"]
    done = subprocess.run(missing, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "there are step-000000002" in done.stderr
