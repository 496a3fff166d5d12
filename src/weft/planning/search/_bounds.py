"""Step times and memory that no layout of a split can go below, for whole tables of splits at once.

Admissible: every figure leaves out or rounds down what pricing adds, so that a split whose bound is above the best plan
found can be dropped unpriced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.planning.price import CostModel, model_flops
from weft.planning.search._space import Space
from weft.planning.search._splits import Splits
from weft.techniques.cost_terms import Layout
from weft.techniques.zero.cost import states_of

Floats = npt.NDArray[np.float64]

_CRITICAL_SHARE = 2 / 3
"""Share of a microbatch's work that no schedule runs side by side: forward and gradients of inputs, where each of the
three passes takes a third."""
_NETWORK_HALVES = 0.5
"""A network that adds up by itself carries half of what a ring does."""


class SplitBounds:
    """Lower bounds of the step time and the memory of splits, of one model on one cluster."""

    def __init__(self, cost_model: CostModel, space: Space, base: Layout) -> None:
        """`base` is one rank, with the precision and bytes of all layouts of the search."""
        self._base = base
        profile, cluster, calibration = cost_model.profile, cost_model.cluster, cost_model.calibration
        device, stem_to_tail = cost_model.device(base), profile.parts
        self._cores = None if cluster.has_accelerators else min(node.cores for node in cluster.nodes)
        self._num_nodes = cluster.num_nodes
        # Where cores are the devices, `base` has all of a node's, and a rank computes with its share of them.
        scale = 1.0 if self._cores is None else 1.0 / self._cores
        attention = max(calibration.attention_share(device.kind))
        # The best of all precisions and kernels: a bound may not assume a slower one than a layout could choose.
        self._flops_per_second = scale * max(
            device.peak(precision) * max(calibration.matmul_share(device.kind, precision), attention)
            for precision in space.precisions
        )
        self._memory_bytes_per_second = device.memory_bytes_per_second * scale
        self._sample_flops, self._length = model_flops(profile), profile.sequence_length
        # The inner size of the products for the weights' gradients is the number of tokens.
        self._inner_half = 0.0 if self._cores is not None else calibration.inner_size_half
        self._expert_parameters = float(sum(block.expert_parameters for block in stem_to_tail))
        self._dense_parameters = float(profile.num_parameters) - self._expert_parameters
        sums = sum(
            operator.n * operator.rows_per_token * base.element_bytes * 2
            for block in profile.blocks
            for operator in block.operators
            if operator.split == "row"
        )
        self._tensor_sums_bytes = 0.0 if cost_model.framework.overlap_tensor else sums * profile.sequence_length
        self._least_factor = calibration.corrections.least_factor
        self._link_bytes_per_second = max((tier.bandwidth_bytes_per_second for tier in cluster.links), default=1e30)

    def seconds(self, splits: Splits) -> Floats:
        """Return seconds that no step of each split goes below."""
        # Pipeline ranks are not among them: they work on other blocks of the same microbatch, one after the other.
        ranks, base = splits.tensor * splits.context, self._base
        speed = np.ones(len(splits))
        if self._cores is not None:
            speed = self._cores / -(-splits.world // self._num_nodes)
        compute = self._sample_flops * splits.size / ranks / (self._flops_per_second * speed)
        tokens = splits.size * self._length / splits.context
        # Frozen weights beside adapters have no products for their gradients.
        of_weights = 0.0 if base.adapters_only else (tokens + self._inner_half) / tokens
        # Forward, gradients of inputs and gradients of weights take a third of the FLOPs each; only the last third
        # depends on how many tokens the inner sum has.
        compute = compute * (2.0 + of_weights) / 3.0
        parameters = self._dense_parameters / splits.tensor + self._expert_parameters / splits.expert / splits.tensor
        gradients = base.gradient_bytes * (not base.adapters_only)
        # Every microbatch reads its weights in forward and in backward, and adds to gradients.
        moved = parameters * (2 * base.element_bytes + gradients) / (self._memory_bytes_per_second * speed)
        # A ring's all-reduce sends 2 (n - 1) / n of the bytes from each of n ranks.
        share = _NETWORK_HALVES * 2 * (splits.tensor - 1) / splits.tensor
        summed = share * self._tensor_sums_bytes * splits.size / splits.context / self._link_bytes_per_second
        whole = (np.maximum(compute, moved) + summed) * self._least_factor
        # Two bounds: the work of a rank when its stages are perfectly even, and one microbatch's way through all
        # stages.
        return np.maximum(splits.microbatches * whole / splits.pipeline, _CRITICAL_SHARE * whole)

    def bytes(self, splits: Splits, lightest: Layout) -> Floats:
        """Return bytes that the fullest rank of each split needs at least: model states shared out as far as they can
        be with stages of equal size.  `lightest` has the ZeRO stage and the offloading that hold least."""
        columns: dict[str, Any] = {"replicate": 1, "shard": splits.data, "context": splits.context}
        layout = replace(lightest, **columns, **{"tensor": splits.tensor, "expert": splits.expert})
        dense = self._dense_parameters / splits.tensor / splits.pipeline
        experts = self._expert_parameters / splits.expert / splits.tensor / splits.pipeline
        return dense * sum(states_of(layout)) + experts * sum(states_of(layout, experts=True))
