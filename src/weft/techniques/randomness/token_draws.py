"""Draws by functions where ranks share the tokens of samples: a rank draws what one process draws for its tokens.

Forwards of samples of several lengths show along which dim of a draw the tokens lie: the one that is as long as the
sample, whatever its length.  A draw that is as large for any length is the same for all tokens, and so on all ranks.
Loaded where ranks share a sequence and something draws by functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

from weft.comm.collectives import shard_bounds
from weft.comm.mesh import GroupView
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.attention.scored import DrawnDropout
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.techniques.core._context import StepContext
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.randomness._draw_trace import LOSS, DrawLayout, Draws, find_draws
from weft.techniques.randomness._noise import COARSE, MANTISSA, Elements
from weft.techniques.randomness.keyed_dropout import RESOLUTION, sample_words

_OF_DROPOUT = ("bernoulli_", "native_dropout")
"""Operators by which torch's dropout draws, one on CPUs, the other elsewhere."""
_Example = Callable[[int], dict[str, Tensor]]
_Part = tuple[list[int], list[int], list[int]]
"""First index, indices held, and indices of the whole, along each dim of a sample's part of a draw."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Numbers for several runs of tokens, one behind another along a dim; see `Numbers`."""

    parts: Sequence[Elements]
    dim: int

    def uniform(self, salt: int = 0) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.uniform(salt) for part in self.parts], self.dim)

    def normal(self) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.normal() for part in self.parts], self.dim)

    def kept(self, probability: float) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.kept(probability) for part in self.parts], self.dim)


def parts_of(held: Sequence[int], layout: DrawLayout, tokens: LocalTokens, view: GroupView) -> list[_Part] | None:
    """Return which parts of a sample's whole draw a rank has, for each run of its tokens; None: nothing says.

    `held` are the sizes of what it has.  Tensor ranks may have parts of one dim: of the tokens that context ranks have
    under sequence parallelism, else of another one.
    """
    starts, whole = [0] * len(held), list(layout.whole)
    runs: list[tuple[int, int]] | None = None
    num_cut = 0
    for dim, size in enumerate(held):
        length = tokens.held if dim == layout.tokens else layout.whole[dim]
        first, last = (0, length) if size == length or view.group is None else shard_bounds(length, view)
        if last - first != size:
            return None
        num_cut += size != length
        starts[dim] = first
        if dim == layout.tokens:
            runs, whole[dim] = tokens.within(first, last), tokens.length
    if num_cut > 1:
        return None
    if runs is None:
        return [(starts, list(held), whole)]
    return [(_with(starts, layout, start), _with(held, layout, stop - start), whole) for start, stop in runs]


def _with(sizes: Sequence[int], layout: DrawLayout, size: int) -> list[int]:
    return [size if dim == layout.tokens else each for dim, each in enumerate(sizes)]


