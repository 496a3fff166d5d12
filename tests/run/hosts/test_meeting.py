"""Hosts that meet by the run's folder, where the host that serves the store answers late."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.events import RunFolder
from weft.events.folder_lock import FolderLock
from weft.files import write_whole
from weft.run.hosts.meeting import FOLDER, open_meeting
from weft.run.hosts.registry import FENCE_SECONDS, RegistryLostError
from weft.run.hosts.roster import HostFacts
from weft.run.hosts.signed import JobSecret
from weft.run.hosts.torch_store import serve_store

FACTS = HostFacts(host="b", address="127.0.0.1", num_devices=1, version="1", recipe="r")
LATE_SECONDS = FENCE_SECONDS + 0.5


class LateNetwork:
    """Passes connections on to a port.  Of the first that is used, all answers but one come late."""

    def __init__(self, port: int, num_late: int) -> None:
        self._port, self._num_late = port, num_late
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> LateNetwork:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                self._start(self._pass, near, far, False)
                self._start(self._pass, far, near, True)

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            number = 0
            while chunk := source.recv(1 << 16):
                number += 1
                if is_answer and number == 2 and self._num_late:  # the first is the handshake's
                    self._num_late -= 1
                    time.sleep(LATE_SECONDS)
                target.sendall(chunk)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def served(folder: Path, secret: JobSecret, num_late: int) -> Iterator[None]:
    """Another host of the job owns the folder, and serves its store behind a late network."""
    lock = FolderLock(folder)
    lock.acquire()
    store, port = serve_store("127.0.0.1")
    owner = RunFolder(folder).owner
    assert owner is not None
    with LateNetwork(port, num_late) as network:
        where = {"address": "127.0.0.1", "port": network.port, "mark": "one", "owner": owner.process}
        write_whole(folder / "meeting.json", secret.sign("meeting.json", where))
        yield
    lock.release()
    del store


def join(folder: Path, secret: JobSecret, seconds: float) -> tuple[str, bool]:
    """Join as a second host does; return its name, and whether it may lead."""
    with open_meeting(
        FOLDER, folder, secret, FACTS, seconds=seconds, is_again=False, is_stopping=lambda: False, log=lambda _: None
    ) as meeting:
        assert not meeting.membership.is_lost
        assert list(meeting.membership.view.members) == [meeting.membership.name]  # no second one of this host
        return meeting.membership.name, meeting.may_lead


def test_a_store_that_answers_late_is_joined_all_the_same(tmp_path: Path) -> None:
    secret = JobSecret.of_folder(tmp_path)
    with served(tmp_path, secret, num_late=2):
        name, may_lead = join(tmp_path, secret, seconds=30)
    assert name
    assert not may_lead


def test_a_store_that_never_answers_in_time_is_given_up(tmp_path: Path) -> None:
    secret = JobSecret.of_folder(tmp_path)
    with served(tmp_path, secret, num_late=1_000), pytest.raises(RegistryLostError, match="has not answered for 2 s"):
        join(tmp_path, secret, seconds=1)
