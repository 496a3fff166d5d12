"""Sends and receives of a shared-memory group: the messages under way, and the works that torch is given for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.futures import Future

from weft.comm._untraced import untraced
from weft.comm._watch import Seen
from weft.comm.shared_memory._call import GroupFailed, Mail, Message
from weft.comm.shared_memory._failure import explain
from weft.comm.shared_memory._tensors import contiguous, region
from weft.comm.shared_memory._work import Completer, WorkUnderWay
from weft.errors import CollectiveError

_MANY = 32
"""Messages under way before it is looked which of them are done."""
_TAGS = 1 << 32


class Post:
    """What one rank sends to others and receives from them, over memory that they share.  `seconds` is how long a wait
    waits that says nothing else."""

    def __init__(self, mail: Mail, ranks: Sequence[int], seconds: float) -> None:
        self.mail = mail
        self.seconds = seconds
        self._ranks = ranks
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[weakref.ref[MessageWork], Tensor]] = {}
        """What a message is read from or written to, by number: somebody must keep it, also where nobody waits."""
        self._completer: Completer | None = None

    def send(self, tensors: list[Tensor], target: int, tag: int, seen: Seen | None) -> MessageWork:
        """Begin to send a tensor's elements, in the order of their indices."""
        return self._begin(tensors, target, tag, seen, is_sent=True)

    def receive(self, tensors: list[Tensor], source: int, tag: int, seen: Seen | None) -> MessageWork:
        """Begin to fill a tensor; a `source` of -1 is any rank."""
        return self._begin(tensors, source, tag, seen, is_sent=False)

    def _begin(self, tensors: list[Tensor], peer: int, tag: int, seen: Seen | None, *, is_sent: bool) -> MessageWork:
        (tensor,) = tensors
        if not -1 <= peer < len(self._ranks) or not 0 <= tag < _TAGS:
            raise CollectiveError(
                f"a message to or from position {peer} with tag {tag}: positions go from 0 to {len(self._ranks) - 1},"
                f" tags from 0 to {_TAGS - 1}."
            )
        if len(self._under_way) > _MANY:
            self._let_go()  # of works that nobody waits for
        flat, _ = contiguous(tensor)
        address, size = region(flat)
        message = Message(is_sent, peer, tag, size)
        begin = self.mail.send if is_sent else self.mail.receive
        try:
            number = begin(peer, tag, address, size)
        except GroupFailed as failed:
            raise explain(failed.failure, message, self._ranks, self.seconds) from None
        work = MessageWork(self, number, message, tensor, flat, seen)
        with self._lock:
            self._under_way[number] = weakref.ref(work), flat
        return work

    def finish(self, number: int, message: Message, seconds: float) -> tuple[int, int]:
        """Wait for a message; return the position of the rank that sent it, and when it was done (0: not known).

        Raises:
            CollectiveError: it could not be sent or received.
        """
        try:
            delivery = self.mail.wait(number, seconds)
        except GroupFailed as failed:
            raise explain(failed.failure, message, self._ranks, seconds) from None
        finally:  # of a group that has failed the tensors are not touched any more
            with self._lock:
                self._under_way.pop(number, None)
        return delivery.source, delivery.done_ns

    def has_done(self, number: int) -> bool:
        try:
            return self.mail.is_done(number)
        except GroupFailed:
            return True

    def complete_later(self, work: MessageWork, future: Future[Any]) -> bool:
        if self._completer is None:
            self._completer = Completer()
        return self._completer.add(work, future)

    def close(self) -> None:
        """The group has been left: nothing is read or written any more."""
        completer, self._completer = self._completer, None
        if completer is not None:
            completer.close()
        with self._lock:
            self._under_way.clear()

    def _let_go(self) -> None:
        with self._lock:
            forgotten = [number for number, (work, _) in self._under_way.items() if work() is None]
            for number in forgotten:
                if self.has_done(number):
                    del self._under_way[number]
                    self.mail.forget(number)


@untraced
class MessageWork(WorkUnderWay):
    """A message under way.  `wait` raises `CollectiveError` where it could not be sent or received."""

    def __init__(
        self,
        post: Post,
        number: int,
        message: Message,
        tensor: Tensor,
        flat: Tensor,
        seen: Seen | None,
    ) -> None:
        super().__init__([tensor], seen)
        self._post: Post | None = post  # None: there is nothing to wait for any more
        self._number = number
        self._message = message
        self._flat = flat
        self._source = message.peer

    def _wait(self, timeout: timedelta | None = None) -> bool:
        with self._waiting:  # a second thread waits for the first one
            post = self._post
            if post is not None:
                self._finish(post, timeout.total_seconds() if timeout else post.seconds)
        if self._error is not None:
            raise self._error
        return True

    def _finish(self, post: Post, seconds: float) -> None:
        try:
            self._source, done_ns = post.finish(self._number, self._message, seconds)
        except CollectiveError as error:
            # Not `error` itself: its traceback and context hold the group, and torch's futures hold on to errors.
            self._error, self._post = CollectiveError(str(error), status=error.status), None
            return
        if self._seen is not None and done_ns:
            self._seen.done(done_ns)
        if not self._message.is_sent and self._flat is not self._tensors[0]:
            self._tensors[0].copy_(self._flat)
        self._post = None

    def _is_over(self) -> bool:
        return self._post is None

    def _has_done(self) -> bool:
        post = self._post
        return post is None or post.has_done(self._number)

    def _complete_later(self, future: Future[Any]) -> bool:
        post = self._post
        return post is not None and post.complete_later(self, future)

    def _source_rank(self) -> int:  # `dist.recv` asks for it by this name
        return self._source
