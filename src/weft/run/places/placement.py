"""What machines a job was given, compared with what its plan asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.formatting import format_percent, format_seconds
from weft.run.hosts.roster import unit_of
from weft.run.places.contract import GangBlock


def num_whole(block: GangBlock, topologies: Sequence[tuple[str, ...]]) -> int:
    """Return how many of a gang's blocks lie inside one unit of their tier.

    Args:
        topologies: where each machine lies, in the order of the ranks: block after block.
    """
    return sum(len(units) == 1 for units in _units(block, topologies))


def placement_lines(blocks: Sequence[GangBlock], topologies: Sequence[tuple[str, ...]]) -> list[str]:
    """Say for each tier how many blocks were asked for and how many are whole, and what that is predicted to cost.
    Empty where the place does not say where machines lie, or nothing was asked."""
    if not all(topologies):
        return []
    lines: list[str] = []
    for block in blocks:
        units = list(_units(block, topologies))
        whole = sum(len(each) == 1 for each in units)
        line = f"placed    {whole} of {len(units)} blocks of {block.num_nodes} lie in one {block.tier}"
        if whole < len(units):
            # A step waits for its slowest block.
            halves = all(len(each) <= 2 for each in units)
            seconds = block.split_seconds if halves else block.scattered_seconds
            more = format_percent(100 * (seconds / block.whole_seconds - 1))
            line += f"; predicted up to {format_seconds(seconds)} per step (+{more})"
        lines.append(line)
    return lines


def _units(block: GangBlock, topologies: Sequence[tuple[str, ...]]) -> Iterator[set[tuple[str, ...]]]:
    """The units of the tier on which each block lies."""
    for start in range(0, len(topologies), block.num_nodes):
        paths = topologies[start : start + block.num_nodes]
        yield {unit_of(path, block.level) for path in paths}
