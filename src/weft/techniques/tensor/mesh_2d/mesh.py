"""A grid of tensor ranks: its groups, and how it cuts every parameter of a model that has a one-dimensional table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import MeshPlan, axis_coordinates
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.losses import IGNORED
from weft.techniques.core import GridSplit
from weft.techniques.core.grid import PartGrid
from weft.techniques.tensor.mesh_2d.roles import Kind, cut_of, role_of
from weft.techniques.tensor.mesh_2d.shape import GridCut, GridShape
from weft.techniques.tensor.mesh_2d.summa import Gathered


@dataclass(frozen=True, slots=True)
class SampleShares:
    """Cuts a microbatch along its samples into `parts`, the longer ones first."""

    parts: int
    of_inputs: int
    """Number of this rank's part of what the model reads."""
    of_loss: int
    """Number of its part of what the loss reads."""
    inputs: frozenset[str]
    fills: bool = False
    """Whether ranks exchange samples, so that parts must be equal: what is missing (of a last batch that is evaluated)
    is filled up with samples without labels."""

    def cut_batch(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], None]:
        """See `SequenceShard`: every field has its samples along dim 0."""
        missing = -len(batch["sample_ids"]) % self.parts if self.fills else 0
        fields = {name: _filled(name, field, missing) for name, field in batch.items()}
        return {name: field.tensor_split(self.parts)[self._part(name)] for name, field in fields.items()}, None

    def _part(self, name: str) -> int:
        return self.of_inputs if name in self.inputs or name == "sample_ids" else self.of_loss


def _filled(name: str, field: Tensor, missing: int) -> Tensor:
    if not missing:
        return field
    last = field[-1:].expand(missing, *field.shape[1:])
    return torch.cat([field, torch.full_like(last, IGNORED) if name == "labels" else last])


class TensorGrid(PartGrid, Protocol):
    """This rank's lines in a grid: what layers do on them, and how parameters are cut over them."""

    def enter(self, x: Tensor, *, is_inside: bool) -> tuple[Tensor, Gathered]:
        """Return what products multiply of an activation, and who gathers it once more for the backward.

        `is_inside`: whether the activation comes from within a layer.
        """
        ...

    def multiply(
        self, entered: tuple[Tensor, Gathered], x: Tensor, weight: Tensor, bias: Tensor | None, inputs: int, kind: Kind
    ) -> Tensor:
        """Return this rank's block of a product with its block of a weight, whose dim `inputs` is that of inputs."""
        ...

    def look_up(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Return this rank's samples and features of an embedding."""
        ...

    def shares(self, rank: int, inputs: Collection[str]) -> SampleShares:
        """Return how a microbatch is cut; the model reads the fields `inputs`, and the loss the others."""
        ...

    def split_of(self, cut: GridCut) -> GridSplit:
        """Return this rank's part of a parameter."""
        ...


def create_line(
    mesh: Mesh, shape: GridShape, name: str, fixed: Callable[[int, int, int], tuple[int, ...]]
) -> GroupView:
    """Return this rank's group among ranks that have in common what is `fixed` of their layer, row and column.

    The first time, groups are created: call it on every rank alike.
    """
    if name not in mesh.lines:
        mesh.lines[name] = mesh.create_group(_partition(mesh.plan, shape, fixed), name)
    return mesh.lines[name]


def _partition(plan: MeshPlan, shape: GridShape, fixed: Callable[[int, int, int], tuple[int, ...]]) -> list[list[int]]:
    """Ranks of the world by what is `fixed` of their place in the grid, and by all other axes."""
    parts: dict[tuple[object, ...], list[int]] = {}
    for rank in range(plan.world_size):
        place = axis_coordinates(plan, rank)
        beside = tuple(index for axis, index in place.items() if axis != "tensor")
        parts.setdefault((beside, fixed(*shape.place(place["tensor"]))), []).append(rank)
    return list(parts.values())


def grid_splits(blueprint: Blueprint, grid: TensorGrid) -> dict[str, GridSplit | Literal["partial"]]:
    """Return the cut of every parameter of the whole model by name; `partial`: whole, with parts of its gradient.

    Raises:
        PlanError: sizes that the side of the grid does not divide, or a module that no cut fits.
    """
    splits: dict[str, GridSplit | Literal["partial"]] = {}
    for name, module in blueprint.module.named_modules(remove_duplicate=False):
        role = role_of(blueprint, name, module)
        for leaf, parameter in module.named_parameters(recurse=False):
            whole_name = f"{name}.{leaf}" if name else leaf
            cut = cut_of(blueprint, role, name, leaf)
            if cut is None:
                splits[whole_name] = "partial"
                continue
            split = splits[whole_name] = grid.split_of(cut)
            _check_divides(whole_name, parameter, split)
    return splits


def _check_divides(name: str, parameter: nn.Parameter, split: GridSplit) -> None:
    for cut in split.cuts:
        size, unit = parameter.shape[cut.dim], cut.parts * cut.blocks
        if size % unit:
            larger = f"pad the size to {-(-size // unit) * unit}"
            raise PlanError(
                f"plan.tensor_parallel.scheme makes a grid whose side of {cut.parts} does not divide dimension"
                f" {cut.dim} of {name}, {tuple(parameter.shape)}. Use a side that does, {larger}, or"
                ' scheme = "1d".'
            )


def check_grid_ties(names: Mapping[str, str], splits: Mapping[str, GridSplit | Literal["partial"]]) -> None:
    """Raise PlanError where two modules share a parameter and cut it differently."""
    for name, first in names.items():
        if name in splits and splits[name] != splits.get(first, splits[name]):
            raise PlanError(
                f"{name} and {first} are one parameter, but a grid of tensor ranks would cut it in two ways. Use"
                ' plan.tensor_parallel.scheme = "1d".'
            )
