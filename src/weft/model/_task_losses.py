"""Losses of tasks other than tokens and classes, by the contract `loss(outputs, batch) -> (sum, count)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.model.blueprint import Batch, Loss, logits_of

_IGNORED = -100


def multi_label_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of each label, averaged over those of a sample and summed over samples; `batch["labels"]`
    (samples, labels) is 0 or 1, and `batch["weights"]` (samples,), where given, weighs samples."""
    logits = _widened(logits_of(outputs))
    losses = F.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits.dtype), reduction="none").mean(-1)
    weights = batch["weights"].to(losses.dtype) if "weights" in batch else torch.ones_like(losses)
    return (losses * weights).sum(), weights.sum().to(torch.float64)


class ctc_loss:  # noqa: N801  # called as the function that it makes
    """Connectionist temporal classification, summed over samples: `batch["labels"]` (samples, length) may end in −100.

    Source: Graves et al., "Connectionist temporal classification", ICML 2006.
    """

    def __init__(self, blank: int) -> None:
        self._blank = blank

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum, and how many samples have labels."""
        logits, labels = _widened(logits_of(outputs)), batch["labels"]
        counts = labels != _IGNORED
        # A label that is the blank is none: synthetic samples have such.
        shown = torch.where(counts, torch.where(labels == self._blank, (self._blank + 1) % logits.shape[-1], labels), 0)
        frames = torch.full((logits.shape[0],), logits.shape[1], device=labels.device)
        lengths = counts.sum(-1)
        order = (~counts).int().argsort(dim=-1, stable=True)  # those that count come first
        each = F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1),
            shown.gather(-1, order),
            frames,
            lengths,
            blank=self._blank,
            reduction="none",
            zero_infinity=True,
        )
        has_labels = lengths > 0
        return (each * has_labels).sum(), has_labels.sum().to(torch.float64)


def pair_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Contrastive: each image's text among all texts of the batch, and each text's image among all images.

    It is no sum over samples, so a plan must show it the whole batch at once.
    Source: Radford et al., "Learning transferable visual models from natural language supervision" (arXiv 2103.00020).
    """
    logits = _widened(outputs.logits_per_image)
    own = torch.arange(logits.shape[0], device=logits.device)
    total = (F.cross_entropy(logits, own, reduction="sum") + F.cross_entropy(logits.t(), own, reduction="sum")) / 2
    return total, total.new_full((), float(logits.shape[0]), dtype=torch.float64)


def sigmoid_pair_loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Contrastive: each pair of an image and a text belongs together, or does not.  It needs the whole batch at once.

    Source: Zhai et al., "Sigmoid loss for language image pre-training" (arXiv 2303.15343).
    """
    logits = _widened(outputs.logits_per_image)
    sign = 2 * torch.eye(logits.shape[0], device=logits.device, dtype=logits.dtype) - 1
    total = -F.logsigmoid(sign * logits).sum()
    return total, total.new_full((), float(logits.shape[0]), dtype=torch.float64)


def _needs_full_batch(loss: Loss) -> None:
    setattr(loss, "per_sample", False)  # noqa: B010  # an attribute of a function, which types do not know


_needs_full_batch(pair_loss)
_needs_full_batch(sigmoid_pair_loss)


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
