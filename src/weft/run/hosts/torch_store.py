"""A registry in torch's TCPStore, which one of the hosts serves: it needs no other service, and ends with that host.

A host's sign of life is a counter.  Another host judges it by its own clock alone: a counter that has not moved for
`LEASE_SECONDS` since it was seen first belongs to a host that is gone.  Clocks of hosts are never compared.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import final

from torch.distributed import DistError, TCPStore

from weft.run.hosts.registry import LEASE_SECONDS, RegistryLostError

_CALL = timedelta(seconds=LEASE_SECONDS)
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
        self._store: TCPStore | None = store
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
        except OSError as error:
            raise _lost(error) from None
        try:
            store = TCPStore(address, port, None, is_master=False, timeout=_CALL, wait_for_workers=False)
        except (DistError, ValueError) as error:
            raise _lost(error) from None
        return cls(store)

    def join(self, value: str) -> str:
        try:
            self._number = self._server.add(_JOINED, 1)
            self._server.set(f"host/{self._number}", value)
            self._server.add(f"beat/{self._number}", 1)
        except DistError as error:
            raise _lost(error) from None
        return str(self._number)

    def beat(self) -> bool:
        try:
            self._server.add(f"beat/{self._number}", 1)
            return not self._server.check([f"left/{self._number}"])
        except DistError as error:
            raise _lost(error) from None

    def members(self) -> list[tuple[str, str]]:
        now = time.monotonic()
        found: list[tuple[str, str]] = []
        try:
            for number in range(1, self._server.add(_JOINED, 0) + 1):
                if self._is_there(number, now):
                    found.append((str(number), self._server.get(f"host/{number}").decode()))
        except DistError as error:
            raise _lost(error) from None
        return found

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        try:
            present = [key for key in keys if self._server.check([f"value/{key}"])]
            return {key: self._server.get(f"value/{key}").decode() for key in present}
        except DistError as error:
            raise _lost(error) from None

    def put(self, key: str, value: str) -> None:
        try:
            self._server.set(f"value/{key}", value)
        except DistError as error:
            raise _lost(error) from None

    def create(self, key: str, value: str) -> bool:
        try:
            return self._server.compare_set(f"value/{key}", "", value).decode() == value
        except DistError as error:
            raise _lost(error) from None

    def leave(self) -> None:
        try:
            self._server.set(f"left/{self._number}", "1")
        except DistError as error:
            raise _lost(error) from None

    def close(self) -> None:
        self._store = None

    @property
    def _server(self) -> TCPStore:
        if self._store is None:
            raise RegistryLostError("the connection to the store is closed.")
        return self._store

    def _is_there(self, number: int, now: float) -> bool:
        if self._server.check([f"left/{number}"]) or not self._server.check([f"beat/{number}"]):
            return False
        count = self._server.add(f"beat/{number}", 0)
        before = self._seen.get(number)
        if before is None or before[0] != count:
            self._seen[number] = count, now
            return True
        return now - before[1] < LEASE_SECONDS


def _lost(error: Exception) -> RegistryLostError:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return RegistryLostError(f"the store of the job's first host cannot be reached: {first}")
