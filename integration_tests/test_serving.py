"""Serving for real: a process that answers HTTP, clients, crashes, a tool that tries to break it."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch

from fuxi_torchrec.export.bundle import Bundle
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.exports import FEATURES
from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export
from fuxi_torchrec.serving.tests.threads import mixed_operations
from integration_tests.services import Service

ROOT = Path(__file__).parents[1]


@pytest.fixture
def export(tmp_path):
    write_demo_export(tmp_path / "x", DemoExport(features=FEATURES))
    return tmp_path / "x"


def test_clients_in_parallel_a_graceful_end_and_a_restart(export):
    as_of = Bundle.open(export).manifest.as_of
    failures, told = [], [0] * 8

    def client(number, url):
        with httpx.Client(base_url=url, timeout=30) as http:
            for n in range(40):
                event = {"user_id": number, "item_id": 1001 + n, "timestamp": as_of + n}
                done = http.post("/append", json={"events": [event]})
                answer = http.post("/recommend", json={"user_id": number, "time": as_of + n})
                if done.status_code != 200 or done.json()["accepted"] != 1 or answer.status_code != 200:
                    failures.append((done.text, answer.text))
                told[number] += 1

    with Service(export) as service:
        threads = [threading.Thread(target=client, args=(number, service.url)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        before = [httpx.post(f"{service.url}/recommend", json={"user_id": n, "time": as_of}).json() for n in range(8)]
        assert 'fuxi_events_total{outcome="accepted"} 320.0' in httpx.get(f"{service.url}/metrics").text
        service.stop()
        assert "everything acknowledged is on disk" in "".join(service.said)
    with Service(export) as service:
        after = [httpx.post(f"{service.url}/recommend", json={"user_id": n, "time": as_of}).json() for n in range(8)]
        for one, other in zip(before, after, strict=True):
            assert one["events"] == other["events"]
            assert [item["item_id"] for item in one["items"]] == [item["item_id"] for item in other["items"]]


def test_a_killed_service_loses_no_acknowledged_event(export):
    as_of = Bundle.open(export).manifest.as_of
    acknowledged = 0
    with Service(export) as service:
        timer = threading.Timer(1.0, service.process.kill)
        timer.start()
        with httpx.Client(base_url=service.url) as http, contextlib.suppress(httpx.HTTPError):
            while True:
                event = {"user_id": 500, "item_id": 1001, "timestamp": as_of + acknowledged}
                assert http.post("/append", json={"events": [event]}).json()["accepted"] == 1
                acknowledged += 1
    assert acknowledged
    with Recommender.load(export) as recommender:
        (answer,) = recommender.recommend([500], as_of, 1)
        assert answer.events in (acknowledged, acknowledged + 1)


def test_a_token_and_one_service_at_a_time(export, tmp_path):
    (tmp_path / "token").write_text("sesame\n")
    with Service(export, "--token-file", str(tmp_path / "token")) as service:
        ask = {"user_id": 1, "time": Bundle.open(export).manifest.as_of}
        assert httpx.post(f"{service.url}/recommend", json=ask).status_code == 401
        shown = {"Authorization": "Bearer sesame"}
        assert httpx.post(f"{service.url}/recommend", json=ask, headers=shown).status_code == 200
        command = [sys.executable, "-m", "pipelines.serve", "--export", str(export), "--port", "0"]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1 and "another process is appending" in second.stderr


def test_schemathesis_finds_nothing(export, tmp_path):
    (tmp_path / "token").write_text("sesame\n")
    tool = Path(sys.executable).with_name("schemathesis")
    with Service(export, "--token-file", str(tmp_path / "token")) as service:
        command = [tool, "run", f"{service.url}/openapi.json", "--checks", "all", "--max-examples", "60"]
        command += ["--header", "Authorization: Bearer sesame", "--seed", "1", "--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr
        service.stop()
        assert "Traceback" not in "".join(service.said)


@pytest.mark.timeout(300)
def test_eight_threads_of_two_thousand_operations(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert mixed_operations(tmp_path, operations=2000, every=40) > 100
    finally:
        torch.set_num_threads(before)
