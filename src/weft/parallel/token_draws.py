"""Draws by functions where ranks share the tokens of samples: a rank draws what one process draws for its tokens.

Forwards of samples of several lengths show along which dim of a draw the tokens lie: the one that is as long as the
sample, whatever its length.  A draw that is as large for any length is the same for all tokens, and so on all ranks.
Loaded where ranks share a sequence and something draws by functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from weft.comm import GroupView, shard_bounds
from weft.errors import PlanError
from weft.models import Blueprint, token_example
from weft.parallel._draw_trace import LOSS, DrawLayout, Draws, find_draws
from weft.parallel._noise import Elements
from weft.parallel.local_tokens import LocalTokens
from weft.plan import Plan

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
        found = _followed([each.layouts.get(key, []) for each in (draws, *runs)], (length, *lengths))
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


def _followed(found: Sequence[Sequence[DrawLayout]], lengths: Sequence[int]) -> list[DrawLayout] | None:
    """Return the layouts of one draw with the dim of the tokens, from those of samples of several lengths; None: they
    do not show it."""
    if len({tuple((layout.place, layout.dim, len(layout.whole)) for layout in each) for each in found}) != 1:
        return None
    layouts: list[DrawLayout] = []
    for same in zip(*found, strict=True):
        first = same[0]
        sizes = list(zip(*(layout.whole for layout in same), strict=True))
        growing = [dim for dim, each in enumerate(sizes) if len(set(each)) > 1]
        if first.place == "unknown" or len(growing) > 1:
            return None
        if growing and sizes[growing[0]] != tuple(lengths):
            return None
        layouts.append(replace(first, tokens=growing[0] if growing else None))
    return layouts
