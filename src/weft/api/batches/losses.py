"""The user's loss by Weft's contract, what else is made of a model's outputs there, and losses that a loop computes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft.api.batches.batch_shape import FILLER, BatchShape, taken_apart
from weft.errors import RecipeError
from weft.model.auxiliary import AuxiliaryLoss, auxiliary_of
from weft.model.blueprint import Batch
from weft.techniques.data.find_whole_batch import GatheredBatch


class LossOfUser:
    """The user's loss by Weft's contract; a plain scalar is taken as a mean over samples, which is said once."""

    def __init__(self, loss: Callable[[Any, Any], Any], like: BatchShape | None = None, hint: str = "") -> None:
        """`like`: shape of the loader's batches; `hint`: what to say where the loss of the model's outputs is None."""
        self._loss = loss
        self._warned = False
        self.per_sample: bool = getattr(loss, "per_sample", True)
        self.like: BatchShape = like or taken_apart({"x": torch.empty(1)})[1]
        self.auxiliary = {name: self._of_user(term) for name, term in auxiliary_of(loss).items()}
        self._look: Callable[[Any, Any], None] | None = None
        self._counts = True
        self._hint = hint

    @contextmanager
    def on_trial(self, like: BatchShape) -> Generator[None]:
        """Take batches of this shape within, and give no warning: the first step after gives it."""
        before = self._warned, self.like
        self._warned, self.like = True, like
        try:
            yield
        finally:
            self._warned, self.like = before

    @contextmanager
    def watched(self, look: Callable[[Any, Any], None], *, counts: bool) -> Generator[None]:
        """Show `look` the outputs and the batch of every microbatch; without `counts` no loss is computed.

        Ranks that do not compute the loss (all stages but the last) see nothing.
        """
        self._look, self._counts = look, counts
        try:
            yield
        finally:
            self._look, self._counts = None, True

    def part(self, name: str, batch: Batch) -> Any:
        """Return an entry of the batch that the model is given, and that is no tensor by itself."""
        return self.like.part(name, batch)

    def show(self, outputs: Any, batch: Batch) -> bool:
        """Show what this rank's own samples gave, before the samples of others are gathered; return whether the loss is
        to be computed."""
        if self._look is not None:
            self._look(outputs, self.like.restored(batch))
        return self._counts

    def _of_user(self, term: AuxiliaryLoss) -> AuxiliaryLoss:
        def sums(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
            return term.sums(outputs, self.like.restored(batch))

        return replace(term, sums=sums)

    def _call(self, outputs: Any, own: Any) -> Any:
        try:
            result = self._loss(outputs, own)
        except TypeError as problem:
            if self._hint and getattr(outputs, "loss", outputs) is None:
                raise RecipeError(f"the loss raised TypeError: {problem}.{self._hint}") from problem
            raise
        if result is None:
            raise RecipeError(f"the loss returned None.{self._hint or ' ' + _CONTRACT}")
        return result

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        if isinstance(batch, GatheredBatch) and self.like.has_rows:
            raise RecipeError(_NO_ROWS)
        own = self.like.restored(batch)
        if self._look is not None and not isinstance(batch, GatheredBatch):
            self._look(outputs, own)
        if not self._counts:
            nothing = torch.zeros((), dtype=torch.float64, device=batch["sample_ids"].device)
            return nothing, nothing
        loss_sum, count = self._totals(self._call(outputs, own), batch)
        return (loss_sum * 0.0, torch.zeros_like(count)) if FILLER in batch else (loss_sum, count)

    def _totals(self, result: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the result of the user's loss as sum and count."""
        learnt = result[0] if isinstance(result, tuple) and result else result
        if isinstance(learnt, Tensor) and torch.is_grad_enabled() and not learnt.requires_grad:
            raise RecipeError(
                "the loss does not depend on what the model computed, so nothing can be learnt from it. Make it of the"
                " outputs, without detach(), item() and torch.no_grad()."
            )
        if isinstance(result, tuple):
            loss_sum, count = _pair(cast(tuple[Any, ...], result))
            return loss_sum, torch.as_tensor(count, dtype=torch.float64, device=loss_sum.device)
        _refuse_no_sum(result)
        samples = next(iter(batch.values())).shape[0]
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the loss returned one number, which is taken as the mean over the batch's samples. If it is a mean"
                " over"
                " something else (tokens, pixels), return (sum, count), so that microbatches and ranks are weighted"
                " right.",
                stacklevel=2,
            )
        return result * samples, result.new_full((), float(samples), dtype=torch.float64)


