import os
import time

import pytest
import torch
import torch.distributed as dist

from fuxi_torchrec.worker_group import WorkerError, WorkerGroup


def sum_of_ranks(start):
    total = torch.tensor(dist.get_rank() + start)
    dist.all_reduce(total)
    return int(total), os.getpid()


def fail_on(rank, how):
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("a bad value")
        if how == "die":
            os._exit(7)
        time.sleep(3600)
    dist.barrier()


def unpicklable():
    return lambda: None


def test_cases_share_processes_and_come_back_in_rank_order(workers):
    first, second = workers(2).run(sum_of_ranks, 1), workers(2).run(sum_of_ranks, start=10)
    assert [total for total, _ in first] == [3, 3]
    assert [total for total, _ in second] == [21, 21]
    assert [pid for _, pid in first] == [pid for _, pid in second]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 of 2: Traceback[\s\S]*ValueError: a bad value"),
        ("die", "rank 1 of 2: died with exit code 7"),
        ("hang", "rank 1 of 2: (no answer in 3 s|still running when another rank failed)"),
    ],
)
def test_a_failing_rank_is_named_and_the_group_works_again(how, message):
    with WorkerGroup(2, timeout_seconds=90) as group:
        group.run(sum_of_ranks, 0)
        group.timeout_seconds = 3 if how == "hang" else 90
        with pytest.raises(WorkerError, match=message):
            group.run(fail_on, 1, how)
        group.timeout_seconds = 90
        assert [total for total, _ in group.run(sum_of_ranks, 1)] == [3, 3]


def test_a_result_that_cannot_travel_is_an_error_not_a_hang(workers):
    with pytest.raises(WorkerError, match="pickle"):
        workers(2).run(unpicklable)
