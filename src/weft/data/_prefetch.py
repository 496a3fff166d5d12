"""Prepare the batches of coming steps in helper processes.

Step s is always the work of helper s mod n and lies in slot s mod depth.  Depth is a multiple of n, so one helper alone
writes a slot, in order, and a helper that died is replaced by one that does exactly the same work.  Requests and
replies are fixed records of integers over a socket; samples travel through the ring.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import subprocess
import time
import weakref
from collections.abc import Sequence

from weft.data._child import describe_exit, end_child, start_child
from weft.data._fields import Fields
from weft.data._reader import TrainReader, TrainSpec
from weft.data._ring import Ring
from weft.errors import DataError
from weft.process import is_stopped

_REQUEST = struct.Struct("<qqq")
"""generation, step, slot"""
_REPLY = struct.Struct("<qqq")
"""generation, step, length of the error that follows"""
_SLOTS_PER_WORKER = 2
_ATTEMPTS = 3
_GRACE_SECONDS = 0.5
_LOOK_SECONDS = 0.5
"""Time between two looks at a helper that is waited for."""
_STOPPED_SECONDS = 1.5
"""Time that a helper may be stopped by a signal while it is waited for; then another does its work, which is the
same."""

logger = logging.getLogger(__name__)


class Prefetcher:
    """The batches of a data rank, some steps ahead.

    Processes start with the first `read`.  Not for several threads at once.

    Args:
        reader: This rank's own reader, for the layout of a batch.
        spec: What the helpers read.
        start, stop: This rank's part of every global batch.
        workers: Helper processes.
        timeout_seconds: A helper that takes longer for one batch is taken for stuck and replaced.
    """

    def __init__(
        self,
        reader: TrainReader,
        spec: TrainSpec,
        start: int,
        stop: int,
        *,
        workers: int,
        timeout_seconds: float = 120.0,
    ) -> None:
        self._depth = workers * _SLOTS_PER_WORKER
        self._ring = Ring(reader.fields, reader.num_samples, self._depth)
        arguments = [spec.to_json(), str(start), str(stop), str(self._depth), str(self._ring.descriptor)]
        self._workers = [_Worker(arguments, self._ring.descriptor, timeout_seconds) for _ in range(workers)]
        self._generation = 0
        self._next = -1
        self._finish = weakref.finalize(self, _finish, self._workers, self._ring)

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid]

    def read(self, step: int) -> Fields:
        """Return the batch of a step and ask for those that follow.  Steps in order are fast; any step is right.

        Raises:
            DataError: A sample is broken, or a helper died or stuck several times on this step.
        """
        if step != self._next:
            self._generation += 1
            for ahead in range(step, step + self._depth):
                self._request(ahead)
        self._worker_of(step).wait(self._generation, step)
        batch = self._ring.read(step % self._depth)
        self._request(step + self._depth)
        self._next = step + 1
        return batch

    def _request(self, step: int) -> None:
        self._worker_of(step).request(self._generation, step, step % self._depth)

    def _worker_of(self, step: int) -> _Worker:
        return self._workers[step % len(self._workers)]

    def close(self) -> None:
        """End the helpers and free the memory.  Harmless when repeated."""
        self._finish()


class _StoppedError(Exception):
    """A helper that is waited for is held by a signal."""


def _finish(workers: Sequence[_Worker], ring: Ring) -> None:
    for worker in workers:
        worker.hang_up()
    for worker in workers:
        worker.end(_GRACE_SECONDS)
    ring.close()


class _Worker:
    """One helper process and the requests it has not answered."""

    def __init__(self, arguments: Sequence[str], memory: int, timeout_seconds: float) -> None:
        self._arguments = arguments
        self._memory = memory
        self._timeout_seconds = timeout_seconds
        self._open: list[tuple[int, int, int]] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def request(self, generation: int, step: int, slot: int) -> None:
        self._open = [entry for entry in self._open if entry[0] == generation]
        self._open.append((generation, step, slot))
        self._send([(generation, step, slot)])

    def _send(self, entries: Sequence[tuple[int, int, int]]) -> None:
        try:
            self._connection().sendall(b"".join(_REQUEST.pack(*entry) for entry in entries))
        except OSError:  # it died; `wait` finds out, replaces it and asks again
            return

    def wait(self, generation: int, step: int) -> None:
        """Return when the step lies in its slot."""
        ending = ""
        for _ in range(_ATTEMPTS):
            try:
                while (answered := self._reply()) != (generation, step):
                    self._close_request(answered)
            except _StoppedError:
                ending = self._replace_stopped()
                continue
            except (OSError, EOFError) as error:
                ending = self._replace(stuck=isinstance(error, TimeoutError))
                continue
            self._close_request(answered)
            return
        raise DataError(
            f"The helper process that reads the batch of step {step} {ending}, {_ATTEMPTS} times in a row. "
            f"Set data.prefetch_workers = 0 to read in the rank itself and see the cause; use fewer if memory is short."
        )

    def _close_request(self, answered: tuple[int, int]) -> None:
        self._open = [entry for entry in self._open if entry[:2] != answered]

    def _reply(self) -> tuple[int, int]:
        connection = self._connection()
        self._await_answer(connection)
        generation, step, error_bytes = _REPLY.unpack(_receive(connection, _REPLY.size))
        if error_bytes:
            message = _receive(connection, error_bytes).decode()
            if (generation, step) in [entry[:2] for entry in self._open]:
                self._close_request((generation, step))
                raise DataError(message)
        return generation, step

    def _await_answer(self, connection: socket.socket) -> None:
        """Return when there is something to read; a stuck helper is left to the connection's own timeout."""
        deadline, stopped_at = time.monotonic() + self._timeout_seconds, None
        ready = select.poll()
        ready.register(connection, select.POLLIN)
        while not ready.poll(1000 * min(_LOOK_SECONDS, self._timeout_seconds)):
            now = time.monotonic()
            if self.pid is None or not is_stopped(self.pid):
                stopped_at = None
            elif stopped_at is None:
                stopped_at = now
            elif now - stopped_at >= _STOPPED_SECONDS:
                raise _StoppedError
            if now >= deadline:
                raise TimeoutError

    def _replace_stopped(self) -> str:
        logger.warning(
            "the data worker of pid %s on host %s was stopped by a signal (SIGSTOP) and the run waited for it: it is"
            " replaced by one that does the same work, and no sample is lost.",
            self.pid,
            socket.gethostname(),
        )
        self._replace(stuck=True)
        return "was stopped by a signal (SIGSTOP)"

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        return self._socket

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(self._timeout_seconds)
        with theirs:
            descriptors = [theirs.fileno(), self._memory]
            self._child = start_child("_prefetch", [*self._arguments, str(theirs.fileno())], descriptors=descriptors)

    def _replace(self, *, stuck: bool) -> str:
        """Start the helper anew with its open requests; return how the old one ended."""
        assert self._child is not None
        self.hang_up()
        if stuck:
            self._child.kill()
        self.end(_GRACE_SECONDS)
        ending = f"was stuck for {self._timeout_seconds:g} s" if stuck else describe_exit(self._child.returncode)
        self._start()
        self._send(self._open)
        return ending

    def hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def end(self, grace_seconds: float) -> None:
        if self._child is not None:
            end_child(self._child, grace_seconds)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def main(arguments: Sequence[str]) -> None:
    """Answer requests until the parent hangs up."""
    spec, start, stop, depth, memory, descriptor = arguments
    with socket.socket(fileno=int(descriptor)) as connection:
        try:
            _answer(connection, spec, int(start), int(stop), int(depth), int(memory))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the parent hung up: there is nothing to save, and nobody to tell


def _answer(connection: socket.socket, spec: str, start: int, stop: int, depth: int, memory: int) -> None:
    reader: TrainReader | None = None
    ring: Ring | None = None
    while True:
        generation, step, slot = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        error = b""
        try:
            if reader is None:
                reader = TrainReader(TrainSpec.from_json(spec), start, stop)
            if ring is None:
                ring = Ring(reader.fields, reader.num_samples, depth, memory)
            ring.write(slot, reader.read(step))
        except DataError as problem:
            error = str(problem).encode()
        connection.sendall(_REPLY.pack(generation, step, len(error)) + error)
