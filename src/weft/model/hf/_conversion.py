"""From the keys of a folder to the names of a model, as the installed transformers declares it for the model's class.

Checkpoints were written by many releases: prefixes came and went, experts lie one by one on disk and stacked in the
model, projections are joined here and apart there.  The library lists these changes (`conversion_mapping.py`) as
renamings by pattern and as operations on tensors.  Both are taken from it and applied key by key, without loading
anything: the result for a name is a `StoredTensor`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.errors import RecipeError
from weft.model.hf._deferred import DeferredBuild, NotDeferrableError
from weft.model.stored import Box, StoredTensor


@dataclass(slots=True)
class _ConversionGroup:
    """Keys that one declared operation turns into one or more of the model's tensors."""

    converter: Any
    tensors: list[tuple[str, DeferredBuild]] = field(default_factory=list[tuple[str, DeferredBuild]])
    """(pattern of the operation, tensor), in the order in which the library would collect them."""

    def convert(self, name: str, model: Any, given: Callable[[DeferredBuild], Any]) -> dict[str, Any]:
        """Return tensors by name in the model, of what `given` makes of the stored ones."""
        converter = copy.deepcopy(self.converter)
        for pattern, tensor in self.tensors:
            converter.collected_tensors[pattern].append(given(tensor))
        made: Mapping[str, Any] = converter.convert(name, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def converted(model: Any, stored: Mapping[str, DeferredBuild], where: str) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the model's tensors by name, as far as `stored` has them, and the keys that no tensor of it comes from.

    Args:
        model: on the meta device, before Weft changes it.
        stored: tensors by their key in the folder.
        where: the folder, for messages.

    Raises:
        RecipeError: an operation that the library declares cannot be applied; names the keys.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if not isinstance(entry, loading.WeightConverter)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names: dict[str, Tensor] = model.state_dict()
    tensors: dict[str, StoredTensor] = {}
    groups: dict[str, _ConversionGroup] = {}
    unread: list[str] = []
    # Numbers in names by value, as the library sorts: experts are stacked in this order.
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = key, None
        if name not in names:
            unread.append(key)
        elif pattern is None:
            tensors.setdefault(name, stored[key])
        else:
            group = groups.setdefault(name, _ConversionGroup(by_pattern[pattern]))
            group.tensors.append((pattern, stored[key]))
    for name, group in groups.items():
        tensors.update(_apply(model, name, group, names, where))
    return tensors, unread


def _apply(
    model: Any, name: str, group: _ConversionGroup, names: Mapping[str, Tensor], where: str
) -> dict[str, StoredTensor]:
    """Tensors of one group, read in parts where the operation only rearranges, else made whole each time."""
    try:
        # Deferred tensors note views, cats and splits, and read later just the box that a rank asks for.
        made = group.convert(name, model, lambda tensor: tensor)
        if all(isinstance(value, DeferredBuild) for value in made.values()):
            return {target: value for target, value in made.items() if target in names}
    except (NotDeferrableError, TypeError, AttributeError, ValueError):
        pass  # it computes, or asks more of a tensor than its shape

    def convert(given: Callable[[DeferredBuild], Tensor]) -> dict[str, Any]:
        try:
            return group.convert(name, model, given)
        except Exception as problem:
            operations = ", ".join(type(operation).__name__ for operation in group.converter.operations)
            raise RecipeError(
                f'model.hf = "{where}": {name} is made from {len(group.tensors)} tensors of the folder by {operations}'
                f" of transformers, which fails ({problem}). Load the folder with transformers and save it again."
            ) from problem

    def reader(target: str, shape: torch.Size, dtype: torch.dtype) -> DeferredBuild:
        def read(box: Box) -> Tensor:
            whole = convert(lambda tensor: tensor.read().clone())[target]
            return whole[tuple(slice(start, stop) for start, stop in box)].clone()

        return DeferredBuild(shape, dtype, read)

    # Once on meta, for shapes and dtypes.
    shown = convert(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return {target: reader(target, like.shape, like.dtype) for target, like in shown.items() if target in names}
