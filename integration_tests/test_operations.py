"""Training through TorchX that is killed, preempted, loses a node or fails: it ends as if nothing had happened."""

import json
import signal
import uuid

import pytest

from integration_tests import runs
from integration_tests.launches import (
    ENDLESS,
    EVERY,
    SETTINGS,
    STEPS,
    all_end,
    command_of,
    descendants,
    held,
    latest,
    launched,
    listener,
    marked,
    none_left,
    strike,
    until,
)
from pipelines.components import free_port

HOLD = 10
ONCE = "OMP_NUM_THREADS=1,PET_MAX_RESTARTS=0,TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
TRAIN, HELD = "pipelines.train", "integration_tests.held_training"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.small_dataset(tmp_path_factory.mktemp("operations") / "set")


def ddp(run_dir, data, module, j="1x2", *more):
    """Arguments of ``torchx run`` as a person gives them."""
    return ["dist.ddp", "-j", j, *more, "-m", module, "--", "--run-dir", run_dir, f"data.path={data}", *SETTINGS]


def finish(process, log, expected=0):
    code = process.wait(90)
    assert code == expected, log.read_text()[-8000:]
    return log.read_text()


def hold(run_dir, step=HOLD):
    run_dir.mkdir()
    (run_dir / "hold").write_text(str(step))


def release(run_dir):
    (run_dir / "hold").unlink()


def held_with_a_checkpoint(run_dir, world=2):
    """The waiting ranks, once the checkpoint before the hold is complete."""
    return held(run_dir, world) if latest(run_dir) == HOLD - HOLD % EVERY else None


def ends_as_undisturbed(run_dir, undisturbed):
    found = runs.losses(run_dir)
    assert found.keys() == undisturbed.keys()
    assert max(abs(found[step] - undisturbed[step]) for step in found) < 1e-5
    assert latest(run_dir) == STEPS
    return True


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """Losses of a run that nobody touches: plain dist.ddp, two ranks on one node."""
    path = tmp_path_factory.mktemp("undisturbed")
    with launched(*ddp(path / "run", data, TRAIN), log=path / "log") as process:
        finish(process, path / "log")
    return runs.losses(path / "run")


def test_two_ranks_on_one_node(undisturbed):
    assert list(undisturbed) == list(range(1, STEPS + 1))
    assert undisturbed[STEPS] < undisturbed[1]


def test_two_nodes_of_one_process_give_the_same_losses(data, tmp_path, undisturbed):
    config = tmp_path / "config.yaml"
    config.write_text("seed: 0\n")
    component = ["pipelines/components.py:train", "-j", "2x1", "--config", config, "--run_dir", tmp_path / "run"]
    with launched(*component, f"data.path={data}", *SETTINGS, log=tmp_path / "log") as process:
        finish(process, tmp_path / "log")
    assert ends_as_undisturbed(tmp_path / "run", undisturbed)


def test_a_killed_worker_is_restarted_from_the_last_checkpoint(data, tmp_path, undisturbed):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    hold(run_dir)
    with launched(*ddp(run_dir, data, HELD), log=log) as process:
        workers = until(lambda: held_with_a_checkpoint(run_dir), process, log)
        strike(workers[1]["pid"])
        release(run_dir)
        said = finish(process, log)
    assert "resumed from step-000000008" in said
    assert ends_as_undisturbed(run_dir, undisturbed)


