"""A session's model with adapters of `peft`, as `peft` itself would save it: the adapters alone."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from weft.api.guards.guards import MovedParameter
from weft.errors import CheckpointError
from weft.run.checkpoint.export import StoredWeights, new_export, open_checkpoint

logger = logging.getLogger(__name__)

_WEIGHTS = "adapter_model.safetensors"
_PLACES = ("modules_to_save", "base_model", "model")
"""Parts of names that files leave out, or put before each."""


def has_adapters(module: nn.Module) -> bool:
    """Whether `peft` has put adapters into a model: by `get_peft_model`, by `inject_adapter_in_model`, or by the
    `add_adapter` of transformers."""
    configs = getattr(module, "peft_config", None)
    return "peft" in sys.modules and isinstance(configs, Mapping) and bool(configs)


def export_adapters(checkpoint: Path, module: nn.Module, folder: Path, *, is_whole: bool = True) -> Path:
    """Write the adapters of a model into a new folder, which `PeftModel.from_pretrained` loads.  Call on one process.

    Args:
        checkpoint: the weights of the whole model, by the names of the module.
        module: the model, whatever it holds of its weights by now.
        folder: must not exist, or be empty; it appears complete or not at all.
        is_whole: whether this process has all of the model's modules; else it is a stage's.

    Raises:
        CheckpointError: peft cannot save these adapters so, or the folder is not writable or not empty.
    """
    weights = StoredWeights(open_checkpoint(checkpoint))
    _check_stage(module, is_whole)
    with new_export(folder) as partial:
        saving = _Saving(module, weights, partial)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what a folder of the base model would say, where there is none
                saving.save()
        except OSError:
            raise
        except Exception as problem:  # whatever a method of peft's may raise
            raise CheckpointError(
                f"peft does not save these adapters ({type(problem).__name__}: {problem}). Keep them by state.save()."
            ) from problem
        saving.warn_of_what_is_left_out()
    return folder


class _Saving(nn.Module):
    """Saves a model while it holds whole weights, for the methods that ask the model for them, not its names."""

    def __init__(self, module: nn.Module, weights: StoredWeights, folder: Path) -> None:
        super().__init__()
        self.module = module
        self._weights, self._folder = weights, folder
        self._configs: Mapping[str, Any] = getattr(module, "peft_config", {})

    def save(self) -> None:
        """Write weights and configurations."""
        asked = {
            f"module.{name}": self._weights[name]
            for name, _ in self.module.named_parameters()
            if name.startswith("prompt_encoder.")
        }
        torch.func.functional_call(self, asked, ())

    def forward(self) -> None:
        peft: Any = sys.modules["peft"]
        if isinstance(self.module, peft.PeftModel):
            cast(Any, self.module).save_pretrained(str(self._folder), state_dict=self._weights)
            return
        for name, config in self._configs.items():
            self._save_injected(peft, name, config)

    def _save_injected(self, peft: Any, name: str, config: Any) -> None:
        """Adapters in a model that is none of peft's own, under the names that peft gives to one of its own."""
        saved: dict[str, Tensor] = peft.get_peft_model_state_dict(
            self.module, state_dict=self._weights, adapter_name=name, save_embedding_layers=False
        )
        folder = self._folder / name if name != "default" else self._folder
        folder.mkdir(exist_ok=True)
        from safetensors.torch import save_file

        tensors = {f"base_model.model.{key}": tensor.clone().contiguous() for key, tensor in saved.items()}
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        before = config.inference_mode, config.base_model_name_or_path
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(self.module, "name_or_path", None) or None
        try:
            config.save_pretrained(str(folder))
        finally:
            config.inference_mode, config.base_model_name_or_path = before

    def warn_of_what_is_left_out(self) -> None:
        """Name the parameters that were trained and that no file of adapters holds."""
        if any(config.is_prompt_learning for config in self._configs.values()):
            return
        held = set[str]()
        for path in self._folder.rglob(_WEIGHTS):
            library: Callable[..., Any] = safe_open  # it has no types
            with library(path, framework="np") as file:
                held.update(self._plain(key) for key in file.keys())  # noqa: SIM118  # it is no mapping
        here = ((name, each) for name, each in self.module.named_parameters() if not isinstance(each, MovedParameter))
        trained = [name for name, each in here if each.requires_grad]
        left = [name for name in trained if self._plain(name) not in held]
        if left:
            logger.warning(
                "%d trained parameters are not exported, because they are none of the adapters' (%s). Name their"
                " modules in modules_to_save of the adapters' configuration, or keep them by state.save().",
                len(left),
                ", ".join(left[:3]),
            )

    def _plain(self, name: str) -> str:
        """A name without what files leave out of it."""
        return ".".join(part for part in name.split(".") if part not in _PLACES and part not in self._configs)


def _check_stage(module: nn.Module, is_whole: bool) -> None:
    """Refuse what is saved by looking at modules, where other stages have some of them."""
    configs: Mapping[str, Any] = getattr(module, "peft_config", {})
    settings = ("modules_to_save", "trainable_token_indices")
    asked = [name for name in settings if any(getattr(each, name, None) for each in configs.values())]
    if asked and not is_whole:
        raise CheckpointError(
            f"under a pipeline no rank has all modules that {asked[0]} of the adapters names, and peft saves them by"
            " looking at them. Save with state.save(), and export it from a session without mesh.pipeline."
        )
