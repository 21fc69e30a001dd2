import os

from fuxi_torchrec import machine


def test_cores_are_those_this_process_may_use():
    assert 1 <= machine.cores() <= os.cpu_count()


def test_the_smallest_limit_of_a_control_group_counts(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/jobs/one\n")
    groups = tmp_path / "groups"
    (groups / "jobs/one").mkdir(parents=True)
    whole = machine.memory_bytes(groups, own)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (groups / "memory.max").write_text("max\n")
    (groups / "jobs/one/memory.max").write_text("3000000\n")
    assert machine.memory_bytes(groups, own) == 3_000_000
    (groups / "jobs/memory.max").write_text("2000000\n")
    assert machine.memory_bytes(groups, own) == 2_000_000


def test_a_machine_without_control_groups_has_all_its_memory(tmp_path):
    assert machine.memory_bytes(tmp_path, tmp_path / "none") > 2**20
