"""Save and load the state of a script: models, optimizers, schedulers, loaders, counters."""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from weft.accelerate._saving import AcceleratorSaves
from weft.accelerate.data_loader import SeedableRandomSampler
from weft.errors import CheckpointError, RecipeError

Hook = Callable[..., None]


class SavedStates(AcceleratorSaves):
    """`save_state`, `load_state` and what they save beside models."""

    _custom_objects: list[Any]
    _save_hooks: OrderedDict[int, Hook]
    _load_hooks: OrderedDict[int, Hook]

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save objects with the state, too: whatever has `state_dict` and `load_state_dict`."""
        wrong = [item for item in objects if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))]
        if wrong:
            names = ", ".join(type(item).__name__ for item in wrong)
            raise ValueError(
                f"{names} cannot be saved: state_dict and load_state_dict are missing. Write both methods."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before every save; the weights are empty, and are saved anyway."""
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, folder)` before every load."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **more: Any) -> str:
        """Save models, optimizers, schedulers, places in the loaders, generators and registered objects, and return the
        folder.  Any later plan can load it."""
        if more:
            raise RecipeError(f"save_state({next(iter(more))}=…) is not had. Leave it out.")
        folder = self._new_folder(output_dir)
        self.wait_for_everyone()
        for hook in self._save_hooks.values():
            hook(self._models, [], str(folder))
        self._job.session.save(folder, extra=self._extra())
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **more: Any) -> None:
        """Go on from a save: the given one, or the last with an automatic name."""
        if load_kwargs or more:
            raise RecipeError("load_state() takes nothing but the folder. Leave load_kwargs and the like out.")
        folder = self._last_folder() if input_dir is None else Path(input_dir).expanduser()
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder, so that nothing can be loaded from it.")
        for hook in self._load_hooks.values():
            hook(self._models, str(folder))
        self._job.session.load(folder, extra=self._extra())

    def _extra(self) -> dict[str, Any]:
        own = {f"object-{number}": item for number, item in enumerate(self._custom_objects)}
        samplers = [getattr(loader, "sampler", None) for loader in self._dataloaders]
        orders = [sampler for sampler in samplers if isinstance(sampler, SeedableRandomSampler)]
        return {"accelerator": _Counters(self), **{f"order-{at}": order for at, order in enumerate(orders)}, **own}

    def _checkpoints(self) -> Path:
        if self.project_dir is None:
            raise ValueError("saves with automatic names need a ProjectConfiguration(project_dir=…).")
        return Path(self.project_dir) / "checkpoints"

    def _new_folder(self, given: Any) -> Path:
        configuration = self.project_configuration
        if not configuration.automatic_checkpoint_naming:
            if given is None:
                raise ValueError("save_state() was given no folder, and saves have no automatic names. Give one.")
            return Path(given).expanduser()
        root = self._checkpoints()
        folder = root / f"checkpoint_{configuration.iteration}"
        if folder.exists():
            raise ValueError(
                f"{folder} is there already. Give ProjectConfiguration(iteration=…) the number to go on with."
            )
        self.wait_for_everyone()
        if self.is_main_process and configuration.total_limit is not None:
            before = _numbered(root)
            for old in before[: max(len(before) + 1 - configuration.total_limit, 0)]:
                shutil.rmtree(old)
        return folder

    def _last_folder(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state() was given no folder, and saves have no automatic names. Give one.")
        folders = _numbered(self._checkpoints())
        if not folders:
            raise CheckpointError(f"{self._checkpoints()} holds no save. Call accelerator.save_state() before.")
        return folders[-1]


class _Counters:
    """Counters of an Accelerator, for a save."""

    def __init__(self, of: SavedStates) -> None:
        self._of = of

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._of.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of.step = int(state["step"])


def _numbered(root: Path) -> list[Path]:
    """Saves with automatic names, the oldest first."""
    named = [(each, re.fullmatch(r"checkpoint_(\d+)", each.name)) for each in root.glob("checkpoint_*")]
    return [each for each, match in sorted(named, key=lambda item: int(item[1][1]) if item[1] else -1) if match]
