"""Step times and memory that no layout of a split can go below, for whole tables of splits at once.

Admissible: every figure leaves out or rounds down what pricing adds, so that a split whose bound is above the best plan
found can be dropped unpriced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.cluster import Cluster
from weft.price import Layout, Pricer, model_flops
from weft.profile import Profile
from weft.search._space import Space
from weft.search._splits import Splits
from weft.techniques.zero.cost import states_of

Floats = npt.NDArray[np.float64]

_CRITICAL_SHARE = 2 / 3
"""Share of a microbatch's work that no schedule runs side by side: forward and gradients of inputs, where each of the
three passes takes a third."""
_NETWORK_HALVES = 0.5
"""A network that adds up by itself carries half of what a ring does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the bounds need of a model, a cluster and a stack."""

    sample_flops: float
    """Forward and backward."""
    sequence_length: int
    inner_half: float
    """Inner size at which a product reaches half of its best: that of the products for the weights' gradients is the
    number of tokens."""
    flops_per_second: float
    """Rate of one device at its best, in the fastest precision of the space."""
    memory_bytes_per_second: float
    element_bytes: int
    gradient_bytes: int
    dense_parameters: float
    """Parameters that the tensor axis splits, at most; experts left out."""
    expert_parameters: float
    tensor_sums_bytes: float
    """Bytes per sample that the tensor axis adds up in a step's forwards and backwards, all blocks."""
    link_bytes_per_second: float
    """The fastest links."""
    usable_bytes: float
    cores_per_node: int | None
    """Where cores are the devices: a rank computes with its share of them."""
    num_nodes: int


def figures_of(profile: Profile, cluster: Cluster, space: Space, pricer: Pricer, base: Layout) -> Figures:
    """Return the figures of the bounds.  `base` has the precision and bytes of all layouts of the search."""
    device = pricer.device(base)
    calibration = pricer.calibration
    attention = max(calibration.attention_share(device.kind))
    best = max(
        device.peak(precision) * max(calibration.matmul_share(device.kind, precision), attention)
        for precision in space.precisions
    )
    blocks = (profile.stem, *profile.blocks, profile.tail)
    expert = float(sum(block.expert_parameters for block in blocks))
    element = base.element_bytes
    sums = sum(
        operator.n * operator.rows_per_token * element * 2
        for block in profile.blocks
        for operator in block.operators
        if operator.split == "row"
    )
    cores = None if cluster.has_accelerators else min(node.cores for node in cluster.nodes)
    scale = 1.0 if cores is None else 1.0 / cores  # `base` is one rank, with all cores of a node
    return Figures(
        sample_flops=model_flops(profile),
        sequence_length=profile.sequence_length,
        inner_half=0.0 if cores is not None else calibration.inner_size_half,
        flops_per_second=best * scale,
        memory_bytes_per_second=device.memory_bytes_per_second * scale,
        element_bytes=element,
        gradient_bytes=base.gradient_bytes,
        dense_parameters=float(profile.num_parameters) - expert,
        expert_parameters=expert,
        tensor_sums_bytes=0.0 if pricer.stack.overlap_tensor else sums * profile.sequence_length,
        link_bytes_per_second=max((tier.bandwidth_bytes_per_second for tier in cluster.links), default=1e30),
        usable_bytes=cluster.usable_memory_bytes,
        cores_per_node=cores,
        num_nodes=cluster.num_nodes,
    )


def time_bounds(figures: Figures, splits: Splits) -> Floats:
    """Return seconds that no step of each split goes below."""
    ranks = splits.tensor * splits.context
    speed = np.ones(len(splits))
    if figures.cores_per_node is not None:
        speed = figures.cores_per_node / -(-splits.world // figures.num_nodes)
    compute = figures.sample_flops * splits.size / ranks / (figures.flops_per_second * speed)
    tokens = splits.size * figures.sequence_length / splits.context
    compute = compute * (2.0 + (tokens + figures.inner_half) / tokens) / 3.0
    held = figures.dense_parameters / splits.tensor + figures.expert_parameters / splits.expert
    moved = held * (2 * figures.element_bytes + figures.gradient_bytes) / (figures.memory_bytes_per_second * speed)
    share = _NETWORK_HALVES * 2 * (splits.tensor - 1) / splits.tensor
    summed = share * figures.tensor_sums_bytes * splits.size / splits.context / figures.link_bytes_per_second
    whole = np.maximum(compute, moved) + summed
    return np.maximum(splits.microbatches * whole / splits.pipeline, _CRITICAL_SHARE * whole)


def memory_bounds(figures: Figures, splits: Splits, base: Layout) -> Floats:
    """Return bytes that the fullest rank of each split needs at least: model states shared out as far as they can be
    with stages of equal size.  `base` has the ZeRO stage and the offloading that hold least."""
    columns: dict[str, Any] = {"replicate": 1, "shard": splits.data, "context": splits.context}
    layout = replace(base, **columns, **{"tensor": splits.tensor, "expert": splits.expert})
    dense = figures.dense_parameters / splits.tensor / splits.pipeline
    experts = figures.expert_parameters / splits.expert / splits.pipeline
    return dense * sum(states_of(layout)) + experts * sum(states_of(layout, experts=True))
