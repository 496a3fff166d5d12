"""Forwards and backwards that a user's own code makes of an uncut model, in the microbatches of one step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from weft.errors import PlanError, RecipeError
from weft.techniques.core._context import MicrobatchState
from weft.techniques.core._part import ModelPart

_FORWARD_BITS = 40
"""Keys of the n-th forward of a microbatch are those of the step `step + n·2⁴⁰`, which no training reaches."""


@final
class OwnForwards:
    """Gives every forward of the model the keys of its draws, and runs backwards under them.

    In training mode the n-th forward of a microbatch draws other numbers than the first, as in plain torch, and the
    same under every plan; the first draws what a step of Weft's own would.
    Floating inputs are cast to `dtype`, where there is one.
    `refuse` is called when a gradient reaches the model by a backward that is not `backward`; where nothing else does,
    it raises.
    """

    def __init__(self, part: ModelPart, dtype: torch.dtype | None, refuse: Callable[[], None]) -> None:
        self._part, self._dtype, self._refuse = part, dtype, refuse
        self._state: MicrobatchState | None = None
        self._number = 0
        """Forwards in training mode of the microbatch in hand."""
        self._open = 0
        """Forwards of the microbatch in hand that record gradients, since its last backward."""
        self._recorded: MicrobatchState | None = None
        """Keys of the last of these."""
        self._is_ours = self._reached = False

    @contextmanager
    def watched(self) -> Generator[None]:
        """Watch the model's forwards, for one step."""
        handles = self.watch()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def watch(self) -> list[RemovableHandle]:
        """Watch them until the handles are removed."""
        module = self._part.module
        # Before those of `fully_shard`: a backward that is refused must not have gathered anything.
        before = module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        return [before, module.register_forward_hook(self._end, prepend=True)]

    def take(self, state: MicrobatchState | None) -> None:
        """Key the forwards that come by these samples, in place of those before."""
        self._state, self._number = state, 0

    @contextmanager
    def microbatch(self, state: MicrobatchState) -> Generator[None]:
        """Key the forwards in here by these samples."""
        self._state, self._number, self._open, self._recorded = state, 0, 0, state
        try:
            with self._part.context.entered(state):
                yield
        finally:
            self._state = None

    @property
    def samples(self) -> int:
        """Samples of the microbatch in hand; 0 outside of one."""
        return 0 if self._state is None else self._state.sample_ids.numel()

    def backward(self, objective: Tensor, retain_graph: bool) -> None:
        """Add the gradients of `objective` to the parameters."""
        with self.own_backward(retain_graph):
            objective.backward(retain_graph=retain_graph)

    @property
    def reached(self) -> bool:
        """Whether the last backward came through outputs of the model."""
        return self._reached

    @contextmanager
    def own_backward(self, retain_graph: bool) -> Generator[None]:
        """A backward within is one of these, whose draws are those of their forward."""
        context = self._part.context
        # What a checkpoint of the model's own runs again here belongs to one forward, and nothing tells to which.
        state = self._recorded if self._open <= 1 else cast(MicrobatchState, _OneOfSeveral())
        self._is_ours, self._reached = True, False
        try:
            with context.entered(state):
                yield
        finally:
            self._is_ours = False
        if self._reached and not retain_graph:
            self._open = 0

    # ── hooks ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        context = self._part.context
        if self._state is not None:
            rows, length = _shape_of_inputs((args, kwargs))
            self._check_rows(rows)
            shifted = replace(self._state, step=self._state.step + (self._number << _FORWARD_BITS))
            context.current = replace(shifted, sequence_length=length)
            if module.training:
                self._number += 1
            if module.training and torch.is_grad_enabled():
                self._open, self._recorded = self._open + 1, context.current
        return self._cast(args), self._cast(kwargs)

    def _check_rows(self, rows: int | None) -> None:
        context = self._part.context
        if rows is None or rows == self.samples or context.is_alone or not context.draws:
            return
        if self._part.module.training:
            raise PlanError(
                f"the model was called with {rows} rows where the part has {self.samples} samples, and it draws"
                " (dropout): no key says which sample a row is of, so plans would differ. Call it once for every"
                " tensor with a row for each sample of the part (their draws differ), in place of one call with"
                " torch.cat, or set its dropout to 0."
            )

    def _cast(self, values: Any) -> Any:
        dtype = self._dtype
        if dtype is None:
            return values

        def convert(value: Tensor) -> Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return tree_map_only(Tensor, convert, values)

    def _end(self, module: Any, args: Any, outputs: Any) -> None:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return  # the fixed side of another's loss
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._check_backward)

    def _check_backward(self, _: Tensor) -> None:
        self._reached = True
        if not self._is_ours:
            self._refuse()


class _OneOfSeveral:
    """In place of a forward's keys, where it could be any of several."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RecipeError(
            "a checkpoint of the model's own (torch.utils.checkpoint) draws its dropout again in this backward, which"
            " comes after several forwards, so nothing says whose draws these were. Call step.backward(loss) after each"
            " forward, or leave recomputation to the plan (memory.recompute) and switch the model's own off."
        )


def _shape_of_inputs(values: Any) -> tuple[int | None, int | None]:
    """Rows and length (dim 1) of the first tensor among a forward's inputs that has such."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = next((tensor.shape[0] for tensor in tensors), None)
    return rows, next((tensor.shape[1] for tensor in tensors if tensor.ndim > 1), None)
