"""A grid of tensor ranks: its groups, and how it cuts every parameter of a model that has a one-dimensional table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from weft.comm import GroupView, Mesh
from weft.errors import PlanError
from weft.models import IGNORED, Blueprint, SplitRule
from weft.parallel.grid import GridSplit, PartGrid
from weft.plan import MeshPlan, axis_coordinates
from weft.techniques.tensor.cuts import is_conv1d, is_linear
from weft.techniques.tensor.grid_norms import is_centred, is_norm
from weft.techniques.tensor.grid_shape import GridCut, GridShape
from weft.techniques.tensor.summa import Gathered

Kind = Literal["column", "row", "alone"]
"""What a product is: the first or the second one of a layer, or a layer by itself."""
Role = Literal["product", "vocabulary", "table", "norm", "heads"]
"""What a module does with features of which a rank has a part: multiplies them, looks them up in a table that is cut by
vocabulary, or in one that is not, normalises them, or works on whole heads."""


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

    def take(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], None]:
        """See `TokenSharing`: every field has its samples along dim 0."""
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


# ── what each module is ───────────────────────────────────────────────────────────────────────────────────────────────


def role_of(blueprint: Blueprint, name: str, module: nn.Module) -> Role | None:
    """Return what a module of the model does with features that are cut; None: what works feature by feature.

    Raises:
        PlanError: a module whose work on a part of the features nothing tells.
    """
    rule = blueprint.rule_of(name)
    kind = None if rule is None else rule.kind
    if kind == "heads":
        return "heads"
    if is_linear(module) or is_conv1d(module):
        if kind in (None, "column", "row", "sequence"):
            return "product"
    elif isinstance(module, nn.Embedding):
        if kind in (None, "vocab", "sequence"):
            return "vocabulary" if kind == "vocab" else "table"
    elif is_norm(module):
        if kind in (None, "sequence"):
            return "norm"
    elif next(module.parameters(recurse=False), None) is None and kind not in ("gather", "replicate", "expert"):
        return None
    raise PlanError(
        f"plan.tensor_parallel.scheme cuts features between the layers, too, and nothing says how {name}, a"
        f" {type(module).__name__}{f' of the kind {chr(34)}{kind}{chr(34)}' if kind else ''}, works on a part of them."
        ' Use scheme = "1d".'
    )


def kind_of_product(blueprint: Blueprint, name: str) -> Kind:
    """Return whether a product is the first or the second one of a layer, as the one-dimensional table has it."""
    kind = blueprint.kind_of(name)
    return kind if kind in ("column", "row") else "alone"


def grid_splits(blueprint: Blueprint, grid: TensorGrid) -> dict[str, GridSplit | Literal["partial"]]:
    """Return the cut of every parameter of the whole model by name; `partial`: whole, with parts of its gradient.

    Raises:
        PlanError: sizes that the side of the grid does not divide, or a module that no cut fits.
    """
    splits: dict[str, GridSplit | Literal["partial"]] = {}
    for name, module in blueprint.module.named_modules(remove_duplicate=False):
        role, rule = role_of(blueprint, name, module), blueprint.rule_of(name)
        for leaf, parameter in module.named_parameters(recurse=False):
            whole_name = f"{name}.{leaf}" if name else leaf
            cut = cut_of(role, module, leaf, rule)
            if cut is None:
                splits[whole_name] = "partial"
                continue
            split = splits[whole_name] = grid.split_of(cut)
            _check_divides(whole_name, parameter, split)
    return splits


def grid_kind(
    blueprint: Blueprint, name: str, module: nn.Module
) -> Literal["product", "rms_norm", "layer_norm"] | None:
    """Return what ranks of a grid share of a module that no table lets one-dimensional ranks share."""
    try:
        role = role_of(blueprint, name, module)
    except PlanError:
        return None
    if role == "norm":
        return "layer_norm" if is_centred(module) else "rms_norm"
    return "product" if role == "product" else None


def cut_of(role: Role | None, module: nn.Module, leaf: str, rule: SplitRule | None) -> GridCut | None:
    """Return how a module's parameter is cut; None: every rank has all of it, and a part of its gradient."""
    blocks = 1 if rule is None else rule.blocks
    if role == "heads":
        return None
    if role == "table":
        return GridCut(1)
    is_product = role == "product"
    is_matrix = role == "vocabulary" or (is_product and leaf == "weight")
    is_inside = role == "vocabulary" or (is_product and (rule is None or rule.kind != "row"))
    return GridCut(1 if is_matrix and is_conv1d(module) else 0, blocks, is_matrix, is_inside)


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
