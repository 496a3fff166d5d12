"""Reading the `config.json` of a Hugging Face model, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.document import JsonObject, read_plain_file
from weft.errors import RecipeError

_LARGEST: Mapping[str, int] = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 10_000
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 100_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 1 << 20),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "head_dim"), 1 << 24),
    **dict.fromkeys(("vocab_size", "type_vocab_size"), 1 << 28),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 1 << 32),
}
"""Counts that decide how much is built, and more than any model has of them."""
_MAY_BE_ZERO = ("num_local_experts", "num_experts", "n_routed_experts", "type_vocab_size")


def read_hf_config(location: str) -> Mapping[str, Any]:
    """Return the configuration in a local folder or file, whose sizes are those of a model.

    Raises:
        RecipeError: there is none, it is not a JSON object, or a size is none; names the file and the field.
    """
    path = Path(location).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        problem = "Give a local folder that holds config.json, or the file; Weft downloads nothing."
        raise RecipeError(f'model.hf = "{location}": there is no file {file}. {problem}')
    advice = "It must be the config.json of a model that transformers itself knows."
    content = read_plain_file(file.resolve(), RecipeError, advice, most_bytes=16 << 20)
    config = JsonObject.parse(file, content, RecipeError, advice)
    for name, most in _LARGEST.items():
        if config.values.get(name) is not None:
            config.count(name, least=0 if name in _MAY_BE_ZERO else 1, most=most)
    if config.values.get("architectures") is not None:
        config.texts("architectures")
    return config.values
