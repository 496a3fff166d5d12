"""A decoder whose blocks have mixtures of experts: what it has beside a dense one, and its names elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.config.plan import default_ffn_size
from weft.config.recipe import DecoderShape
from weft.model._initialise import NORMAL_STD
from weft.model.auxiliary import AuxiliaryLoss, LossWithTerms
from weft.model.blueprint import Batch, Blueprint, Routers
from weft.model.families import SplitRule
from weft.model.reference.decoder import Decoder, SwiGLU, build_decoder
from weft.model.reference.mixture import Experts, Mixture, Router, Routing

_SPLIT = (
    # Each tensor rank has a part of every expert, and all of the router.
    SplitRule(match="blocks.*.mixture", kind="expert"),
    SplitRule(match="blocks.*.mixture.experts.gate_up", kind="part", dim=1, blocks=2),
    SplitRule(match="blocks.*.mixture.experts.down", kind="part", dim=2),
    SplitRule(match="blocks.*.mixture.shared.gate.weight", kind="part", dim=0),
    SplitRule(match="blocks.*.mixture.shared.up.weight", kind="part", dim=0),
    SplitRule(match="blocks.*.mixture.shared.down.weight", kind="part", dim=1),
)


def build_mixture_decoder(shape: DecoderShape, *, isolated_documents: bool = False) -> Blueprint:
    """Return the decoder on the meta device with its tables; see `build_decoder`."""
    terms = losses_of(shape)
    kind = RoutedDecoder if terms else Decoder
    blueprint = build_decoder(
        shape, isolated_documents=isolated_documents, construct=lambda shape: kind(shape, mixture_of)
    )
    blueprint.split = (*_SPLIT, *blueprint.split)
    blueprint.keep_dtype = ("*.router.bias",)
    blueprint.routers = Routers(
        names=tuple(f"blocks.{at}.mixture.router" for at in range(shape.num_layers) if shape.is_mixture(at)),
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        scoring=shape.router,
        balance_rate=shape.balance_rate,
    )
    if terms:
        blueprint.loss = LossWithTerms(blueprint.loss, terms)
    dense, config = blueprint.export, blueprint.export_config
    assert dense is not None
    assert config is not None
    blueprint.export = blueprint.export_config = None  # in transformers nothing is like it
    if is_mixtral(shape):
        blueprint.export = partial(_exported, dense)
        blueprint.export_config = config_of_mixtral(config, shape)
    return blueprint


def mixture_of(shape: DecoderShape) -> Mixture:
    """Return the mixture of one block."""
    width, narrow = shape.expert_ffn_size or default_ffn_size(shape), NORMAL_STD / math.sqrt(2 * shape.num_layers)
    router = Router(
        shape.hidden_size,
        shape.num_experts,
        shape.top_k,
        scoring=shape.router,
        normalise=shape.normalise,
        biased=shape.balance_rate > 0,
        std=NORMAL_STD,
    )
    experts = Experts(shape.num_experts, shape.hidden_size, width, std=NORMAL_STD, output_std=narrow)
    shared = SwiGLU(shape.hidden_size, shape.shared_experts * width) if shape.shared_experts else None
    return Mixture(router, experts, shared)


class RoutedLogits(NamedTuple):
    """Output of a decoder whose loss asks how its tokens were routed."""

    logits: Any
    routings: tuple[Routing, ...]
    """One for each mixture in turn, of all tokens."""


class RoutedDecoder(Decoder):
    """A decoder that also returns its routings."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> RoutedLogits:
        """See `Decoder`."""
        routings: list[Routing] = []
        mixtures = [module for module in self.modules() if isinstance(module, Mixture)]
        for mixture in mixtures:
            mixture.record = routings.append
        try:
            logits = super().forward(tokens, positions, document_ids)
        finally:
            for mixture in mixtures:  # a block that is computed again has told already
                mixture.record = None
        return RoutedLogits(logits, tuple(routings))