def with_tokens(draws: Draws, blueprint: Blueprint, plan: Plan, ignored: Callable[[nn.Module], bool]) -> Draws:
    """Return the draws of a model with the dims of its tokens, found by forwards of samples of other lengths.

    `draws` are those of samples as the example has them; `ignored`: see `find_draws`.

    Raises:
        PlanError: of a draw it is not known for which tokens it is.
    """
    named = f"plan.mesh.context = {plan.mesh.context} cannot be had for this model"
    if LOSS in draws.modules:
        raise PlanError(f"{named}: its loss draws random numbers by functions. Use plan.mesh.context = 1.")
    example = blueprint.example or token_example(blueprint.sequence_length or 0, blueprint.inputs.values())
    length = example(1)["tokens"].shape[1]
    lengths = (length, length - 1, max(2, length // 2))
    runs = [find_draws(_of_length(blueprint, example, each), ignored) for each in lengths]
    layouts: dict[tuple[str, str, int], list[DrawLayout]] = {}
    for key in dict.fromkeys(key for each in (draws, *runs) for key in each.layouts):
        attends = blueprint.writes_attention and key[0] in blueprint.attending and key[1] in _OF_DROPOUT
        every = [each.layouts.get(key, []) for each in (draws, *runs)]
        found = _followed(every, (length, *lengths), attends=attends)
        is_flat = not blueprint.attending and any(layout.place == "flat" for layout in found or ())
        if found is None or is_flat or any(run.unseen != draws.unseen for run in runs):
            where = key[0] or f"the forward of {type(blueprint.module).__name__} itself"
            raise PlanError(
                f"{named}: {where} draws by {key[1]} what shows no dim of the tokens, so a rank cannot tell which"
                " numbers are those of its tokens. Draw by nn.Dropout modules, or use plan.mesh.context = 1."
            )
        layouts[key] = found
    return Draws(layouts=layouts, foreign=draws.foreign, unseen=draws.unseen)


def _of_length(blueprint: Blueprint, example: _Example, length: int) -> Blueprint:
    """The model given samples of fewer tokens, and their places, as ranks that share a sequence give them."""
    inputs, whole = dict(blueprint.inputs), example(1)["tokens"].shape[1]
    if blueprint.position_input and blueprint.position_input not in inputs:
        inputs[blueprint.position_input] = "positions"

    def shorter(samples: int) -> dict[str, Tensor]:
        fields = example(samples)
        fields.setdefault("positions", fields["tokens"])
        return {
            name: each[:, :length] if each.dim() > 1 and each.shape[1] == whole else each
            for name, each in fields.items()
        }

    return replace(blueprint, inputs=inputs, example=shorter)


def _followed(
    found: Sequence[Sequence[DrawLayout]], lengths: Sequence[int], *, attends: bool
) -> list[DrawLayout] | None:
    """Return the layouts of one draw with the dim of the tokens, from those of samples of several lengths; None: they
    do not show it.  `attends`: it may be a dropout of probabilities, (heads, queries, keys) of each sample."""
    if len({tuple((layout.place, layout.dim, len(layout.whole)) for layout in each) for each in found}) != 1:
        return None
    layouts: list[DrawLayout] = []
    for same in zip(*found, strict=True):
        first = same[0]
        sizes = list(zip(*(layout.whole for layout in same), strict=True))
        growing = [dim for dim, each in enumerate(sizes) if len(set(each)) > 1]
        if attends and _is_of_pairs(first, sizes, lengths):
            layouts.append(replace(first, pairs=True))
            continue
        if first.place == "unknown" or len(growing) > 1:
            return None
        if growing and sizes[growing[0]] != tuple(lengths):
            return None
        layouts.append(replace(first, tokens=growing[0] if growing else None))
    return layouts


def _is_of_pairs(first: DrawLayout, sizes: Sequence[Sequence[int]], lengths: Sequence[int]) -> bool:
    """Whether a draw is of samples × heads, in one dim or in two, and of all pairs of tokens."""
    *lead, queries, keys = [*sizes, (), ()] if len(sizes) < 3 else sizes
    heads = [each for each in lead if each != (1,) * len(lengths)]
    is_by_sample = first.dim == 0 and first.place == ("flat" if len(lead) == 1 else "sample")
    is_alike = all(len(set(each)) == 1 for each in heads)
    return len(lead) in (1, 2) and is_by_sample and is_alike and queries == keys == tuple(lengths)


@dataclass(frozen=True, slots=True)
class PairDraw:
    """Which probabilities of attention a dropout by a function drops, of those that nobody computes together."""

    words: Tensor
    """int64 (samples,): the draw of each sample."""
    heads: int
    """Heads of the whole model."""
    view: GroupView
    """Ranks that may have parts of the heads."""

    def first_of(self, heads: int) -> int:
        """Return the first of the heads that this rank has.

        Raises:
            PlanError: they are no even part of all of them.
        """
        if heads == self.heads:
            return 0
        if heads * self.view.size != self.heads:
            raise PlanError(
                f"a rank attends with {heads} of {self.heads} heads, and plan.mesh.tensor = {self.view.size} does not"
                " say which, so it cannot draw which of its probabilities are dropped. Use plan.mesh.tensor = 1."
            )
        return heads * self.view.index


def claimed(rate: float, context: StepContext, view: GroupView) -> DrawnDropout:
    """Return the dropout by a function that an attention asks for, with its draw.

    Raises:
        PlanError: no forward has shown it.
    """
    state = context.require()
    calls: list[Any] = [mode for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "claim")]
    found: tuple[str, DrawLayout] | None = calls[-1].claim(_OF_DROPOUT) if calls else None
    if found is None or not found[1].pairs:
        raise PlanError(
            "plan.mesh.context lets ranks share a sequence, but attention that is written out is dropped by a function"
            " where a forward of the model has shown no such draw. Use plan.mesh.context = 1."
        )
    key, layout = found
    words = sample_words(key, state.seed, state.step, state.sample_ids)
    return DrawnDropout(rate, PairDraw(words, math.prod(layout.whole[:-2]), view))


def dropped_of(probability: float) -> int:
    """Return how many of `RESOLUTION` elements are dropped, as `Elements.kept` has it; 0: that is too coarse, and each
    is drawn by itself."""
    dropped = round((1.0 - probability) * RESOLUTION)
    error = abs(dropped / RESOLUTION - (1.0 - probability))
    return dropped if 0 < dropped < RESOLUTION and error <= COARSE * min(probability, 1.0 - probability) else 0


def uniform_of(words: Tensor) -> Tensor:
    """Return words as numbers, fp64 in [0, 1), as `Elements.uniform` has them."""
    return ((words >> (64 - MANTISSA)) & ((1 << MANTISSA) - 1)).to(torch.float64).mul_(2.0**-MANTISSA)
