"""What a codec is told about the gradients that it compresses, and the wire bytes that it answers for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpan:
    """One parameter inside a flat storage of gradients."""

    name: str
    """Name in the whole model: what state is kept by."""
    offset: int
    """First element in the flat storage."""
    shape: torch.Size
    """Shape on this rank."""

    @property
    def stop(self) -> int:
        return self.offset + self.shape.numel()

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Columns of the matrix that codecs see: all dims but the first are one."""
        return self.shape.numel() // max(self.rows, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The layout of one flat storage, the same on every rank that takes part.  What no span covers is padding: zero."""

    spans: tuple[ParameterSpan, ...]
    num_elements: int
    regions: tuple[tuple[int, int], ...] | None = None
    """`regions[r]` is all that member r needs of the sum (ZeRO-1 and 2); None: every member needs all of it."""

    @property
    def num_values(self) -> int:
        """Elements that are no padding."""
        return sum(span.shape.numel() for span in self.spans)

    def gaps(self) -> Iterator[slice]:
        """Yield the runs of padding, rising."""
        stop = 0
        for span in sorted(self.spans, key=lambda span: span.offset):
            if span.offset > stop:
                yield slice(stop, span.offset)
            stop = span.stop
        if self.num_elements > stop:
            yield slice(stop, self.num_elements)


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Bytes that one rank hands to collectives for one reduction: values, scales and indices, padding included."""

    sent: int = 0
    """Bytes in messages to other ranks, each counted for every rank it goes to."""
    reduced: int = 0
    """Bytes in all-reduces: the size of the tensors."""

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.sent + other.sent, self.reduced + other.reduced)

    def leaving(self, members: int) -> float:
        """Bytes that leave a rank when all-reduces run as rings, each moving 2(n − 1)/n of its tensor."""
        return self.sent + 2 * (members - 1) / members * self.reduced
