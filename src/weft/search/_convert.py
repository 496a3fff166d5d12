"""From a layout, which is numbers, to a plan, which a recipe can be trained under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from weft.errors import PlanError
from weft.plan import (
    ComputePlan,
    ContextParallelPlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    Schedule,
    TensorParallelPlan,
    even_shares,
)
from weft.price import Layout
from weft.recipe import Precision


def plan_of(layout: Layout, *, global_batch_size: int, shares: Sequence[int] | None = None) -> Plan:
    """Return the plan that says what a layout says; `Layout.of` gives the layout back.

    Args:
        global_batch_size: of the recipe; the data ranks share its microbatches as evenly as can be.
        shares: microbatches of each data rank, where they are meant to be uneven.

    Raises:
        PlanError: a plan cannot say it: its precision, frozen weights, or microbatches that are not the global batch.
    """
    return Plan(
        mesh=MeshPlan(
            pipeline=layout.pipeline,
            replicate=layout.replicate,
            shard=layout.shard,
            context=layout.context,
            tensor=layout.tensor,
            expert=layout.expert,
            order=layout.order,
        ),
        data_parallel=DataParallelPlan(
            zero=_zero(layout.zero),
            algorithm=layout.algorithm,
            bucket_bytes=layout.bucket_bytes,
            first_bucket_bytes=min(layout.bucket_bytes, layout.first_bucket_bytes),
            compression=layout.compression,
            reduce_every=layout.reduce_every,
            reduce_precision=_reduce_precision(layout),
            local_steps=layout.local_steps,
            outer_learning_rate=layout.outer_learning_rate,
            outer_momentum=layout.outer_momentum,
        ),
        tensor_parallel=TensorParallelPlan(scheme=layout.tensor_scheme, sequence=layout.sequence_parallel),
        context_parallel=ContextParallelPlan(scheme=layout.context_scheme),
        pipeline_parallel=PipelineParallelPlan(
            schedule=_schedule(layout), chunks_per_rank=layout.chunks, cuts=layout.cuts
        ),
        microbatch=_microbatch(layout, global_batch_size, shares),
        memory=MemoryPlan(recompute=layout.recompute, offload=layout.offload, fused_loss=layout.fused_loss),
        compute=ComputePlan(precision=_precision(layout)),
    )


def _microbatch(layout: Layout, global_batch_size: int, shares: Sequence[int] | None) -> MicrobatchPlan:
    size, total = layout.microbatch_size, global_batch_size // layout.microbatch_size
    given = tuple(shares) if shares is not None else even_shares(total, layout.data)
    if size * sum(given) != global_batch_size or len(given) != layout.data or max(given) != layout.microbatches:
        raise PlanError(
            f"{layout.microbatches} microbatches of {size} samples on the busiest of {layout.data} data ranks do not "
            f"make a global batch of {global_batch_size}: even shares would be {even_shares(total, layout.data)[0]}."
        )
    return MicrobatchPlan(size=size, per_step=given[0] if len(set(given)) == 1 else given)


def _zero(stage: int) -> Literal[0, 1, 2, 3]:
    match stage:
        case 0 | 1 | 2 | 3:
            return stage
        case _:
            raise PlanError(f"data_parallel.zero = {stage} is no stage. Use 0, 1, 2 or 3.")


def _schedule(layout: Layout) -> Schedule:
    if layout.schedule == "zero_bubble_2p":
        raise PlanError('schedule = "zero_bubble_2p" is priced, not run. Use schedule = "interleaved_zero_bubble".')
    return layout.schedule


def _precision(layout: Layout) -> Precision:
    if layout.adapters_only:
        raise PlanError("a plan trains all weights; this layout has frozen ones and adapters.")
    for precision in get_args(Precision):
        if precision == layout.precision:
            return precision
    known = ", ".join(get_args(Precision))
    problem = f"can be priced, but no plan has it. Use one of {known}."
    raise PlanError(f'compute.precision = "{layout.precision}" {problem}')


def _reduce_precision(layout: Layout) -> Literal["fp32", "compute"]:
    element = {"fp64": 8, "fp32": 4}.get(_precision(layout))
    if element is None:
        if layout.gradient_bytes in (2, 4):
            return "compute" if layout.gradient_bytes == 2 else "fp32"
    elif layout.gradient_bytes == element:
        return "fp32"
    raise PlanError(f"gradients of {layout.gradient_bytes} bytes stand in no plan with {layout.precision}.")
