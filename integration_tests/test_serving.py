"""Serving for real: a process that answers HTTP, clients, crashes, a tool that tries to break it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize("open_files", [None, 1024])
def test_two_thousand_slow_connections_hurt_nobody_and_are_dropped(export, open_files):
    """With few files, there are fewer connections: accepting never fails."""
    as_of = Bundle.open(export).manifest.as_of
    started, stop, counts, failures = threading.Barrier(3), threading.Event(), [0, 0], []

    def clients(number, url):
        """One keeps its connection, one takes a new one each time."""
        with httpx.Client(base_url=url, timeout=60) as kept:
            while not stop.is_set():
                http = httpx if number else kept
                base = url if number else ""
                for answer in (
                    http.get(f"{base}/health", timeout=60),
                    http.post(f"{base}/recommend", json={"user_id": 1, "time": as_of}, timeout=60),
                ):
                    if answer.status_code != 200:
                        failures.append(answer.text)
                counts[number] += 1
                if counts[number] == 1:
                    started.wait(60)

    with Service(export, "--header-seconds", "5", open_files=open_files) as service, contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(clients, number, service.url) for number in range(2)]
            try:
                started.wait(60)
                slow = []
                for _ in range(2000):
                    slow.append(stack.enter_context(socket.create_connection(service.address, 60)))
                    slow[-1].sendall(b"GET /health HTTP/1.1\r\nHost")
                before, most = list(counts), service.open_files
                while min(now - then for now, then in zip(counts, before, strict=True)) < 10:
                    time.sleep(0.01)
                for connection in slow:
                    with contextlib.suppress(ConnectionResetError):
                        while connection.recv(65536):
                            pass
            finally:
                stop.set()
            for each in done:
                each.result(120)
        assert not failures
        assert most <= (open_files or 2048)
        dropped = re.findall(
            r'fuxi_dropped_connections_total{reason="(\w+)"} (\d+)', httpx.get(f"{service.url}/metrics").text
        )
        assert sum(int(count) for why, count in dropped if why in ("room", "header")) >= 2000
        service.stop()
        said = "".join(service.said)
        assert "Traceback" not in said and "out of system resource" not in said
        assert ("at most 1024 files may be open" in said) == bool(open_files)


def test_requests_in_flight_finish_at_a_signal_and_the_others_are_bounded(export):
    as_of = Bundle.open(export).manifest.as_of
    body = json.dumps({"events": [{"user_id": 7, "item_id": 1001, "timestamp": as_of}]})
    head = f"POST /append HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for how in (signal.SIGTERM, signal.SIGINT):
        with Service(export, "--stop-seconds", "6") as service, contextlib.ExitStack() as stack:
            half, whole, never = (stack.enter_context(socket.create_connection(service.address, 30)) for _ in range(3))
            half.sendall(b"GET /health HTTP/1.1\r\nHost")
            for connection in (whole, never):
                connection.sendall((head + body[:-5]).encode())
            assert httpx.get(f"{service.url}/health").status_code == 200  # the others have been read by now
            children = [path.read_text() for path in Path(f"/proc/{service.process.pid}/task").glob("*/children")]
            assert not any(children), "nothing to leave behind"
            service.process.send_signal(how)
            assert half.recv(65536) == b"", "a request that has not begun is not waited for"
            whole.sendall(body[-5:].encode())
            answer = whole.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            assert service.process.wait(30) == 0
            service.reader.join(10)
            assert "everything acknowledged is on disk" in "".join(service.said)
            assert "Traceback" not in "".join(service.said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "99999"], "--port must be at most 65535, not 99999"),
        (["--port", "-1"], "--port must be at least 0, not -1"),
        (["--port", "TAKEN"], "Address already in use"),
        (["--host", "no.such.host.invalid"], "cannot listen on --host no.such.host.invalid --port 8000: "),
        (["--host", "192.0.2.1"], "Cannot assign requested address"),
        (["--token-file", "missing"], "--token-file missing: No such file or directory"),
        (["--token-file", "."], "--token-file .: Is a directory"),
        (["--token-file", "two lines"], "a token is one line of visible ASCII characters"),
        (["--token-file", "nothing"], "--token-file nothing holds no token"),
        (["--token-env", "NO_SUCH_TOKEN"], "--token-env NO_SUCH_TOKEN holds no token"),
        (["--header-seconds", "0"], "--header-seconds must be at least 0.1, not 0.0"),
        (["--export", "missing", "--port", "0"], "missing: no export here"),
    ],
)
def test_a_start_that_cannot_work_says_why_in_one_line(export, tmp_path, options, said):
    (tmp_path / "two lines").write_text("one\ntwo\n")
    (tmp_path / "nothing").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = [str(taken.getsockname()[1]) if option == "TAKEN" else option for option in options]
        command = [sys.executable, "-m", "pipelines.serve", "--export", str(export), *options]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert said in done.stderr and done.stderr.startswith("serve: ") and done.stderr.count("\n") == 1


def test_help_names_every_default_and_imports_nothing_heavy():
    code = "import sys; from pipelines import serve; serve.parse(['--export', 'x']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "pyarrow", "faiss", "fastapi", "uvicorn", "duckdb"} & set(loaded.stdout.split())
    command = [sys.executable, "-m", "pipelines.serve", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for flag in re.split(r"\n  (?=--)", text.partition("options:")[2])[1:]:
        assert flag.startswith("--export") or "default" in flag or "--token-env" in flag, flag


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
