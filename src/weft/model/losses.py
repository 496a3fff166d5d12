"""Losses by the contract `loss(outputs, batch) -> (sum, count)`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.errors import RecipeError, did_you_mean
from weft.model._imports import import_attribute
from weft.model.blueprint import Batch, Loss, logits_of

IGNORED = -100
"""Label of a position that the loss leaves out."""


@runtime_checkable
class LazyLogits(Protocol):
    """Logits that never exist as one tensor: split over the vocabulary, or fused with the head."""

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """Return the 0-d sum of the cross-entropy over the labels that are not −100, in fp32 or wider.

        `labels` is int64 with the shape of the logits without their last dim.  Call on every rank of the tensor group.
        """
        ...


def token_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over tokens; `batch["labels"]` (samples, length) is aligned with the logits, not shifted.

    Logits are widened to fp32 (fp64 stays fp64).  Labels of −100 count for nothing.
    """
    labels = batch["labels"]
    return _cross_entropy(logits_of(outputs), labels), (labels != IGNORED).sum().to(torch.float64)


token_loss.per_token = True  # pyright: ignore[reportFunctionMemberAccess]


def class_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over samples; `batch["labels"]` is int64 of shape (samples,), −100 counts for nothing."""
    return token_loss(outputs, batch)


def regression_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Squared error, averaged over the values of a sample and summed over samples.

    `batch["labels"]` has the shape of the outputs; the last dim may be left out where it is 1.  `batch["weights"]`
    (samples,), where given, weighs the samples in sum and count: 0 for those that only fill up a batch.
    """
    predicted = _widened(logits_of(outputs))
    target = batch["labels"].to(predicted.dtype).view_as(predicted)
    losses = (predicted - target).square().flatten(1).mean(1)
    if "weights" in batch:
        weights = batch["weights"].to(losses.dtype)
        return (losses * weights).sum(), weights.sum().to(torch.float64)
    total = losses.sum()
    return total, total.new_full((), float(predicted.shape[0]), dtype=torch.float64)


def _cross_entropy(logits: Any, labels: Tensor) -> Tensor:
    if isinstance(logits, LazyLogits):
        return logits.cross_entropy(labels)
    wide = _widened(cast(Tensor, logits))
    return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def loss_by_name(name: str) -> Loss:
    """Return a built-in loss (`tokens`, `classes`, `regression`) or import `module:function`.

    Raises:
        RecipeError: no such loss, or what was imported cannot be called as `loss(outputs, batch)`.
    """
    builtin: dict[str, Loss] = {"tokens": token_loss, "classes": class_loss, "regression": regression_loss}
    if name in builtin:
        return builtin[name]
    if ":" not in name:
        raise RecipeError(
            f'model.loss = "{name}" is not a loss.{did_you_mean(name, builtin)}'
            f" Use one of {', '.join(builtin)}, or module:function."
        )
    loss = import_attribute("model.loss", name)
    try:
        inspect.signature(loss).bind(None, {})
    except TypeError as problem:
        raise RecipeError(
            f'model.loss = "{name}" cannot be called as loss(outputs, batch): {problem}.'
            " Write it as def loss(outputs, batch) returning (sum, count)."
        ) from None
    except ValueError:
        pass  # a built-in without a signature: only calling it can tell
    return cast(Loss, loss)


def count_labels(batch: Mapping[str, Tensor]) -> int:
    """Return how many labels of a microbatch count; 0 where samples have none."""
    labels = batch.get("labels")
    return 0 if labels is None else int((labels != IGNORED).sum())
