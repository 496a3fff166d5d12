"""One process at a time writes in a run's folder, and whoever comes second learns who it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.errors import LaunchError
from weft.events import FolderToken
from weft.events.folder_lock import FolderLock

HOLD = """
import os, sys, time
from pathlib import Path
from weft.events.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
if "forks" in sys.argv and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@contextmanager
def holder(folder: Path, *how: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the folder."""
    command = [sys.executable, "-c", HOLD, str(folder), *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def owner_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "owner.json").read_text())


def change(folder: Path, **values: Any) -> None:
    path = folder / "owner.json"
    path.write_text(json.dumps(owner_of(folder) | values))


def test_a_second_owner_is_told_of_the_first_and_touches_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        before = (tmp_path / "owner.json").read_bytes()
        with pytest.raises(
            LaunchError, match=rf"in use by process {process.pid} on host .*since 20.*stop it \(kill {process.pid}\)"
        ):
            FolderLock(tmp_path).acquire()
        assert (tmp_path / "owner.json").read_bytes() == before


def test_so_is_a_second_one_of_the_same_process(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        assert lock.acquire() == ""  # it has it already
        with pytest.raises(LaunchError, match=r"in use by this process .* Wait until that has ended, end it, or give"):
            FolderLock(tmp_path).acquire()


def test_tokens_grow_with_each_owner(tmp_path: Path) -> None:
    tokens: list[int] = []
    for _ in range(3):
        with FolderLock(tmp_path / "new") as lock:
            assert lock.acquire() == ""
            assert lock.token is not None
            tokens.append(lock.token.owner.token)
        assert owner_of(tmp_path / "new")["ended"] is True
    assert tokens == [1, 2, 3]


@pytest.mark.parametrize("how", ["", "forks"])
def test_the_folder_of_a_killed_owner_is_taken_over_at_once(tmp_path: Path, how: str) -> None:
    with holder(tmp_path, how) as process:
        process.kill()
        started = time.monotonic()
        with FolderLock(tmp_path) as lock:
            line = lock.acquire()
            assert time.monotonic() - started < 5.0
            assert lock.token is not None
            assert lock.token.owner.token == 2
    assert f"was left by process {process.pid} on host" in line
    assert line.endswith("which has ended: this run takes the folder over.")
    assert "\n" not in line


def test_an_owner_that_was_replaced_finds_out(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as first, FolderLock(tmp_path) as second:
        first.acquire()
        first.check()
        assert first.token is not None
        of_ranks = FolderToken.of_json(tmp_path, json.loads(json.dumps(first.token.to_json())))
        of_ranks.check()
        (tmp_path / "owner.json").unlink()  # as somebody does who takes it for dead
        with pytest.raises(LaunchError, match="has been taken away. Nothing more is written"):
            first.check()
        second.acquire()
        second.check()
        for asked in (first, of_ranks):
            with pytest.raises(LaunchError, match="no longer this run's folder: it is that of this process"):
                asked.check()
        before = (tmp_path / "owner.json").stat().st_mtime_ns
        of_ranks.beat()
        first.release()
        assert (tmp_path / "owner.json").stat().st_mtime_ns == before
        second.check()


def test_an_owner_on_another_host_lives_as_long_as_it_gives_signs_of_life(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        lock.acquire()
    change(tmp_path, ended=False, host="far", machine="far/another-boot/pid:[1]", pid=77)
    with pytest.raises(
        LaunchError,
        match=r"process 77 on host far .*end it, .* cannot be seen from .*gone after 1,200 s.*remove .*owner.json",
    ):
        FolderLock(tmp_path).acquire()
    long_ago = time.time() - 1300
    os.utime(tmp_path / "owner.json", (long_ago, long_ago))
    with FolderLock(tmp_path) as lock:
        assert "has given no sign of life for 1,300 s" in lock.acquire()
        lock.check()


def test_one_that_beats_is_watched_by_the_own_clock(tmp_path: Path) -> None:
    """Clocks of two hosts are not compared: the file's time may lie an hour away."""
    change_to_far(tmp_path, silent_seconds=0.6)
    began = time.monotonic()
    with FolderLock(tmp_path) as lock:
        assert "process 77 on host far" in lock.acquire()
    assert 0.6 <= time.monotonic() - began < 10


def test_one_that_beats_keeps_the_folder(tmp_path: Path) -> None:
    change_to_far(tmp_path, silent_seconds=2.0)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(tmp_path / "owner.json")

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(LaunchError, match="process 77 on host far"):
            FolderLock(tmp_path).acquire()
    finally:
        ended.set()
        beating.join()


def test_one_that_is_known_to_be_lost_is_replaced_at_once(tmp_path: Path) -> None:
    """Even where its lock still seems to be held; it finds out before it names a checkpoint."""
    with FolderLock(tmp_path, silent_seconds=3.0, beats=True) as lost, FolderLock(tmp_path) as other:
        lost.acquire()
        with pytest.raises(LaunchError):
            other.acquire()
        other.acquire(is_lost=lambda: True)
        other.check()
        with pytest.raises(LaunchError, match="no longer this run's folder"):
            lost.check()


def change_to_far(folder: Path, *, silent_seconds: float) -> None:
    """Leave the record of an owner on another host, whose clock is an hour behind."""
    with FolderLock(folder, silent_seconds=silent_seconds, beats=True) as lock:
        lock.acquire()
    change(folder, ended=False, host="far", machine="far/another-boot/pid:[1]", pid=77)
    behind = time.time() - 3600
    os.utime(folder / "owner.json", (behind, behind))


def _no_locks(*_: Any) -> None:
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("lives", [True, False])
def test_where_files_cannot_be_locked_the_process_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    monkeypatch.setattr("fcntl.flock", _no_locks)
    first = FolderLock(tmp_path)
    first.acquire()
    if lives:
        with pytest.raises(LaunchError, match="in use by this process"):
            FolderLock(tmp_path).acquire()
    else:
        change(tmp_path, started="1")
        with FolderLock(tmp_path) as second:
            assert "which has ended" in second.acquire()
            with pytest.raises(LaunchError, match="no longer this run's folder"):
                first.check()
    first.release()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"token": "x"}'])
def test_a_file_that_names_nobody_is_nobodys(tmp_path: Path, content: str) -> None:
    (tmp_path / "owner.json").write_text(content)
    with FolderLock(tmp_path) as lock:
        assert lock.acquire() == ""
        lock.check()


def _link(folder: Path) -> None:
    (folder / "owner.json").symlink_to("/dev/null")


def _directory(folder: Path) -> None:
    (folder / "owner.json").mkdir()


@pytest.mark.parametrize("make", [_link, _directory])
def test_what_is_no_plain_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    with pytest.raises(LaunchError, match=r"owner.json cannot be written: .*give a folder that is writable"):
        FolderLock(tmp_path).acquire()
