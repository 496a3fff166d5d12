"""Whether a model computes in evaluation what it computes in training, dropout and batch norms aside.

A module may do anything where it is not trained: a softmax over its features, another head, a mean over the tokens of a
sample.  How a model is split must fit both, so both forwards are compared; and where they differ, both are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_map

from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import BATCH_NORMS
from weft.analysis.trace._trace import Mode, trace
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint

_Step = tuple[Any, ...]
"""An operator on values that are named by the operator that made them first."""


def trace_both(blueprint: Blueprint, dtype: torch.dtype) -> tuple[Trace, tuple[Mode, ...]]:
    """Return a forward in training; where the one in evaluation is another, both in one trace; and which they are.

    Give a copy of the module: it stays in training mode.

    Raises:
        RecipeError: one of them cannot be followed.
    """
    forward = trace(blueprint, dtype, loss=False)
    if first_difference(blueprint.module, forward, trace_evaluation(blueprint, dtype)) is None:
        return forward, ("as it is",)
    return trace(blueprint, dtype, loss=False, modes=BOTH), BOTH


BOTH: tuple[Mode, ...] = ("as it is", "evaluation")


def trace_evaluation(blueprint: Blueprint, dtype: torch.dtype, **options: Any) -> Trace:
    """Return the forward in evaluation.  Raises RecipeError, which says so, where it cannot be followed."""
    try:
        return trace(blueprint, dtype, loss=False, modes=("evaluation",), **options)
    except RecipeError as problem:
        raise RecipeError(f"in evaluation, {problem}") from problem


def first_difference(root: nn.Module, training: Trace, evaluation: Trace) -> str | None:
    """Return the module that evaluation runs where two forwards part, "" for the model; None: they are the same.

    Dropout is none of an evaluation's, and a batch norm is one operator, whatever its statistics are.  Values that a
    tensor held before (masks that a forward makes) are compared where both traces tell them.
    """
    first, second = _Steps(root, training), _Steps(root, evaluation)
    for mine, theirs in zip(first, second, strict=False):
        if mine != theirs:
            return theirs[1]
    left = next(second, None) or next(first, None)
    if left is not None:
        return left[1]
    same = first.named(training.outputs) == second.named(evaluation.outputs)
    return None if same else ""


class _Steps(Iterator[_Step]):
    """The operators of a forward, one after another."""

    def __init__(self, root: nn.Module, forward: Trace) -> None:
        self._events = iter(forward.events)
        self._norms = {name for name, module in root.named_modules() if _is_batch_norm(module)}
        self._names: dict[int, object] = {storage: names[0] for storage, names in forward.parameters.items()}
        self._names |= forward.buffers
        self._names |= {value.storage: f"batch.{name}" for name, value in forward.inputs.items()}
        self._made = 0

    def __next__(self) -> _Step:
        while True:
            event = next(self._events)
            if event.name == "dropout":
                self._names[event.outputs[0].storage] = self._name(event.inputs[0])
            elif event.module not in self._norms:
                return self._step(event)
            elif event.name in BATCH_NORMS:
                return ("batch_norm", event.module, self._name(event.inputs[0]), self._name(event.outputs[0]))

    def named(self, arguments: Any) -> Any:
        """Arguments with names for their values."""
        return tree_map(self._place, arguments)

    def _step(self, event: Event) -> _Step:
        keywords: Mapping[str, Any] = event.keywords
        if event.name == "attention":
            keywords = {name: value for name, value in keywords.items() if name not in ("dropout", "drawn")}
        arguments = self.named((event.arguments, dict(keywords)))
        return (event.name, event.module, arguments, self.named(event.outputs[:1]), event.reads)

    def _place(self, argument: Any) -> Any:
        if not isinstance(argument, Value):
            return argument
        return (self._name(argument), argument.offset, argument.shape, argument.stride)

    def _name(self, value: Value) -> object:
        if value.storage not in self._names:
            self._made += 1
            self._names[value.storage] = self._made
        return self._names[value.storage]


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
