"""Reading the `config.json` of a Hugging Face model, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import RecipeError


def read_hf_config(given: str) -> Mapping[str, Any]:
    """Return the configuration in a local folder or file.

    Raises:
        RecipeError: there is none, or it is not a JSON object.
    """
    path = Path(given).expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        problem = "Give a local folder that holds config.json, or the file; Weft downloads nothing."
        raise RecipeError(f'model.hf = "{given}": there is no file {file}. {problem}') from None
    except ValueError as failure:
        raise RecipeError(f'model.hf = "{given}": {file} is not JSON ({failure}).') from None
    if not isinstance(config, dict):
        raise RecipeError(f'model.hf = "{given}": {file} is not the configuration of a model.')
    return config


_WINDOW_OF_MISTRAL = 4096
_FULL_LAYERS_OF_QWEN = 28
"""What `transformers` takes where the configuration leaves it out."""


def has_sliding_windows(config: Mapping[str, Any]) -> bool:
    """Return whether some layer of a `config.json` attends through a sliding window, its family's defaults included."""
    layers = config.get("layer_types")
    if layers is not None:
        return "sliding_attention" in layers
    if config.get("model_type") == "mistral":
        return config.get("sliding_window", _WINDOW_OF_MISTRAL) is not None
    if not config.get("use_sliding_window", False) or config.get("sliding_window", _WINDOW_OF_MISTRAL) is None:
        return False
    return config.get("max_window_layers", _FULL_LAYERS_OF_QWEN) < config.get("num_hidden_layers", 0)
