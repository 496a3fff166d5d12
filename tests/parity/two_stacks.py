"""Encoder-decoders of `transformers` whose tensor ranks form a square; samples of uneven lengths, from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cells import BATCH, Cell, plan

from weft.config.recipe import ModelRecipe

LENGTH, VOCABULARY = 9, 64
_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": VOCABULARY, "dropout_rate": 0.1, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "sliding_window": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout_rate": 0.1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "bart": {"architectures": ["BartForConditionalGeneration"], **_BART},
    "mbart": {"architectures": ["MBartForConditionalGeneration"], "scale_embedding": True, **_BART},
    "blenderbot-small": {"architectures": ["BlenderbotSmallForConditionalGeneration"], **_BART},
    "marian": {"architectures": ["MarianMTModel"], **_BART},
    "t5": {"architectures": ["T5ForConditionalGeneration"], **_T5},
    "mt5": {
        "architectures": ["MT5ForConditionalGeneration"], "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False, **_T5,
    },
    "fsmt": {
        "architectures": ["FSMTForConditionalGeneration"], "langs": ["en", "de"], **_BART, "src_vocab_size": VOCABULARY,
        "tgt_vocab_size": VOCABULARY,
    },
    "t5gemma": {
        "architectures": ["T5GemmaForConditionalGeneration"], "encoder": _GEMMA, "decoder": _GEMMA,
        "vocab_size": VOCABULARY, "dropout_rate": 0.1, "attention_dropout": 0.0,
    },
}  # fmt: skip
MASKED = ("mbart", "t5", "fsmt")
"""Families with a tokenizer beside them, so that samples have a mask of what was filled up."""


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model, from configurations that are written into `folder`."""
    found: dict[str, ModelRecipe] = {}
    for name, config in CONFIGS.items():
        own = folder / name
        own.mkdir()
        (own / "config.json").write_text(json.dumps({"model_type": name, **config}))
        if name in MASKED:
            (own / "tokenizer_config.json").write_text("{}")
        found[name] = ModelRecipe(hf=str(own), sequence_length=LENGTH)
    return found


def write_samples(folder: Path, *, is_masked: bool) -> Path:
    """Write samples whose labels, and with a mask their inputs, are of uneven lengths."""
    drawn, rows = random.Random(15), []
    for _ in range(4 * BATCH):
        read = drawn.randint(2, LENGTH) if is_masked else LENGTH
        tokens = [drawn.randrange(3, VOCABULARY) for _ in range(read)]
        labels = [drawn.randrange(3, VOCABULARY) for _ in range(drawn.randint(1, LENGTH))]
        rows.append({"input_ids": tokens, "labels": labels})
    path = folder / ("masked.jsonl" if is_masked else "whole.jsonl")
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


ALL = tuple(Cell(name, plan(tensor=4, grid="2d")) for name in CONFIGS)


def _combined() -> Iterator[Cell]:
    for name in ("bart", "t5", "fsmt", "t5gemma"):
        yield Cell(name, plan(tensor=4, grid="2d", recompute="full"))
    for name in ("mbart", "t5"):
        yield Cell(name, plan(tensor=4, grid="2d", shard=2, zero=3))
        yield Cell(name, plan(tensor=4, grid="2d", replicate=2, zero=1, recompute="selective"))
        yield Cell(name, plan(tensor=8, grid="2.5d", micro=4))


COMBINED = tuple(_combined())
