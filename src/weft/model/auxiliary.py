"""Auxiliary losses that are statistics over the batch: the load of experts, the entropy of a code book.

Such a term is no sum over samples: it is a function of means over the *whole* batch of a step, and its gradient at one
sample depends on all others.  A loss says which terms it has:

    def balance(outputs, batch):                     # probabilities of experts, (samples, length, experts)
        chosen = F.one_hot(outputs.probabilities.argmax(-1), EXPERTS).to(outputs.probabilities)
        both = torch.stack([chosen, outputs.probabilities]).flatten(1, 2)
        return both.sum(1), both.new_tensor(both.shape[1])

    loss.auxiliary = {
        "balance": AuxiliaryLoss(sums=balance, value=lambda means: EXPERTS * means.prod(0).sum(), weight=0.01)
    }

Source of the example: Fedus et al., "Switch transformers", 2021 (arXiv 2101.03961, eq. 4 to 6), over the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.errors import RecipeError
from weft.model.blueprint import Batch, Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryLoss:
    """One term of the objective, `weight` · `value`(Σ sums / Σ count), with both sums over the whole batch of a step.

    It is exact under accumulation, unequal shares and on data and context ranks.  With several microbatches a step
    first runs their forwards once more, because the gradient of the first one needs the statistics of all.
    """

    sums: Callable[[Any, Batch], tuple[Tensor, Tensor]]
    """`sums(outputs, batch)`: sums over the samples or tokens of a microbatch, of any shape, the same for every
    microbatch, and differentiable as far as gradients are wanted; and what they are divided by, 0-d.  It must not
    draw."""
    value: Callable[[Tensor], Tensor]
    """Function from the means over the batch to the term, 0-d and differentiable."""
    weight: float
    """The term's factor beside the mean loss."""


def auxiliary_of(loss: object) -> Mapping[str, AuxiliaryLoss]:
    """Return the auxiliary terms of a loss, by name; none for most.

    Raises:
        RecipeError: its attribute `auxiliary` is something else.
    """
    terms: Any = getattr(loss, "auxiliary", {})
    wrong = not isinstance(terms, Mapping) or any(not isinstance(term, AuxiliaryLoss) for term in terms.values())
    if wrong:
        raise RecipeError(
            f"the loss has an attribute auxiliary, {terms!r:.100}, which is not name → AuxiliaryLoss. Write"
            ' loss.auxiliary = {"name": AuxiliaryLoss(sums=…, value=…, weight=…)}.'
        )
    return terms


class LossWithTerms:
    """A loss, and the auxiliary terms of a model beside its own."""

    def __init__(self, loss: Loss, terms: Mapping[str, AuxiliaryLoss]) -> None:
        self._loss = loss
        self.per_sample: bool = getattr(loss, "per_sample", True)
        self.per_token: bool = getattr(loss, "per_token", False)
        self.auxiliary: Mapping[str, AuxiliaryLoss] = {**terms, **auxiliary_of(loss)}

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._loss(outputs, batch)