def _pair(pair: tuple[Any, ...]) -> tuple[Tensor, Any]:
    if len(pair) != 2:
        raise RecipeError(f"the loss returned {len(pair)} values. {_CONTRACT}")
    loss_sum, count = pair
    _refuse_no_sum(loss_sum)
    if isinstance(count, Tensor):
        is_number = count.ndim == 0 and not count.is_complex()
        is_known = is_number and count.device.type == "cpu"  # to read another would wait for the device
    else:
        is_number = is_known = isinstance(count, int | float)
    if not is_number or (is_known and not 0 <= float(count) < math.inf):
        raise RecipeError(f"the loss returned {count!r} as its count. {_CONTRACT}")
    return loss_sum, count


def _refuse_no_sum(value: object) -> None:
    if not isinstance(value, Tensor):
        raise RecipeError(f"the loss returned a {type(value).__name__}. {_CONTRACT}")
    if value.ndim or not value.is_floating_point():
        raise RecipeError(f"the loss returned a tensor of shape {tuple(value.shape)} and {value.dtype}. {_CONTRACT}")


_CONTRACT = "Return (sum, count): a tensor with the sum over the samples, and how many there are; or their mean alone."
_NO_ROWS = (
    "the loss is of the whole batch, whose samples data ranks gather, and the batch holds texts or tensors of several"
    " sizes, which are no tensor with a row for each sample and stay where the loader put them. Give the loss tensors"
    " (encode the texts in collate_fn), or use one data rank."
)


_MOST_NODES = 32
"""Steps of a computation that are looked at: what makes a loss of its terms is short."""
_SUM = 2
"""Value with which torch's loss nodes record `reduction="sum"`."""
_JOINING = ("Add", "Sub", "Neg", "Mul", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone")
_SMALL = 0.1
"""A factor below this may be what divides by the number of samples."""


def is_sum_over_samples(loss: Tensor) -> bool:
    """Whether every term of a loss is a sum that nothing divides.  False where it cannot be told."""
    waiting: list[Any] = [loss.grad_fn]
    sums = 0
    for _ in range(_MOST_NODES):
        if not waiting:
            return sums > 0
        node = waiting.pop()
        if node is None or _is_divided(node):
            return False
        if _is_sum(node):
            sums += 1
        elif node.name().removesuffix("0").startswith(tuple(f"{each}Backward" for each in _JOINING)):
            waiting += [function for function, _ in node.next_functions if function is not None]
        else:
            return False
    return False


def warn_of_sum(loss: Tensor, ranks: int) -> None:
    """Warn that a sum would be taken for a mean, on so many data ranks."""
    if is_sum_over_samples(loss):
        warnings.warn(
            "the loss is a sum over samples, and session.backward(loss) takes it for a mean over this rank's: on"
            f" {ranks} data ranks gradients are {ranks} times smaller than those of one process. Write"
            " session.backward(loss, reduction='sum'), or divide the loss by len(x).",
            stacklevel=4,
        )


def _is_sum(node: Any) -> bool:
    if hasattr(node, "_saved_reduction"):
        return node._saved_reduction == _SUM
    # A product may have weights that add up to 1.
    made = node.next_functions[0][0] if node.next_functions else None
    return node.name().startswith("SumBackward") and not (made is not None and made.name().startswith(("Mul", "Div")))


def _is_divided(node: Any) -> bool:
    """Whether a product is with a number that may be what divides, or with something that is not known."""
    if not node.name().startswith("MulBackward"):
        return False
    saved = (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None))
    factors = [factor for factor in saved if factor is not None]
    return any(factor.numel() != 1 or abs(float(factor)) < _SMALL for factor in factors)


def stand_in_loss(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    """The sum of all that the outputs have for each sample, which is what looks for samples that meet; never trained
    on."""
    rows = _rows(batch)
    floating = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # Of the state of a recurrent network samples lie along another dim, and layers may be as many along the first.
    own = [leaf for leaf in floating if rows in leaf.shape]
    total = sum((leaf.sum() for leaf in own), start=torch.zeros(()))
    if not own and floating:  # means over the batch: nothing of one sample alone
        total = floating[0].sum() * 0.0
    return torch.as_tensor(total), rows


def _rows(batch: Any) -> int:
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)
