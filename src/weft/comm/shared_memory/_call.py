"""One rank's part in a collective, by addresses: what the engine carries out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from weft.comm._failure import Failure


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
"""Dtypes that can be reduced → the engine's numbers of them.  Other dtypes can only be moved."""
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


class GroupFailed(Exception):
    """Inside this package: a call could not be carried out.  The process group makes a `CollectiveError` of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code.name)
        self.failure = failure
