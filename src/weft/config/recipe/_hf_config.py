"""Reading the `config.json` of a Hugging Face model, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.config.document import JsonObject, read_plain_file
from weft.errors import RecipeError

HF_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "ffn_size": ("intermediate_size", "n_inner"),
    "vocabulary_size": ("vocab_size",),
    "token_types": ("type_vocab_size",),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "sequence_length": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
"""Size of a transformer → what configurations of `transformers` call it, the commonest name first."""
_LARGEST: Mapping[str, int] = {
    "num_layers": 10_000,
    "num_experts": 100_000,
    **dict.fromkeys(("num_heads", "num_kv_heads"), 1 << 20),
    **dict.fromkeys(("hidden_size", "head_size", "ffn_size"), 1 << 24),
    **dict.fromkeys(("vocabulary_size", "token_types"), 1 << 28),
    "sequence_length": 1 << 32,
}
"""More than any model has of what decides how much is built."""
ROUTER_LOSS = "router_balance"
"""Auxiliary loss of a model whose configuration says `output_router_logits`."""
_MAY_BE_ZERO = ("num_experts", "token_types")


def hf_size(config: Mapping[str, Any], size: str) -> int | None:
    """Return a size of `HF_KEYS` by the first of its names that holds a number; None: no name does."""
    return next((value for key in HF_KEYS[size] if isinstance(value := config.get(key), int)), None)


def hf_config_file(location: str) -> Path:
    """Return where the configuration of a local folder, or a file of one, is."""
    path = Path(location).expanduser()
    return path / "config.json" if path.is_dir() else path


def read_hf_config(location: str) -> Mapping[str, Any]:
    """Return the configuration in a local folder or file, whose sizes are those of a model.

    Raises:
        RecipeError: there is none, it is not a JSON object, or a size is none; names the file and the field.
    """
    file = hf_config_file(location)
    if not file.is_file():
        problem = "Give a local folder that holds config.json, or the file; Weft downloads nothing."
        raise RecipeError(f'model.hf = "{location}": there is no file {file}. {problem}')
    advice = "It must be the config.json of a model that transformers itself knows."
    content = read_plain_file(file.resolve(), RecipeError, advice, most_bytes=16 << 20)
    config = JsonObject.parse(file, content, RecipeError, advice)
    for size, most in _LARGEST.items():
        for name in HF_KEYS[size]:
            # A list has a number for each stage of the model.
            if config.values.get(name) is not None and not isinstance(config.values[name], list):
                config.count(name, least=0 if size in _MAY_BE_ZERO else 1, most=most)
    if config.values.get("architectures") is not None:
        config.texts("architectures")
    return config.values
