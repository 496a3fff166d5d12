"""The layouts that a row may mean: one where it says everything, several where its authors left a choice unsaid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from benchmarks.published._cuts import cuts_of
from benchmarks.published._models import trains_adapters_only
from benchmarks.published._rows import Run
from benchmarks.published._sources import FrameworkHistory, history_of, year_of
from benchmarks.published._unpredictable import Unpredictable
from weft.config.cluster import Cluster
from weft.config.plan import Recompute
from weft.model.profile import Profile
from weft.techniques.cost_terms import Layout, PricedPrecision
from weft.techniques.pipeline.schedules import PricedSchedule, Schedule, chunk_limits
from weft.techniques.zero.settings import stage_of

_PRECISIONS: dict[str, PricedPrecision] = {
    "fp64": "fp64",
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "amp_bf16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp8": "fp8",
    "float8": "fp8",
    "mxfp8": "mxfp8",
    "fp8-mx": "mxfp8",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}
_RECOMPUTES: dict[str, Recompute] = {
    "none": "none",
    "no": "none",
    "selective": "selective",
    "sel": "selective",
    "full": "full",
    "every_layer": "full",
    "block": "full",
}
_SCHEDULES: dict[str, PricedSchedule] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "1f1b-i": "interleaved_1f1b",
    "interleaved 1f1b": "interleaved_1f1b",
    "zb-1p": "interleaved_zero_bubble",
    "zb-h1": "interleaved_zero_bubble",
    "zb-2p": "zero_bubble_2p",
    "zb-h2": "zero_bubble_2p",
    "zb-v": "zbv",
    "dualpipev": "dualpipev",
}
"""Schedules by their names in papers, besides those of a plan."""
_RECOMPUTED_SHARES = (0.25, 0.5, 0.75)
"""Shares of the blocks of a stage that are recomputed, as Megatron's `recompute-num-layers` allows."""
_MICROBATCHES_TRIED = (1, 2, 4, 8, 16)


def world_of(run: Run) -> int:
    """Return the number of devices.

    Raises:
        Unpredictable: neither `n_gpus` nor all axes are given.
    """
    if run.devices is not None:
        return run.devices
    if run.data is None or run.tensor is None or run.pipeline is None:
        raise Unpredictable("n_gpus is empty, and dp, tp and pp are not all given")
    return run.data * run.tensor * run.pipeline * (run.context or 1)


def layouts_of_run(run: Run, profile: Profile, cluster: Cluster) -> tuple[Layout, ...]:
    """Return the layouts that the row may mean, the likeliest first; all of them use the whole world.

    Raises:
        Unpredictable: axes or the batch are not given, or contradict one another.
    """
    data, tensor, pipeline, context = _axes(run)
    history = history_of(run)
    zero = _zero(run, history, data * context)
    expert = _expert(run, profile, data * context, tensor)
    # Ranks that share out experts stand on the shard axis, as in a plan.
    shard = data if zero == 3 or expert > 1 else 1
    base = Layout(
        pipeline=pipeline,
        replicate=data // shard,
        shard=shard,
        context=context,
        tensor=tensor,
        expert=expert,
        cuts_experts=False,
        zero=stage_of(zero),
        sequence_parallel=tensor > 1 and _sequence_parallel(run, history),
        context_scheme="all_gather" if history.name in ("torchtitan", "nemo-automodel") else "ring",
        precision=_precision(run, cluster),
        trained_share=0.0 if trains_adapters_only(run) else 1.0,
    )
    base = _with_states(_with_schedule(base, run, history, profile), history)
    return tuple(
        replace(base, microbatch_size=size, microbatches=count, recompute=recompute)
        for size, count in _microbatches(run, data)
        for recompute in _recomputes(run, base.num_stages, len(profile.blocks))
    )


def _axes(run: Run) -> tuple[int, int, int, int]:
    """Return data, tensor, pipeline and context; one of them may be left to the rest of the world."""
    world = world_of(run)
    context = run.context or 1
    given = {"dp": run.data, "tp": run.tensor, "pp": run.pipeline}
    missing = [name for name, size in given.items() if size is None]
    if len(missing) > 1:
        raise Unpredictable(f"the layout is not known: {', '.join(missing)} are empty")
    known = math.prod(size for size in given.values() if size is not None) * context
    if missing:
        if world % known:
            raise Unpredictable(f"the given axes make {known}, which does not divide n_gpus = {world}")
        given[missing[0]] = world // known
    elif known != world:
        raise Unpredictable(f"dp × tp × pp × cp = {known} is not n_gpus = {world}")
    return given["dp"] or 1, given["tp"] or 1, given["pp"] or 1, context


def _zero(run: Run, history: FrameworkHistory, ranks: int) -> int:
    """Return the stage; `ranks` counts those of the data and context axes, over which weights may be shared out."""
    if run.zero is not None:
        return run.zero if ranks > 1 or run.zero < 3 else 0
    if history.fully_sharded:
        return 3 if ranks > 1 else 0
    is_distributed_optimizer = year_of(run) >= history.overlaps_gradients_since and history.memory == "allocated"
    return 1 if is_distributed_optimizer or history.shards_optimizer or history.name == "mlperf" else 0


