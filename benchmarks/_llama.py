"""The model and the data that all contenders share: the tiny Llama of the Foundation, or one of other sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.recipe import DecoderShape
from weft.model.blueprint import Blueprint
from weft.model.reference.decoder import build_decoder
from weft.techniques.core import ModelLayout, ParameterLayout, materialise

SEED = 1234
POOL = 4
"""Batches per rank, taken in turn: few enough to be learned, so that losses show whether all learn alike."""
SIZES = ("num_layers", "hidden_size", "num_heads", "ffn_size", "vocabulary_size", "sequence_length")


def shape_of(settings: Mapping[str, Any]) -> DecoderShape:
    """The tiny Llama with the sizes that `settings` changes."""
    sizes: dict[str, int] = {
        "num_layers": 6,
        "hidden_size": 256,
        "num_heads": 8,
        "ffn_size": 1024,
        "vocabulary_size": 8192,
        "sequence_length": 256,
    }
    sizes |= {name: int(settings[name]) for name in SIZES if name in settings}
    return DecoderShape(**sizes, tie_embeddings=False)


def plain_model(settings: Mapping[str, Any]) -> nn.Module:
    """The decoder as a plain module with the very weights that Weft gives it."""
    blueprint: Blueprint = build_decoder(shape_of(settings))
    module = blueprint.module
    layout = ModelLayout(
        {name: ParameterLayout(name=name, shape=parameter.shape) for name, parameter in module.named_parameters()}
    )
    materialise(module, blueprint, layout, SEED, torch.device("cpu"), torch.float32)
    return module.train()


_UNIT = 8
"""Samples that are drawn at once."""


def batch_of(settings: Mapping[str, Any], step: int) -> dict[str, Tensor]:
    """This rank's samples of a step; global sample ids, so that the world size could be another."""
    size = int(settings.get("batch", _UNIT))
    first = (step % POOL) * size * world_size() + rank() * size
    return samples_of(settings, range(first, first + size))


def samples_of(settings: Mapping[str, Any], ids: range) -> dict[str, Tensor]:
    """Samples by their global ids: the same whatever else is asked for, if the ids begin and end between units."""
    shape = shape_of(settings)
    unit = min(_UNIT, len(ids))
    drawn = [
        torch.randint(
            shape.vocabulary_size,
            (min(unit, ids.stop - first), shape.sequence_length + 1),
            generator=torch.Generator().manual_seed(SEED + first),
        )
        for first in ids[::unit]
    ]
    tokens = torch.cat(drawn)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "sample_ids": torch.tensor(ids),
    }


def pool_of(settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    return [batch_of(settings, step) for step in range(POOL)]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """What everybody writes: the mean cross-entropy over tokens, with an fp32 softmax."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])
