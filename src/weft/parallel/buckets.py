"""Gradient buckets: which parameters lie together in one flat storage, and which data rank keeps which run of it.

Torch's DDP copies gradients into buckets and ZeRO libraries copy them again into partitions.  Here the flat storage is
the only one: parameters and gradients are views of it, a reduction runs on it in place, and a shard is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.comm import GroupView
from weft.parallel._layout import ParameterLayout
from weft.parallel._shard import Segment, Shard
from weft.techniques.buckets.formation import Cuts, Entry, FlatLayout, form_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
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


@dataclass(slots=True, kw_only=True)
class Bucket(FlatLayout):
    """Members at fixed offsets in one flat storage."""

    key: BucketKey
    members: list[Member]

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
    data_ranks: int,
    sharded: bool,
    cuts: Cuts,
    limits: tuple[int, int],
    compressed: Callable[[Member], bool] | None = None,
) -> list[Bucket]:
    """Lay `members` into buckets in the order in which backward is expected to complete them (last registered first).

    `limits` are the bytes at which the first bucket and the others are full (`form_buckets`).  With `sharded`, every
    bucket is cut into one region per data rank: anywhere, or at parameter borders for optimizers that look at whole
    tensors.  `compressed` says which members share a compressed bucket; by default none does.
    """
    entries = [
        Entry(
            _key(member, compressed is not None and compressed(member)),
            member.parameter.numel(),
            member.parameter.numel() * member.parameter.element_size(),
        )
        for member in members
    ]
    return [
        Bucket(
            key=formed.key,
            members=[members[place] for place in formed.places],
            offsets=formed.offsets,
            num_elements=formed.num_elements,
            regions=formed.regions,
        )
        for formed in form_buckets(entries, ranks=data_ranks if sharded else 1, cuts=cuts, limits=limits)
    ]


def _key(member: Member, compressed: bool) -> BucketKey:
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
