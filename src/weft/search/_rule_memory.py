"""How much memory a rank needs: a first estimate, by the usual counts.

Sources: model states after Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054); activations after Korthikanti
et al. 2022 (https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan import ModelFacts, Plan
from weft.recipe import OptimizerRecipe, Recipe
from weft.techniques.pipeline.schedules import peak_activations, schedule_orders
from weft.techniques.registry import held
from weft.techniques.zero.contract import keeps_whole_gradients, shares_of

_ELEMENT_BYTES = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}
_FUSED_SHARE = 0.125
"""Share of the logits that exists at once when head and loss are computed together in chunks."""
_PROCESS_BYTES = {False: 400_000_000, True: 1_500_000_000}
"""What a rank holds besides, on the CPU and on an accelerator: libraries, the device's context, communicators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of the fullest rank."""

    states_bytes: float
    """Weights, gradients, optimizer."""
    activations_bytes: float
    logits_bytes: float
    process_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.states_bytes + self.activations_bytes + self.logits_bytes + self.process_bytes


def estimate_memory(plan: Plan, recipe: Recipe, facts: ModelFacts, *, on_accelerator: bool) -> MemoryNeed | None:
    """Return what the fullest rank needs, or None when the model's sizes are not known."""
    if facts.num_parameters is None or facts.block_parameters is None or not facts.num_blocks:
        return None
    mesh, element = plan.mesh, _ELEMENT_BYTES[plan.compute.precision]
    blocks = -(-facts.num_blocks // mesh.pipeline)
    ends = facts.num_parameters - facts.num_blocks * facts.block_parameters
    parameters = (blocks * facts.block_parameters + ends) / mesh.tensor
    return MemoryNeed(
        states_bytes=parameters * _state_bytes(plan, recipe.optimizer),
        activations_bytes=_activations(plan, facts, blocks) * element,
        logits_bytes=_logits(plan, facts) * element,
        process_bytes=_PROCESS_BYTES[on_accelerator],
    )


def _state_bytes(plan: Plan, optimizer: OptimizerRecipe) -> float:
    """Bytes per parameter of the part that this rank would hold without ZeRO."""
    data, precision = plan.data_parallel, plan.compute.precision
    element = _ELEMENT_BYTES[precision]
    master = max(element, 4)
    weights = float(element)
    gradients = float(element if data.reduces_narrow else master)
    kept = float(optimizer.moments * master + (master if master > element else 0))
    kept += master if optimizer.average_decay is not None else 0
    besides = held(data)
    kept += besides.master_copies * master
    owed = besides.gradient_bytes
    ranks = plan.mesh.shard if data.replicas_step_alone or data.shards_weights else plan.mesh.data
    each = shares_of(data.stage, ranks)
    gradients *= 1.0 if keeps_whole_gradients(plan) else each.gradients
    return gradients + (weights + owed) * each.weights + kept * each.states


def _activations(plan: Plan, facts: ModelFacts, blocks: int) -> float:
    """Elements that wait for backward, over all microbatches in flight."""
    whole = facts.activation_elements_per_block or 0
    entry = (facts.sequence_length or 1) * (facts.hidden_size or 0)
    # Blocks with a word of their own count as the one that keeps most; a block that is computed again keeps its input.
    share, again = plan.memory.kept_share, plan.memory.kept_share < 1
    kept = share * whole / plan.mesh.tensor + (entry if again else 0)
    live = whole / plan.mesh.tensor if again else 0.0
    return plan.microbatch.size * (blocks * kept * _in_flight(plan) + live)


def _in_flight(plan: Plan) -> float:
    """Microbatches whose activations a rank holds at once, counted in whole ranks' blocks."""
    pipeline, chosen = plan.mesh.pipeline, plan.pipeline_parallel
    if pipeline == 1:
        return 1.0
    microbatches = min(max(plan.microbatch.shares(plan.mesh.data)), 4 * plan.num_stages)
    orders = schedule_orders(*chosen.shape(pipeline), microbatches)
    return max(peak_activations(orders)) * pipeline / plan.num_stages


def _logits(plan: Plan, facts: ModelFacts) -> float:
    """Elements of logits and their gradients."""
    whole = 2 * plan.microbatch.size * (facts.sequence_length or 1) * (facts.vocabulary_size or 0) / plan.mesh.tensor
    return whole * (_FUSED_SHARE if plan.memory.fuses_loss else 1.0)
