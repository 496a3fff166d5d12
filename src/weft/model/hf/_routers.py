"""Routers of mixtures of `transformers`: what reports tell of them, and their balance loss over the whole batch.

With `output_router_logits` the library's forward makes that loss of the tokens that it sees, which is a microbatch of
one rank.  Here it is a statistic over the batch of a step, as one process without accumulation has it.
"""

from __future__ import annotations

import importlib
import inspect
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from weft.config.recipe import ROUTER_LOSS
from weft.errors import RecipeError
from weft.model.auxiliary import AuxiliaryLoss, LossWithTerms
from weft.model.blueprint import Batch, Loss, Routers
from weft.model.families import Family
from weft.model.stacked import ExpertStack, num_stacked, prove_stacks


def routers_of(model: Any, family: Family) -> Routers | None:
    """Return the routers of a model of `family`; None: it has none."""
    names = tuple(name for name, _ in model.named_modules() if family.router and fnmatchcase(name, family.router))
    routers = [(name, module) for name in names if hasattr(module := model.get_submodule(name), "top_k")]
    if not routers:
        return None
    first = routers[0][1]
    return Routers(
        names=tuple(name for name, _ in routers),
        num_experts=first.num_experts,
        top_k=first.top_k,
        scoring=family.scoring,
    )


def stacks_of(model: Any) -> dict[str, ExpertStack]:
    """Return the experts of a model of a family with a file, whose forward calls them with choices and weights."""
    proven = prove_stacks({name: (module, True) for name, module in model.named_modules() if num_stacked(module) > 1})
    return {name: stack for name, stack in proven.items() if stack is not None}


_TAKES = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Parameters of the library's balance loss that the one computed here stands for. With other parameters it is another
loss."""


def with_router_loss(loss: Loss, model: Any, where: str, *, has_own_masks: bool = False) -> Loss:
    """Return the loss with the balance loss that a model's configuration asks for (`output_router_logits`).

    `has_own_masks`: whether the model is given masks of documents, of (tokens, tokens).

    Raises:
        RecipeError: the library computes another one for this model, or takes such masks for those of padding.
    """
    if has_own_masks:
        raise RecipeError(
            f'model.hf = "{where}": its config.json says output_router_logits = true, and the forward of a'
            f" {type(model).__name__} takes a mask that keeps documents apart for one of padding. Set it to false, or"
            ' use data.documents = "packed".'
        )
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    settings: list[Any] = [getattr(model, name, None) for name in names]
    home = importlib.import_module(type(model).__module__)
    function = getattr(home, "load_balancing_loss_func", None)
    takes = () if function is None else tuple(inspect.signature(function).parameters)
    if None in settings or takes != _TAKES:
        raise RecipeError(
            f'model.hf = "{where}": its config.json says output_router_logits = true, and the loss that a'
            f" {type(model).__name__} makes of them is of the tokens of one microbatch: plans would differ. Set it to"
            " false."
        )
    weight, num_experts, top_k = settings

    def loads(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Choices and probabilities, (2, experts), of all tokens in all mixtures, as if these were one."""
        sums = torch.stack([_load(logits, top_k) for logits in outputs.router_logits]).sum(0)
        return sums, sums.new_full((), float(sum(logits.shape[0] for logits in outputs.router_logits)))

    def balance(means: Tensor) -> Tensor:
        return num_experts * means.prod(0).sum()

    return LossWithTerms(loss, {ROUTER_LOSS: AuxiliaryLoss(sums=loads, value=balance, weight=float(weight))})


def _load(logits: Tensor, top_k: int) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    chosen = wide.detach().topk(top_k, -1).indices.flatten()
    counts = torch.zeros_like(wide[0]).index_add_(0, chosen, torch.ones_like(chosen, dtype=wide.dtype))
    return torch.stack([counts, wide.sum(0)])
