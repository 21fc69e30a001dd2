"""The demo: nothing that it started is left when it was stopped, at any moment."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from fuxi_torchrec.processes import strike
from integration_tests.launches import all_end, marked, until

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("moment", "number", "users"),
    [
        ("logs/3-train.log", signal.SIGKILL, 800),  # TorchX starts
        ("run/metrics.jsonl", signal.SIGKILL, 800),  # training, which would go on for minutes
        ("run/metrics.jsonl", signal.SIGTERM, 800),
        ("run/metrics.jsonl", signal.SIGINT, 800),
        ("logs/5-evaluate.log", signal.SIGKILL, 60),
    ],
)
def test_nothing_outlives_a_demo_that_was_stopped(tmp_path, moment, number, users):
    mark, log = uuid.uuid4().hex, tmp_path / "said"
    command = [sys.executable, "-m", "pipelines.demo", "--users", str(users), "--directory", str(tmp_path / "demo")]
    with log.open("w") as file:
        environment = {**os.environ, "MARK": mark}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in the background
        )
    try:
        until((tmp_path / "demo" / moment).exists, process, log, 300)
        process.send_signal(number)
        process.wait(60)
        all_end(mark)
    finally:
        process.kill()
        strike(marked(mark))
    assert "[3/8] train on two ranks\n  $ torchx run dist.ddp -j 1x2 -m pipelines.train -- " in log.read_text()
