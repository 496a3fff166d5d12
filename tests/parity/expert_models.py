"""A small decoder with mixtures in all blocks but the first, one of whose routers is surer than the others.

No surer than this: where probabilities are nearly 0 and 1, gradients of the router are so small that AdamW makes
updates of their rounding, and after 20 steps two runs of one process differ by 1e-8 (with weights of 5.0; 6e-14 now).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.config.recipe import DecoderShape
from weft.model.blueprint import Blueprint
from weft.model.reference.decoder import SwiGLU, build_decoder
from weft.model.reference.mixture import Experts, Mixture, Router

HIDDEN, FFN = 32, 12


def mixture(experts: int, *, shared: bool, spread: float) -> Mixture:
    router = Router(HIDDEN, experts, 2, scoring="sigmoid" if shared else "softmax", std=spread)
    return Mixture(router, Experts(experts, HIDDEN, FFN, std=0.2), SwiGLU(HIDDEN, FFN) if shared else None)


def build_mixtures(experts: int = 4, dropout: float = 0.0, tied: bool = True) -> Blueprint:
    """`experts` per mixture, of which a token visits two."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocabulary_size": 64}
    shape = DecoderShape(
        num_layers=4, hidden_size=HIDDEN, sequence_length=11, dropout=dropout, tie_embeddings=tied, **sizes
    )
    blueprint = build_decoder(shape)
    with torch.device("meta"):
        for index in range(1, shape.num_layers):
            block = blueprint.module.get_submodule(f"blocks.{index}")
            block.ffn = mixture(experts, shared=index > 1, spread=0.5 if index == 1 else 0.2)
    plain = blueprint.initialise
    assert plain is not None

    def initialise(name: str, module: nn.Module) -> None:
        if isinstance(module, Router | Experts):
            module.reset_parameters()
        else:
            plain(name, module)

    blueprint.initialise = initialise
    return blueprint
