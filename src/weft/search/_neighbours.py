"""Layouts next to one that was priced: another value of one setting, or ranks moved from one axis to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.plan import chunk_limits
from weft.price import Layout, Pricer
from weft.search._space import Space, chunk_choices

_AXES = ("pipeline", "tensor", "context", "expert", "data")


def neighbours(start: Layout, space: Space, pricer: Pricer, batch: int) -> Iterator[Layout]:
    """Yield the neighbours of a layout in a space that keep the batch; whether they fit is not looked at."""
    base = replace(start, recompute=space.recomputes[0], offload=space.offloads[0], cuts=None)
    seen = {base}
    for layout in _changed(base, space, pricer, batch):
        if layout not in seen:
            seen.add(layout)
            yield layout


def _changed(base: Layout, space: Space, pricer: Pricer, batch: int) -> Iterator[Layout]:
    yield from _schedules(base, space, len(pricer.profile.blocks))
    for zero in space.zeros:
        yield from _sharded(replace(base, zero=zero), space, base.data)
    sizes = {axis: getattr(base, axis) for axis in _AXES}
    changes = [dict(sizes)]
    for one in _AXES:
        for size in _next_sizes(one, sizes[one], space):
            here = {**sizes, one: size}
            changes.append(here)
            for other in _AXES:
                if other != one:
                    changes += [{**here, other: again} for again in _next_sizes(other, sizes[other], space)]
    devices = pricer.cluster.num_devices
    for change in changes:
        ranks = change["pipeline"] * change["tensor"] * change["context"]
        for size in _near(base.microbatch_size, space.microbatch_sizes):
            for data in {change["data"], min(devices // ranks, batch // size)}:
                yield from _resized(base, space, pricer, {**change, "data": data}, size, batch)


def _resized(
    base: Layout, space: Space, pricer: Pricer, sizes: dict[str, int], size: int, batch: int
) -> Iterator[Layout]:
    data, pipeline, tensor, context = (sizes[axis] for axis in ("data", "pipeline", "tensor", "context"))
    if data < 1 or batch % size or data > batch // size or (space.datas is not None and data not in space.datas):
        return
    total = batch // size
    if space.single_microbatch and data != total:
        return
    if pipeline * tensor * context * data > pricer.cluster.num_devices or (data * context) % sizes["expert"]:
        return
    changed = replace(
        base,
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        expert=sizes["expert"],
        microbatch_size=size,
        microbatches=-(-total // data),
        sequence_parallel=tensor > 1 and True in space.sequence_parallels,
    )
    for layout in _sharded(changed, space, data):
        least, most = chunk_limits(layout.schedule)
        room = chunk_choices(space, least, most, len(pricer.profile.blocks) // pipeline)
        if pipeline == 1:
            yield replace(layout, schedule=space.schedules[0], chunks=1)
        elif base.pipeline == 1:
            yield from _schedules(layout, space, len(pricer.profile.blocks))
        elif room:
            yield replace(layout, chunks=min(room, key=lambda chunks: (abs(chunks - layout.chunks), chunks)))


def _sharded(layout: Layout, space: Space, data: int) -> Iterator[Layout]:
    """The layout over so many data ranks, which its ZeRO stage says how to share out."""
    if layout.zero == 3:
        shards = [n for n in space.shards or (data,) if n > 1 and data % n == 0]
    else:
        shards = [data if layout.expert > 1 and layout.zero else 1]
    for shard in shards:
        if (shard * layout.context) % layout.expert == 0:
            yield replace(layout, shard=shard, replicate=data // shard)


def _schedules(layout: Layout, space: Space, blocks: int) -> Iterator[Layout]:
    for schedule in space.schedules if layout.pipeline > 1 else ():
        for chunks in chunk_choices(space, *chunk_limits(schedule), blocks // layout.pipeline):
            yield replace(layout, schedule=schedule, chunks=chunks)


def _next_sizes(axis: str, size: int, space: Space) -> list[int]:
    """The next smaller and larger values, and half and twice the size."""
    if axis == "data":
        return [size // 2, size * 2] if size > 1 else [2]
    known = {"pipeline": space.pipelines, "tensor": space.tensors, "context": space.contexts, "expert": space.experts}
    return [each for each in _near(size, known[axis]) if each != size]


def _near(size: int, known: tuple[int, ...]) -> list[int]:
    below, above = [each for each in known if each < size], [each for each in known if each > size]
    wanted = {size, size // 2, size * 2, *below[-1:], *above[:1]}
    return sorted(wanted & set(known))
