"""What ranks do in the tests of failures: a victim that is killed, stopped or late at some moment, and survivors."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pool
import torch
import torch.distributed as dist
from shared_memory_jobs import traces

from weft.comm.rendezvous import Rendezvous
from weft.comm.shared_memory import register_shared_memory_backend, shared_memory_group
from weft.comm.shared_memory._handshake import Handshake
from weft.comm.shared_memory.engine import Engine, Manner
from weft.comm.shared_memory.group import SharedMemoryGroup
from weft.errors import CollectiveError

VICTIM = 1
DEADLINE_SECONDS = 0.6
PAUSE_SECONDS = 1.5
LONG = timedelta(seconds=20)
FORMING = {
    "before it comes": None,
    "once it has come": (Rendezvous, "during"),
    "before it has mapped": (Handshake, "_segment"),
    "once it has mapped": (Handshake, "_reasons"),
    "before it opens": (Handshake, "_open"),
}
"""Phase of a group's forming → the method at whose beginning the victim halts."""


@dataclass(slots=True)
class Told:
    """What one rank has seen."""

    text: str = ""
    """Of its error."""
    seconds: float = 0.0
    """From the victim's deed (killed), or from the survivor's call, to the error."""
    closing_seconds: float = 0.0
    left: str = ""
    """What the group has left behind in this process."""
    rebuilt_seconds: float = 0.0
    """From the victim's death to the first sum of a group of those that are left."""


def tell(folder: str, told: Told) -> None:
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(asdict(told)))


def heard(folder: Path, rank: int) -> Told:
    return Told(**json.loads((folder / f"rank{rank}.json").read_text()))


# ── the victim ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Deed:
    """What happens to the victim."""

    kind: str
    """`killed`, `stopped` or `late`."""
    folder: str
    pause_seconds: float = PAUSE_SECONDS

    def __call__(self) -> None:
        """Of the thread that calls: `late` lets the process's others go on."""
        self._note()
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stopped":
            stop_for(self.pause_seconds)
        else:
            time.sleep(self.pause_seconds)

    def _note(self) -> None:
        (Path(self.folder) / "when").write_text(repr(time.time()))

    def slowly(self) -> Callable[[], None]:
        """`late` in a call of C++, whose thread cannot be told to sleep: the process runs a tenth of the time.

        Returns the deed.  Who will wake this process waits for it already: a shell that had to be started first would
        find the call done.
        """
        if self.kind != "late":
            return self
        mine = os.getpid()
        script = f"until grep -q 'State:.T' /proc/{mine}/status; do sleep 0.005; done;"
        script += f" for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do kill -STOP {mine}; sleep 0.1;"
        script += f" kill -CONT {mine}; sleep 0.01; done"
        waker = subprocess.Popen(["sh", "-c", script])

        def deed() -> None:
            self._note()
            os.kill(mine, signal.SIGSTOP)
            waker.wait()

        return deed


def stop_for(seconds: float) -> None:
    """Stop this whole process, at this very moment."""
    waker = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


