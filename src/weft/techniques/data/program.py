"""What data ranks send beside buckets: statistics of batch norms, samples for a loss over the whole batch, rows of
sparse tables, the agreement on a step, flags of use."""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.techniques.data.contract import Data
from weft.techniques.send_trace import ModelShare, RankSend

_DOUBLE, _FLAG, _INDEX = 8, 4, 8
"""Bytes of a slot of the agreement (fp64), of a flag of use (fp32), and of a row's number (int64)."""


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield all of it."""
    yield from statistics(share)
    yield from samples(share)
    yield from auxiliary(share)
    yield from rows(share)
    yield from agreement(share)
    yield from flags(share)
    yield from routing(share)


def statistics(share: ModelShare) -> Iterator[RankSend]:
    """Yield what batch norms exchange: mean, squares and count forward, two sums per channel backward."""
    axis, ranks, _ = share.summing
    if ranks == 1:
        return
    for part in share.parts:
        for call in part.calls:
            if call.kind == "batch_norm":
                channels = call.shape[1] // (share.plan.mesh.tensor if call.is_divided else 1)
                again = (2 if share.recomputes(call.block) else 1) + share.runs_ahead
                forward = ranks * (2 * channels + 1) * share.master_bytes
                yield _statistic("all_gather", axis, forward, again * share.microbatches, call.module)
                if call.needs_gradient:
                    yield _statistic(
                        "all_reduce", axis, 2 * channels * share.master_bytes, share.microbatches, call.module
                    )


def _statistic(operation: str, axis: str, size_bytes: int, count: int, module: str) -> RankSend:
    return RankSend(
        operation=operation,  # pyright: ignore[reportArgumentType]
        axis=axis,
        size_bytes=size_bytes,
        count=count,
        technique=Data.name,
        reason=f"statistics of the batch, {module}",
    )


def samples(share: ModelShare) -> Iterator[RankSend]:
    """Yield what is gathered for a loss that is no sum over samples, and the sums of gradients that come back."""
    axis, ranks, _ = share.summing
    for gather in share.outline.gathers if ranks > 1 else ():
        size = gather.element_bytes or share.compute_bytes
        for operation in ("all_gather", "reduce_scatter") if gather.needs_gradient else ("all_gather",):
            yield RankSend(
                operation=operation,
                axis=axis,
                size_bytes=ranks * share.plan.microbatch.size * gather.elements_per_sample * size,
                count=share.microbatches,
                technique=Data.name,
                reason=f"samples of all ranks, {gather.what}",
            )


def auxiliary(share: ModelShare) -> Iterator[RankSend]:
    """Yield the one sum of what auxiliary losses say of the batch, with the count of the loss."""
    axis, ranks, _ = share.summing
    if share.outline.auxiliary and ranks > 1:
        yield RankSend(
            operation="all_reduce",
            axis=axis,
            size_bytes=_DOUBLE * (1 + sum(elements + 1 for elements in share.outline.auxiliary)),
            technique=Data.name,
            reason="statistics of auxiliary losses",
        )


def routing(share: ModelShare) -> Iterator[RankSend]:
    """Yield the sum over all ranks of what routers chose: where a bias balances it in every step, else for reports."""
    if share.outline.routers is None or share.plan.mesh.world_size == 1:
        return
    routers, experts = share.outline.routers
    yield RankSend(
        operation="all_reduce",
        axis=share.world_axis,
        size_bytes=_DOUBLE * routers * (experts + 1),
        when="always" if share.outline.is_balanced else "reported",
        phase="update",
        technique=Data.name,
        reason="choices of routers",
    )


def rows(share: ModelShare) -> Iterator[RankSend]:
    """Yield the exchange of rows of each table, over those who see other samples and then over those who have parts:
    how many each rank brings, their numbers and their values, as many as the rank with the most has."""
    axis, ranks, _ = share.summing
    for table in share.held:
        if not table.parameter.is_sparse:
            continue
        row = math.prod(table.shape[1:]) * share.gradient_bytes
        groups = ((axis, ranks), ("tensor", share.plan.mesh.tensor if table.partial_over else 1))
        for number, (over, size) in enumerate(group for group in groups if group[1] > 1):
            key = (table.name, number)
            for element, rows_of in ((_INDEX, None), (_INDEX, key), (row, key)):
                yield RankSend(
                    operation="all_gather",
                    axis=over,
                    size_bytes=size * element,
                    technique=Data.name,
                    reason=f"rows of {table.name}" if rows_of else f"number of rows of {table.name}",
                    rows_of=rows_of,
                )


def agreement(share: ModelShare) -> Iterator[RankSend]:
    """Yield the one all-reduce of a step's totals over all ranks.

    Loss, count and squared norm by replica, flags of use and stopping, and a slot per rank for its memory, and where
    batches are compared one more for its batch.
    """
    world = share.plan.mesh.world_size
    replicas = share.plan.mesh.replicate if share.sums_apart else 1
    if world > 1:
        yield RankSend(
            operation="all_reduce",
            axis=share.world_axis,
            size_bytes=_DOUBLE * (3 * replicas + 2 + world * (2 if share.is_fingerprinted else 1)),
            phase="agreement",
            technique=Data.name,
            reason="loss, count, norm and memory of the step",
        )


def flags(share: ModelShare) -> Iterator[RankSend]:
    """Yield the sums of flags by which ranks find out which parameters nobody used, in steps in which there are such
    on any rank."""
    axis, ranks, _ = share.summing
    for name, size in ((axis, ranks), ("tensor", share.plan.mesh.tensor)):
        if size > 1:
            yield RankSend(
                operation="all_reduce",
                axis=name,
                size_bytes=_FLAG * len({parameter.name for parameter in share.held}),
                when="unused",
                phase="update",
                technique=Data.name,
                reason="flags of parameters that took no part",
            )
