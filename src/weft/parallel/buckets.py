"""Gradient buckets: which parameters lie together in one flat storage, and which rank keeps which run of it.

Torch's DDP copies gradients into buckets and ZeRO libraries copy them again into partitions.  Here the flat storage is
the only one: parameters and gradients are views of it, a reduction runs on it in place, and a shard is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from weft.comm import Collectives, GroupView, Mesh, Wait, nothing_to_wait_for
from weft.parallel._layout import ParameterLayout
from weft.parallel._shard import Segment, Shard

if TYPE_CHECKING:
    from weft.techniques.compression.codecs import CompressedReduction

_ALIGNMENT = 16
"""Elements: 64 bytes in fp32, a cache line and the widest vector load of today's processors."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One trainable parameter on its way into a bucket, with the groups that follow from its layout on a mesh.

    Create them in the same order on all ranks of a stage.
    """

    mesh: InitVar[Mesh]
    parameter: nn.Parameter
    layout: ParameterLayout
    part: int
    """Index of the model part whose backward completes it."""
    group: int
    """Optimizer parameter group."""
    tie: GroupView | None = None
    """Ranks of other stages that hold the same parameter."""
    reducing: GroupView = field(init=False)
    """The ranks that sum its gradient."""
    completing: tuple[GroupView, ...] = field(init=False)
    """Over which that sum is summed once more, one after another."""
    counts: bool = field(init=False)
    """Whether norms and checkpoints count this rank's part among the copies outside of `reducing`."""

    def __post_init__(self, mesh: Mesh) -> None:
        self.reducing, self.completing = self.layout.reducing(mesh), self.layout.completing(mesh)
        self.counts = self.layout.is_first_copy(mesh)


@dataclass(frozen=True, slots=True)
class BucketKey:
    """Parameters share a bucket only where everything that happens to it is the same for all of them."""

    part: int
    group: int
    dtype: torch.dtype
    counts: bool
    reducing: GroupView
    completing: tuple[GroupView, ...]
    tie: str
    """Name of the tied parameter, which has a bucket of its own so that all its holders cut it alike; else empty."""
    compressed: bool = False
    """Whether its reduction is compressed, which is never so for what ranks outside of it hold copies of."""


@dataclass(slots=True)
class Bucket:
    """Members at fixed offsets in one flat storage; `regions[r]` is what rank r of the reducing group keeps."""

    key: BucketKey
    members: list[Member]
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

    def views(self, flat: Tensor) -> Iterable[tuple[Member, Tensor]]:
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
    members: Sequence[Member],
    *,
    sharded: bool,
    cuts: Literal["anywhere", "parameter"],
    limits: tuple[int, int],
    compressed: Callable[[Member], bool] | None = None,
) -> list[Bucket]:
    """Lay `members` into buckets in the order in which backward is expected to complete them (last registered first).

    `limits` are the bytes at which the first bucket and the others are full.  The first is small so that communication
    starts early; a parameter larger than a bucket gets one of its own.
    With `sharded`, every bucket is cut into one region per rank that reduces it: anywhere, or at parameter borders for
    optimizers that look at whole tensors.  `compressed` says which members share a compressed bucket; by default none
    does.  A pure function of its arguments: all ranks of a stage that do not cut its weights get the same buckets.
    """
    keys = {id(m): _key(m, compressed is not None and compressed(m)) for m in members}
    open_buckets: dict[BucketKey, list[Member]] = {}
    closed: list[tuple[BucketKey, list[Member]]] = []
    limit = dict.fromkeys(keys.values(), limits[0])
    for member in reversed(members):
        key = keys[id(member)]
        held = open_buckets.setdefault(key, [])
        held.append(member)
        if sum(m.parameter.numel() * m.parameter.element_size() for m in held) >= limit[key]:
            closed.append((key, open_buckets.pop(key)))
            limit[key] = limits[1]
    closed.extend(open_buckets.items())
    return [_lay_out(key, held, key.reducing.size if sharded else 1, cuts) for key, held in closed]


def _key(member: Member, compressed: bool) -> BucketKey:
    return BucketKey(
        part=member.part,
        group=member.group,
        dtype=member.parameter.dtype,
        counts=member.counts,
        reducing=member.reducing,
        completing=member.completing,
        tie=member.layout.name if member.tie is not None else "",
        compressed=compressed,
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _lay_out(key: BucketKey, members: list[Member], ranks: int, cuts: Literal["anywhere", "parameter"]) -> Bucket:
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


def _lay_out_whole(key: BucketKey, members: list[Member], ranks: int) -> Bucket:
    """Give every member whole to one rank, largest first to the rank with the least, ranks side by side in the
    storage."""
    owned: list[list[Member]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for member in sorted(members, key=lambda m: -m.parameter.numel()):
        rank = load.index(min(load))
        owned[rank].append(member)
        load[rank] += _aligned(member.parameter.numel())
    ordered: list[Member] = []
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


@dataclass(slots=True, kw_only=True)
class LiveBucket:
    """A bucket with its storages and where it stands in the step."""

    bucket: Bucket
    collectives: Collectives
    """Over the ranks that reduce it."""
    weights: Tensor
    master: Tensor
    shard: Shard
    gradients: Tensor | None = None
    kept: Tensor | None
    """ZeRO-2: this rank's region of the summed gradients, all that outlives backward."""
    reduction: CompressedReduction | None
    """None: gradients travel as they are."""
    pending: set[int] = field(default_factory=set[int])
    """Members whose last gradient of this round is still to come."""
    adopted: set[int] = field(default_factory=set[int])
    """Members whose `.grad` is a view of `gradients`."""
    wait: Wait = nothing_to_wait_for
    launched: bool = False
    settled: bool = False
    arrival: Wait | None = None
    """Of the gather under way, if there is one."""
    away: Sequence[Tensor] = ()
    """What the members' parameters will be again when it has ended."""

    def advance(self) -> None:
        """Start the second exchange of a compressed bucket: its first had the time that the next bucket took to
        fill."""
        if self.reduction is not None:
            self.reduction.advance()

    def send_away(self) -> None:
        """Leave the members' parameters without elements until their weights arrive."""
        self.away = [member.parameter.data for member in self.bucket.members]
        nothing = self.weights[:0]
        for member in self.bucket.members:
            member.parameter.data = nothing
