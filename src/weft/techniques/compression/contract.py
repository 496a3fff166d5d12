"""Compression of gradients: what it cannot join, what it sends and keeps, its words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from weft.config.document import format_value
from weft.config.plan import Plan
from weft.techniques.compression.settings import CompressionSettings
from weft.techniques.contract import Case, ExtraMemory, Technique

_KEY = "plan.data_parallel.compression"

_RUNNABLE = ("bf16", "int8", "powersgd", "topk", "onebit", "randomk", "signsgd")
"""The others can only be predicted."""
_OWED_BYTES = 8.0
"""Bytes per parameter and data rank: what is owed, and what will be if the step is not skipped, whole and in fp32."""
_MOMENTUM_BYTES = 4.0
"""Besides, of 1-bit Adam."""


@final
class Compression(Technique):
    """Gradients that travel in fewer bytes than they have."""

    name = "compression"
    part = CompressionSettings

    def runs(self, plan: Plan) -> bool:
        return plan.data_parallel.compresses

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        mesh, data, precision = plan.mesh, plan.data_parallel, plan.compute.precision
        named = f'{_KEY} = "{data.compression}"'
        if not data.compresses:
            return
        if data.compression not in _RUNNABLE:
            yield f'{named} can be predicted but not run yet: the engine has not got this compression. Use "none".'
            return
        if data.shards_weights and mesh.shard > 1 and mesh.replicate == 1:
            yield (
                f"{named} cannot join data_parallel.zero = 3 with mesh.replicate = 1: only the sum over mesh.replicate"
                f" can be compressed there, because torch's fully_shard makes the sum over mesh.shard = {mesh.shard}"
                ' itself. Use "none", zero = 1 or 2, or more than one replica.'
            )
        if precision in ("bf16", "fp16") and data.reduces_narrow:
            yield (
                f'{named} cannot join data_parallel.reduce_precision = "compute": gradients are kept in {precision}'
                ' then, and would be rounded twice. Use "none", or reduce_precision = "fp32".'
            )
        often = data.reduce_every == "microbatch" or (data.reduce_every == "auto" and mesh.pipeline == 1)
        if data.compression == "onebit" and data.shards_gradients_alone and often:
            yield (
                f"{named} cannot join data_parallel.zero = 2, which reduces in every microbatch: 1-bit Adam sends"
                " momenta, which go on once per step. Use zero = 0 or 1."
            )
        if precision == "fp16" and data.owes:
            yield (
                f'{named} cannot join compute.precision = "fp16": what it owes to later steps is in units of the loss'
                ' scale, which changes between steps. Use "int8" or "bf16", or precision = "bf16".'
            )

    def check(self, case: Case) -> None:
        data, permit = case.plan.data_parallel, case.recipe.permit
        path = ("data_parallel", "compression")
        if not data.compresses:
            return
        if data.compression not in permit.compression:
            more = format_value([*permit.compression, data.compression])
            problem = f'is not permitted by the recipe.\nUse "none", or permit.compression = {more}.'
            raise case.refuse(path, problem)
        if case.plan.mesh.data * case.plan.mesh.context == 1:
            problem = "has no effect with 1 data rank: there are no gradients to exchange."
            raise case.refuse(path, f'{problem}\nUse "none", or more data ranks.')
        if data.compression == "onebit":
            self._check_onebit(case)

    def _check_onebit(self, case: Case) -> None:
        data, optimizer, steps = case.plan.data_parallel, case.recipe.optimizer, case.recipe.run.steps
        path = ("data_parallel", "compression")
        if optimizer.name != "adamw":
            problem = f'is a way to run AdamW, and optimizer.name = "{optimizer.name}".\nUse "int8", or AdamW.'
            raise case.refuse(path, problem)
        if optimizer.max_grad_norm is not None:
            problem = "sends momenta, whose differences have norms of their own: nothing can be clipped by them."
            fix = 'Take max_grad_norm out of the recipe (in TOML, max_grad_norm = "none"), or use "int8".'
            raise case.refuse(path, f"{problem}\n{fix}")
        if data.onebit_warmup_steps >= steps:
            problem = f"is as long as the run of {steps} steps: nothing would be compressed.\nUse {max(1, steps // 5)}."
            raise case.refuse(("data_parallel", "onebit_warmup_steps"), problem)

    def extra_memory(self, settings: CompressionSettings) -> ExtraMemory:
        momentum = _MOMENTUM_BYTES * (settings.frozen_after is not None)
        return ExtraMemory(gradient_bytes=_OWED_BYTES * settings.owes + momentum)

    def describe(self, settings: CompressionSettings) -> Iterator[str]:
        if settings.compresses:
            yield f"gradients compressed by {settings.compression}"

    unsupported_by_others = describe

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        if plan.data_parallel.compresses:
            yield (f'{_KEY} = "{plan.data_parallel.compression}": the script sums gradients as they are. Use "none".')

    def exact(self, plan: Plan) -> tuple[Plan, str]:
        data = plan.data_parallel
        if not data.compresses:
            return plan, ""
        note = f"compared without compression: {data.compression} changes gradients, which the recipe permits"
        return replace(plan, data_parallel=data.uncompressed()), note
