"""Weights that a loss reads by itself, as a penalty on them does, where this rank has a part of them.

A layer computes with its part as its split says.  Code outside of it knows of no split: it would take the part for the
whole.  A mode around the loss sees every function that is given a weight, which takes about a microsecond for each call
of torch in the loss; where no weight is cut there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.errors import PlanError
from weft.model.blueprint import Loss
from weft.techniques.core._part import ModelPart

_OF_SHAPE = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
    + ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "register_hook")
)
"""Functions that read a tensor's dtype, device or shape and none of its values."""
_OF_OTHER = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
"""Functions that read the values of their first operand alone."""


@final
class LossWithoutWeights:
    """A loss that is refused where it reads a weight that is cut."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._cut: Mapping[int, tuple[nn.Parameter, str]] = {}

    def watch(self, parts: Sequence[ModelPart]) -> None:
        """Look out for the weights of these parts, which are in place and cut."""
        self._cut = {
            id(parameter): (parameter, _why(part.layout[name].name, parameter))
            for part in parts
            for name, parameter in part.module.named_parameters()
            if part.layout[name].split or isinstance(parameter, DTensor)
        }

    def __call__(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        if not self._cut:
            return self._loss(outputs, batch)
        with _Reads(self._cut):
            return self._loss(outputs, batch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loss":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._loss, name)


class _Reads(TorchFunctionMode):
    def __init__(self, cut: Mapping[int, tuple[nn.Parameter, str]]) -> None:
        super().__init__()
        self._cut = cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        name = getattr(func, "__name__", "")
        read = None if name in _OF_SHAPE else self._read(args[:1] if name in _OF_OTHER else (*args, *keywords.values()))
        if read is not None and not _is_by_weft() and self._has_values(func, args, keywords):
            raise PlanError(read)
        return func(*args, **keywords)

    def _has_values(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a function makes more of weights than their shape and the like, as it does without any values."""

        def bare(operand: Any) -> Any:
            if id(operand) not in self._cut:
                return operand
            return torch.empty(operand.shape, dtype=operand.dtype, device="meta")

        try:
            made = func(*tree_map(bare, args), **tree_map(bare, kwargs))
        except RuntimeError:  # beside tensors that have values, or asked for a number
            return True
        return any(isinstance(leaf, Tensor) for leaf in tree_leaves(made))

    def _read(self, operands: Sequence[Any]) -> str | None:
        for operand in operands:
            if id(operand) in self._cut:
                return self._cut[id(operand)][1]
            if isinstance(operand, list | tuple):  # of tensors, as `torch.cat` takes them
                inside: Sequence[Any] = operand
                if (weight := next((tensor for tensor in inside if id(tensor) in self._cut), None)) is not None:
                    return self._cut[id(weight)][1]
        return None


def _is_by_weft() -> bool:
    """Whether Weft itself reads, as the fused vocabulary loss does, which knows that it has a part."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # what `inspect` and `logging` use
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "weft"


def _why(name: str, parameter: nn.Parameter) -> str:
    cut, instead = "the plan gives", "plan.mesh.tensor = 1 and plan.mesh.expert = 1"
    if isinstance(parameter, DTensor):
        cut, instead = "ZeRO-3 gives", "plan.data_parallel.zero = 2"
    return (
        f"the loss reads {name} itself, of which {cut} this rank a part: a penalty on weights would be one on the part."
        f" Use {instead}, or leave the term out of the loss (weight_decay of the optimizer is right under any plan)."
    )
