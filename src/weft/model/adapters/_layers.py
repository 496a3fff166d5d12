"""The modules that `peft` has put around a model's layers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft.errors import RecipeError

BASE = "base_layer"
"""Name of the model's own layer in such a module."""


def adapter_layers(module: nn.Module) -> list[str]:
    """Names of the modules that `peft` has put around others."""
    tuner: Any = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    return [name for name, each in module.named_modules() if isinstance(each, tuner)]


def check_single(module: nn.Module, layers: Sequence[str], method: str) -> None:
    """Refuse adapters that are not made of a single layer's own parameters and buffers.

    Raises:
        RecipeError: layers share tensors, or one keeps a tensor that torch does not know of as its.
    """
    owners: dict[int, str] = {}
    for name in layers:
        layer = module.get_submodule(name)
        for tensor in (*layer.parameters(), *layer.buffers()):
            if owners.setdefault(id(tensor), name) != name:
                why = f"shares weights between layers ({owners[id(tensor)]} and {name})"
                raise RecipeError(f'model.adapter.method = "{method}" {why}. Use another, such as lora.')
        inside = layer.named_modules()
        loose = next((f"{path}.{key}".strip(".") for path, each in inside for key in _loose_tensors(each)), None)
        if loose is not None:
            why = f"keeps {loose} of {name} as no parameter or buffer, so it is in no checkpoint"
            raise RecipeError(f'model.adapter.method = "{method}" {why}. Use another, such as lora.')


def _loose_tensors(module: nn.Module) -> Iterator[str]:
    """Attributes that are tensors, or mappings of them, and neither parameters nor buffers."""
    for key, value in vars(module).items():
        if key not in ("_parameters", "_buffers", "_modules"):
            values: Any = value.values() if isinstance(value, Mapping) else (value,)
            if any(isinstance(value, Tensor) for value in values):
                yield key
