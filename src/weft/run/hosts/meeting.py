"""How hosts find one another: at etcd, or at the host that owns the run's folder.

Without etcd the host that gets the folder's lock leads.  It serves a store, and writes into the folder where: the
others read it there.  When that host is lost, another takes the lock, and all meet again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.errors import LaunchError
from weft.events import RunFolder
from weft.events.folder_lock import FolderLock
from weft.files import write_whole
from weft.run.hosts.etcd import EtcdRegistry
from weft.run.hosts.membership import Membership
from weft.run.hosts.registry import BEAT_SECONDS, LEASE_SECONDS, Registry, RegistryLostError
from weft.run.hosts.roster import HostFacts
from weft.run.hosts.signed import JobSecret
from weft.run.hosts.torch_store import TorchStoreRegistry, serve_store

FOLDER = "folder"
"""`--rendezvous` of hosts that meet by the run's folder."""
_MEETING = "meeting.json"
_PAUSE_SECONDS = 0.2


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
        deadline = time.monotonic() + 2 * LEADER_SILENT_SECONDS
        while True:
            try:
                return self.lock.acquire(is_lost=self._is_of_a_lost_host if self.takes_over else None)
            except LaunchError:
                # A leader that was lost before its first generation is known by its silence alone.
                if time.monotonic() > deadline or self.membership.is_lost or self.membership.is_stopping:
                    raise
            time.sleep(_PAUSE_SECONDS)

    @property
    def may_lead(self) -> bool:
        """Whether this host can lead: at etcd any can, else the one that serves the store, and owns the folder."""
        return self.takes_over or self.lock.token is not None

    @property
    def still_leads(self) -> bool:
        """Whether this host still owns the run's folder and is there, so that it may say how the job ended."""
        try:
            self.lock.check()
        except LaunchError:
            return False
        return not self.membership.is_lost and self.membership.is_leader

    def _is_of_a_lost_host(self) -> bool:
        """Whether the folder's owner led this job's last generation and has lost its lease.  The leader of another job,
        of which this registry knows nothing, is not lost."""
        owner, view = RunFolder(self.lock.folder).owner, self.membership.view
        if owner is None or view.roster is None:
            return False
        token = view.roster.arguments.get("owner")
        led = isinstance(token, dict) and owner.process == "{machine} {pid} {started}".format(**token)
        return led and view.roster.seats[0].member not in view.members


LEADER_SILENT_SECONDS = LEASE_SECONDS
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
    is_stopping: Callable[[], bool],
    log: Callable[[str], object],
) -> Generator[Meeting]:
    """Join the other hosts of a job, and leave them at the end.

    Args:
        rendezvous: `folder`, or the address of etcd.
        seconds: time to find them.
        is_again: whether this host has met them before: what it asks for is right, and may come back.
        is_stopping: whether a signal has come: then this host waits no longer.
        log: says what this host waits for.

    Raises:
        RegistryLostError: they are not found.
        LaunchError: the run's folder is another run's.
    """
    with ExitStack() as stack:
        lock = stack.enter_context(FolderLock(folder, silent_seconds=LEADER_SILENT_SECONDS, beats=True))
        is_etcd = rendezvous != FOLDER
        deadline = time.monotonic() + seconds

        def find() -> _Place:
            if is_etcd:
                return _Place(EtcdRegistry(rendezvous, secret.job), "")
            lock.beat()  # between two tries of the host that owns the folder
            return _store_of_folder(lock, secret, facts, deadline, is_stopping, log)

        def join(place: _Place) -> Membership:
            own = secret.of_meeting(place.mark)
            return stack.enter_context(Membership(place.registry, own, facts, is_stopping=is_stopping))

        try:
            place, membership = _joined(find, join, deadline, is_stopping)
            if place.port:
                assert lock.token is not None
                # Only now that this host has joined: whoever joins first leads, and must own the folder.
                where = {"address": facts.address, "port": place.port, "mark": place.mark}
                where["owner"] = lock.token.owner.process
                _check_owned(lock)
                write_whole(folder / _MEETING, secret.sign(_MEETING, where))
            stack.enter_context(_beating(lock, membership))
        except RegistryLostError as error:
            if is_again:
                raise RegistryLostError(f"{error} This host has waited {seconds:.0f} s for it.", status=75) from None
            raise
        yield Meeting(membership=membership, lock=lock, takes_over=is_etcd)


def _check_owned(lock: FolderLock) -> None:
    """Raise `RegistryLostError` where the folder is another's by now: a host that was slow for long has lost it."""
    try:
        lock.check()
    except LaunchError as error:
        raise RegistryLostError(f"this host no longer owns {lock.folder}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where hosts meet."""

    registry: Registry
    mark: str
    """A mark of this meeting, by which its signatures differ from those of others."""
    port: int = 0
    """Port of the store that this host serves; 0: it serves none."""


@contextmanager
def _beating(lock: FolderLock, membership: Membership) -> Generator[None]:
    """Give signs of life of the owner of the folder, in a thread of its own: a slow file server must not keep the host
    from giving its own."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            if not membership.is_lost:
                lock.beat()

    thread = threading.Thread(target=beat, name="weft-folder-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LEASE_SECONDS)


def _joined(
    find: Callable[[], _Place], join: Callable[[_Place], Membership], deadline: float, is_stopping: Callable[[], bool]
) -> tuple[_Place, Membership]:
    """Join, as soon as the registry answers.  One that did not answer in time, as under load, is looked for again: a
    connection that has waited in vain once is of no use any more."""
    while True:
        place = find()
        try:
            return place, join(place)
        except RegistryLostError:
            place.registry.close()
            if time.monotonic() > deadline or is_stopping():
                raise
        # What was sent may still be carried out.  Then a second of this host stands in the list for so long.
        again = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < again and not is_stopping():
            time.sleep(_PAUSE_SECONDS)


def _store_of_folder(
    lock: FolderLock,
    secret: JobSecret,
    facts: HostFacts,
    deadline: float,
    is_stopping: Callable[[], bool],
    log: Callable[[str], object],
) -> _Place:
    """Serve the store, if this host gets the folder or has it; else connect to the one that does.  Nobody is told of a
    store before this host has joined, so that it may serve another when the first has not answered it."""
    path, problem = lock.folder / _MEETING, ""
    while True:
        owner = RunFolder(lock.folder).owner
        content = secret.open(_MEETING, path.read_text()) if path.is_file() else None
        # A file that a lost leader has left names another owner.
        if content is not None and owner is not None and content["owner"] == owner.process and not owner.ended:
            try:
                return _Place(TorchStoreRegistry.connect(content["address"], content["port"]), content["mark"])
            except RegistryLostError as error:
                problem = str(error)
        try:
            if line := lock.acquire():
                log(line)
        except LaunchError as error:
            problem = str(error)
        else:
            _check_owned(lock)
            store, port = serve_store(facts.address)
            return _Place(TorchStoreRegistry(store), os.urandom(8).hex(), port)
        if time.monotonic() > deadline or is_stopping():
            raise RegistryLostError(f"this host finds no other by the folder {lock.folder}. {problem}")
        time.sleep(_PAUSE_SECONDS)
