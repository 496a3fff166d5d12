"""What a model adds to scores of attention that it writes out, where it depends on places alone: a number for each
head, query and key (ALiBi, Press et al. 2022, https://arxiv.org/abs/2108.12409).

Whoever reads such attention (`written.py`) asks a `Biases` about what is added.  A look at a forward without memory
knows values of what comes from numbers and indices alone, never from weights or activations, so a value is a proof.
Ranks that share a sequence take those of whole samples, which such a forward of as many tokens makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

_LARGEST = 1e6
"""What is added is no larger: beyond it, it would be a mask."""
Place = tuple[str, int]
"""Module, and which of the attentions of one of its calls."""


@dataclass(frozen=True, slots=True)
class Added:
    """Something that was added to scores."""

    given: Tensor
    factor: float
    """What the scores were multiplied by since."""
    lead: int
    """Dims of the scores before those of tokens when it was added: samples × heads in one, or both."""


class Biases(Protocol):
    """Who knows what may be added to scores."""

    def takes(self, given: Tensor) -> bool:
        """Whether it may be of places alone."""
        ...

    def made(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return how a tensor of numbers of Python is made, which no dispatch mode sees."""
        ...

    def placed(self, at: Place, bias: Tensor | None) -> Tensor | None:
        """Return the bias that counts; the given one is (heads or 1, queries or 1, keys or 1), of the tokens at hand;
        None: nothing is added.

        Raises ValueError, with the end of a sentence that begins with the module.
        """
        ...


def joined(added: Sequence[Added], samples: int, heads: int, tokens: int) -> Tensor | None:
    """Return the sum of what was added as (heads or 1, queries or 1, keys or 1), in fp32 or wider; None: it is not for
    all samples the same, or of another shape."""
    total: Tensor | None = None
    for each in added:
        own = _by_head(each, samples, heads, tokens)
        if own is None:
            return None
        own = own.to(torch.promote_types(own.dtype, torch.float32)) * each.factor
        total = own if total is None else total + own
    return total


def _by_head(added: Added, samples: int, heads: int, tokens: int) -> Tensor | None:
    given = added.given
    if given.dim() > added.lead + 2:
        return None
    shape = (*(1,) * (added.lead + 2 - given.dim()), *given.shape)
    if added.lead == 1:
        if shape[0] not in (1, samples * heads):
            return None
        shape = (1, 1, *shape[1:]) if shape[0] == 1 else (samples, heads, *shape[1:])
    if not all(size in (1, most) for size, most in zip(shape, (samples, heads, tokens, tokens), strict=True)):
        return None
    found = given.reshape(shape)
    if found.shape[0] > 1 and has_values(found) and not bool((found == found[:1]).all()):
        return None
    return found[0]


@final
class AnyBias:
    """Takes whatever is added, where only shapes are asked for."""

    def takes(self, given: Tensor) -> bool:
        """See `Biases`."""
        return True

    def made(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Biases`."""
        return settings

    def placed(self, at: Place, bias: Tensor | None) -> Tensor | None:
        """See `Biases`."""
        return bias


@final
class BiasesOfPlaces:
    """Takes what has values where weights, activations and draws have none, and keeps it."""

    def __init__(self) -> None:
        self.found: dict[Place, Tensor | None] = {}

    def made(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Biases`: with its values."""
        return {name: value for name, value in settings.items() if name != "device"}

    def takes(self, given: Tensor) -> bool:
        """See `Biases`."""
        return given.is_floating_point() and not given.is_meta and not given.requires_grad

    def placed(self, at: Place, bias: Tensor | None) -> Tensor | None:
        """See `Biases`."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            if bias is not None and not bool((bias.abs() < _LARGEST).all()):
                raise ValueError(
                    "adds to its scores something that is no mask which can be read, and too large for a bias"
                )
            if not _are_equal(self.found.setdefault(at, None if bias is None else bias.detach().clone()), bias):
                raise ValueError("adds something else to its scores where it is called again")
        return bias


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is more than a shape."""
    return type(tensor) is Tensor and not tensor.is_meta