def _expert(run: Run, profile: Profile, ranks: int, tensor: int) -> int:
    """Return the expert axis; where it is not given, as many ranks as experts and batch allow."""
    if not profile.num_experts:
        return 1
    if run.expert is None:
        return math.gcd(profile.num_experts, ranks)
    if run.expert > ranks:
        ranks *= tensor  # whole experts on the ranks of the tensor axis too
    if ranks % run.expert or profile.num_experts % run.expert:
        raise Unpredictable(f"ep = {run.expert} does not divide dp × cp = {ranks} or the {profile.num_experts} experts")
    return run.expert


def _sequence_parallel(run: Run, history: FrameworkHistory) -> bool:
    if run.sequence_parallel is not None:
        return run.sequence_parallel
    return year_of(run) >= history.sequence_parallel_since


def _precision(run: Run, cluster: Cluster) -> PricedPrecision:
    peaks = cluster.nodes[0].devices.peak_flops
    if run.precision is None:
        return "bf16" if "bf16" in peaks else "fp16"
    precision = _PRECISIONS.get(run.precision.lower())
    if precision is None:
        raise Unpredictable(f'dtype = "{run.precision}" is none of {", ".join(_PRECISIONS)}')
    # NVIDIA's containers let fp32 products run in TF32, and nobody trains without.
    return "tf32" if precision == "fp32" and "tf32" in peaks else precision


def _with_schedule(layout: Layout, run: Run, history: FrameworkHistory, profile: Profile) -> Layout:
    if layout.pipeline == 1:
        return layout
    chunks, layers = run.chunks, len(profile.blocks)
    if chunks is None:
        unsaid = layers // layout.pipeline if year_of(run) >= history.interleaves_since else 1
        chunks = max(1, unsaid) if layers % layout.pipeline == 0 else 1
    # Embedding and head may be stages of their own: 22 layers make 24 stages.
    chunks = min(chunks, max(1, (layers + 2) // layout.pipeline))
    schedule: PricedSchedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
    if chunks == 1 and history.name == "zero-bubble":
        schedule = "interleaved_zero_bubble"
    if "deepseek" in run.family and layers >= 2 * layout.pipeline:
        schedule, chunks = "dualpipev", 2
    if run.schedule is not None:
        schedule = _named_schedule(run.schedule)
        least, most = chunk_limits(schedule)
        chunks = max(least, chunks if most is None else min(most, chunks))
    return replace(layout, schedule=schedule, chunks=chunks, cuts=cuts_of(profile, history, layout.pipeline * chunks))


def _named_schedule(name: str) -> PricedSchedule:
    own: tuple[Schedule, ...] = get_args(Schedule)
    known: dict[str, PricedSchedule] = {schedule: schedule for schedule in own}
    known |= _SCHEDULES
    schedule = known.get(name.lower())
    if schedule is None:
        raise Unpredictable(f'schedule = "{name}" is none of {", ".join(known)}')
    return schedule


def _with_states(layout: Layout, history: FrameworkHistory) -> Layout:
    """Set the bytes of gradients and optimizer as the framework keeps them, weights of 2 bytes beside them."""
    if layout.precision in ("fp32", "tf32"):
        return replace(layout, gradient_bytes=4, master_bytes=8)
    if layout.shards_weights and history.fully_sharded:
        # FSDP shards fp32 weights, gradients and two moments: 16 bytes, of which 2 stand under weights.
        return replace(layout, gradient_bytes=4, master_bytes=10)
    if history.name in ("nemo", "megatron-bridge"):
        # Their performance recipes reduce gradients in 16 bits.
        return replace(layout, gradient_bytes=2, master_bytes=12)
    if layout.precision == "fp16" and history.flash_since > 9000 and not history.shards_optimizer:
        # DeepSpeed reduces fp16 gradients and keeps fp32 masters and moments.
        return replace(layout, gradient_bytes=2, master_bytes=12)
    if history.name.startswith("hagemann"):
        # DeepSpeed reduces gradients in the weights' precision.
        return replace(layout, gradient_bytes=2, master_bytes=12)
    return replace(layout, gradient_bytes=4, master_bytes=12)


def _microbatches(run: Run, data: int) -> Iterator[tuple[int, int]]:
    """Yield sizes and numbers of microbatches that make up the global batch."""
    batch = run.global_batch
    if batch is None:
        if run.layers == 1 and run.microbatch is not None:
            yield run.microbatch, 1
            return
        raise Unpredictable("global_batch is empty, so that the step is not known")
    if batch % data:
        raise Unpredictable(f"global_batch = {batch} is no multiple of dp = {data}")
    share = batch // data
    if run.microbatch is not None:
        if share % run.microbatch:
            raise Unpredictable(
                f"micro_batch = {run.microbatch} does not divide global_batch / dp = {batch} / {data} = {share}"
            )
        yield run.microbatch, share // run.microbatch
        return
    for size in _MICROBATCHES_TRIED:
        if share % size == 0:
            yield size, share // size


def _recomputes(run: Run, stages: int, layers: int) -> Iterator[Recompute | tuple[Recompute, ...]]:
    """Yield what the row says; where it says nothing, none first, then of the first blocks of each stage, then all."""
    if run.recompute is not None:
        recompute = _RECOMPUTES.get(run.recompute.lower())
        if recompute is None:
            raise Unpredictable(f'recompute = "{run.recompute}" is none of {", ".join(_RECOMPUTES)}')
        yield recompute
        return
    yield "none"
    held = -(-layers // stages)
    for share in _RECOMPUTED_SHARES:
        count = round(share * held)
        if 0 < count < held:
            blocks: list[Recompute] = ["full" if layer % held < count else "none" for layer in range(layers)]
            yield tuple(blocks)
    yield "full"
