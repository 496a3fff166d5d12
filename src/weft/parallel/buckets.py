"""Gradient buckets: which parameters lie together in one flat storage, and which data rank keeps which run of it.

Torch's DDP copies gradients into buckets and ZeRO libraries copy them again into partitions.  Here the flat storage is
the only one: parameters and gradients are views of it, a reduction runs on it in place, and a shard is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from weft.comm import GroupView
from weft.parallel._layout import ParameterLayout
from weft.parallel._shard import Segment, Shard

_ALIGNMENT = 16
"""Elements: 64 bytes in fp32, a cache line and the widest vector load of today's processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMember:
    """One trainable parameter on its way into a bucket."""

    parameter: nn.Parameter
    layout: ParameterLayout
    part: int
    """Index of the model part whose backward completes it."""
    group: int
    """Optimizer parameter group."""
    tie: GroupView | None = None
    """Ranks of other stages that hold the same parameter."""


@dataclass(frozen=True, slots=True)
class BucketKey:
    """Parameters share a bucket only where everything that happens to it is the same for all of them."""

    part: int
    group: int
    dtype: torch.dtype
    counts: bool
    tensor_partial: bool
    tie: str
    """Name of the tied parameter, which has a bucket of its own so that all its holders cut it alike; else empty."""
    compressed: bool = False
    """Whether its reduction is compressed, which is never so for what tied stages or tensor ranks hold copies of."""


@dataclass(slots=True)
class Bucket:
    """Members at fixed offsets in one flat storage; `regions[r]` is what data rank r keeps."""

    key: BucketKey
    members: list[BucketMember]
    offsets: list[int]
    num_elements: int
    regions: list[tuple[int, int]]

    @property
    def even(self) -> bool:
        """Whether the regions are equal and tile the storage, so that one reduce-scatter or all-gather serves it."""
        sizes = {stop - start for start, stop in self.regions}
        return len(sizes) == 1 and self.regions[-1][1] == self.num_elements and self.regions[0][0] == 0

    def view(self, flat: Tensor, position: int) -> Tensor:
        """One member's view of a flat storage of this bucket."""
        parameter = self.members[position].parameter
        offset = self.offsets[position]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def views(self, flat: Tensor) -> Iterable[tuple[BucketMember, Tensor]]:
        """Each member with its view of a flat storage of this bucket."""
        for position, member in enumerate(self.members):
            yield member, self.view(flat, position)

    def segments(self, start: int, stop: int) -> list[Segment]:
        """The members' runs inside [start, stop) of the flat storage."""
        found: list[Segment] = []
        for member, offset in zip(self.members, self.offsets, strict=True):
            first, last = max(start, offset), min(stop, offset + member.parameter.numel())
            if first < last:
                found.append(
                    Segment(
                        layout=member.layout,
                        local_shape=member.parameter.shape,
                        offset=first - start,
                        start=first - offset,
                        length=last - first,
                    )
                )
        return found


def compose_buckets(
    members: Sequence[BucketMember],
    *,
    data_ranks: int,
    sharded: bool,
    cuts: Literal["anywhere", "parameter"],
    limits: tuple[int, int],
    compressed: Callable[[BucketMember], bool] | None = None,
) -> list[Bucket]:
    """Lay `members` into buckets in the order in which backward is expected to complete them (last registered first).

    `limits` are the bytes at which the first bucket and the others are full.  The first is small so that communication
    starts early; a parameter larger than a bucket gets one of its own.
    With `sharded`, every bucket is cut into one region per data rank: anywhere, or at parameter borders for optimizers
    that look at whole tensors.  `compressed` says which members share a compressed bucket; by default none does.  A
    pure function of its arguments: all data ranks get the same buckets.
    """
    keys = {id(m): _key(m, compressed is not None and compressed(m)) for m in members}
    open_buckets: dict[BucketKey, list[BucketMember]] = {}
    closed: list[tuple[BucketKey, list[BucketMember]]] = []
    limit = dict.fromkeys(keys.values(), limits[0])
    for member in reversed(members):
        key = keys[id(member)]
        held = open_buckets.setdefault(key, [])
        held.append(member)
        if sum(m.parameter.numel() * m.parameter.element_size() for m in held) >= limit[key]:
            closed.append((key, open_buckets.pop(key)))
            limit[key] = limits[1]
    closed.extend(open_buckets.items())
    return [_lay_out(key, held, data_ranks if sharded else 1, cuts) for key, held in closed]


def _key(member: BucketMember, compressed: bool) -> BucketKey:
    layout = member.layout
    return BucketKey(
        part=member.part,
        group=member.group,
        dtype=member.parameter.dtype,
        counts=layout.counts,
        tensor_partial=layout.tensor_partial,
        tie=layout.name if member.tie is not None else "",
        compressed=compressed,
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _lay_out(key: BucketKey, members: list[BucketMember], ranks: int, cuts: Literal["anywhere", "parameter"]) -> Bucket:
    if ranks > 1 and cuts == "parameter":
        return _lay_out_whole(key, members, ranks)
    offsets: list[int] = []
    end = 0
    for member in members:
        offsets.append(end)
        end = _aligned(end + member.parameter.numel())
    share = _aligned(-(-end // ranks))
    regions = [(rank * share, (rank + 1) * share) for rank in range(ranks)]
    return Bucket(key, members, offsets, share * ranks, regions)


def _lay_out_whole(key: BucketKey, members: list[BucketMember], ranks: int) -> Bucket:
    """Give every member whole to one rank, largest first to the rank with the least, ranks side by side in the
    storage."""
    owned: list[list[BucketMember]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for member in sorted(members, key=lambda m: -m.parameter.numel()):
        rank = load.index(min(load))
        owned[rank].append(member)
        load[rank] += _aligned(member.parameter.numel())
    ordered: list[BucketMember] = []
    offsets: list[int] = []
    regions: list[tuple[int, int]] = []
    end = 0
    for mine in owned:
        start = end
        for member in mine:
            ordered.append(member)
            offsets.append(end)
            end = _aligned(end + member.parameter.numel())
        regions.append((start, end))
    return Bucket(key, ordered, offsets, end, regions)


def create_shard(
    bucket: Bucket, master: Tensor, start: int, stop: int, *, counts: bool, cut_group: GroupView | None
) -> Shard:
    """Return the shard over [start, stop) of a bucket; `master` has that length."""
    return Shard(
        master=master,
        segments=bucket.segments(start, stop),
        group=bucket.key.group,
        counts=counts and bucket.key.counts,
        data_cut=cut_group is not None,
        cut_group=cut_group,
    )
