"""Compressed gradients as bytes: which are compressed, their layout, and what a reduction sends.  No torch.

The codecs pack and send by it, and the predicted program of a rank reads its sends off it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, assert_never

from weft.techniques.compression.settings import CompressionSettings

Codec = Literal["bf16", "int8", "powersgd", "topk", "onebit", "randomk", "signsgd"]

SCALED_BLOCK = 256
"""Elements that share a scale."""
INDEX_BYTES = 4
"""Size of an element's place in a storage, int32."""
_PAIR = 2
"""Elements of bfloat16 so many that every part begins at a multiple of 4 bytes."""
_LEAST_VALUES = 1024
"""Parameters with fewer are neither quantised nor thinned out; they are norms and biases, which cost little and matter
much.  Int8's blocks reach over the borders of parameters: beside a matrix with gradients 254 times as large a norm's
would be rounded to zero in every step."""
_LEAST_GAIN = 2
"""Times that PowerSGD's factors of a matrix must be smaller than the matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Which codec, with its settings.  `feedback` is False only to show what happens without it."""

    codec: Codec
    powersgd_rank: int = 4
    topk_share: float = 0.01
    randomk_share: float = 0.1
    seed: int = 0
    """Seed of random draws; the same on every rank."""
    onebit_warmup_steps: int = 0
    onebit_decay: float = 0.9
    """Decay of the optimizer's momentum."""
    feedback: bool = True

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape (on a rank) is compressed; others travel as they are."""
        if self.codec == "powersgd":
            return is_worthwhile(shape, self.powersgd_rank)
        return self.codec == "bf16" or _LEAST_VALUES <= math.prod(shape) < 2**31


def spec_of(settings: CompressionSettings, seed: int, momentum_decay: float | None) -> CodecSpec:
    """Return the codec that a plan names, which `runnability` has checked; random draws follow `seed`."""
    match settings.compression:
        case "bf16" | "int8" | "powersgd" | "topk" | "onebit" | "randomk" | "signsgd" as codec:
            return CodecSpec(
                codec=codec,
                powersgd_rank=settings.powersgd_rank,
                topk_share=settings.topk_share,
                randomk_share=settings.randomk_share,
                seed=seed,
                onebit_warmup_steps=settings.onebit_warmup_steps,
                onebit_decay=momentum_decay or 0.0,
            )
        case other:
            raise AssertionError(f"{other} cannot be run")


# ── how gradients lie ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpan:
    """One parameter inside a flat storage of gradients."""

    name: str
    """Name in the full model, under which residuals and bases are kept."""
    offset: int
    """First element in the flat storage."""
    shape: Sequence[int]
    """Shape on this rank."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.num_elements

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Columns of the matrix that codecs see: all dims but the first are one."""
        return self.num_elements // max(self.rows, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The layout of one flat storage, the same on every rank that takes part.  What no span covers is padding: zero."""

    spans: tuple[ParameterSpan, ...]
    num_elements: int
    regions: tuple[tuple[int, int], ...] | None = None
    """`regions[r]` is all that member r needs of the sum (ZeRO-1 and 2); None: every member needs all of it."""

    @property
    def num_values(self) -> int:
        """Number of elements without padding."""
        return sum(span.num_elements for span in self.spans)

    def gaps(self) -> Iterator[slice]:
        """Yield the runs of padding, rising."""
        stop = 0
        for span in sorted(self.spans, key=lambda span: span.offset):
            if span.offset > stop:
                yield slice(stop, span.offset)
            stop = span.stop
        if self.num_elements > stop:
            yield slice(stop, self.num_elements)

    def parts(self, members: int, block: int) -> Sequence[tuple[int, int]]:
        """Return the run that each member sums, for codecs whose sums are made by owners."""
        return self.regions if self.regions is not None else part_bounds(self.num_elements, members, block)


