"""Scores of attention that a model writes out, which nobody computes: what they would be, and what they tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from weft.model.attention.dropping import PendingScores
from weft.model.attention.place_biases import Added

FACTS = ("shape", "dtype", "device", "ndim")
"""What a model may ask of scores."""
_OF_GRADIENTS = ("requires_grad", "grad_fn", "is_leaf", "_base")
SIZES = ("size", "dim", "numel", "ndimension", "__len__", "is_floating_point", "element_size")
CASTS = ("to", "type", "float", "double", "half", "bfloat16", "type_as")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What scores would be: scale × query · keyᵀ, masked; or what a softmax and a dropout make of them."""

    query: Tensor
    """(…, tokens, size)."""
    key: Tensor
    """(…, size, tokens)."""
    lead: tuple[int, ...]
    """Dims before those of tokens: samples × heads, or both."""
    heads: tuple[int, int] | None
    """Samples and heads, once they are known."""
    dtype: torch.dtype
    scale: float
    place: str
    """Module in which the product was made."""
    with_gradients: bool
    """Whether it was made where gradients are."""
    versions: tuple[int, int] | None
    """Versions of query and key when it was made; None: nobody counts them."""
    causal: bool = False
    window: int | None = None
    left_out: int | None = None
    """The window of masks that ranks which share a sequence do not make."""
    hidden: float = -math.inf
    """The greatest of what stands in place of hidden scores."""
    added: tuple[Added, ...] = ()
    """What was added to them."""
    softcap: float | None = None
    """What a tanh of them was multiplied by, since which `scale` is what they were multiplied by before; None: nothing
    bent them."""
    sinks: Tensor | None = None
    """Scores of every query that stand beside them, (heads, sinks of each)."""
    beside: int = 0
    """How many of these stand there still, in the dim of the keys."""
    peak: State | None = None
    """Scores, of which these are the greatest of each query; None: these are scores."""
    gate: Tensor | None = None
    """What they were multiplied by, 0 or 1 each, until what is hidden is made small."""
    is_probability: bool = False
    dropout: nn.Module | None = None


@final
class Scores(PendingScores):
    """Scores that are not computed.  They have a shape, a dtype and a device, and no values."""

    state: State

    @staticmethod
    def of(state: State) -> Scores:
        """Return scores of such a state."""
        tokens = state.query.shape[-2]
        width = 1 if state.peak is not None else tokens + state.beside
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]
                Scores, (*state.lead, tokens, width), dtype=state.dtype, device=state.query.device
            )
        made.state = state
        return made

    def dropped_by(self, dropout: nn.Module) -> Scores:
        """See `PendingScores`."""
        if not self.state.is_probability or self.state.dropout is not None or self.state.beside:
            raise UnreadError("drops scores that are no probabilities, or drops them twice")
        return Scores.of(replace(self.state, dropout=dropout))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What others ask of scores that a module returned beside its result: hooks, precision."""
        name = name_of(func)
        asks = name in SIZES or (name == "__get__" and name_of(func.__self__) in (*FACTS, *_OF_GRADIENTS))
        if asks:
            return asked(func, args, kwargs or {})
        if name in CASTS and isinstance(args[0], Scores):
            return Scores.of(replace(args[0].state, dtype=cast_of(func, args, kwargs or {})))
        raise UnreadError(f"does {name_of(func)} to scores of attention outside of what attends")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnreadError(f"does {name_of(func)} to scores of attention, which are computed nowhere")


class UnreadError(Exception):
    """Something that was done to scores and is not understood: the end of a sentence that begins with the module."""


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def has_scores(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(
        isinstance(each, Scores) or (isinstance(each, list | tuple) and any(isinstance(one, Scores) for one in each))
        for each in (*args, *kwargs.values())
    )


def asked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return func(*args, **kwargs)


def shape_of(scores: Scores) -> tuple[int, ...]:
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return tuple(scores.shape)


def cast_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a cast, by one of nothing.  A move to another device is none."""
    if not isinstance(args[0], Scores):
        raise UnreadError("casts something as its scores are")
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        made = func(torch.empty(0, dtype=args[0].state.dtype, device=args[0].state.query.device), *args[1:], **kwargs)
        if not isinstance(made, Tensor) or made.device != args[0].state.query.device or not made.is_floating_point():
            raise UnreadError("takes its scores elsewhere")
        return made.dtype


def operands_of(args: Sequence[Any]) -> tuple[Scores, Any]:
    if len(args) == 2:
        first, second = args
        if isinstance(first, Scores) and not isinstance(second, Scores):
            return first, second
        if isinstance(second, Scores) and not isinstance(first, Scores):
            return second, first
    raise UnreadError("combines scores with one another")


def versions_of(query: Tensor, key: Tensor) -> tuple[int, int] | None:
    """Return how often each was changed in place; None: of tensors for inference nobody counts it."""
    is_counted = not (query.is_inference() or key.is_inference())
    return (query._version, key._version) if is_counted else None


def changed(scores: Any, **changes: Any) -> Scores:
    """Return scores with something of their state changed."""
    if not isinstance(scores, Scores):
        raise UnreadError("does something else with its scores")
    if torch.is_grad_enabled() != scores.state.with_gradients:
        raise UnreadError("makes its scores partly without gradients")
    return Scores.of(replace(scores.state, **changes))
