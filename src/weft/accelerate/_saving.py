"""Models that a script writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.accelerate._gathering import ProcessGathers
from weft.accelerate.utils.other import convert_file_size_to_int, write_tensors


class AcceleratorSaves(ProcessGathers):
    """`save_model` and its like."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole model's state: on rank 0, and nothing elsewhere where ranks hold parts of it."""
        return self._job.inside.weights(model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write tensors by name, on rank 0, as safetensors.

        Raises:
            RecipeError: it is no dictionary of tensors.
        """
        if self.is_main_process or (self.project_configuration.save_on_each_node and self.is_local_main_process):
            write_tensors(obj, f)

    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights into a folder, as safetensors, in files that are no larger than is said."""
        state = self.get_state_dict(model)
        if self.should_save_model:
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("model*.safetensors*"):
                old.unlink()
            _write_model(state, folder, convert_file_size_to_int(max_shard_size))
        self.wait_for_everyone()


def _write_model(state: Mapping[str, Tensor], folder: Path, limit: int) -> None:
    """One file, or several and an index, as `transformers` reads them.  A tensor of two names is written once."""
    groups: list[dict[str, Tensor]] = [{}]
    seen: set[tuple[int, torch.Size]] = set()
    room = limit
    for name, tensor in state.items():
        if (place := (tensor.data_ptr(), tensor.shape)) in seen and tensor.numel():
            continue
        seen.add(place)
        size = tensor.numel() * tensor.element_size()
        if size > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= size
    if len(groups) == 1:
        write_tensors(groups[0], folder / "model.safetensors")
        return
    files = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    for file, group in zip(files, groups, strict=True):
        write_tensors(group, folder / file)
    total = sum(tensor.numel() * tensor.element_size() for group in groups for tensor in group.values())
    places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
