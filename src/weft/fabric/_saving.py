"""Checkpoints: a script's dictionary of models, optimizers, loaders and values, saved and loaded by the session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors.torch import load_file
from torch import nn

from weft.errors import CheckpointError, RecipeError
from weft.fabric._place import FabricPlace
from weft.fabric.wrappers import is_wrapped, module_of

_NAME = "state"


class FabricSaves(FabricPlace):
    """Saves of models and optimizers that were set up, whole, with the other entries of a state; a checkpoint is a
    folder that any plan loads."""

    def save(self, path: str | Path, state: Mapping[str, Any], filter: Any = None) -> None:
        """Save all that was set up, and the values and objects of a state."""
        if filter is not None:
            raise RecipeError("fabric.save(filter=…) is not had: models are saved whole. Leave it out.")
        self._session.save(path, extra={_NAME: _Beside(state)})

    def load(
        self, path: str | Path, state: Mapping[str, Any] | None = None, strict: bool = True, **options: Any
    ) -> dict[str, Any]:
        """Load what `save` has written: into all that was set up, and into a state, whose values are replaced; return
        what else was saved.  A pass through a loader that was left in mid-pass begins again, with the same order,
        unless the state has the loader, whose next pass is then the rest.

        Raises:
            CheckpointError: there is none, or it lacks something of the state, and `strict`.
        """
        del options  # no pickles are read, whatever is trusted
        if state is None:
            raise RecipeError(
                "fabric.load(path) would hand out whole weights. Give it what is to be loaded, as fabric.save was."
            )
        beside = _Beside(state)
        self._session.load(path, extra={_NAME: beside})
        for loader in self._loaders:
            if not any(value is loader for value in state.values()):
                loader.skip(0)
        missing = [name for name in beside.values if name not in beside.found]
        if missing and strict:
            raise CheckpointError(
                f"{path} has no {', '.join(missing)}. Leave it out of the state, or give strict=False."
            )
        for name in beside.values.keys() & beside.found.keys():
            cast(dict[str, Any], state)[name] = beside.found.pop(name)
        return beside.found

    def load_raw(self, path: str | Path, obj: nn.Module, strict: bool = True, **options: Any) -> None:
        """Load a model's weights from a file of safetensors."""
        del options
        if isinstance(obj, torch.optim.Optimizer) or Path(path).suffix != ".safetensors":
            raise RecipeError(
                f"fabric.load_raw({str(path)!r}) reads no pickles, which may run code. Write a model's state_dict() by"
                " safetensors.torch.save_file, and give that file; an optimizer's states come by fabric.load."
            )
        module_of(obj).load_state_dict(load_file(path), strict=strict)


@final
class _Beside:
    """Entries of a state that the session does not save by itself: values, and objects that have a state."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        others = {name: value for name, value in state.items() if not is_wrapped(value)}
        for name, item in others.items():
            if isinstance(item, nn.Module | torch.optim.Optimizer):
                raise RecipeError(f"the state's {name!r} was not set up. Give it what fabric.setup returned.")
        self._objects = {name: item for name, item in others.items() if hasattr(item, "load_state_dict")}
        self.values = {name: item for name, item in others.items() if name not in self._objects}
        self.found: dict[str, Any] = {}
        """Values that were saved."""

    def state_dict(self) -> dict[str, Any]:
        """Values, and states of objects."""
        return {"values": self.values, "objects": {name: item.state_dict() for name, item in self._objects.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Give objects their states back."""
        self.found = dict(saved["values"])
        for name, item in self._objects.items():
            if name not in saved["objects"]:
                raise CheckpointError(f"the checkpoint has no state of {name!r}. Leave it out of the state.")
            item.load_state_dict(saved["objects"][name])
