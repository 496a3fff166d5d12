"""What data ranks send under ZeRO-3: weights gathered unit by unit, gradients scattered
(`weft.techniques.zero.sharded_weights`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.techniques.compression.program import between_replicas
from weft.techniques.send_trace import HeldParameter, ModelShare, Parameter, Part, RankSend
from weft.techniques.zero.contract import Zero, reduction_rounds
from weft.techniques.zero.cuts import cut_dim, kept_out, padded, shard_shape, sharding_of


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together: a block's, what lies outside the blocks, or a mixture's experts."""

    name: str
    is_block: bool
    axis: str
    ranks: int
    """Ranks that share them out."""
    weights: tuple[Parameter, ...]
    trained: tuple[Parameter, ...]


def holds_weights(share: ModelShare) -> bool:
    """Whether weights are gathered once per step: because data ranks would not gather equally often otherwise, or
    because a pipeline's stages would gather them anew for every microbatch."""
    return share.plan.mesh.pipeline > 1 or share.plan.microbatch.has_unequal_shares


def units_of(share: ModelShare, part: Part, left_out: set[str]) -> list[Unit]:
    """Return a part's units, in the order of its blocks; the one outside of them is the last."""
    of_blocks: dict[str, list[Parameter]] = {}
    of_experts: dict[str, list[Parameter]] = {}
    outside: list[Parameter] = []
    for parameter in part.parameters:
        if (parameter.first in left_out and parameter.is_trained) or cut_dim(share, parameter) is None:
            continue
        block = next((name for name in share.outline.blocks if parameter.name.startswith(f"{name}.")), None)
        if share.shares_out(parameter):
            of_experts.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
        elif block is None:
            outside.append(parameter)
        else:
            of_blocks.setdefault(block, []).append(parameter)
    units = [_unit(share, name, parameters) for name, parameters in of_experts.items()]
    units += [_unit(share, name, of_blocks[name]) for name in share.outline.blocks if name in of_blocks]
    return [*units, _unit(share, "outside of blocks", outside, is_block=False)] if outside else units


def _unit(share: ModelShare, name: str, parameters: Sequence[Parameter], *, is_block: bool = True) -> Unit:
    axis, ranks, _ = sharding_of(share, is_expert=share.shares_out(parameters[0]))
    return Unit(name, is_block, axis, ranks, tuple(parameters), tuple(one for one in parameters if one.is_trained))


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield what a step sends for weights that are shared out and their gradients."""
    left_out = kept_out(share)
    for part in share.parts:
        for unit in units_of(share, part, left_out):
            yield from _of_unit(share, unit)
    members = [parameter for parameter in share.held if parameter.name not in left_out]
    if share.plan.data_parallel.compresses:
        yield from between_replicas(share, members)
    yield from _partial(share, members)


def _of_unit(share: ModelShare, unit: Unit) -> Iterator[RankSend]:
    axis, replicas = unit.axis, share.plan.mesh.replicate
    gathered = sum(padded(share, parameter) for parameter in unit.weights) * share.compute_bytes
    # Outside of blocks weights stay from the forward to the backward, also from one that runs ahead.
    passes = (3 if share.runs_ahead else 2) if unit.is_block else 1
    gathers = 1 if holds_weights(share) else passes * share.microbatches
    yield _send("all_gather", axis, gathered, gathers, f"weights, {unit.name}")
    yield _send("all_gather", axis, gathered, 1, f"weights to be watched, {unit.name}", is_first=True)
    if not unit.trained:
        return
    elements = sum(padded(share, parameter) for parameter in unit.trained)
    scattered = elements * share.gradient_bytes
    yield _send("reduce_scatter", axis, scattered, reduction_rounds(share.plan), f"gradients, {unit.name}")
    if replicas > 1 and not share.sums_apart and not share.plan.data_parallel.compresses:
        yield _send("all_reduce", "replicate", scattered // unit.ranks, 1, f"gradients of copies, {unit.name}")


def _partial(share: ModelShare, members: Sequence[HeldParameter]) -> Iterator[RankSend]:
    """Yield the sums of partial gradients over tensor ranks that hold the same parameters, one by one."""
    for parameter in members:
        if parameter.partial_over:
            yield RankSend(
                operation="all_reduce",
                axis=parameter.partial_over,
                size_bytes=math.prod(shard_shape(share, parameter)) * share.master_bytes,
                technique="tensor parallelism",
                reason=f"parts of gradients, {parameter.name}",
            )


def _send(operation: str, axis: str, size_bytes: int, count: int, reason: str, *, is_first: bool = False) -> RankSend:
    return RankSend(
        operation=operation,  # pyright: ignore[reportArgumentType]
        axis=axis,
        size_bytes=size_bytes,
        count=count,
        when="first" if is_first else "always",
        technique=Zero.name,
        reason=reason,
    )
