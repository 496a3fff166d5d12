"""Mistakes that are easily made where forwards were looked at for squares of tensor ranks; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.techniques.core.grid import GridSplit
from weft.techniques.fused_loss import vocabulary
from weft.techniques.randomness import draws
from weft.techniques.tensor.mesh_2d import layers as grid_layers
from weft.techniques.tensor.mesh_2d import narrowing, own_lookups
from weft.techniques.tensor.mesh_2d import norms as grid_norms
from weft.techniques.tensor.mesh_2d.shape import Formula, GridCut
from weft.techniques.tensor.mesh_2d.square import SquareGrid
from weft.techniques.tensor.mesh_2d.summa import gather


def _scale_left_out() -> list[tuple[Any, str, Any]]:
    """An embedding looks up, and does nothing else that its own forward does."""
    return [(own_lookups, "looking_up", lambda module, look_up: look_up)]


def _weights_as_they_are() -> list[tuple[Any, str, Any]]:
    """Weights of norms are taken for factors where they are what factors differ from one by."""
    return [(grid_norms, "norm_formula", lambda module: Formula("rms_norm"))]


def _own_gradients_of_wholes() -> list[tuple[Any, str, Any]]:
    """What every rank of a row makes of a product's whole result is not summed: each keeps its own."""

    def unsummed(x: Tensor, view: GroupView, dim: int) -> Tensor:
        parts = [*gather(x.detach(), view, dim).chunk(view.size, dim)]
        parts[view.index] = x
        return torch.cat(parts, dim)

    return [(grid_layers, "enter", unsummed)]


def _first_part_for_all() -> list[tuple[Any, str, Any]]:
    """Every rank takes the first part of what it has whole."""
    own = narrowing.narrowing

    def first(forward: Any, parts: int, narrow: Any) -> Any:
        return own(forward, parts, lambda x, dim: x.chunk(parts, dim)[0])

    return [(narrowing, "narrowing", first)]


def _drops_as_the_first() -> list[tuple[Any, str, Any]]:
    """What a function drops of a part is what it drops of the first one."""
    placed = draws._Keyed._placed

    def first(self: Any, held: tuple[int, ...], layout: Any) -> Any:
        starts, whole = placed(self, held, layout)
        return [0] * len(starts), whole

    return [(draws._Keyed, "_placed", first)]


def _logits_of_another_part() -> list[tuple[Any, str, Any]]:
    """A rank takes its part of the logits for that of another."""
    local = vocabulary._local_forward

    def turned(forward: Any, view: GroupView, *of: Any, **named: Any) -> Any:
        return local(forward, replace(view, index=view.size - 1 - view.index), *of, **named)

    return [(vocabulary, "_local_forward", turned)]


def _biases_of_other_heads() -> list[tuple[Any, str, Any]]:
    """What is added to the scores of a head is looked up in the columns of another one."""
    split_of = SquareGrid.split_of

    def turned(self: SquareGrid, cut: GridCut) -> GridSplit:
        made = split_of(self, cut)
        if cut != GridCut(1):
            return made
        (along,) = made.cuts
        return replace(made, cuts=(replace(along, index=along.parts - 1 - along.index),))

    return [(SquareGrid, "split_of", turned)]


def _own_gradients_of_biases() -> list[tuple[Any, str, Any]]:
    """What ranks of a column find for a table of biases is not summed: each keeps what its samples say."""
    split_of = SquareGrid.split_of

    def unsummed(self: SquareGrid, cut: GridCut) -> GridSplit:
        made = split_of(self, cut)
        return replace(made, is_partial=False) if cut == GridCut(1) else made

    return [(SquareGrid, "split_of", unsummed)]


PATCHES: Mapping[str, Callable[[], list[tuple[Any, str, Any]]]] = {
    "scale of an embedding left out": _scale_left_out,
    "weights of norms as they are": _weights_as_they_are,
    "own gradients of wholes": _own_gradients_of_wholes,
    "first part for all": _first_part_for_all,
    "drops as the first rank": _drops_as_the_first,
    "logits of another part": _logits_of_another_part,
    "biases of other heads": _biases_of_other_heads,
    "own gradients of biases": _own_gradients_of_biases,
}
