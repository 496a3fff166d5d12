"""What ZeRO costs: how often gradients travel, what stays whole until then, and what each microbatch waits for.

Sizes of a layout may be columns of candidates (`weft.vectorized`); its ZeRO stage and how often it reduces are the same
for all of them.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (arXiv 1910.02054).
"""

from __future__ import annotations

from typing import NamedTuple

from weft.techniques.cost_terms import AxisGroup, Calibration, Framework, Groups, Layout, Seconds
from weft.techniques.registry import extra_memory
from weft.techniques.zero.contract import shares_of
from weft.vectorized import Column, Flags, chosen, larger, smaller

# ── when gradients travel, and what is whole until then ───────────────────────────────────────────────────────────────


def reduces_once(layout: Layout, framework: Framework) -> Flags:
    """Whether ZeRO-2 and 3 reduce gradients once per step, instead of after every microbatch."""
    if layout.reduce_every == "auto":
        return (not layout.shards_gradients) | ((layout.pipeline > 1) & framework.memory.accumulates_unsharded)
    return layout.reduce_every == "step"


def holds_whole_gradients(layout: Layout, framework: Framework) -> Flags:
    """Whether gradients stay whole between microbatches although ZeRO-2 or 3 shares them out."""
    if not layout.shards_gradients:
        return False
    several = layout.microbatches > 1
    return chosen(reduces_once(layout, framework), (layout.pipeline > 1) | several, layout.uneven & several)


def gathers_weights(layout: Layout) -> Flags:
    """Whether ranks have only shares of the weights, and gather them where they compute."""
    return layout.shards_weights & (layout.shard * layout.context > 1)


def holds_weights(layout: Layout, framework: Framework) -> Flags:
    """Whether ZeRO-3 holds gathered weights from a step's first forward to its last backward."""
    return gathers_weights(layout) & framework.memory.holds_gathered & ((layout.pipeline > 1) | layout.uneven)


# ── what a rank keeps ─────────────────────────────────────────────────────────────────────────────────────────────────


class States(NamedTuple):
    """Bytes per element of the weights that a rank would hold without ZeRO."""

    weights: Column
    gradients: Column
    optimizer: Column


def sharing_ranks(layout: Layout, *, experts: bool = False) -> Column:
    """Return the ranks among which model states are shared out, where the stage shares them.

    ZeRO-1 and 2 share over data × context (over shard × context under local steps), ZeRO-3 over shard × context;
    experts, which the expert axis has shared out already, over as many ranks less, and over the tensor axis where its
    ranks have whole experts and share out the tokens.
    """
    ranks = (layout.shard if layout.shards_weights else layout.summing) * layout.context
    return larger(1, ranks * (layout.tensor // layout.expert_tensor) // layout.expert) if experts else ranks


def states_of(layout: Layout, *, experts: bool = False, whole_gradients: Flags = False) -> States:
    """Return bytes of model states per element.  `whole_gradients`: they are reduced once per step, so that ZeRO-2 and
    3 hold them whole until then."""
    besides = extra_memory(layout)
    optimizer = 0.0 if layout.offloads_optimizer else float(layout.master_bytes)
    here = 0.0 if layout.offloads_parameters else 1.0
    optimizer += besides.master_copies * layout.wide_bytes
    kept = shares_of(layout.stage, sharing_ranks(layout, experts=experts))
    gradients = layout.gradient_bytes * chosen(whole_gradients, 1.0, kept.gradients)
    gradients = (gradients + besides.gradient_bytes * kept.weights) * here
    trained = layout.trained_share
    return States(layout.held_bytes * kept.weights * here, gradients * trained, optimizer * kept.states * trained)


# ── what ZeRO-3 waits for ─────────────────────────────────────────────────────────────────────────────────────────────


class Gathers(NamedTuple):
    """Seconds per byte of weights, of gathering them and of scattering their gradients."""

    gather: float
    scatter: float

    @classmethod
    def of(cls, block_bytes: float, group: AxisGroup, seconds: Seconds) -> Gathers:
        """Of blocks of so many bytes, one by one."""
        if group.size == 1 or block_bytes <= 0.0:
            return cls(0.0, 0.0)
        gather = seconds("all_gather", block_bytes, group) / block_bytes
        return cls(gather, seconds("reduce_scatter", block_bytes, group) / block_bytes)


def gathers_of(dense_bytes: float, expert_bytes: float, groups: Groups, seconds: Seconds) -> tuple[Gathers, Gathers]:
    """Return what travels per byte in every microbatch, of weights that are no experts and of experts.  The bytes are
    those of a block."""
    return Gathers.of(dense_bytes, groups.shard, seconds), Gathers.of(expert_bytes, groups.expert_shard, seconds)


class Waits(NamedTuple):
    """Seconds that ZeRO-3's collectives add to a stage's passes of one microbatch."""

    forward: Column
    backward: Column
    last: Column
    """Besides, to the last backward of a step, where it is the only one that reduces."""


def waits_of(
    sent: Column, scattered: Column, forward: Column, backward: Column, *, once: Flags, share: float, slowdown: float
) -> Waits:
    """Return what a stage waits for: weights come before its forward and before its backward, gradients go after.

    Args:
        sent: seconds of gathering its weights.
        scattered: seconds of reducing its gradients.
        forward: seconds of its forward, beside which gathers hide.
        backward: the same, of both parts of its backward.
        once: whether gradients are reduced once per step.
        share: of a computation, beside which collectives hide.
        slowdown: how many times as long a computation takes beside them.
    """

    def exposed(seconds: Column, beside: Column) -> Column:
        hidden = smaller(seconds, share * beside)
        return seconds - hidden + (slowdown - 1.0) * hidden

    reducing = exposed(sent + scattered, backward)
    back = chosen(once, exposed(sent, backward), reducing)
    return Waits(exposed(sent, forward), back, larger(0.0, reducing - back))


def hiding(calibration: Calibration, framework: Framework, *, on_accelerator: bool) -> dict[str, float]:
    """Return `share` and `slowdown` of `waits_of`: on cores, and in stacks that do not overlap them, nothing hides."""
    share = calibration.overlap_share if framework.overlap_parameters and on_accelerator else 0.0
    return {"share": share, "slowdown": calibration.overlap_slowdown}
