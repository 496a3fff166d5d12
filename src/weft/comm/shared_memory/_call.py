"""One rank's part in a collective, by addresses: what the transports of this package carry out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch


class Kind(IntEnum):
    """As the engine numbers them."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    BARRIER = 4

    @property
    def title(self) -> str:
        return self.name.lower().replace("_", "-")


class Trouble(IntEnum):
    """What can go wrong with a group, as the engine numbers it."""

    NONE = 0
    DIED = 1
    DEADLINE = 2
    ABORTED = 3
    MISMATCH = 4
    LEFT = 5
    CLOSED = 6


DTYPES: Mapping[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 9,
    torch.uint16: 10,
    torch.uint32: 11,
    torch.uint64: 12,
}
"""Those that can be reduced, as the engine numbers them; the others can only be moved."""
OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""Operations in torch's order."""

Region = tuple[int, int]
"""Address and bytes."""


@dataclass(frozen=True, slots=True)
class Call:
    """What this rank gives and takes.  `send` and `receive` have one region per rank of the group."""

    kind: Kind
    dtype: int = 8
    op: int = 0
    input: int = 0
    """Address of an all-reduce's tensor, or of what this rank gives to an all-gather."""
    output: int = 0
    """Address of an all-reduce's result (may be `input`), or of this rank's part of a reduce-scatter's."""
    num_bytes: int = 0
    """Bytes of an all-reduce's tensor."""
    send: Sequence[Region] = ()
    """Reduce-scatter: what each rank owns; all-to-all: what each rank gets."""
    receive: Sequence[Region] = ()
    """All-gather and all-to-all: what comes from each rank."""

    @property
    def size_bytes(self) -> int:
        """The larger of what goes in and what comes out."""
        return max(self.num_bytes, sum(size for _, size in self.send), sum(size for _, size in self.receive))


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends or receives."""

    is_sent: bool
    peer: int
    """Position in the group of the other rank; -1 for a message from whoever sends one."""
    tag: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a group.  Ranks are those of the group, -1 where nobody is meant."""

    trouble: Trouble
    culprit: int = -1
    reporter: int = -1
    detail: str = ""


class GroupFailed(Exception):
    """Inside this package: a call could not be carried out.  The process group makes a `CollectiveError` of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.trouble.name)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Delivery:
    """Of a message that is done."""

    source: int
    """Position in the group of the rank that sent it."""
    done_ns: int
    """End by the clock of `perf_counter_ns`; 0 where another thread had waited for it before."""


class Mail(Protocol):
    """Carries the messages of one rank, those to one other and of one tag in the order in which they were sent.

    A message is done when its memory can be used again: a sent one may still lie in the shared memory then.
    """

    def send(self, target: int, tag: int, address: int, num_bytes: int) -> int:
        """Begin to send, and return the message's number.

        Raises:
            GroupFailed: this rank has left the group.
        """
        ...

    def receive(self, source: int, tag: int, address: int, num_bytes: int) -> int:
        """Begin to receive from a rank, or (-1) from any, and return the message's number.

        Raises:
            GroupFailed: this rank has left the group.
        """
        ...

    def wait(self, number: int, patience_seconds: float) -> Delivery:
        """Return when the message is done, and forget it.

        Raises:
            GroupFailed: it could not be sent or received.
        """
        ...

    def is_done(self, number: int) -> bool:
        """Whether a wait would return, or raise, at once."""
        ...

    def forget(self, number: int) -> None:
        """Of a message that is done and that nobody will wait for."""
        ...


class Transport(Protocol):
    """Carries out the calls of one rank, one after another in the order of their submission."""

    name: str
    has_arena: bool
    """Whether it has memory for tensors that need no staging."""

    @property
    def mail(self) -> Mail | None:
        """What carries messages between two ranks; None where this transport does not."""
        ...

    def submit(self, call: Call, patience_seconds: float, *, background: bool) -> int:
        """Put a call in the queue and return its number; `background`: begin although nobody waits for it yet."""
        ...

    def wait(self, ticket: int, patience_seconds: float) -> None:
        """Return when the call is done.

        Raises:
            GroupFailed: it, or a call before it, could not be carried out.
        """
        ...

    def all_reduce(self, address: int, num_bytes: int, dtype: int, op: int, patience_seconds: float) -> None:
        """An all-reduce in place that the caller waits for: the same as `submit` and `wait`, with less ado."""
        ...

    def completed(self) -> int:
        """The number up to which calls are done, in whatever way."""
        ...

    def done_ns(self, ticket: int) -> int:
        """When a call was done, by the clock of `perf_counter_ns`; 0 where it is not, or too long ago to be known."""
        ...

    def supports(self, dtype: int, op: int) -> bool:
        """Whether the reduction is defined: bitwise ones are not for floats, averages not for truth values."""
        ...

    def allocate(self, num_bytes: int) -> memoryview | None:
        """Memory that the other ranks of the group can reach; None where there is no more.

        Raises:
            GroupFailed: this rank has left the group.
        """
        ...

    def abort(self) -> None:
        """Release every rank that waits in this group, with an error; the group cannot be used afterwards."""
        ...

    def leave(self) -> None:
        """End the threads and fail what waits.  Twice is as good as once."""
        ...

    def close(self) -> None:
        """Leave, and let go of the memory.  Twice is as good as once."""
        ...