def test_sigterm_saves_marks_and_leaves_and_the_run_continues(data, tmp_path, undisturbed):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    hold(run_dir)
    reading = "data.num_workers=1"  # the launcher signals these processes too
    with launched(*ddp(run_dir, data, HELD), reading, log=log) as process:
        until(lambda: held_with_a_checkpoint(run_dir), process, log)
        process.send_signal(signal.SIGTERM)  # ends the hold when it reaches the workers
        process.wait(30)
    assert "killed by signal" not in log.read_text()
    assert json.loads((run_dir / "preempted").read_text())["step"] == HOLD + 1
    assert latest(run_dir) == HOLD + 1
    with launched(*ddp(run_dir, data, TRAIN), log=log) as process:
        said = finish(process, log)
    assert f"resumed from step-{HOLD + 1:09d}" in said
    assert not (run_dir / "preempted").exists()
    assert ends_as_undisturbed(run_dir, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_torchrun_is_struck_none_of_its_processes_stays(data, tmp_path, number):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with launched(*ddp(run_dir, data, TRAIN), *ENDLESS, log=log) as process:
        until(lambda: latest(run_dir) > 0, process, log)
        (torchrun,) = [
            pid for pid in descendants(process.pid) if command_of(pid)[1:2] and "torchrun" in command_of(pid)[1]
        ]
        below = descendants(torchrun)
        assert len(below) >= 4  # two ranks, and what reads for each
        strike(torchrun, number)
        none_left(lambda: set(filter(command_of, below)))
        assert finish(process, log, expected=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_torchx_that_was_struck(data, tmp_path, number):
    run_dir, log, mark = tmp_path / "run", tmp_path / "log", uuid.uuid4().hex
    with launched(*ddp(run_dir, data, TRAIN), *ENDLESS, log=log, MARK=mark) as process:
        try:
            until(lambda: latest(run_dir) > 0, process, log)
            assert len(marked(mark)) >= 6  # torchx, torchrun, two ranks, and what reads for each
            process.send_signal(number)
            process.wait(30)
            all_end(mark)
        finally:
            for pid in marked(mark):
                strike(pid)


def test_when_a_node_dies_the_other_one_continues_alone(data, tmp_path, undisturbed):
    run_dir, log, port = tmp_path / "run", tmp_path / "log", free_port()
    hold(run_dir)
    # how long torchrun waits for a second node once it has one; 30 s by default
    patience = {"PET_RDZV_CONF": "last_call_timeout=6"}
    with launched(*ddp(run_dir, data, HELD, "1:2x1", "--rdzv_port", port), log=log, **patience) as process:
        workers = until(lambda: held_with_a_checkpoint(run_dir), process, log)
        agents = {each["agent"] for each in workers.values()}
        keeper = until(lambda: listener(port, agents), process, log)  # of the rendezvous: its node must live
        (dying,) = agents - {keeper}
        for pid in {dying, *descendants(dying)}:
            strike(pid)
        release(run_dir)
        said = finish(process, log, expected=1)  # TorchX says that a node has failed
    assert "resumed from step-000000008, saved by 2 ranks" in said
    assert json.loads((run_dir / "plan.json").read_text())["world_size"] == 1
    assert ends_as_undisturbed(run_dir, undisturbed)


def test_a_worker_that_raises_ends_the_job_with_exit_code_1_and_its_error_first(data, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    run_dir.mkdir()
    (run_dir / "raise").write_text("3")
    with launched(*ddp(run_dir, data, HELD, "1x2", "--env", ONCE), log=log) as process:
        said = finish(process, log, expected=1)
    root_cause = said[said.index("Root Cause") :]
    assert "rank      : 1 " in root_cause
    assert "ValueError: rank 1 was told to fail" in root_cause
    assert list(runs.losses(run_dir)) == [1, 2, 3]


def test_a_process_that_stands_still_is_an_error_and_shows_where(data, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    run_dir.mkdir()
    (run_dir / "stuck").write_text("3")
    command = [str(word).replace("timeout_seconds=60", "timeout_seconds=8") for word in ddp(run_dir, data, HELD)]
    command[3:3] = ["--env", ONCE]
    with launched(*command, log=log) as process:
        said = finish(process, log, expected=1)
    stuck = [line for line in said.splitlines() if "[1]:" in line and "stand_still" in line]
    assert stuck, said[-8000:]
    assert "Timed out waiting 8000ms" in said