@contextlib.contextmanager
def halting(owner: Any, name: str, deed: Callable[[], None], *, nth: int = 1, after: bool = False) -> Iterator[None]:
    """Do the deed when `owner.name` is called for the nth time, before or after what it does."""
    original, calls = getattr(owner, name), 0

    def halted(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            deed()
        result = original(*args, **keywords)
        if calls == nth and after:
            deed()
        return result

    setattr(owner, name, halted)
    try:
        yield
    finally:
        setattr(owner, name, original)


def own_turn(group: SharedMemoryGroup) -> int:
    """The word in which this rank counts its turns, in the page that it has in the segment."""
    engine: Any = group.engine
    memory = engine._segment.memory
    at = 4096 * (1 + dist.get_rank())
    return int.from_bytes(memory[at : at + 4], "little")


@contextlib.contextmanager
def watching(
    group: SharedMemoryGroup, turns: int, deed: Callable[[], None], *, waiting: bool = False
) -> Iterator[None]:
    """Do the deed on a thread as soon as this rank has taken `turns` more; `waiting`: once it stands still after that,
    because another has not."""
    start = own_turn(group)
    gone = threading.Event()

    def watch() -> None:
        seen, since = -1, 0.0
        while not gone.is_set():
            turn = own_turn(group)
            if turn != seen:
                seen, since = turn, time.monotonic()
            if (turn - start) & 0xFFFFFFFF >= turns and (not waiting or time.monotonic() - since > 0.1):
                deed()
                return
            time.sleep(0.0002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        gone.set()
        watcher.join()


# ── the survivors ─────────────────────────────────────────────────────────────────────────────────────────────────────


def seen_here() -> dict[str, Any]:
    return {**traces(), "ports": len(pool.listening_ports({os.getpid()}))}


def settle(before: dict[str, Any], seconds: float) -> str:
    """What is more than before, once what ends by itself has had `seconds` to do so."""
    limit = time.monotonic() + seconds
    while True:
        gc.collect()
        after = seen_here()
        more = {name: (before[name], after[name]) for name in before if after[name] > before[name]}
        if not more or time.monotonic() > limit:
            return str(more) if more else ""
        time.sleep(0.05)


def since_deed(folder: str) -> float:
    return time.time() - float((Path(folder) / "when").read_text())


def failing(folder: str, deed: Deed, call: Callable[[], Any]) -> Told:
    """Make the call, which must fail, and return what was said."""
    start = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        told = Told(str(error), time.monotonic() - start)
        if deed.kind == "killed":
            told.seconds = since_deed(folder)
        return told
    return Told("nothing was said")


def form(timeout: timedelta, *, engine: bool = True, ranks: list[int] | None = None) -> SharedMemoryGroup:
    register_shared_memory_backend(use_engine=engine)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Gloo
            made = shared_memory_group(dist.new_group(ranks, timeout=timeout))
    finally:
        register_shared_memory_backend()
    assert made is not None
    return made


def rebuild(folder: str) -> float:
    """Survivors go on without the victim; seconds from its death to the first all-reduce without it."""
    others = [rank for rank in range(dist.get_world_size()) if rank != VICTIM]
    value, group = torch.ones(3), form(LONG, ranks=others)
    dist.all_reduce(value, group=group)
    seconds = since_deed(folder)
    assert value[0].item() == len(others)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return seconds


def warmed_up() -> dict[str, Any]:
    """What is here once a first group has come and gone: Gloo opens some things late."""
    one = form(LONG)
    dist.all_reduce(torch.ones(3), group=one)
    dist.barrier()
    dist.destroy_process_group(one)
    del one
    gc.collect()
    return seen_here()


def form_with_a_victim(folder: str, phase: str, kind: str, engine: bool) -> None:
    """The whole life of a rank in which a group is not formed."""
    deed = Deed(kind, folder)
    before = warmed_up()
    dist.barrier()
    timeout = timedelta(seconds=1.5 if kind == "killed" else DEADLINE_SECONDS)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == VICTIM:
            place = FORMING[phase]
            if place is None:
                deed()
            else:
                stack.enter_context(halting(*place, deed))
        told = failing(folder, deed, lambda: form(timeout, engine=engine))
    if kind == "killed":
        told.rebuilt_seconds = rebuild(folder)
    told.left = settle(before, timeout.total_seconds())
    tell(folder, told)


def call_with_a_victim(folder: str, phase: str, kind: str, operation: str) -> None:
    """The whole life of a rank in which a collective is not finished."""
    deed = Deed(kind, folder, PAUSE_SECONDS + (0.5 if phase in ("between phases", "end") else 0.0))
    before = warmed_up()
    group = form(LONG)
    group.engine.set_manner(Manner(4096, False))  # so small a slot makes many turns
    call = operation_of(operation, group)
    dist.barrier()
    if kind != "killed" and dist.get_rank() != VICTIM:
        more = 0.6 if phase == "between phases" else 0.0
        group.set_timeout(timedelta(seconds=DEADLINE_SECONDS + more))
    told = PHASES[phase](folder, deed, group, call)
    start = time.monotonic()
    dist.destroy_process_group(group)
    told.closing_seconds = time.monotonic() - start
    del group, call
    if kind == "killed":
        told.rebuilt_seconds = rebuild(folder)
    told.left = settle(before, 2.0)
    tell(folder, told)


def operation_of(name: str, group: SharedMemoryGroup) -> Callable[[], Any]:
    """A large collective, of more than a thousand turns where it is staged."""
    world, count = dist.get_world_size(), 3 << 20
    flat = torch.ones(count)
    parts = list(flat.chunk(world))
    if name == "all_reduce in place":
        shared = group.allocate(2 * count)
        return lambda: dist.all_reduce(shared.fill_(1.0), group=group)
    if name == "all_reduce":
        return lambda: dist.all_reduce(flat, group=group)
    if name == "asynchronous all_reduce":
        return lambda: dist.all_reduce(flat, group=group, async_op=True).wait()
    if name == "reduce_scatter":
        return lambda: group.reduce_scatter_regions(parts, parts[dist.get_rank()]).wait()
    if name == "all_gather":
        return lambda: group.all_gather_regions(parts[dist.get_rank()], parts).wait()
    output = torch.empty(count)
    return lambda: dist.all_to_all_single(output, flat, group=group)


def _at_entry(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any]) -> Told:
    if dist.get_rank() == VICTIM:
        deed()
    return failing(folder, deed, call)


def _in_the_middle(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any]) -> Told:
    if dist.get_rank() != VICTIM:
        return failing(folder, deed, call)
    with watching(group, 20, deed.slowly()):
        return failing(folder, deed, call)


