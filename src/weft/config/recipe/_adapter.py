"""Fine-tuning by adapters: small trained weights beside frozen ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.config.document import Rules
from weft.errors import RecipeError

BaseKind = Literal["plain", "int8", "nf4"]
_RULES = Rules(RecipeError)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRecipe:
    """Adapters of the package `peft`.  Only they are trained and exported; all other weights stay as they are."""

    method: str = "lora"
    """Method of `peft`, by its name in lower case: `lora`, `ia3`, `loha`, `lokr`, `oft`, …"""
    rank: int | None = None
    """Rank of the adapters; by default the method's own."""
    alpha: float | None = None
    """The adapter's product is scaled by alpha / rank; by default the method's own."""
    dropout: float = 0.0
    """Share of the adapters' input that is dropped in training."""
    targets: tuple[str, ...] = ()
    """Ends of names of modules that get an adapter, or `all-linear`; by default what `peft` knows for the family."""
    base: BaseKind = "plain"
    """How the frozen weights of linear layers are held: `plain`, in the dtype of the plan; `int8`, a byte each with a
    scale per row; `nf4`, half a byte each with a scale per 64.  It is a part of what is trained, whatever the plan."""
    settings: Mapping[str, str | int | float | bool] = field(
        default_factory=dict[str, str | int | float | bool], hash=False
    )
    """`[model.adapter.settings]`: further settings of the method's configuration in `peft`, such as `use_dora`."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if not _NAME.fullmatch(self.method):
            raise _RULES.refuse(self, "method", 'is no name of a method. Write "lora".')
        _RULES.at_least(self, 1, "rank")
        _RULES.above_zero(self, "alpha")
        _RULES.between(self, 0, 1, "dropout")
        if "all-linear" in self.targets and len(self.targets) > 1:
            raise _RULES.refuse(self, "targets", 'names "all-linear" beside others. Write it alone, or leave it out.')

    @property
    def divides(self) -> bool:
        """Whether its adapters follow any layer that the tensor axis divides: pairs of linear layers, with DoRA and a
        magnitude for each feature.  How others split is seen by looking at the model that has them."""
        return self.method == "lora"

    @property
    def has_magnitudes(self) -> bool:
        """Whether it is DoRA, which computes with the norms of its layers' weights."""
        return self.method == "lora" and bool(self.settings.get("use_dora", False))
