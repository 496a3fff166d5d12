"""What a model adds to scores of attention that it writes out, where it depends on places alone: a number for each
head, query and key (ALiBi, Press et al. 2022, https://arxiv.org/abs/2108.12409).

Whoever reads such attention (`written.py`) asks a `Biases` about what is added.  A look at a forward without memory
knows values of what comes from numbers and indices alone, never from weights or activations, so a value is a proof.
Ranks that share a sequence take those of whole samples, which such a forward of as many tokens makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from weft.models._blueprint import Blueprint
from weft.models._examples import token_example

_LARGEST = 1e6
"""What is added is no larger: beyond it, it would be a mask."""
_ROUNDING = 2.0
"""Units in the last place by which devices may differ, of what a model computes in, or as in fp32 whatever it does."""
Place = tuple[str, int]
"""Module, and which of the attentions of one of its calls."""


@dataclass(frozen=True, slots=True)
class Added:
    """Something that was added to scores."""

    given: Tensor
    factor: float
    """By which the scores were multiplied since."""
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


@final
class WholeBiases:
    """Biases of whole samples, of any length, found by forwards without memory."""

    def __init__(self, blueprint: Blueprint, dtype: torch.dtype) -> None:
        """`dtype`: that in which the model computes."""
        self._blueprint, self._dtype = blueprint, dtype
        self._known: dict[tuple[int, bool], Mapping[Place, Tensor | None]] = {}

    @property
    def rounding(self) -> float:
        """By which share two devices may differ."""
        return _ROUNDING * max(torch.finfo(self._dtype).eps, torch.finfo(torch.float32).eps)

    def of(self, tokens: int, *, training: bool) -> Mapping[Place, Tensor | None]:
        """Return the biases of samples of so many tokens, None where there is none.  Not collective.

        Raises whatever the forward raises.
        """
        if (tokens, training) not in self._known:
            # What a rank is doing meanwhile need not see this.
            with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
                self._known[tokens, training] = self._found(tokens, training)
        return self._known[tokens, training]

    def _found(self, tokens: int, training: bool) -> Mapping[Place, Tensor | None]:
        from weft.models.hf import (  # models of one's own may need nothing of it
            count_places,
            drop_masks,
            square_buffers,
        )
        from weft.models.written import AttentionReader
        from weft.stand_ins import StandInMode, copy_on_meta

        blueprint, biases = self._blueprint, BiasesOfPlaces()
        module = copy_on_meta(blueprint.module, self._dtype).train(training)
        drop_masks(module, written=True)
        count_places(module)
        for name, value in square_buffers(blueprint.module).items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, value)
        causal = blueprint.attention == "causal"
        AttentionReader(tokens, causal=causal, refused=_refused, biases=biases).watch(module)
        example = token_example(tokens, blueprint.inputs.values())(2)
        inputs = {keyword: example[name] for keyword, name in blueprint.inputs.items()}
        with StandInMode("", constants=True):
            module(**{keyword: torch.zeros(each.shape, dtype=each.dtype) for keyword, each in inputs.items()})
        return biases.found


def _refused(place: str, what: str) -> Exception:
    return ValueError(f"{place} {what}")


@final
class BiasesOfRank:
    """Gives a rank that has some of the tokens the biases of whole samples, where its own are what a forward of as many
    tokens makes."""

    def __init__(
        self,
        whole: WholeBiases,
        root: nn.Module,
        tokens: Callable[[], tuple[int, int]],
        first_of: Callable[[int], int],
    ) -> None:
        """`tokens`: how many a sample has, and how many of them this rank.  `first_of`: so many heads, where ranks have
        as many each → this rank's first."""
        self._whole, self._root, self._tokens, self._first_of = whole, root, tokens, first_of
        self._now: list[Mapping[Place, Tensor | None]] = []
        """Biases of whole samples, and of as many tokens as this rank has."""

    def begin(self) -> None:
        """Say that a forward begins: in it nothing else can be followed."""
        training = self._root.training
        self._now = [self._whole.of(tokens, training=training) for tokens in self._tokens()]

    def takes(self, given: Tensor) -> bool:
        """See `Biases`."""
        return True

    def made(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Biases`."""
        return settings

    def placed(self, at: Place, bias: Tensor | None) -> Tensor | None:
        """See `Biases`."""
        if any(at not in known for known in self._now):
            raise ValueError("attends where no forward has shown what it adds to its scores")
        whole, part = (known[at] for known in self._now)
        if bias is not None and whole is not None and bias.shape[0] < whole.shape[0]:
            heads = slice(first := self._first_of(bias.shape[0]), first + bias.shape[0])
            whole, part = whole[heads], None if part is None else part[heads]
        if (whole is None) != (bias is None) or not self._is_alike(bias, part):
            raise ValueError("adds something else to its scores than a forward of as many tokens showed")
        return None if whole is None or bias is None else whole.to(bias.device)

    def _is_alike(self, bias: Tensor | None, part: Tensor | None) -> bool:
        if bias is None or part is None:
            return bias is part
        if bias.shape != part.shape or bias.requires_grad:
            return False
        if not has_values(bias):  # in a dry run
            return True
        mine, rounding = part.to(bias.device, bias.dtype), self._whole.rounding
        return torch.allclose(bias, mine, rtol=rounding, atol=rounding)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is more than a shape."""
    return type(tensor) is Tensor and not tensor.is_meta
