"""Read `Fabric(precision=…)`: a plan's precision, and the casts around a model's forward."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from weft.config.recipe import Precision
from weft.errors import RecipeError


@dataclass(frozen=True, slots=True)
class FabricPrecision:
    """Dtypes in which a model computes."""

    name: str
    plan: Precision = "fp32"
    """Precision of the plan."""
    weights: torch.dtype | None = None
    """Dtype that models are converted to, and made as; None: they stay as they are."""
    inputs: torch.dtype | None = None
    """Dtype that real inputs of a forward become; outputs become torch's default then."""
    autocast: torch.dtype | None = None
    said: str = ""
    """How that differs from Fabric's own."""

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which forwards go on."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)

    def given(self, values: Any) -> Any:
        """Return the inputs of a forward in its dtype."""
        return values if self.inputs is None else _cast(values, self.inputs)

    def returned(self, values: Any) -> Any:
        """Return the outputs of a forward in the loop's dtype."""
        return values if self.inputs is None else _cast(values, torch.get_default_dtype())

    @contextmanager
    def made(self, device: torch.device) -> Generator[None]:
        """Tensors that are made within are on the device, and of the weights' type."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.weights or before)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(before)


def _cast(values: Any, to: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(to) if each.is_floating_point() else each, values)


_HALF = "the plan's {}, which computes in {} beside weights in fp32"
_KNOWN: Mapping[str, FabricPrecision] = {
    "32-true": FabricPrecision("32-true"),
    "64-true": FabricPrecision("64-true", "fp64", torch.float64, torch.float64),
    "bf16-mixed": FabricPrecision("bf16-mixed", inputs=torch.bfloat16, autocast=torch.bfloat16),
    "bf16-true": FabricPrecision("bf16-true", "bf16", inputs=torch.bfloat16, said=_HALF.format("bf16", "bf16")),
    "16-mixed": FabricPrecision("16-mixed", "fp16", inputs=torch.float16, said=_HALF.format("fp16", "fp16")),
    "16-true": FabricPrecision("16-true", "fp16", inputs=torch.float16, said=_HALF.format("fp16", "fp16")),
}
_SHORT: Mapping[str, str] = {
    "None": "32-true",
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}


def numbers_of(precision: Any) -> FabricPrecision:
    """Return what a word for a precision means.

    Raises:
        RecipeError: it means nothing here.
    """
    name = _SHORT.get(str(precision), str(precision))
    if name not in _KNOWN:
        raise RecipeError(f"Fabric(precision={precision!r}) is not had. Use {', '.join(map(repr, _KNOWN))}.")
    return _KNOWN[name]
