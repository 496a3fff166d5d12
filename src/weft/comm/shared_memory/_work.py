"""A call that is under way, as torch sees it, and the futures that are made of it."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from weft.comm._untraced import untraced
from weft.comm._watch import Seen
from weft.comm.shared_memory._call import Call
from weft.comm.shared_memory._future import of_tensors
from weft.comm.shared_memory._tensors import CopyBack
from weft.errors import CollectiveError

if TYPE_CHECKING:
    from weft.comm.shared_memory._group import SharedMemoryGroup


@untraced
class WorkUnderWay(dist.Work):
    """What torch is given of something that goes on over shared memory; its end may be waited for more than once."""

    def __init__(self, tensors: list[Tensor], seen: Seen | None) -> None:
        super().__init__()
        self._tensors = tensors
        self._seen = seen
        self._error: CollectiveError | None = None
        self._waiting = threading.Lock()

    def _is_over(self) -> bool:
        """Whether somebody has waited for it to the end."""
        raise NotImplementedError

    def _has_done(self) -> bool:
        """Whether a wait would return, or raise, at once."""
        raise NotImplementedError

    def _wait(self, timeout: timedelta | None = None) -> bool:
        """Wait without being seen to; raise what went wrong, each time."""
        raise NotImplementedError

    def _complete_later(self, future: Future[Any]) -> bool:
        """Let a thread complete a future; False where this one has to."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        seen = None if self._is_over() else self._seen
        if seen is None:
            return self._wait(timeout)
        entered = seen.enter_wait()
        try:
            return self._wait(timeout)
        finally:
            seen.exit_wait(entered)

    def is_completed(self) -> bool:
        return self._is_over() or self._has_done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> CollectiveError | None:
        if self.is_completed() and not self._is_over():
            try:
                self.wait()
            except CollectiveError as error:
                return error
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """A future that is completed when this is, by a thread that waits for such futures.

        What is chained to it runs on that thread.  If it calls collectives in turn, ranks may do so in different
        orders: the call after it then fails on all of them with the error of different calls (Gloo would take what
        comes).
        """
        future: Future[Any] = Future()
        if self._is_over() or not self._complete_later(future):
            self.complete(future)
        is_half = len(self._tensors) == 1 and self._tensors[0].dtype is torch.float16
        return of_tensors(future) if is_half else future  # DDP's own hook for fp16 asserts that

    def complete(self, future: Future[Any]) -> None:
        """Wait, and give the future its value or its error."""
        try:
            self._wait()  # nobody computes less for it: it is not seen as a wait
        except CollectiveError:
            future.set_exception(self._error)  # pyright: ignore[reportArgumentType]  # torch's stub: a generic T
        except Exception as error:  # of copying back; the thread must live for the futures that follow
            future.set_exception(error)  # pyright: ignore[reportArgumentType]
        else:
            future.set_result(self._tensors)


@untraced
class SharedMemoryWork(WorkUnderWay):
    """A call under way.  `wait` raises `CollectiveError` where it could not be carried out."""

    def __init__(
        self,
        group: SharedMemoryGroup | None,
        ticket: int,
        call: Call | None,
        tensors: list[Tensor],
        copy_back: CopyBack,
        seen: Seen | None,
    ) -> None:
        super().__init__(tensors, seen)
        self._group = group  # None: there is nothing to wait for any more
        self._ticket = ticket
        self._call = call
        self._copy_back = copy_back

    def _wait(self, timeout: timedelta | None = None) -> bool:
        group = self._group
        if group is not None:
            seconds = timeout.total_seconds() if timeout else group.seconds
            try:
                group.finish(self._ticket, self._call, seconds)
            except CollectiveError as error:
                # Not `error` itself: its traceback and context hold the group, and torch's futures hold on to errors.
                self._error, self._group = CollectiveError(str(error), status=error.status), None
                raise
            finally:
                if self._seen is not None and (done_ns := group.done_ns(self._ticket)):
                    self._seen.done(done_ns)
            with self._waiting:
                if self._group is not None:  # else another thread that waited has done so, and the caller goes on
                    for target, source in self._copy_back:
                        target.copy_(source)
                    self._group = None
        if self._error is not None:
            raise self._error
        return True

    def _is_over(self) -> bool:
        return self._group is None

    def _has_done(self) -> bool:
        group = self._group
        return group is None or group.has_done(self._ticket)

    def _complete_later(self, future: Future[Any]) -> bool:
        group = self._group
        return group is not None and group.complete_later(self, future)


class Completer:
    """A thread that waits for works and completes their futures, in the order of the calls."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[WorkUnderWay, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._complete, name="weft-futures", daemon=True)
        self._thread.start()

    def add(self, work: WorkUnderWay, future: Future[Any]) -> bool:
        """False on the very thread that would complete it: what is chained to a future may wait for another."""
        if threading.current_thread() is self._thread:
            return False
        self._works.put((work, future))
        return True

    def close(self) -> None:
        self._works.put(None)
        self._thread.join()

    def _complete(self) -> None:
        while (item := self._works.get()) is not None:
            work, future = item
            work.complete(future)
            del item, work, future  # nothing is kept while waiting for the next
