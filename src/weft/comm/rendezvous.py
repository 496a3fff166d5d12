"""The rendezvous of a new group's ranks: who has come, what each has to say, who is missing or dead; by a store alone.

Gloo and the stores of torch wait for a rank that never comes as long as they are told to, and then name nobody.  Here
every rank says which process it is as soon as it has come, and whoever waits looks at the others' processes from time
to time; who gives up leaves a note, so that a rank that comes later need not wait for those that have gone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from weft.comm._failure import ErrorCode, Failure, name_of
from weft.comm._process import Process
from weft.errors import CollectiveError

T = TypeVar("T")

_LOOK_SECONDS = 0.1
_DYING_SECONDS = 0.3
_FIRST_NAP, _LONGEST_NAP = 0.5e-3, 10e-3
_GIVEN_UP = "given-up"
_HERE = "here"


def rendezvous(
    store: dist.Store, *, rank: int, num_ranks: int, seconds: float, earlier: dist.Store | None = None
) -> None:
    """Wait at `store`, which nobody has used before, until all ranks have come.  Call on each of them.

    `earlier` is the store of these ranks' rendezvous before, if there was one: who has ended since is then seen at
    once.

    Raises:
        CollectiveError: a rank did not come in time, or is dead; it is named.
    """
    ranks = range(num_ranks)
    processes = _processes_that_came(earlier, ranks) if earlier is not None else {}
    Rendezvous(store, rank=rank, ranks=ranks, seconds=seconds, processes=processes).begin()


def _processes_that_came(store: dist.Store, positions: Iterable[int]) -> dict[int, Process]:
    """Return who has come to a rendezvous at `store` so far, by position.  Waits for nobody."""
    came = [position for position in positions if store.check([f"{_HERE}/{position}"])]
    return {position: Process.read(store.get(f"{_HERE}/{position}").decode()) for position in came}


class Rendezvous:
    """This rank's side; it stands at position `rank` of `ranks`.  All of these must make the same calls in the same
    order.

    `processes` are those of ranks that this one knows from another group, by their position in `ranks`; after `begin`
    it holds all others.  Every method that waits raises `CollectiveError`, naming the rank, when one dies (within a
    second, where it is of this host), when somebody has given up, and `seconds` after this object was made.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        processes: Mapping[int, Process],
    ) -> None:
        self._store = store
        self.rank = rank
        self.ranks = tuple(ranks)
        self._seconds = seconds
        self._limit = time.monotonic() + seconds
        self._next_look = 0.0
        self.processes = {position: process for position, process in processes.items() if position != rank}

    def begin(self) -> None:
        """Say that this rank has come, and wait for the others."""
        for position, description in enumerate(self.gather(_HERE, Process.own().describe())):
            if position != self.rank:
                self.processes[position] = Process.read(description)

    def say(self, what: str, value: str) -> None:
        """Say `what` to whoever asks for it."""
        self._store.set(f"{what}/{self.rank}", value)

    def hear(self, what: str, position: int) -> str:
        """Return what a rank has said, waiting until it has."""
        self._wait_for(what, [position])
        return self._store.get(f"{what}/{position}").decode()

    def gather(self, what: str, value: str) -> list[str]:
        """Say `value`, and return what each rank has said, in their order."""
        self.say(what, value)
        self._wait_for(what, range(len(self.ranks)))
        return [self._store.get(f"{what}/{position}").decode() for position in range(len(self.ranks))]

    def during(self, what: str, make: Callable[[], T]) -> T:
        """Return what `make` returns, in which all ranks wait for one another in a way of its own.

        Where it does not end, it is left to itself on a thread that ends with it (Gloo: at the store's timeout).
        """
        made: list[T] = []
        problems: list[Exception] = []

        def run() -> None:
            try:
                made.append(make())
            except Exception as problem:
                problems.append(problem)

        self.gather(f"{what}-begun", "")  # as many as possible are missed here, where they can be named
        thread = threading.Thread(target=run, name="weft-forming", daemon=True)
        thread.start()
        others = [position for position in range(len(self.ranks)) if position != self.rank]
        thread.join(_FIRST_NAP)
        while thread.is_alive():
            self._look(what, others, together=True)
            thread.join(_LONGEST_NAP)
        if problems:
            self._look_for_the_reason(what, others)
            raise problems[0]
        self.say(what, "")
        return made[0]

    def _look_for_the_reason(self, what: str, missing: Sequence[int]) -> None:
        """A lost connection may be all that is seen of a death at first: its sockets close before a process is gone."""
        limit = time.monotonic() + _DYING_SECONDS
        while time.monotonic() < limit:
            self._next_look = 0.0
            self._look(what, missing, together=True)
            time.sleep(_LONGEST_NAP)

    def give_up(self, failure: Failure) -> None:
        """Leave the note, if nobody has."""
        if not self._store.check([_GIVEN_UP]):
            self._store.set(_GIVEN_UP, json.dumps([failure.code, failure.culprit, failure.reporter]))

    def _wait_for(self, what: str, positions: Sequence[int]) -> None:
        missing, nap = self._silent(what, positions), _FIRST_NAP
        while missing:
            self._look(what, missing)
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_NAP)
            missing = self._silent(what, missing)
        self._heed_note()  # those who have said so may have gone since

    def _silent(self, what: str, positions: Sequence[int]) -> list[int]:
        return [position for position in positions if not self._has(f"{what}/{position}")]

    def _has(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except dist.DistError as problem:
            # The store lives in a rank's process, mostly the first's, and goes with it.
            time.sleep(_DYING_SECONDS)
            for position, process in self.processes.items():
                if process.is_dead():
                    raise self._error(Failure(ErrorCode.DIED, position, self.rank)) from problem
            raise

    def _look(self, what: str, missing: Sequence[int], *, together: bool = False) -> None:
        """Raise when `missing` need not be waited for any longer; `together`: they may wait for this rank, too."""
        moment = time.monotonic()
        if moment < min(self._next_look, self._limit):
            return
        self._next_look = moment + _LOOK_SECONDS
        self._heed_note()
        for position in missing:
            process = self.processes.get(position)
            # It may have said so, and ended, between two looks.
            if process is not None and process.is_dead() and self._silent(what, [position]):
                self._fail(ErrorCode.DIED, position)
        if moment >= self._limit:
            self._fail(ErrorCode.DEADLINE, self._stopped(missing) if together else missing[0])

    def _heed_note(self) -> None:
        if self._has(_GIVEN_UP):
            code, culprit, reporter = json.loads(self._store.get(_GIVEN_UP))
            raise self._error(Failure(ErrorCode(code), culprit, reporter))

    def _stopped(self, missing: Sequence[int]) -> int:
        """The first that a signal holds; -1 where there is none."""
        known = [position for position in missing if position in self.processes]
        return next((position for position in known if self.processes[position].is_stopped()), -1)

    def _fail(self, code: ErrorCode, culprit: int) -> None:
        failure = Failure(code, culprit, self.rank)
        self.give_up(failure)
        raise self._error(failure)

    def _error(self, failure: Failure) -> Exception:
        return _explain(failure, self.ranks, self.rank, self._seconds)


def _explain(failure: Failure, ranks: Sequence[int], here: int, seconds: float) -> CollectiveError:
    """Return the error for a group of `ranks` (global ranks) that was not formed; `here` is this one's position."""
    what = f"The group of ranks {', '.join(map(str, ranks))}"
    who = name_of(failure.culprit, ranks)
    reporter = "" if failure.reporter == here else f" ({name_of(failure.reporter, ranks)} says so and has given up)"
    match failure.code:
        case ErrorCode.DIED:
            text = (
                f"{what} cannot be formed: the process of {who} has died{reporter}. Form it again with another in its"
                " place, or without it."
            )
        case ErrorCode.DEADLINE:
            text = (
                f"{what} timed out: it was not formed in {seconds:g} s: {who} has not come{reporter}. It may be"
                " stopped, busy, or forming its groups in another order. If it was only slow, give its groups a longer"
                " timeout (compute.collective_timeout_seconds in the plan)."
            )
        case _:
            text = f"{what} cannot be formed: {name_of(failure.reporter, ranks)} has given up, for a reason of its own."
    return CollectiveError(text, status=1)
