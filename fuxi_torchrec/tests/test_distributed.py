import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from fuxi_torchrec import distributed
from fuxi_torchrec.distributed import (
    PeerError,
    World,
    broadcast_from_rank_0,
    check_same,
    process_group,
    raise_on_all_ranks,
)


def outcome_of_a_failing_step(failing_ranks):
    try:
        with raise_on_all_ranks("reading the config"):
            if dist.get_rank() in failing_ranks:
                raise ValueError(f"bad file on rank {dist.get_rank()}")
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    else:
        outcome = "fine"
    dist.barrier()  # every rank is still in step
    return outcome


def test_a_failure_on_one_rank_raises_on_all(workers):
    assert workers(3).run(outcome_of_a_failing_step, [1]) == [
        "PeerError: reading the config failed on 1 of 3 ranks: rank 1: ValueError: bad file on rank 1",
        "ValueError: bad file on rank 1",
        "PeerError: reading the config failed on 1 of 3 ranks: rank 1: ValueError: bad file on rank 1",
    ]


def test_without_a_failure_nothing_happens(workers):
    assert workers(3).run(outcome_of_a_failing_step, []) == ["fine"] * 3


def outcome_of_comparing(values):
    try:
        check_same("the plan", values[dist.get_rank()])
    except RuntimeError as error:
        return str(error)
    return "fine"


def test_ranks_that_differ_are_named_on_all_of_them(workers):
    assert workers(3).run(outcome_of_comparing, ["a", "a", "a"]) == ["fine"] * 3
    for said in workers(3).run(outcome_of_comparing, ["a", "a", "b"]):
        assert said.startswith("the plan is not the same on all ranks, rank 2 has another than rank 0")


def what_the_first_finds(fails):
    def find():
        if fails:
            raise FileNotFoundError("nothing there")
        return f"found by {dist.get_rank()}"

    try:
        return broadcast_from_rank_0("looking", find)
    except Exception as error:
        return type(error).__name__


def test_what_the_first_rank_finds_is_everybodys(workers):
    assert workers(2).run(what_the_first_finds, False) == ["found by 0", "found by 0"]
    assert workers(2).run(what_the_first_finds, True) == ["FileNotFoundError", "PeerError"]


def test_outside_a_group_the_error_is_simply_raised():
    with pytest.raises(ValueError, match="bad"), raise_on_all_ranks("a step"):
        raise ValueError("bad")
    assert issubclass(PeerError, RuntimeError)


def test_a_group_of_one_needs_no_launcher_and_leaves_nothing_behind(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with process_group(timeout_seconds=10, device_type="cpu") as world:
            assert (world.rank, world.size, world.device.type) == (0, 1, "cpu")
            assert dist.get_world_size() == 1
        assert not dist.is_initialized()


def test_half_a_launcher_is_named(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(RuntimeError, match="RANK is set but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"),
        process_group(device_type="cpu"),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"timeout_seconds": 0}, "timeout_seconds must be positive"), ({"device_type": "tpu"}, "not 'tpu'")],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message), process_group(**arguments):
        pass


def test_process_0_works_and_the_others_wait(workers):
    assert workers(2).run(slowly) == ["done", None]
    assert ["broken" in each for each in workers(2).run(failing)] == [True, True]


def here():
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def slowly():
    distributed._HEARTBEAT_SECONDS = 0.05

    def work():
        time.sleep(0.3)
        return "done"

    return distributed.run_on_rank_0(here(), "working", work)


def failing():
    with pytest.raises((ValueError, RuntimeError)) as caught:
        distributed.run_on_rank_0(here(), "working", lambda: int("broken"))
    return str(caught.value)


AT_EXIT = """
import atexit, ctypes, sys
from fuxi_torchrec.distributed import exit_now
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)  # a native library whose end goes wrong
atexit.register(print, "python's own")
{how}(3)
"""


@pytest.mark.parametrize(("how", "code"), [("exit_now", 3), ("sys.exit", -signal.SIGABRT)])
def test_a_job_that_is_done_ends_as_such_whatever_native_libraries_do(how, code):
    done = subprocess.run([sys.executable, "-c", AT_EXIT.format(how=how)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "python's own\n")