def part_bounds(length: int, parts: int, multiple: int) -> list[tuple[int, int]]:
    """Cut [0, length) into `parts` runs of about equal length that begin at multiples; late ones may be empty."""
    share = -(-length // (parts * multiple)) * multiple
    return [(min(index * share, length), min((index + 1) * share, length)) for index in range(parts)]


def storages_of(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Yield runs of places with at most `most` elements together, or a single place with more."""
    start, size = 0, 0
    for place, own in enumerate(sizes):
        if place > start and size + own > most:
            yield range(start, place)
            start, size = place, 0
        size += own
    if sizes:
        yield range(start, len(sizes))


# ── how large they are when packed ────────────────────────────────────────────────────────────────────────────────────


def bf16_bytes(length: int) -> int:
    """Return the bytes of a run of `length` elements as bfloat16, padded to 4."""
    return 2 * (length + length % _PAIR)


def int8_bytes(length: int) -> int:
    """Return the bytes of a run as 8-bit integers with an fp32 scale for every block."""
    return 4 * -(-length // SCALED_BLOCK) + -(-length // 4) * 4


def sign_bytes(length: int) -> int:
    """Return the bytes of a run as one bit per element with an fp32 scale for every block."""
    return 4 * -(-length // SCALED_BLOCK) + 4 * -(-length // 32)


def packet_words(frame: Frame, share: float, element_bytes: int) -> int:
    """Return the 4-byte words of a packet of top-k: values, indices, and padding that aligns the next packet."""
    width = element_bytes // INDEX_BYTES
    return -(-chosen_count(frame, share) * (width + 1) // width) * width


def chosen_count(frame: Frame, share: float) -> int:
    """Return the number of elements of a storage that top-k sends."""
    return max(1, math.ceil(share * frame.num_values))


def count_of(length: int, share: float) -> int:
    """Return the number of elements that random-k draws of `length`: at least one, if there is one."""
    return min(length, max(1, math.ceil(share * length)))


def factor_width(span: ParameterSpan, rank: int) -> int:
    """Return the columns of PowerSGD's factors: the rank, unless a shard has fewer rows or columns."""
    return min(rank, span.rows, span.columns)


def is_worthwhile(shape: Sequence[int], rank: int) -> bool:
    """Return whether PowerSGD's factors, rank · (rows + columns), save enough of rows · columns (`_LEAST_GAIN`)."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return _LEAST_GAIN * rank * (rows + columns) <= rows * columns


# ── what a reduction sends ────────────────────────────────────────────────────────────────────────────────────────────


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
        """Return the bytes that leave a rank when all-reduces run as rings, each moving 2(n − 1)/n of its tensor."""
        return self.sent + 2 * (members - 1) / members * self.reduced


class CodecCollective(NamedTuple):
    """One collective of a compressed reduction."""

    operation: Literal["all_reduce", "all_to_all", "all_gather"]
    sizes: Sequence[int]
    """Bytes of every member's part; for an all-reduce, one number: the bytes of the tensor."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole tensor on a rank."""
        return sum(self.sizes)

    def wire_bytes(self, index: int) -> WireBytes:
        """Return the bytes that member `index` hands over."""
        if self.operation == "all_reduce":
            return WireBytes(reduced=self.size_bytes)
        own = self.sizes[index]
        return WireBytes(sent=self.size_bytes - own if self.operation == "all_to_all" else own * (len(self.sizes) - 1))


def collectives_of(
    spec: CodecSpec, frame: Frame, members: int, element_bytes: int, *, warms_up: bool = False
) -> list[CodecCollective]:
    """Return the collectives of one reduction of a storage, in their order.  `warms_up`: 1-bit Adam sends exact sums
    still."""
    match spec.codec:
        case "powersgd":
            widths = [(span, factor_width(span, spec.powersgd_rank)) for span in frame.spans]
            lefts, rights = (sum(s.rows * w for s, w in widths), sum(s.columns * w for s, w in widths))
            return [CodecCollective("all_reduce", (elements * element_bytes,)) for elements in (lefts, rights)]
        case "randomk":
            drawn = sum(count_of(span.num_elements, spec.randomk_share) for span in frame.spans)
            return [CodecCollective("all_reduce", (drawn * element_bytes,))]
        case "topk":
            packet = INDEX_BYTES * packet_words(frame, spec.topk_share, element_bytes)
            return [CodecCollective("all_gather", (packet,) * members)]
        case "onebit":
            if warms_up:
                return [CodecCollective("all_reduce", (frame.num_elements * element_bytes,))]
            return _two_phases("onebit", replace(frame, regions=None), members)
        case "bf16" | "int8" | "signsgd" as packed:
            return _two_phases(packed, frame, members)
        case _:
            assert_never(spec.codec)


def _two_phases(codec: Codec, frame: Frame, members: int) -> list[CodecCollective]:
    block = _PAIR if codec == "bf16" else SCALED_BLOCK
    packed_bytes = {"bf16": bf16_bytes, "int8": int8_bytes}.get(codec, sign_bytes)
    sizes = [packed_bytes(last - first) for first, last in frame.parts(members, block)]
    phases = [CodecCollective("all_to_all", sizes), CodecCollective("all_gather", sizes)]
    return phases if frame.regions is None else phases[:1]
