"""A registry in torch's TCPStore, which one of the hosts serves: it needs no other service, and ends with that host.

A host's sign of life is a counter.  Another host judges it by its own clock alone: a counter that has not moved for
`LEASE_SECONDS` since it was seen first belongs to a host that is gone.  Clocks of hosts are never compared.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar, final

from torch.distributed import DistError, TCPStore

from weft.run.hosts.registry import FENCE_SECONDS, LEASE_SECONDS, RegistryLostError

T = TypeVar("T")
_CALL = timedelta(seconds=FENCE_SECONDS)
_REACH_SECONDS = 0.7
_JOINED = "joined"


def serve_store(address: str) -> tuple[TCPStore, int]:
    """Serve a store on one address of this host alone, and return it with its port.

    The port is bound before anybody is told of it, so that no other process can take it.  torch itself would listen on
    every address of the host.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        descriptor = listener.detach()
    finally:
        listener.close()
    store = TCPStore(
        address, port, None, is_master=True, timeout=_CALL, wait_for_workers=False, master_listen_fd=descriptor
    )
    return store, port


@final
class TorchStoreRegistry:
    """The registry of one job in a TCPStore."""

    def __init__(self, store: TCPStore) -> None:
        self._calls = _BoundedCalls(store)
        self._number = 0
        self._seen: dict[int, tuple[int, float]] = {}
        """Number of a host → its counter as it was seen last, and when it had changed, in this host's clock."""

    @classmethod
    def connect(cls, address: str, port: int) -> TorchStoreRegistry:
        """Connect to the host that serves the store.

        Raises:
            RegistryLostError: it does not answer.
        """
        try:
            # torch's client retries, and prints a page for every host that is gone: one look shows whether it is there.
            socket.create_connection((address, port), timeout=_REACH_SECONDS).close()
            return cls(TCPStore(address, port, None, is_master=False, timeout=_CALL, wait_for_workers=False))
        except (OSError, DistError, ValueError) as error:
            raise _lost(error) from None

    def join(self, value: Callable[[str], str]) -> str:
        def join(store: TCPStore) -> int:
            number = store.add(_JOINED, 1)
            # A call that nobody waits for any more must not leave a host that gives no sign of life.
            if not self._calls.are_given_up:
                store.set(f"host/{number}", value(str(number)))
            if not self._calls.are_given_up:
                store.add(f"beat/{number}", 1)
            return number

        self._number = self._calls.do(join)
        return str(self._number)

    def beat(self) -> bool:
        def beat(store: TCPStore) -> bool:
            store.add(f"beat/{self._number}", 1)
            return not store.check([f"left/{self._number}"])

        return self._calls.do(beat)

    def members(self) -> list[tuple[str, str]]:
        return self._calls.do(self._members)

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        wanted = list(keys)

        def get(store: TCPStore) -> dict[str, str]:
            return {key: _text(store.get(f"value/{key}")) for key in wanted if store.check([f"value/{key}"])}

        return self._calls.do(get)

    def put(self, key: str, value: str) -> None:
        self._calls.do(lambda store: store.set(f"value/{key}", value))

    def create(self, key: str, value: str) -> bool:
        return self._calls.do(lambda store: _text(store.compare_set(f"value/{key}", "", value))) == value

    def leave(self) -> None:
        self._calls.do(lambda store: store.set(f"left/{self._number}", "1"))

    def close(self) -> None:
        self._calls.close()

    def _members(self, store: TCPStore) -> list[tuple[str, str]]:
        numbers = range(1, store.add(_JOINED, 0) + 1)
        now = time.monotonic()
        return [(str(one), _text(store.get(f"host/{one}"))) for one in numbers if self._is_there(store, one, now)]

    def _is_there(self, store: TCPStore, number: int, now: float) -> bool:
        if store.check([f"left/{number}"]) or not store.check([f"beat/{number}"]):
            return False
        count = store.add(f"beat/{number}", 0)
        before = self._seen.get(number)
        if before is None or before[0] != count:
            self._seen[number] = count, now
            return True
        return now - before[1] < LEASE_SECONDS


class _BoundedCalls:
    """Calls of a store in a thread of their own: torch's client waits without a bound for a host whose network is gone.

    After one call that was not answered in time there are no more: its thread may hang for ever, and holds nothing.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store: TCPStore | None = store
        self._asked: SimpleQueue[tuple[Callable[[TCPStore], Any], Future[Any]] | None] = SimpleQueue()
        self._problem = ""
        threading.Thread(target=self._run, name="weft-store-calls", daemon=True).start()

    def do(self, call: Callable[[TCPStore], T]) -> T:
        """Return what a call of the store returns; `RegistryLostError` where that takes too long."""
        if self._problem:
            raise RegistryLostError(self._problem)
        answer: Future[T] = Future()
        self._asked.put((call, answer))
        try:
            return answer.result(_CALL.total_seconds())
        except DistError as error:
            raise _lost(error) from None
        except TimeoutError:
            self._problem = f"the store of the job's first host has not answered for {_CALL.total_seconds():.0f} s"
            raise RegistryLostError(self._problem) from None

    @property
    def are_given_up(self) -> bool:
        """Whether a call was not answered in time, or the connection is closed."""
        return bool(self._problem)

    def close(self) -> None:
        """End the thread, unless it hangs."""
        self._problem = "the connection to the store is closed."
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            call, answer = asked
            assert self._store is not None
            try:
                answer.set_result(call(self._store))
            except BaseException as error:  # the caller's to raise
                answer.set_exception(error)
        self._store = None


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _lost(error: Exception) -> RegistryLostError:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return RegistryLostError(f"the store of the job's first host cannot be reached: {first}")
