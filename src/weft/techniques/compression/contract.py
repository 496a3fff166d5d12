"""Compression of gradients: settings, what it cannot join, what it sends and keeps, its words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from weft.config.document import Rules, spell
from weft.config.recipe import COMPRESSIONS
from weft.config.settings import setting
from weft.errors import PlanError, did_you_mean
from weft.techniques.contract import Case, Held, Technique

if TYPE_CHECKING:
    from weft.config.plan import Plan

_RULES = Rules(PlanError)
_KEY = "plan.data_parallel.compression"

_RUNNABLE = ("bf16", "int8", "powersgd", "topk", "onebit", "randomk", "signsgd")
"""The others can only be predicted."""
_OWING = ("powersgd", "topk", "onebit", "randomk", "signsgd")
"""Those that leave out a part of the gradient and owe it to later steps."""
_OWED_BYTES = 8.0
"""Bytes per parameter and data rank: what is owed, and what will be if the step is not skipped, whole and in fp32."""
_MOMENTUM_BYTES = 4.0
"""Besides, of 1-bit Adam."""
_UNPROVEN = ("randomk", "signsgd")
"""Those of which nobody can say that a training ends where it would have: whoever runs one is told so."""
_WIRE_SHARES: Mapping[str, float] = {
    "bf16": 0.5,
    "fp16": 0.5,
    "fp8": 0.25,
    "int8": 0.25,
    "int4": 0.125,
    "onebit": 1 / 28,
    "topk": 0.02,
    "powersgd": 0.02,
    "randomk": 0.1,
    "signsgd": 1 / 28,
}
"""Bytes on the wire over those of an all-reduce in fp32, at usual settings: PowerSGD of a low rank; top-k of 1 % with
its indices between two ranks; random-k of 10 %."""
_WHOLE = ("topk", "powersgd", "onebit", "randomk")
"""Those that every rank gets whole, under ZeRO too, where the others need half of what an all-reduce moves."""
_PASSES = 3.0
"""Times that compressed gradients are read or written besides."""


@dataclass(frozen=True, kw_only=True)
class CompressionSettings:
    """The part of `data_parallel` that is about compression."""

    compression: str = setting("none", space="compressions")
    """Compression of gradients on the wire, with the recipe's permission only."""
    powersgd_rank: int = 4
    """Columns of PowerSGD's factors: more are more exact, and more bytes."""
    topk_share: float = 0.01
    """Share of the gradients that top-k sends."""
    randomk_share: float = 0.1
    """Share of every parameter's gradients that random-k sends."""
    onebit_warmup_steps: int = 100
    """Steps of plain AdamW with exact gradients before 1-bit Adam freezes the variance."""

    def check_settings(self) -> None:
        if self.compression != "none" and self.compression not in COMPRESSIONS:
            hint = did_you_mean(self.compression, COMPRESSIONS) or f" Known are none, {', '.join(COMPRESSIONS)}."
            raise _RULES.refuse(self, "compression", f"is not a compression.{hint}")
        _RULES.at_least(self, 1, "powersgd_rank", "onebit_warmup_steps")
        _RULES.above_zero(self, "topk_share", "randomk_share")
        _RULES.between(self, 0, 1, "topk_share", "randomk_share", below=False)
        for codec, name in _SETTINGS_OF_CODECS.items():
            if self.compression != codec and getattr(self, name) != getattr(_DEFAULTS, name):
                problem = f'has no effect with compression = "{self.compression}". Remove it, or use "{codec}".'
                raise _RULES.refuse(self, name, problem)

    @property
    def compression_setting(self) -> str:
        """The setting as an error names it."""
        return f'data_parallel.compression = "{self.compression}"'

    @property
    def compresses(self) -> bool:
        """Whether gradients are sent other than they are."""
        return self.compression != "none"

    @property
    def owes(self) -> bool:
        """Whether a part of the gradients is left to later steps."""
        return self.compression in _OWING

    @property
    def is_unproven(self) -> bool:
        """Whether nothing guarantees that a training converges as without it."""
        return self.compression in _UNPROVEN

    @property
    def frozen_after(self) -> int | None:
        """Steps after which AdamW's variance is kept as it is; None where it never is."""
        return self.onebit_warmup_steps if self.compression == "onebit" else None

    @property
    def sends_whole(self) -> bool:
        """Whether every rank gets the whole sum, also where it needs its own share only."""
        return self.compression in _WHOLE

    @property
    def wire_passes(self) -> float:
        """Times that gradients are read or written in memory for it."""
        return _PASSES if self.compresses else 0.0

    def wire_share(self, element_bytes: int, ranks: int) -> float:
        """Return the bytes of a collective over those of gradients of so many bytes each as they are.

        What top-k keeps is gathered, from every rank to all, and so grows with the ranks, where the bytes of an
        all-reduce do not.
        """
        if not self.compresses:
            return 1.0
        share = _WIRE_SHARES[self.compression] * 4 / element_bytes
        return share * max(1.0, ranks / 2) if self.compression == "topk" else share


_DEFAULTS = CompressionSettings()
_SETTINGS_OF_CODECS: Mapping[str, str] = {
    "powersgd": "powersgd_rank",
    "topk": "topk_share",
    "randomk": "randomk_share",
    "onebit": "onebit_warmup_steps",
}
"""Codec → its setting, whose default says that it was not given."""


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
            more = spell([*permit.compression, data.compression])
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

    def held(self, settings: CompressionSettings) -> Held:
        momentum = _MOMENTUM_BYTES * (settings.frozen_after is not None)
        return Held(gradient_bytes=_OWED_BYTES * settings.owes + momentum)

    def words(self, settings: CompressionSettings) -> Iterator[str]:
        if settings.compresses:
            yield f"gradients compressed by {settings.compression}"

    elsewhere = words

    def unwritten(self, plan: Plan) -> Iterator[str]:
        if plan.data_parallel.compresses:
            yield (f'{_KEY} = "{plan.data_parallel.compression}": the script sums gradients as they are. Use "none".')

    def exact(self, plan: Plan) -> tuple[Plan, str]:
        data = plan.data_parallel
        if not data.compresses:
            return plan, ""
        plain = {name: getattr(_DEFAULTS, name) for name in ("compression", *_SETTINGS_OF_CODECS.values())}
        told = f"compared without compression: {data.compression} changes gradients, which the recipe permits"
        return replace(plan, data_parallel=replace(data, **plain)), told
