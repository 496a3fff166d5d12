"""Recomputation: blocks drop their activations in the forward and compute them again in the backward.

`full` keeps only a block's input.  `selective` keeps the results of matrix products, convolutions and attention kernels
besides, which are most of the time, and recomputes what is cheap between them: norms, activations, dropouts, sums.
Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,  # pyright: ignore[reportUnknownVariableType]
)

from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.techniques.core import MicrobatchState, StepContext, is_own
from weft.techniques.core.unkept import is_unkept
from weft.techniques.recompute.selective import selective_contexts

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def apply_recompute(part: nn.Module, blueprint: Blueprint, plan: Plan, context: StepContext) -> None:
    """Wrap the forward of the blocks of `part` as `plan.memory.recompute` says: one word, or one per block of the
    model.

    Hooks of a block run outside, once; hooks of modules inside run again, collectives in the same order on every rank.
    The microbatch that the context held in the forward is put back for the recomputation, which a pipeline starts in
    the middle of another's.

    Raises:
        PlanError: the model has no blocks, or the list is not one word per block.
    """
    words = plan.memory.recompute
    if words == "none":
        return
    blocks = blueprint.cut.blocks if blueprint.cut is not None else ()
    if not blocks:
        raise PlanError(
            f"plan.memory.recompute = {_shown(words)}, but nothing says what the blocks of"
            f" {type(blueprint.module).__name__}"
            ' are (it has no cut table). Use recompute = "none".'
        )
    by_block = (words,) * len(blocks) if isinstance(words, str) else tuple(words)
    if len(by_block) != len(blocks):
        raise PlanError(
            f"plan.memory.recompute lists {len(by_block)} blocks, but the model has {len(blocks)}."
            f" Give {len(blocks)} words, or one for all."
        )
    for name, word in zip(blocks, by_block, strict=True):
        if word != "none" and is_own(part, blueprint, name):
            block = part.get_submodule(name)
            kept = _compiled_contexts if plan.compute.compile else partial(_contexts, context)
            contexts = None if word == "full" else kept
            # A compiler computes statistics once, with the forward, whatever else it computes again.
            norms = () if plan.compute.compile else _batch_norms(block)
            block.forward = partial(_recomputed, block, block.forward, context, contexts, norms)


def _shown(words: Any) -> str:
    return f'"{words}"' if isinstance(words, str) else str(list(words))


def _recomputed(
    block: nn.Module,
    forward: Callable[..., Any],
    context: StepContext,
    selective: Callable[[], Any] | None,
    norms: Sequence[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    contexts = {} if selective is None else {"context_fn": selective}
    within = partial(_within, forward, context, context.current)
    if norms:
        within = _Once(within, norms)
    return checkpoint(within, *args, use_reentrant=False, **contexts, **kwargs)


def _within(
    forward: Callable[..., Any], context: StepContext, state: MicrobatchState | None, *args: Any, **kwargs: Any
) -> Any:
    with context.entered(state):
        return forward(*args, **kwargs)


def _batch_norms(block: nn.Module) -> tuple[nn.Module, ...]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return tuple(module for module in block.modules() if isinstance(module, kinds))


class _Once:
    """Runs a forward, again and again, whose batch norms take note of the batch once: in the first one."""

    def __init__(self, forward: Callable[..., Any], norms: Sequence[nn.Module]) -> None:
        self._forward, self._norms, self._is_first = forward, norms, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            self._is_first = False
            return self._forward(*args, **kwargs)
        # Other tensors, and not old values: a backward may hold on to these.
        kept = [(norm, *named) for norm in self._norms for named in norm.named_buffers(recurse=False)]
        for norm, leaf, buffer in kept:
            setattr(norm, leaf, buffer.clone())
        try:
            return self._forward(*args, **kwargs)
        finally:
            for norm, leaf, buffer in kept:
                setattr(norm, leaf, buffer)


def _contexts(context: StepContext | None = None) -> Any:
    return selective_contexts(_keeps, None if context is None else context.activation_store)


def _keeps(operation: Any) -> bool:
    return operation in _KEPT and not is_unkept()


def _compiled_contexts() -> Any:
    """Torch's own: the compiler reads them, and what it compiles writes nothing in place."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
