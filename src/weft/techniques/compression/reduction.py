"""The link between codecs, which know flat storages and names, and reducers, which know layouts and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weft.comm.mesh import GroupView, Mesh
from weft.techniques.buckets.bucket_state import Bucket, BucketMember, BucketState
from weft.techniques.compression.codecs import CodecSpec, CompressedReduction, Frame, KeptTensor, ParameterSpan
from weft.techniques.core._layout import ParameterLayout
from weft.techniques.core._shard import CheckpointShard


def compressible(compression: CodecSpec, mesh: Mesh) -> Callable[[BucketMember], bool]:
    """Return which parameters may be compressed.

    Not those of which ranks outside the reduction hold copies: a stage that shares a tied weight, and the tensor ranks
    of what is not cut between them.  Each copy would be rounded by itself, and copies that differ drift apart.
    """

    def is_taken(member: BucketMember) -> bool:
        travels = member.reducing.group is not None and not member.layout.is_copied(mesh)
        return travels and compression.takes(member.parameter.shape)

    return is_taken


def frame_of(bucket: Bucket, *, sharded: bool) -> Frame:
    """Describe a bucket's storage to a codec; `sharded` when each data rank needs its region only."""
    spans = [
        ParameterSpan(name=member.layout.name, offset=offset, shape=member.parameter.shape)
        for member, offset in zip(bucket.members, bucket.offsets, strict=True)
    ]
    return Frame(
        spans=tuple(spans),
        num_elements=bucket.num_elements,
        regions=tuple(bucket.regions) if sharded else None,
    )


def reduction_shards(
    reduction: CompressedReduction,
    layouts: Mapping[str, ParameterLayout],
    view: GroupView,
    *,
    starts: Mapping[str, int] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> list[CheckpointShard]:
    """Return what a reduction over `view` must keep, as checkpoint shards.

    `starts` gives the first element of parameters of which this rank holds a run only, and `shard` its place (index,
    number) among the ranks that hold the other runs.
    """
    stored_shards: list[CheckpointShard] = []
    for kept in reduction.kept():
        layout = layouts[kept.name]
        if kept.is_own:
            stored_shards.append(_residual(kept, layout, view, (starts or {}).get(kept.name, 0)))
        else:
            stored_shards.append(_shared(kept, layout, view, shard))
    return stored_shards


def residual_shards(buckets: Sequence[BucketState]) -> list[CheckpointShard]:
    """Return what the reductions of buckets must keep."""
    stored: list[CheckpointShard] = []
    for state in buckets:
        if state.reduction is not None:
            layouts = {member.layout.name: member.layout for member in state.bucket.members}
            stored += reduction_shards(state.reduction, layouts, state.bucket.key.reducing)
    return stored


def _residual(kept: KeptTensor, layout: ParameterLayout, view: GroupView, start: int) -> CheckpointShard:
    return CheckpointShard(
        name=f"compression/{kept.kind}/{layout.name}",
        shape=layout.shape,
        tensor=kept.tensor,
        split=layout.split,
        start=start,
        addend=(view.index, view.size),
    )


def _shared(kept: KeptTensor, layout: ParameterLayout, view: GroupView, shard: tuple[int, int]) -> CheckpointShard:
    """What all members hold alike belongs to the matrix that this rank sees; of one cut otherwise it says nothing, and
    none is loaded."""
    cut = f"/tensor-{layout.split.index}-of-{layout.split.parts}" if layout.split else ""
    cut += "" if shard[1] == 1 else f"/shard-{shard[0]}-of-{shard[1]}"
    return CheckpointShard(
        name=f"compression/{kept.kind}{cut}/{layout.name}",
        shape=torch.Size(kept.tensor.shape),
        tensor=kept.tensor.view(-1),
        counts=view.index == 0,
    )