def _while_summing(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any]) -> Told:
    """In place there is one turn before the sum, and one after it.

    The sum takes a few milliseconds, in which a busy machine may not let the watching thread run at all: the call is
    made again until the deed is done, so that it falls into one of them or between two.
    """

    def again() -> None:
        while True:
            call()

    if dist.get_rank() != VICTIM:
        return failing(folder, deed, again)
    with watching(group, 1, deed.slowly()):
        return failing(folder, deed, again if deed.kind == "killed" else call)


def _between_phases(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any]) -> Told:
    """Another rank holds everybody up for a while in the middle of the call: the victim waits for its turn."""
    if dist.get_rank() == 0:
        with watching(group, 20, lambda: stop_for(0.5)):
            return failing(folder, deed, call)
    return _waiting(folder, deed, group, call, turns=20)


def _waiting(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any], turns: int) -> Told:
    if dist.get_rank() != VICTIM:
        return failing(folder, deed, call)
    with watching(group, turns, deed, waiting=True):
        return failing(folder, deed, call)


def _at_the_end(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any]) -> Told:
    """The victim has given all that the others need when it is hit: they finish this call, and fail in the next."""
    value = torch.ones(3)

    def end_and_call() -> None:
        with watching(group, 1, deed, waiting=True):
            dist.all_reduce(value, group=group)  # it may learn here already what the others found in the next
        call()

    if dist.get_rank() == VICTIM:
        return failing(folder, deed, end_and_call)
    if dist.get_rank() == 0:
        time.sleep(0.3)
    dist.all_reduce(value, group=group)
    assert value[0].item() == dist.get_world_size(), "what had been given was not summed"
    return failing(folder, deed, call)


def _before_it_leaves(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any]) -> Told:
    if dist.get_rank() != VICTIM:
        return failing(folder, deed, call)
    with halting(Engine, "leave", deed):
        group.engine.close()
    return Told("left")


def _once_it_has_left(folder: str, deed: Deed, group: SharedMemoryGroup, call: Callable[[], Any]) -> Told:
    if dist.get_rank() != VICTIM:
        return failing(folder, deed, call)
    with halting(Engine, "leave", deed, after=True):
        group.engine.close()
    return Told("left")


PHASES = {
    "entry": _at_entry,
    "middle": _in_the_middle,
    "summing": _while_summing,
    "between phases": _between_phases,
    "end": _at_the_end,
    "before it leaves": _before_it_leaves,
    "once it has left": _once_it_has_left,
}
"""Phase of a call, or of a group's end → what a rank does."""


def pause_within_the_deadline(turns: int) -> float:
    """A rank that is stopped for a moment, in the middle or at the end, is waited for."""
    group = form(LONG)
    group.engine.set_manner(Manner(4096, False))
    value = torch.ones(3 << 20)
    pauses = watching(group, turns, lambda: stop_for(0.4)) if dist.get_rank() == VICTIM else contextlib.nullcontext()
    with pauses:
        dist.all_reduce(value, group=group)
    found = value.unique()
    dist.destroy_process_group(group)
    assert len(found) == 1
    return found.item()
