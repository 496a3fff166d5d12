"""What models do to scores that no mask does (`written.py`): a tanh that bends them, sinks that stand beside them, and
the greatest of a row, which is taken off.

Nobody computes scores, so rules say what they would be.  A softmax is the same of scores that a row's greatest was
taken off.  Sinks are scores that take part in the softmax and whose probabilities are cut off behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.model.attention.scores import Scores, UnreadError, changed, operands_of, shape_of
from weft.model.attention.sights import number_of

_OF_PEAKS = ("sub", "__sub__", "subtract", "detach")
_BESIDE_SINKS = (*_OF_PEAKS, "max", "amax", "softmax", "__getitem__")
Rule = Callable[[Sequence[Any], Mapping[str, Any]], Any]


class Greatest(NamedTuple):
    """What `max` returns of scores along their keys."""

    values: Scores
    indices: None = None


def check_whole(name: str, args: Sequence[Any]) -> None:
    """Raise UnreadError where `name` is done to the greatest of scores, or to scores and sinks at once, and is not what
    is understood of these."""
    for each in args:
        state = each.state if isinstance(each, Scores) else None
        if state is not None and state.peak is not None and name not in _OF_PEAKS:
            raise UnreadError(f"does {name} to the greatest of its scores")
        if state is not None and state.beside and name not in _BESIDE_SINKS:
            raise UnreadError(f"does {name} to scores and sinks at once")


def _bent(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
    """The tanh of scores to which nothing was done but to scale them."""
    scores: Any = args[0] if len(args) == 1 and not kwargs else None
    state = scores.state if isinstance(scores, Scores) else None
    if state is None or state.is_probability or state.softcap is not None or state.added or state.gate is not None:
        raise UnreadError("does tanh to scores that something was done to")
    if state.causal or state.window is not None or state.hidden != -math.inf:
        raise UnreadError("does tanh to scores some of which are hidden")
    return changed(scores, softcap=1.0)


def _beside(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
    """cat([scores, sinks], -1)."""
    given = dict(zip(("tensors", "dim"), args, strict=False)) | dict(kwargs)
    parts: Any = given.get("tensors")
    scores, sinks = parts if isinstance(parts, list | tuple) and len(parts) == 2 else (None, None)  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(scores, Scores) or isinstance(sinks, Scores) or not isinstance(sinks, Tensor):
        raise UnreadError("puts something beside its scores that is no sink behind them")
    state = scores.state
    if given.get("dim") not in (-1, len(state.lead) + 1) or state.is_probability or state.gate is not None:
        raise UnreadError("puts something beside its scores that is no sink behind them")
    if len(state.lead) != 2 or sinks.dim() != 4 or tuple(sinks.shape[:3]) != shape_of(scores)[:3]:
        raise UnreadError("puts something beside its scores that is not for each of its heads")
    is_one = [sinks.shape[dim] == 1 or sinks.stride(dim) == 0 for dim in (0, 2)]
    if not sinks.is_floating_point() or not all(is_one):
        raise UnreadError("puts something beside its scores that differs between samples or tokens")
    dtype = torch.promote_types(state.dtype, sinks.dtype)
    of_one = sinks.select(2, 0)[0]  # in this order nothing on the way depends on how many tokens there are
    return changed(scores, sinks=of_one, beside=sinks.shape[-1], dtype=dtype)


def _cut_off(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
    """probabilities[..., :-1], without those of sinks."""
    scores, index = args
    state = scores.state
    last = index[-1] if isinstance(index, tuple) and index else None  # pyright: ignore[reportUnknownVariableType]
    if not state.beside or not state.is_probability or not isinstance(last, slice):
        raise UnreadError("takes some of its scores")
    others = all(each is Ellipsis or each == slice(None) for each in index[:-1])
    is_whole = Ellipsis in index or len(index) == len(state.lead) + 2
    width = shape_of(scores)[-1]
    if not others or not is_whole or last.indices(width) != (0, width - state.beside, 1):
        raise UnreadError("takes some of its probabilities, and not all but those of its sinks")
    return changed(scores, beside=0)


def _greatest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
    """amax(scores, -1, keepdim=True)."""
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | dict(kwargs)
    scores, dim = given.get("input"), given.get("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(scores, Scores) or scores.state.is_probability or scores.state.gate is not None:
        raise UnreadError("takes the greatest of something else than its scores")
    if dim not in (-1, len(scores.state.lead) + 1) or given.get("keepdim") is not True:
        raise UnreadError("takes the greatest of its scores, and not of each query")
    return changed(scores, peak=scores.state)


def _max(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The greatest of each query, or the greater of scores and the least number that there is."""
    if not (len(args) == 2 and isinstance(args[1], Tensor)) and "other" not in kwargs:
        return Greatest(_greatest(args, kwargs))
    return _no_less(args, kwargs)


def _no_less(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
    scores, other = operands_of(args)
    if kwargs or number_of(other) != torch.finfo(scores.state.dtype).min or scores.state.is_probability:
        raise UnreadError("takes the greater of its scores and something else")
    return changed(scores)


def _taken_off(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
    """Scores without the greatest of each query."""
    scores, peak = args if len(args) == 2 and not kwargs else (None, None)
    if not isinstance(scores, Scores) or not isinstance(peak, Scores) or peak.state.peak is not scores.state:
        raise UnreadError("takes something off its scores")
    return scores


def _detached(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scores:
    """The greatest without its gradient, which is none where it is taken off."""
    if kwargs or args[0].state.peak is None:
        raise UnreadError("detaches its scores")
    return args[0]


RULES: Mapping[str, Rule] = {
    "tanh": _bent,
    **dict.fromkeys(("cat", "concat", "concatenate"), _beside),
    "__getitem__": _cut_off,
    "amax": _greatest,
    "max": _max,
    "maximum": _no_less,
    **dict.fromkeys(("sub", "__sub__", "subtract"), _taken_off),
    "detach": _detached,
}
"""What may be done, by the name of the function."""
