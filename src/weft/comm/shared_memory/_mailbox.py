"""Messages between two ranks of a shared-memory group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.comm.shared_memory._call import GroupFailed, Message
from weft.comm.shared_memory._failure import explain
from weft.comm.shared_memory._tensors import contiguous, region
from weft.comm.shared_memory._work import Completer, SharedMemoryWork
from weft.comm.shared_memory.engine import Engine
from weft.comm.trace_event import TraceEvent
from weft.errors import CollectiveError

_MANY = 32
"""Messages under way before it is looked which of them are done."""
_TAGS = 1 << 32


class Mailbox:
    """What one rank sends to others and receives from them, over memory that they share.  `seconds` is how long a wait
    waits that says nothing else."""

    def __init__(self, engine: Engine, ranks: Sequence[int], seconds: float) -> None:
        self.engine = engine
        self.seconds = seconds
        self.ranks = ranks
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[weakref.ref[SharedMemoryWork], Tensor]] = {}
        """Message number → tensors that it reads or writes, which must be kept even if nobody waits."""
        self.completer = Completer()
        """Apart from that of the collectives: messages end in any order, and one that is waited for holds up others."""

    def send(self, tensors: list[Tensor], target: int, tag: int, seen: TraceEvent | None) -> SharedMemoryWork:
        """Begin to send a tensor's elements, in the order of their indices."""
        return self._begin(tensors, target, tag, seen, is_sent=True)

    def receive(self, tensors: list[Tensor], source: int, tag: int, seen: TraceEvent | None) -> SharedMemoryWork:
        """Begin to fill a tensor; a `source` of -1 is any rank."""
        return self._begin(tensors, source, tag, seen, is_sent=False)

    def _begin(
        self, tensors: list[Tensor], peer: int, tag: int, seen: TraceEvent | None, *, is_sent: bool
    ) -> SharedMemoryWork:
        (tensor,) = tensors
        if not -1 <= peer < len(self.ranks) or not 0 <= tag < _TAGS:
            raise CollectiveError(
                f"a message to or from position {peer} with tag {tag}: positions go from 0 to {len(self.ranks) - 1},"
                f" tags from 0 to {_TAGS - 1}."
            )
        if len(self._under_way) > _MANY:
            self._let_go()  # of works that nobody waits for
        flat, _ = contiguous(tensor)
        address, size = region(flat)
        message = Message(is_sent, peer, tag, size)
        begin = self.engine.send if is_sent else self.engine.receive
        try:
            number = begin(peer, tag, address, size)
        except GroupFailed as failed:
            raise explain(failed.failure, message, self.ranks, self.seconds) from None
        work = SharedMemoryWork([tensor], _MessageUnderWay(self, number, message, tensor, flat), seen)
        with self._lock:
            self._under_way[number] = weakref.ref(work), flat
        return work

    def close(self) -> None:
        """The group has been left: nothing is read or written any more."""
        self.completer.close()
        with self._lock:
            self._under_way.clear()

    def _let_go(self) -> None:
        with self._lock:
            forgotten = [number for number, (work, _) in self._under_way.items() if work() is None]
            for number in forgotten:
                if is_done(self.engine, number):
                    del self._under_way[number]
                    self.engine.forget_message(number)

    def forget(self, number: int) -> None:
        """Let go of what a message was read from or written to."""
        with self._lock:
            self._under_way.pop(number, None)


def is_done(engine: Engine, number: int) -> bool:
    """Whether a wait for a message would return, or raise, at once."""
    try:
        return engine.is_message_done(number)
    except GroupFailed:
        return True


@dataclass(frozen=True, slots=True)
class _MessageUnderWay:
    """A message that has begun; see `UnderWay`."""

    mailbox: Mailbox
    number: int
    message: Message
    tensor: Tensor
    flat: Tensor
    """The tensor that is read or written, or a contiguous copy of it."""

    @property
    def seconds(self) -> float:
        return self.mailbox.seconds

    @property
    def completer(self) -> Completer:
        return self.mailbox.completer

    def finish(self, seconds: float) -> tuple[int, int]:
        mailbox = self.mailbox
        try:
            source, done_ns = mailbox.engine.wait_for_message(self.number, seconds)
        except GroupFailed as failed:
            raise explain(failed.failure, self.message, mailbox.ranks, seconds) from None
        finally:  # of a group that has failed the tensors are not touched any more
            mailbox.forget(self.number)
        if not self.message.is_sent and self.flat is not self.tensor:
            self.tensor.copy_(self.flat)
        return source, done_ns

    def has_done(self) -> bool:
        return is_done(self.mailbox.engine, self.number)
