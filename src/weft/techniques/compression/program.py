"""What data ranks send in place of gradients that a codec packs (`weft.techniques.compression.codecs`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weft.techniques.compression.contract import Compression
from weft.techniques.compression.wire import CodecSpec, Frame, ParameterSpan, collectives_of, spec_of, storages_of
from weft.techniques.send_trace import HeldParameter, ModelShare, RankSend, Shape


def codec_of(share: ModelShare) -> CodecSpec | None:
    """What packs gradients; None where they travel as they are."""
    data = share.plan.data_parallel
    return spec_of(data, share.recipe.run.seed, None) if data.compresses else None


def is_taken(share: ModelShare, parameter: HeldParameter, shape: Shape) -> bool:
    """Whether a parameter whose gradient has this shape is compressed: not where ranks that do not sum it hold copies,
    which would drift apart (`weft.techniques.compression.reduction`)."""
    codec = codec_of(share)
    is_copied = parameter.is_tied or (share.plan.mesh.tensor > 1 and not parameter.is_split)
    return codec is not None and not is_copied and codec.takes(shape)


def packed_sends(share: ModelShare, frame: Frame, axis: str, members: int, count: int, name: str) -> Iterator[RankSend]:
    """Yield what `count` reductions of a storage send."""
    codec = codec_of(share)
    assert codec is not None, "what is not compressed travels as it is"
    for warms_up in (True, False) if codec.codec == "onebit" else (False,):
        for one in collectives_of(codec, frame, members, share.gradient_bytes, warms_up=warms_up):
            sizes = [one.size_bytes]
            operation = one.operation
            if operation == "all_gather":
                operation, sizes = share.gathered(one.sizes)
            for size_bytes in sizes:
                yield RankSend(
                    operation=operation,
                    axis=axis,
                    size_bytes=size_bytes,
                    count=count,
                    when="always" if codec.codec != "onebit" else "warm_up" if warms_up else "after_warm_up",
                    technique=Compression.name,
                    reason=f"gradients by {codec.codec}, {name}",
                )


def between_replicas(share: ModelShare, members: Sequence[HeldParameter]) -> Iterator[RankSend]:
    """Yield the sums over copies of ZeRO-3's shards, made storage by storage
    (`weft.techniques.compression.replicas`)."""
    from weft.techniques.zero.cuts import shard_shape  # where weights are cut

    here = [(parameter, rows) for parameter in members if (rows := shard_shape(share, parameter))[0]]
    most = max(1, share.plan.data_parallel.bucket_limits[1] // share.gradient_bytes)
    shards, replicas = share.shards, share.plan.mesh.replicate
    for is_compressed in (True, False):
        chosen = [
            (parameter, rows)
            for parameter, rows in here
            if is_taken(share, parameter, (-(-parameter.shape[0] // shards), *parameter.shape[1:])) == is_compressed
        ]
        for places in storages_of([math.prod(rows) for _, rows in chosen], most):
            frame = frame_of([(chosen[place][0].name, chosen[place][1]) for place in places])
            name = f"copies of {chosen[places[0]][0].name} … ({len(places)})"
            if is_compressed:
                yield from packed_sends(share, frame, "replicate", replicas, 1, name)
                continue
            yield RankSend(
                operation="all_reduce",
                axis="replicate",
                size_bytes=frame.num_elements * share.gradient_bytes,
                technique=Compression.name,
                reason=f"gradients as they are, {name}",
            )


def frame_of(shapes: Sequence[tuple[str, Shape]]) -> Frame:
    """Lay parameters one behind the other."""
    spans: list[ParameterSpan] = []
    for name, shape in shapes:
        spans.append(ParameterSpan(name=name, offset=spans[-1].stop if spans else 0, shape=shape))
    return Frame(spans=tuple(spans), num_elements=spans[-1].stop)
