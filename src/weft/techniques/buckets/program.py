"""What data ranks send for gradients and weights that lie in buckets, under ZeRO-0, 1 and 2
(`weft.techniques.data.gradient_reducer`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.techniques.buckets.contract import Buckets
from weft.techniques.buckets.formation import BucketEntry, Formed, form_buckets
from weft.techniques.compression.program import is_taken, packed_sends
from weft.techniques.compression.wire import Frame, ParameterSpan
from weft.techniques.send_trace import HeldParameter, ModelShare, RankSend, Shape
from weft.techniques.zero.contract import Zero, reduction_rounds

_FLAG_BYTES, _INDEX_BYTES = 4, 8
"""Sizes of a flag of use (fp32), and of a number in the order of buckets (int64)."""


class Key(NamedTuple):
    """What a bucket's parameters have in common; see `weft.techniques.buckets.bucket_state.BucketKey`."""

    part: int
    group: int
    counts: bool
    partial_over: str
    is_expert: bool
    tie: str
    is_compressed: bool


def buckets_of(share: ModelShare, members: Sequence[HeldParameter]) -> list[Formed[Key]]:
    """Return the buckets of `members`, exactly as the engine forms them."""
    data = share.plan.data_parallel
    entries = [
        BucketEntry(_key(share, parameter), parameter.num_elements, parameter.num_elements * share.master_bytes)
        for parameter in members
    ]

    def ranks(key: Key) -> int:
        return share.summing_of(is_expert=key.is_expert)[1] if data.bucket_stage > 0 else 1

    return form_buckets(entries, ranks=ranks, cuts=share.recipe.optimizer.cuts, limits=data.bucket_limits)


def _key(share: ModelShare, parameter: HeldParameter) -> Key:
    is_compressed = share.summing[1] > 1 and is_taken(share, parameter, parameter.shape)
    tie = parameter.name if parameter.tie else ""
    return Key(
        parameter.part,
        parameter.group,
        parameter.counts,
        parameter.partial_over,
        parameter.is_expert,
        tie,
        is_compressed,
    )


class Masters(NamedTuple):
    """What the optimizer of a rank works on, whoever has cut it."""

    cut: list[tuple[HeldParameter, Shape]]
    """Parameters that ZeRO-3 has cut, and what this rank has of them."""
    in_buckets: list[HeldParameter]
    tables: list[HeldParameter]
    """Tables with sparse gradients, which stay whole."""


def masters_of(share: ModelShare) -> Masters:
    """Return who holds each of this rank's trained parameters."""
    tables = [parameter for parameter in share.held if parameter.parameter.is_sparse]
    members = [parameter for parameter in share.held if not parameter.parameter.is_sparse]
    if not (share.plan.data_parallel.shards_weights and share.shards > 1):
        return Masters([], members, tables)
    from weft.techniques.zero.cuts import kept_out, shard_shape  # only ranks that cut weights load it

    whole = kept_out(share)
    cut = [(parameter, shard_shape(share, parameter)) for parameter in members if parameter.name not in whole]
    return Masters(cut, [parameter for parameter in members if parameter.name in whole], tables)


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield what a step sends for the trained parameters that lie in buckets."""
    members = masters_of(share).in_buckets
    formed = buckets_of(share, members)
    for number, bucket in enumerate(formed):
        inside = [members[place] for place in bucket.places]
        yield from _over_data(
            share, bucket, inside, f"bucket {number}: {_names([parameter.name for parameter in inside])}"
        )
    for bucket in formed:
        yield from _over_model(share, bucket, [members[place].name for place in bucket.places])
    axis, ranks, _ = share.summing
    if ranks > 1 and formed:
        yield RankSend(
            operation="broadcast",
            axis=axis,
            size_bytes=_INDEX_BYTES * len(formed),
            when="first",
            technique=Buckets.name,
            reason="the order in which buckets become ready",
        )


def _over_data(
    share: ModelShare, bucket: Formed[Key], parameters: Sequence[HeldParameter], name: str
) -> Iterator[RankSend]:
    """The sum of a bucket's gradients; where ranks share it out, its halves: before and after the optimizer."""
    axis, ranks, _ = share.summing_of(is_expert=bucket.key.is_expert)
    data = share.plan.data_parallel
    if ranks == 1:
        return
    is_cut = data.bucket_stage > 0
    rounds = reduction_rounds(share.plan) if data.shards_gradients_alone else 1
    if bucket.key.is_compressed:
        spans = (
            ParameterSpan(name=parameter.name, offset=offset, shape=parameter.shape)
            for parameter, offset in zip(parameters, bucket.offsets, strict=True)
        )
        regions = tuple(bucket.regions) if is_cut else None
        frame = Frame(spans=tuple(spans), num_elements=bucket.num_elements, regions=regions)
        yield from packed_sends(share, frame, axis, ranks, rounds, name)
    else:
        yield RankSend(
            operation="reduce_scatter" if is_cut and (bucket.even or share.cuts_anywhere) else "all_reduce",
            axis=axis,
            size_bytes=bucket.num_elements * share.gradient_bytes,
            count=rounds,
            technique=Zero.name if is_cut else Buckets.name,
            reason=f"gradients, {name}",
        )
    if is_cut:
        yield from _weights(share, bucket, name)


def _weights(share: ModelShare, bucket: Formed[Key], name: str) -> Iterator[RankSend]:
    """Gathers of what each rank has renewed, also by the average of replicas that ends a round of local steps."""
    operation, sizes = share.gathered([(stop - start) * share.compute_bytes for start, stop in bucket.regions])
    for when in ("always", "round") if share.sums_apart else ("always",):
        for size_bytes in sizes:
            yield RankSend(
                operation=operation,
                axis=share.summing_of(is_expert=bucket.key.is_expert)[0],
                size_bytes=size_bytes,
                when=when,
                phase="update",
                technique=Zero.name,
                reason=f"weights, {name}",
            )


def own_region(share: ModelShare, bucket: Formed[Key]) -> tuple[int, int]:
    """Return the elements of a bucket whose masters this rank has: first and end."""
    _, _, index = share.summing_of(is_expert=bucket.key.is_expert)
    return bucket.regions[index if len(bucket.regions) > 1 else 0]


def _over_model(share: ModelShare, bucket: Formed[Key], names: Sequence[str]) -> Iterator[RankSend]:
    """Sums of what other axes hold of the same parameters: parts of gradients, and copies of tied weights."""
    start, stop = own_region(share, bucket)
    mine = (stop - start) * share.gradient_bytes
    if bucket.key.partial_over:
        yield RankSend(
            operation="all_reduce",
            axis=bucket.key.partial_over,
            size_bytes=mine,
            technique="tensor parallelism",
            reason=f"parts of gradients, {_names(names)}",
        )
    if bucket.key.tie:
        axis = share.tie_axes[bucket.key.tie]
        for size_bytes, what in ((mine, "gradients"), (_FLAG_BYTES * len(names), "flags of use")):
            yield RankSend(
                operation="all_reduce",
                axis=axis,
                size_bytes=size_bytes,
                technique="pipeline parallelism",
                reason=f"{what} of stages that share {bucket.key.tie}",
            )


def _names(names: Sequence[str]) -> str:
    """The first and the last of several parameters."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
