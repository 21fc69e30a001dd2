import errno
import fcntl
import multiprocessing

import pytest

from fuxi_torchrec.artifacts import OutputLock, is_locked, lock


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
        OutputLock(tmp_path / "output").take()


def test_an_output_has_one_writer_and_the_lock_is_gone_afterwards(tmp_path):
    first, second = OutputLock(tmp_path / "output"), OutputLock(tmp_path / "output")
    assert first.take() and not second.take()
    first.release()
    assert second.take()
    second.release()
    assert list(tmp_path.iterdir()) == []
