import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuxi_torchrec.artifacts import NewDirectory, OutputError, is_locked, lock, replace_file, write_atomically

ROOT = Path(__file__).parents[2]


def hold(path, ready, done):
    with path.open("a") as file:
        assert lock(file)
        ready.set()
        done.wait(20)


def test_a_lock_that_another_process_has_is_not_ours(tmp_path):
    path, context = tmp_path / "lock", multiprocessing.get_context("spawn")
    assert not is_locked(path)
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(path, ready, done))
    other.start()
    try:
        assert ready.wait(20)
        assert is_locked(path)
        with path.open("a") as file:
            assert not lock(file, 0.0)
            done.set()
            assert lock(file, 20.0)  # waits until it is free
    finally:
        done.set()
        other.join(20)
    assert not is_locked(path)


def test_who_only_looks_needs_no_more_than_to_read(tmp_path, monkeypatch):
    path, flock = tmp_path / "lock", fcntl.flock

    def as_on_nfs(file, operation):  # flock is a lock of bytes there: an exclusive one needs a file open for writing
        if operation & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    with path.open("a") as file:
        assert lock(file) and is_locked(path)
    assert not is_locked(path)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as file, pytest.raises(OSError, match="this file system does not lock files"):
        lock(file)
    with pytest.raises(OSError, match="take another place"):
        NewDirectory(tmp_path / "output").begin()


# --- whole or not there ----------------------------------------------------------------------------------------------

CALLS = ("open", "fsync", "replace", "rename", "mkdir", "unlink")
WRITE_FILE = "write_atomically(Path('file'), 'new')"
WRITE_DIRECTORY = """
with NewDirectory('output') as place:
    (place / 'a').mkdir()
    (place / 'a' / 'one').write_text('1')
    (place / 'two').write_text('2')
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from fuxi_torchrec.artifacts import NewDirectory, write_atomically

left = int(sys.argv[1])

def counted(call):
    def with_a_kill(*given, **named):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)
    return with_a_kill

for name in {calls}:
    setattr(os, name, counted(getattr(os, name)))
"""


def killed_at(moment, code, directory):
    """Whether a process that runs some code was killed before its n-th call of the system."""
    whole = KILLED.format(calls=CALLS) + code
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", whole, str(moment)], cwd=directory, env=environment, timeout=60)
    assert done.returncode in (0, -9)
    return done.returncode == -9


def test_a_file_is_the_old_or_the_new_one_whenever_its_writer_is_killed(tmp_path):
    seen, moment = [], 0
    while True:
        (tmp_path / "file").write_text("old")
        killed = killed_at(moment, WRITE_FILE, tmp_path)
        seen.append((tmp_path / "file").read_text())
        if not killed:
            break
        moment += 1
    assert moment >= 3 and seen[0] == "old" and seen[-1] == "new" and set(seen) == {"old", "new"}
    assert os.listdir(tmp_path) == ["file"], "what killed writers left is gone"


def test_a_directory_is_whole_or_not_there_whenever_its_writer_is_killed(tmp_path):
    moment, there = 0, []
    while killed_at(moment, WRITE_DIRECTORY, tmp_path):
        there.append((tmp_path / "output").exists())
        if there[-1]:
            assert sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "output").rglob("*")) == [
                *("output/a", "output/a/one", "output/two"),
            ]
            (tmp_path / "output").rename(tmp_path / f"done-{moment}")
        moment += 1
    assert moment >= 5 and False in there and True in there
    assert [name for name in os.listdir(tmp_path) if not name.startswith("done-")] == ["output"]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    def half():
        with replace_file(tmp_path / "file") as aside:
            aside.write_text("half")
            full()

    write_atomically(tmp_path / "file", "old")
    with pytest.raises(OSError, match="No space left"):
        half()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old" and os.listdir(tmp_path) == ["file"]


def write(output, then=lambda: None):
    with NewDirectory(output) as place:
        (place / "file").write_text("!")
        then()


def test_a_full_disk_leaves_no_directory(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "output", full)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "output")
    assert os.listdir(tmp_path) == []


def test_an_output_has_one_writer(tmp_path):
    first, second = NewDirectory(tmp_path / "output"), NewDirectory(tmp_path / "output")
    place = first.begin()
    assert is_locked(second.lock_path)
    with pytest.raises(OutputError, match="output: another job is writing it: wait for it, or choose another output"):
        second.begin()
    second.end()  # not begun: the other one's stays
    assert place.exists()
    first.end()
    assert not is_locked(second.lock_path) and os.listdir(tmp_path) == []
    write(tmp_path / "output")
    assert os.listdir(tmp_path) == ["output"]


def test_an_output_that_exists_is_left_alone_also_if_it_appears_meanwhile(tmp_path):
    with pytest.raises(OutputError, match="output exists"):
        write(tmp_path / "output", lambda: os.makedirs(tmp_path / "output" / "mine"))
    with pytest.raises(OutputError, match="output exists: nothing is written over it, choose another output"):
        NewDirectory(tmp_path / "output").begin()
    assert os.listdir(tmp_path) == ["output"] and os.listdir(tmp_path / "output") == ["mine"]
