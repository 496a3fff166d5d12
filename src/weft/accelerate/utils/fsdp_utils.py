"""How libraries save what FSDP shards: here as every plan saves, model and optimizer as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FSDP_MODEL_NAME = "pytorch_model_fsdp"
OPTIMIZER_NAME = "optimizer"


def save_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, output_dir: str | Path, model_index: int = 0, **how: Any
) -> None:
    """Save all that was prepared, for any plan, into a folder below `output_dir`.  Call on every rank."""
    del fsdp_plugin, model, how
    accelerator.save_state(_folder(output_dir, model_index))


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, input_dir: str | Path, model_index: int = 0, **how: Any
) -> None:
    """Load what `save_fsdp_model` has saved, the optimizer with it.  Call on every rank."""
    del fsdp_plugin, model, how
    accelerator.load_state(_folder(input_dir, model_index))


def save_fsdp_optimizer(
    fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, output_dir: str | Path, optimizer_index: int = 0
) -> None:
    """Leave a folder by which libraries know that there is an optimizer: `save_fsdp_model` has saved it."""
    del fsdp_plugin, optimizer, model
    if accelerator.is_main_process:
        (Path(output_dir) / f"{OPTIMIZER_NAME}_{optimizer_index}").mkdir(exist_ok=True)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, input_dir: str | Path, *more: Any, **how: Any
) -> None:
    """Do nothing: `load_fsdp_model` has loaded it."""


def _folder(root: str | Path, number: int) -> Path:
    return Path(root) / f"{FSDP_MODEL_NAME}_{number}"
