"""How hosts find one another: at etcd, or at the host that owns the run's folder.

Without etcd the host that gets the folder's lock leads.  It serves a store, and writes into the folder where: the
others read it there.  When that host is lost, another takes the lock, and all meet again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError
from weft.events import read_owner
from weft.events.folder_lock import FolderLock
from weft.files import write_whole
from weft.run.hosts.etcd import EtcdRegistry
from weft.run.hosts.membership import Membership
from weft.run.hosts.registry import LEASE_SECONDS, RegistryLostError
from weft.run.hosts.roster import HostFacts
from weft.run.hosts.signed import JobSecret
from weft.run.hosts.torch_store import TorchStoreRegistry, serve_store

FOLDER = "folder"
"""`--rendezvous` of hosts that meet by the run's folder."""
_MEETING = "meeting.json"
_PAUSE_SECONDS = 0.2
_OWNER = "owner.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """This host among the others."""

    membership: Membership
    lock: FolderLock
    """Lock of the run's folder; this process owns it once `lead` has returned."""
    takes_over: bool
    """Whether the registry knows better than the folder who is there: a leader's hold on the folder ends with its
    lease."""

    def lead(self) -> str:
        """Become the owner of the run's folder.  Returns a line on the last owner, where that was lost.

        Raises:
            LaunchError: another run owns it.
        """
        return self.lock.acquire(is_lost=self._is_of_a_lost_host if self.takes_over else None)

    def _is_of_a_lost_host(self) -> bool:
        """Whether the folder's owner led this job's last generation and has lost its lease.  The leader of another job,
        of which this registry knows nothing, is not lost."""
        owner, view = read_owner(self.lock.folder / _OWNER), self.membership.view
        if owner is None or view.roster is None:
            return False
        led = view.roster.seats[0]
        return owner.host == led.host and led.member not in view.members


LEADER_SILENT_SECONDS = 1.5 * LEASE_SECONDS
"""Silence after which a leader no longer owns the run's folder.  It gives a sign of life six times as often, and ends
its ranks when it cannot reach the registry for two thirds of that time."""


@contextmanager
def open_meeting(
    rendezvous: str,
    folder: Path,
    secret: JobSecret,
    facts: HostFacts,
    *,
    seconds: float,
    is_again: bool,
    log: Callable[[str], object],
) -> Generator[Meeting]:
    """Join the other hosts of a job, and leave them at the end.

    Args:
        rendezvous: `folder`, or the address of etcd.
        seconds: time to find them.
        is_again: whether this host has met them before: what it asks for is right, and may come back.
        log: says what this host waits for.

    Raises:
        RegistryLostError: they are not found.
        LaunchError: the run's folder is another run's.
    """
    with ExitStack() as stack:
        lock = stack.enter_context(FolderLock(folder, silent_seconds=LEADER_SILENT_SECONDS, beats=True))
        is_etcd = rendezvous != FOLDER
        deadline = time.monotonic() + seconds
        try:
            registry, port = (
                (EtcdRegistry(rendezvous, secret.job), None)
                if is_etcd
                else _store_of_folder(lock, secret, facts, deadline, log)
            )
            membership = _joined(stack, Membership(registry, secret, facts, beat=lock.beat), deadline)
            if port is not None:
                assert lock.token is not None
                # Only now that this host has joined: whoever joins first leads, and must own the folder.
                place = {"address": facts.address, "port": port, "owner": lock.token.owner.process}
                write_whole(folder / _MEETING, secret.sign(_MEETING, place))
        except RegistryLostError as error:
            if is_again:
                raise RegistryLostError(f"{error} This host has waited {seconds:.0f} s for it.", status=75) from None
            raise
        yield Meeting(membership=membership, lock=lock, takes_over=is_etcd)


def _joined(stack: ExitStack, membership: Membership, deadline: float) -> Membership:
    """Join, as soon as the registry answers."""
    while True:
        try:
            return stack.enter_context(membership)
        except RegistryLostError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


def _store_of_folder(
    lock: FolderLock, secret: JobSecret, facts: HostFacts, deadline: float, log: Callable[[str], object]
) -> tuple[TorchStoreRegistry, int | None]:
    """Serve the store, if this host gets the folder, and return its port, too; else connect to the one that does."""
    path, problem = lock.folder / _MEETING, ""
    while True:
        owner = read_owner(lock.folder / _OWNER)
        content = secret.open(_MEETING, path.read_text()) if path.is_file() else None
        # A file that a lost leader has left names another owner.
        if content is not None and owner is not None and content["owner"] == owner.process and not owner.ended:
            try:
                return TorchStoreRegistry.connect(content["address"], content["port"]), None
            except RegistryLostError as error:
                problem = str(error)
        try:
            if line := lock.acquire():
                log(line)
        except LaunchError as error:
            problem = str(error)
        else:
            store, port = serve_store(facts.address)
            return TorchStoreRegistry(store), port
        if time.monotonic() > deadline:
            raise RegistryLostError(f"this host finds no other by the folder {lock.folder}. {problem}")
        time.sleep(_PAUSE_SECONDS)
