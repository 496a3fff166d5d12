"""Biases of whole samples, on ranks that have some of their tokens (`place_biases.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from weft.model.attention.place_biases import BiasesOfPlaces, Place, has_values
from weft.model.attention.written import AttentionReader
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.meta_forward import StandInMode, copy_on_meta

_ROUNDING = 2.0
"""Units in the last place by which devices may differ, of what a model computes in, or as in fp32 whatever it does."""


@final
class WholeBiases:
    """Biases of whole samples, of any length, found by forwards without memory."""

    def __init__(self, blueprint: Blueprint, dtype: torch.dtype) -> None:
        """`dtype`: that in which the model computes."""
        self._blueprint, self._dtype = blueprint, dtype
        self._known: dict[tuple[int, bool], Mapping[Place, Tensor | None]] = {}

    @property
    def rounding(self) -> float:
        """The share by which two devices may differ."""
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
        from weft.model.hf import (  # models of one's own may need nothing of it
            count_places,
            drop_masks,
            square_buffers,
        )

        blueprint, biases = self._blueprint, BiasesOfPlaces()
        module = copy_on_meta(blueprint.module, self._dtype).train(training)
        drop_masks(module, written=True)
        count_places(module)
        for name, value in square_buffers(blueprint.module).items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, value)
        causal = blueprint.attention == "causal"
        AttentionReader(tokens, causal=causal, windows=blueprint.windows, refused=_refused, biases=biases).watch(module)
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
