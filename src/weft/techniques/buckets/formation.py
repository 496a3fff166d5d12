"""Which parameters share a flat storage, and which run of it each data rank keeps: by their sizes alone, without torch.

The engine lays parameters and gradients out by it, and the predicted program of a rank reads its sends off it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

ALIGNMENT = 16
"""Elements: 64 bytes in fp32, a cache line and the widest vector load of today's processors."""
Cuts = Literal["anywhere", "parameter"]
"""Where data ranks may cut a bucket; `parameter`: at the borders of parameters only."""
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BucketEntry(Generic[K]):
    """One parameter on its way into a bucket."""

    key: K
    """Only parameters with equal keys share a bucket."""
    num_elements: int
    size_bytes: int
    """Bytes that count towards the limit of a bucket."""


@dataclass(slots=True, kw_only=True)
class FlatLayout:
    """Where parameters and the ranks' regions lie in one flat storage, in elements."""

    offsets: list[int]
    """First element of each parameter."""
    num_elements: int
    """Elements of the storage, padding included."""
    regions: list[tuple[int, int]]
    """[start, stop) that rank r of the reducing group keeps, for each r; they tile the storage."""

    @property
    def even(self) -> bool:
        """Whether the regions are equal and tile the storage, so that one reduce-scatter or all-gather serves it."""
        sizes = {stop - start for start, stop in self.regions}
        return len(sizes) == 1 and self.regions[-1][1] == self.num_elements and self.regions[0][0] == 0


@dataclass(slots=True, kw_only=True)
class Formed(FlatLayout, Generic[K]):
    """A bucket: which of the entries it has, in the order of the storage."""

    key: K
    places: list[int]
    """Indices of its entries in the sequence that `form_buckets` was given."""


def form_buckets(
    entries: Sequence[BucketEntry[K]], *, ranks: Callable[[K], int], cuts: Cuts, limits: tuple[int, int]
) -> list[Formed[K]]:
    """Lay `entries` into buckets in the order in which backward is expected to complete them: the last one first.

    `limits` are the bytes at which the first bucket of a key and its others are full.  The first is small so that
    communication starts early; a parameter larger than a bucket gets one of its own.  Every bucket is cut into as many
    regions as `ranks` says of its key.  A pure function of its arguments: all ranks that reduce a bucket get the same.
    """
    open_buckets: dict[K, list[int]] = {}
    closed: list[tuple[K, list[int]]] = []
    limit = dict.fromkeys((entry.key for entry in entries), limits[0])
    # Backward completes gradients roughly in reverse order of registration; torch's DDP (Li et al., VLDB 2020, arXiv
    # 2006.15704, §3.2.3) fills its buckets by the same rule.
    for place in reversed(range(len(entries))):
        key = entries[place].key
        members = open_buckets.setdefault(key, [])
        members.append(place)
        if sum(entries[index].size_bytes for index in members) >= limit[key]:
            closed.append((key, open_buckets.pop(key)))
            limit[key] = limits[1]  # only the first one of a key is small
    closed.extend(open_buckets.items())
    return [_lay_out(key, members, entries, ranks(key), cuts) for key, members in closed]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _lay_out(key: K, places: list[int], entries: Sequence[BucketEntry[K]], ranks: int, cuts: Cuts) -> Formed[K]:
    lay_out = _side_by_side if ranks > 1 and cuts == "parameter" else _in_order
    return lay_out(key, places, entries, ranks)


def _in_order(key: K, places: list[int], entries: Sequence[BucketEntry[K]], ranks: int) -> Formed[K]:
    offsets: list[int] = []
    end = 0
    for place in places:
        offsets.append(end)
        end = _aligned(end + entries[place].num_elements)
    # Equal aligned regions, padded at the end: one reduce-scatter serves the bucket, without a table of sizes.
    share = _aligned(-(-end // ranks))
    regions = [(rank * share, (rank + 1) * share) for rank in range(ranks)]
    return Formed(key=key, places=places, offsets=offsets, num_elements=share * ranks, regions=regions)


def _side_by_side(key: K, places: list[int], entries: Sequence[BucketEntry[K]], ranks: int) -> Formed[K]:
    """Give every parameter unsplit to one rank; the ranks' regions lie side by side in the storage.

    The largest parameter goes first, to the rank with the fewest elements: Graham's longest-processing-time rule, which
    is within 4/3 of the best balance (Graham 1969).
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for place in sorted(places, key=lambda place: -entries[place].num_elements):
        rank = load.index(min(load))
        owned[rank].append(place)
        load[rank] += _aligned(entries[place].num_elements)
    offsets: list[int] = []
    regions: list[tuple[int, int]] = []
    end = 0
    for mine in owned:
        start = end
        for place in mine:
            offsets.append(end)
            end = _aligned(end + entries[place].num_elements)
        regions.append((start, end))
    ordered = [place for mine in owned for place in mine]
    return Formed(key=key, places=ordered, offsets=offsets, num_elements=end, regions=regions)
