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
_ROUNDING = 16
"""Units in the last place by which devices may differ."""
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

    def placed(self, at: Place, bias: Tensor) -> Tensor:
        """Return the bias that counts; the given one is (heads or 1, queries or 1, keys or 1), of the tokens at hand.

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
    if found.shape[0] > 1 and not found.is_meta and not bool((found == found[:1]).all()):
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

    def placed(self, at: Place, bias: Tensor) -> Tensor:
        """See `Biases`."""
        return bias


@final
class BiasesOfPlaces:
    """Takes what has values where weights, activations and draws have none, and keeps it."""

    def __init__(self) -> None:
        self.found: dict[Place, Tensor] = {}

    def made(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Biases`: with its values."""
        return {name: value for name, value in settings.items() if name != "device"}

    def takes(self, given: Tensor) -> bool:
        """See `Biases`."""
        return given.is_floating_point() and not given.is_meta and not given.requires_grad

    def placed(self, at: Place, bias: Tensor) -> Tensor:
        """See `Biases`."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            if not bool((bias.abs() < _LARGEST).all()):
                raise ValueError(
                    "adds to its scores something that is no mask which can be read, and too large for a bias"
                )
            if at in self.found and not torch.equal(self.found[at], bias):
                raise ValueError("adds something else to its scores where it is called again")
            self.found[at] = bias.detach().clone()
        return bias


@final
class WholeBiases:
    """Biases of whole samples, of any length, found by forwards without memory."""

    def __init__(self, blueprint: Blueprint, dtype: torch.dtype) -> None:
        """`dtype`: that in which the model computes."""
        self._blueprint, self._dtype = blueprint, dtype
        self._known: dict[tuple[int, bool], Mapping[Place, Tensor]] = {}

    def of(self, tokens: int, *, training: bool) -> Mapping[Place, Tensor]:
        """Return the biases of samples of so many tokens.  Not collective.

        Raises whatever the forward raises.
        """
        if (tokens, training) not in self._known:
            # What a rank is doing meanwhile need not see this.
            with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
                self._known[tokens, training] = self._found(tokens, training)
        return self._known[tokens, training]

    def _found(self, tokens: int, training: bool) -> Mapping[Place, Tensor]:
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
        self._now: list[Mapping[Place, Tensor]] = []
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

    def placed(self, at: Place, bias: Tensor) -> Tensor:
        """See `Biases`."""
        whole, part = (known.get(at) for known in self._now)
        if whole is None or part is None:
            raise ValueError("adds something to its scores of which no forward has shown that it is of places alone")
        heads, every = bias.shape[0], whole.shape[0]
        if heads < every:
            first = self._first_of(heads)
            whole, part = (each[first : first + heads] for each in (whole, part))
        mine = part.to(bias.device, bias.dtype)
        rounding = _ROUNDING * max(torch.finfo(each).eps for each in (bias.dtype, part.dtype))
        is_alike = bias.shape == mine.shape and not bias.requires_grad
        if is_alike and type(bias) is Tensor and not bias.is_meta:  # in a dry run it has no values
            is_alike = torch.allclose(bias, mine, rtol=rounding, atol=rounding)
        if not is_alike:
            raise ValueError("adds something else to its scores than a forward of as many tokens showed")
        return whole.to(bias.device)
