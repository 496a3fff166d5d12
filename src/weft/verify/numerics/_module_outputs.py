"""Finds the module at which a forward goes wrong, from the outputs of all modules beside those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.run.engine import TrainingState

_CLOSE = 1e-9


@dataclass(slots=True)
class ModuleOutputs:
    """The first output of every module of a whole model, in the order in which they return."""

    by_module: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def watch(self, training: TrainingState) -> None:
        """Note what the modules of the first part return, from now on."""
        for name, module in training.model.parts[0].module.named_modules():
            if name:
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and name not in self.by_module:
                self.by_module[name] = first.detach().to("cpu", torch.float64).contiguous().clone()

        return note

    def write(self, path: Path) -> None:
        """Keep the order in the names: the format sorts."""
        save_file({f"{index:06}.{name}": value for index, (name, value) in enumerate(self.by_module.items())}, path)

    @classmethod
    def read(cls, path: Path) -> ModuleOutputs:
        return cls({name.partition(".")[2]: value for name, value in sorted(load_file(path).items())})


def first_different_output(
    reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]
) -> tuple[str, float] | None:
    """Return the first module whose output differs, and by how much, relative to its norm.

    `candidate` is that of the first data rank's first microbatch, which has the first samples of `reference`.  Outputs
    that are cut (other shapes than in one process) are passed over.
    """
    for name, output in candidate.items():
        whole = reference.get(name)
        if whole is None or whole.shape[1:] != output.shape[1:] or whole.ndim == 0:
            continue
        # Samples lie along dim 0, and the first rank has the first of them.
        rows = whole[: output.shape[0]]
        scale = float(rows.norm())
        if rows.shape == output.shape and not float((rows - output).norm()) <= _CLOSE * scale:
            return name, float((rows - output).norm()) / max(scale, 1e-300)
    return None
