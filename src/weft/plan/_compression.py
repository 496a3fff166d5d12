"""Which compressions of gradients the engine has, and with what they cannot be joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.plan._plan import Plan

RUNNABLE_COMPRESSIONS = ("bf16", "int8", "powersgd", "topk", "onebit", "randomk", "signsgd")
"""The others can only be predicted."""

FEEDBACK = ("powersgd", "topk", "onebit", "randomk", "signsgd")
"""Those that leave out a part of the gradient and owe it to later steps."""
FEEDBACK_BYTES = 8.0
"""Per parameter and data rank: what is owed, and what will be if the step is not skipped, whole and in fp32."""
_MOMENTUM_BYTES = 4.0
"""Besides, of 1-bit Adam."""

UNPROVEN = ("randomk", "signsgd")
"""Those of which nobody can say that a training ends where it would have: whoever runs one is told so."""


def kept_bytes(compression: str) -> float:
    """Return the bytes per parameter that a compression keeps whole on every data rank, in fp32."""
    return FEEDBACK_BYTES * (compression in FEEDBACK) + _MOMENTUM_BYTES * (compression == "onebit")


def compression_conflicts(plan: Plan) -> Iterator[str]:
    """Yield why a plan's compression cannot be joined with its other settings, with the change to make."""
    mesh, data, precision = plan.mesh, plan.data_parallel, plan.compute.precision
    named = f'plan.data_parallel.compression = "{data.compression}"'
    if data.compression == "none":
        return
    if data.zero == 3 and mesh.shard > 1 and mesh.replicate == 1:
        yield (
            f"{named} cannot join data_parallel.zero = 3 with mesh.replicate = 1: only the sum over mesh.replicate can"
            f" be compressed there, because torch's fully_shard makes the sum over mesh.shard = {mesh.shard} itself."
            ' Use "none", zero = 1 or 2, or more than one replica.'
        )
    if precision in ("bf16", "fp16") and data.reduce_precision == "compute":
        yield (
            f'{named} cannot join data_parallel.reduce_precision = "compute": gradients are kept in {precision} then,'
            ' and would be rounded twice. Use "none", or reduce_precision = "fp32".'
        )
    often = data.reduce_every == "microbatch" or (data.reduce_every == "auto" and mesh.pipeline == 1)
    if data.compression == "onebit" and data.zero == 2 and often:
        yield (
            f"{named} cannot join data_parallel.zero = 2, which reduces in every microbatch: 1-bit Adam sends momenta,"
            " which go on once per step. Use zero = 0 or 1."
        )
    if precision == "fp16" and data.compression in FEEDBACK:
        yield (
            f'{named} cannot join compute.precision = "fp16": what it owes to later steps is in units of the loss'
            ' scale, which changes between steps. Use "int8" or "bf16", or precision = "bf16".'
        )
