"""Settings of compression: the codec, what it sends and what it owes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from weft.config.document import Rules
from weft.config.recipe import COMPRESSIONS
from weft.config.settings import setting
from weft.errors import PlanError, did_you_mean

_RULES = Rules(PlanError)
_OWING = ("powersgd", "topk", "onebit", "randomk", "signsgd")
"""Codecs that leave out a part of the gradient and keep it as a residual for later steps."""
_UNPROVEN = ("randomk", "signsgd")
"""Codecs under which a training may end elsewhere; a run warns of them."""
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
"""Codecs whose sum every rank gets in full, under ZeRO too; the others then move half of an all-reduce's bytes."""
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

    def uncompressed(self) -> Self:
        """Return the same with gradients that are sent as they are."""
        names = ("compression", *_SETTINGS_OF_CODECS.values())
        return replace(self, **{name: getattr(_DEFAULTS, name) for name in names})

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