def losses_of(shape: DecoderShape) -> dict[str, AuxiliaryLoss]:
    """Return the auxiliary losses that a shape has weights for, by name.

    Source: load balance, Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 4 to 6, of `top_k` choices;
    with sigmoid scores DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, eq. 17 to 20, over the batch in place of a
    sequence; z-loss, Zoph et al. 2022, https://arxiv.org/abs/2202.08906, eq. 5.
    """

    def loads(outputs: RoutedLogits, batch: Batch) -> tuple[Tensor, Tensor]:
        return _loads(outputs.routings, shape.router == "softmax")

    def balance(means: Tensor) -> Tensor:
        return shape.num_experts / shape.top_k * means.prod(0).sum()

    def squares(outputs: RoutedLogits, batch: Batch) -> tuple[Tensor, Tensor]:
        return _squares(outputs.routings)

    terms = {"load_balance": (loads, balance), "router_z": (squares, torch.sum)}
    return {
        name: AuxiliaryLoss(sums=terms[name][0], value=terms[name][1], weight=weight)
        for name, weight in shape.auxiliary_losses.items()
    }


def _loads(routings: tuple[Routing, ...], shares: bool) -> tuple[Tensor, Tensor]:
    """Choices and scores, (2, mixtures, experts), summed over tokens; and tokens."""
    return torch.stack([load_sums(one, shares=shares) for one in routings], 1), _tokens(routings)


def load_sums(routing: Routing, *, shares: bool) -> Tensor:
    """Return how often each expert was chosen and its scores, (2, experts), summed over tokens; only scores have
    gradients.  `shares`: scores are shares of one, else each is a sigmoid, divided by their sum."""
    logits = routing.logits
    scores = logits.softmax(-1) if shares else logits.sigmoid()
    if not shares:
        scores = scores / scores.sum(-1, keepdim=True)
    chosen = torch.zeros_like(logits[0]).index_add_(
        0, routing.chosen.flatten(), torch.ones_like(routing.chosen.flatten(), dtype=logits.dtype)
    )
    return torch.stack([chosen, scores.sum(0)])


def _squares(routings: tuple[Routing, ...]) -> tuple[Tensor, Tensor]:
    return torch.stack([one.logits.logsumexp(-1).square().sum() for one in routings]), _tokens(routings)


def _tokens(routings: tuple[Routing, ...]) -> Tensor:
    logits = routings[0].logits
    return logits.new_full((), logits.shape[0])


def is_mixtral(shape: DecoderShape) -> bool:
    """Whether `transformers` has this model: as Mixtral, whose routers have no bias and blocks no shared expert."""
    plain = shape.router == "softmax" and shape.normalise and not shape.balance_rate
    return plain and not shape.shared_experts and not shape.first_dense_layers


def _exported(
    dense: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights by the names of Mixtral's checkpoints, of which `dense` knows all but those of mixtures."""
    exported: dict[str, Tensor] = {}
    for name in weights:
        block, mark, inner = name.partition(".mixture.")
        if mark:
            exported |= _exported_mixture(f"model.layers.{block.removeprefix('blocks.')}", inner, weights[name])
        else:
            exported |= dense({name: weights[name]})
    return exported


def _exported_mixture(prefix: str, inner: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A mixture's tensor, one expert after another."""
    if inner == "router.weight":
        yield f"{prefix}.block_sparse_moe.gate.weight", tensor
        return
    for index, one in enumerate(tensor.unbind(0)):
        expert = f"{prefix}.block_sparse_moe.experts.{index}"
        if inner == "experts.down":
            yield f"{expert}.w2.weight", one.contiguous()
        else:
            gate, up = one.chunk(2)
            yield f"{expert}.w1.weight", gate.contiguous()
            yield f"{expert}.w3.weight", up.contiguous()


def config_of_mixtral(dense: Mapping[str, Any], shape: DecoderShape) -> dict[str, Any]:
    """Return `config.json` of Mixtral, from that of the dense decoder."""
    return {
        **{name: value for name, value in dense.items() if name not in ("attention_bias", "mlp_bias")},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": shape.expert_ffn_size or default_ffn_size(shape),
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "sliding_window": None,
        "output_router_logits": False,
        "router_aux_loss_coef": shape.balance_loss_weight,
    }
