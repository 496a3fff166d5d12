"""Which algorithm for which size, as a plan writes it: `tree:0-32K;direct:32K-8M;ring:8M-max`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from weft.comm.algorithms._registry import ALGORITHMS, find_algorithm
from weft.errors import CollectiveError, did_you_mean

if TYPE_CHECKING:
    from weft.config.cluster import Collective

BUILT_IN: Mapping[str, tuple[Collective, ...]] = MappingProxyType(
    {"backend": ("all_reduce", "reduce_scatter", "all_gather"), "exchange": ("reduce_scatter", "all_gather")}
)
"""Ways that need no schedule, and what they do.  `backend`: the process group's own collective, over the memory that
its ranks share, or Gloo's (where a reduce-scatter is an all-reduce, of which every rank keeps its region).  `exchange`:
every region straight to whom it concerns, by messages that are all posted at once where the collective is started."""

_ENTRY = re.compile(r"([a-z_]+(?:\+[a-z_]+)?)(?::(\d+)([KMG]?)-(?:(\d+)([KMG]?)|max))?")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SYNTAX = 'is neither "auto" nor "measured" nor a list by size, such as "tree:0-32K;direct:32K-8M;ring:8M-max".'


@dataclass(frozen=True, slots=True)
class SizeRange:
    """An algorithm and the sizes for which it is chosen."""

    algorithm: str
    first_byte: int
    stop_byte: int | None
    """One past the last; None: no end."""


@dataclass(frozen=True, slots=True)
class AlgorithmsBySize:
    """An algorithm for every size of the whole tensor in bytes: spans from 0 up, side by side, the last without end."""

    spans: tuple[SizeRange, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every algorithm once."""
        return tuple(dict.fromkeys(span.algorithm for span in self.spans))

    def algorithm_for(self, size_bytes: int) -> str:
        """Return the algorithm for a tensor of so many bytes."""
        return next(s.algorithm for s in self.spans if s.stop_byte is None or size_bytes < s.stop_byte)


def parse_choices(text: str) -> AlgorithmsBySize:
    """Read a list by size.  `32K-8M` begins with 32 KiB and ends before 8 MiB; one entry without sizes takes the rest.

    Raises:
        CollectiveError: it cannot be read, names what does not exist, or has sizes twice or not at all.  The message
            goes on after the setting's name and value.
    """
    spans: list[SizeRange] = []
    rest: list[str] = []
    for entry in text.split(";"):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise CollectiveError(_SYNTAX)
        name, first, unit, stop, stop_unit = match.groups()
        _check_name(name)
        if first is None:
            rest.append(name)
            continue
        start = int(first) * _UNITS[unit]
        end = None if stop is None else int(stop) * _UNITS[stop_unit]
        if end is not None and end <= start:
            raise CollectiveError(f"has the empty range {entry}: sizes go from less to more.")
        spans.append(SizeRange(name, start, end))
    if len(rest) > 1:
        raise CollectiveError(f"gives the rest to both {rest[0]} and {rest[1]}. Write sizes for all but one.")
    return AlgorithmsBySize(_side_by_side(sorted(spans, key=lambda span: span.first_byte), rest[0] if rest else None))


def defines(name: str, collective: Collective) -> bool:
    """Whether a way of `parse_choices` does a collective."""
    if name in BUILT_IN:
        return collective in BUILT_IN[name]
    return collective in find_algorithm(name).methods


def stand_in(name: str, collective: Collective) -> tuple[str, Collective] | None:
    """Return what is done where a way is asked for a collective; None: it cannot help.

    A way that does it, does it.  One that knows all-reduces only does a reduce-scatter as an all-reduce, of which every
    rank keeps its region, and leaves an all-gather, which sums nothing, to `exchange`.
    """
    if defines(name, collective):
        return name, collective
    if not defines(name, "all_reduce") or collective not in ("reduce_scatter", "all_gather"):
        return None
    return (name, "all_reduce") if collective == "reduce_scatter" else ("exchange", collective)


def format_size(size_bytes: int) -> str:
    """Return bytes as a list by size writes them: `32K`."""
    for unit in ("G", "M", "K"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


def parse_size(text: str) -> int:
    """Return the bytes that `32K`, `8M` or `4096` says.

    Raises:
        CollectiveError: it says none, or less than 1.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if match is None or int(match.group(1)) < 1:
        raise CollectiveError(f"{text} is no size: write bytes such as 4096, 32K or 8M.")
    return int(match.group(1)) * _UNITS[match.group(2)]


def _check_name(name: str) -> None:
    if name in BUILT_IN:
        return
    if name == "auto":
        raise CollectiveError('mixes "auto" with others: auto chooses for all sizes. Name an algorithm for each range.')
    if name.startswith("hierarchical+"):
        try:
            find_algorithm(name)
        except CollectiveError as error:
            raise CollectiveError(f"cannot be: {error}") from None
    elif name not in ALGORITHMS:
        known = (*BUILT_IN, *ALGORITHMS)
        hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
        raise CollectiveError(f"names the algorithm {name}, which does not exist.{hint}")


def _side_by_side(spans: Sequence[SizeRange], rest: str | None) -> tuple[SizeRange, ...]:
    """Spans in order, with what lies between them given to `rest`."""
    merged: list[SizeRange] = []
    at: int | None = 0
    for span in spans:
        if at is None or span.first_byte < at:
            before = merged[-1].algorithm
            raise CollectiveError(
                f"gives {format_size(span.first_byte)} and more to both {before} and {span.algorithm}: "
                "ranges must not overlap."
            )
        if span.first_byte > at:
            merged.append(_filled(rest, at, span.first_byte))
        merged.append(span)
        at = span.stop_byte
    if at is not None:
        merged.append(_filled(rest, at, None))
    return tuple(merged)


def _filled(rest: str | None, first: int, stop: int | None) -> SizeRange:
    if rest is None:
        gap = f"{format_size(first)}-{'max' if stop is None else format_size(stop)}"
        raise CollectiveError(f'says nothing about {gap}. Add "backend:{gap}", or "backend" alone for all the rest.')
    return SizeRange(rest, first, stop)
