"""How ZeRO-3 cuts what a rank holds of each parameter; loaded where it does."""

from __future__ import annotations

import math

from weft.config.plan import EXPERT_LENDERS
from weft.techniques.send_trace import HeldParameter, ModelShare, Parameter, Shape
from weft.techniques.zero.shard_dims import dim_of_shards


def sharding_of(share: ModelShare, *, is_expert: bool) -> tuple[str, int, int]:
    """Return axis, ranks and this rank's index of those over which a parameter is cut."""
    if not is_expert:
        return "shard", share.shards, share.shard_index
    ranks = share.group_over(EXPERT_LENDERS, ("expert",))
    return "expert_data" if share.plan.mesh.replicate == 1 else "expert_shard", len(ranks), ranks.index(share.rank)


def cut_dim(share: ModelShare, parameter: Parameter) -> int | None:
    """Return the dim along which a parameter is cut; None: it stays whole."""
    is_expert = share.shares_out(parameter)
    ranks = sharding_of(share, is_expert=is_expert)[1]
    return dim_of_shards(share.local_shape(parameter), ranks, is_expert=is_expert) if ranks > 1 else None


def kept_out(share: ModelShare) -> set[str]:
    """Names of trained parameters that stay whole under ZeRO-3: tied ones, tables with sparse gradients, and those that
    nobody can cut."""
    return {
        parameter.name
        for parameter in share.held
        if parameter.is_tied or parameter.parameter.is_sparse or cut_dim(share, parameter.parameter) is None
    }


def shard_shape(share: ModelShare, parameter: HeldParameter) -> Shape:
    """Return what this rank holds of a parameter that is cut: the last runs are shorter."""
    _, ranks, index = sharding_of(share, is_expert=parameter.is_expert)
    sizes, dim = list(parameter.shape), cut_dim(share, parameter.parameter) or 0
    chunk = -(-sizes[dim] // ranks)
    start = min(sizes[dim], index * chunk)
    sizes[dim] = min(sizes[dim], start + chunk) - start
    return tuple(sizes)


def padded(share: ModelShare, parameter: Parameter) -> int:
    """Return the elements of all shards of a parameter, each as long as the longest along the dim that is cut."""
    sizes, dim = list(share.local_shape(parameter)), cut_dim(share, parameter) or 0
    ranks = sharding_of(share, is_expert=share.shares_out(parameter))[1]
    sizes[dim] = -(-sizes[dim] // ranks) * ranks
    return math.prod(sizes)
