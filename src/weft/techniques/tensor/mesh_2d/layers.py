"""Layers on a grid of tensor ranks: between them a rank has its samples and its part of the features.

Every product is cut in both dimensions, so that what a layer returns lies as what it was given, and the model's own
forward runs on it: sums of residuals and activations feature by feature, attention on the heads of a part of the
features.  Norms, the embedding and the loss over the vocabulary sum over a row of the grid.  A microbatch is cut along
its samples, so no rank holds an activation that another has, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm.mesh import GroupView, Mesh
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.plain_layers import is_conv1d, localise, runs
from weft.techniques.core import ModelPart, NestedSplit, fill_layout, first_names, is_own
from weft.techniques.core.grid import GridSplit
from weft.techniques.randomness.draws import LOSS
from weft.techniques.runtime import Build
from weft.techniques.tensor.cuts import check_sizes, mark_partial
from weft.techniques.tensor.layers import check_embedding
from weft.techniques.tensor.mesh_2d.mesh import TensorGrid, check_grid_ties, grid_splits
from weft.techniques.tensor.mesh_2d.norms import norm_forward
from weft.techniques.tensor.mesh_2d.roles import Kind, kind_of_product, role_of
from weft.techniques.tensor.mesh_2d.shape import GridShape
from weft.techniques.tensor.mesh_2d.summa import Gathered, HeldWhole, enter


def apply_grid(part: ModelPart, build: Build, shape: GridShape) -> None:
    """Cut `part` over the grid in place, enter its parameters in the layout, and let its layers work on what they get.

    Call it on every rank, before anything else that installs hooks.  `part` may be on meta or hold real, equal data.
    Attributes go on describing whole layers, but those that the table localises.

    Raises:
        PlanError: a model, a module or a size that no grid fits.
    """
    blueprint, mesh = build.blueprint, build.mesh
    _check_built(build, shape)
    check_sizes(blueprint, shape.side, is_grid=True)
    grid = _create_grid(mesh, shape)
    splits = grid_splits(blueprint, grid)
    names = first_names(part.module) | first_names(blueprint.module)
    check_grid_ties(names, splits)
    fill_layout(part.layout, part.module, names, {n: each for n, each in splits.items() if isinstance(each, GridSplit)})
    _install(part.module, blueprint, grid)
    _narrow(part.module, blueprint, grid)
    _cut(part, splits)
    localise(part.module, blueprint, shape.side, is_grid=True)
    part.grid = grid
    build.context.sharing = grid.shares(mesh.index("tensor"), blueprint.inputs.values())
    mesh.see_alike(grid.heads)


def _create_grid(mesh: Mesh, shape: GridShape) -> TensorGrid:
    if shape.is_cube:
        from weft.techniques.tensor.mesh_2d.cube import create_cube  # ranks load the kind of grid that they form

        return create_cube(mesh, shape)
    from weft.techniques.tensor.mesh_2d.square import create_square  # as above

    return create_square(mesh, shape)


def _check_built(build: Build, shape: GridShape) -> None:
    """Refuse what only the built model shows.

    Raises:
        PlanError: a model of which it is not known how its features meet, or that draws by functions.
    """
    blueprint, scheme = build.blueprint, build.plan.tensor_parallel.scheme
    problem = blueprint.no_grid or (blueprint.no_cube if shape.is_cube else "")
    if not problem and build.plan.compute.precision == "fp16":
        problem = blueprint.no_fp16_grid
    given = sorted({*blueprint.inputs.values()} - {"tokens"})
    if not problem and shape.is_cube and given:
        problem = f"its forward reads {' and '.join(given)} beside tokens, of other samples than its layers work on"
    if not problem and (drawing := _undetermined(build)):
        problem = f"{drawing[0] or 'its forward'} draws random numbers by functions"
    if problem:
        raise PlanError(
            f'plan.tensor_parallel.scheme = "{scheme}" cannot be had for this model: {problem}. Use scheme = "1d".'
        )


def _undetermined(build: Build) -> list[str]:
    """Modules that draw by functions without a look at where; or so that a shape does not tell whose part it is."""
    draws, is_looked_at = build.draws, not build.blueprint.has_known_features
    return [
        name
        for name in draws.modules
        if not is_looked_at
        or name == LOSS
        or any(len(layouts) > 1 for (owner, _, _), layouts in draws.layouts.items() if owner == name)
    ]


def _cut(part: ModelPart, splits: Mapping[str, GridSplit | Literal["partial"]]) -> None:
    """Replace every parameter by this rank's part: on meta an empty one, else sliced data.  Ties stay ties."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(part.module.named_parameters(remove_duplicate=False)):
        split = splits.get(name)
        if split is None:
            continue
        if split == "partial":
            mark_partial(part.layout, name)
            continue
        cuts = NestedSplit(split.cuts)
        if id(parameter) not in made:
            data = parameter.detach()
            local = data.new_empty(cuts.local_shape(data.shape)) if data.is_meta else cuts.slice(data)
            made[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(part.module.get_submodule(owner), leaf, made[id(parameter)])


# ── what runs instead of a module's own forward ───────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Reads:
    """The gathered input of the products that read one tensor (query, key, value; gate, up); `layers._SharedInput`
    says why.  The next product of another kind empties the slot."""

    grid: TensorGrid
    source: Tensor | None = None
    version: int = -1
    entered: tuple[Tensor, Gathered] | None = None

    def get(self, x: Tensor) -> tuple[Tensor, Gathered]:
        version = 0 if x.is_inference() else x._version
        held, wants = self.entered, torch.is_grad_enabled() and x.requires_grad
        if held is None or self.source is not x or self.version != version or held[0].requires_grad != wants:
            held = self.grid.enter(x, is_inside=False)
            self.source, self.version, self.entered = x, version, held
        return held

    def clear(self) -> None:
        self.source = self.entered = None


def _install(part: nn.Module, blueprint: Blueprint, grid: TensorGrid) -> None:
    done: set[int] = set()
    reads = _Reads(grid)
    for name, module in part.named_modules(remove_duplicate=False):
        if id(module) in done or not is_own(part, blueprint, name):
            continue
        done.add(id(module))
        match role_of(blueprint, name, module):
            case "product":
                shared = (
                    None if name == blueprint.vocabulary_head or name in blueprint.features.get("reads", ()) else reads
                )
                kind = kind_of_product(blueprint, name)
                forward = _product_forward(
                    module, grid, kind, reads, shared, is_whole=name in blueprint.features.get("reads", ())
                )
                if name in blueprint.features.get("results", ()):
                    rule = blueprint.rule_of(name)
                    forward = partial(_whole, forward, grid.features, 1 if rule is None else rule.blocks)
                module.forward = forward
            case "vocabulary":
                module.forward = _lookup_forward(check_embedding(name, module), grid)
            case "norm":
                module.forward = norm_forward(module, grid.features)
            case _:
                pass
    if wholes := [name for name in blueprint.features.get("wholes", ()) if is_own(part, blueprint, name)]:
        compute_whole(part, wholes, frozenset(blueprint.features.get("shares", ())), grid.features, reads)


def compute_whole(
    part: nn.Module, wholes: Collection[str], shares: Collection[str], view: GroupView, reads: _Reads
) -> None:
    """Let modules see all features; what they gather they share with products that read the same."""
    from weft.techniques.tensor.mesh_2d.computed_whole import computed_whole  # ranks of few models need it

    def gather(x: Tensor) -> Tensor:
        return reads.get(x)[0]

    def cut(x: Tensor) -> Tensor:
        return x.chunk(view.size, -1)[view.index].contiguous()

    for module, is_shared in {part.get_submodule(name): name in shares for name in wholes}.items():
        module.forward = computed_whole(module.forward, gather, cut if is_shared else None)


def _narrow(part: nn.Module, blueprint: Blueprint, grid: TensorGrid) -> None:
    """Let modules take parts of what they have whole, where their own forward has parts meet it."""
    if not blueprint.features.get("meets", ()):
        return
    from weft.techniques.tensor.mesh_2d.narrowing import narrowing  # ranks of few models need it

    view = grid.features

    def narrow(x: Tensor, dim: int) -> Tensor:
        return x.chunk(view.size, dim)[view.index]

    for name in blueprint.features.get("meets", ()):
        if not name or is_own(part, blueprint, name):
            module = part.get_submodule(name)
            module.forward = narrowing(module.forward, view.size, narrow)


def _product_forward(
    module: nn.Module, grid: TensorGrid, kind: Kind, reads: _Reads, shared: _Reads | None, *, is_whole: bool
) -> Callable[[Tensor], Tensor]:
    """`is_whole`: whether it is given all features."""
    inputs = 0 if is_conv1d(module) else 1

    def forward(input: Tensor) -> Tensor:
        if kind == "column" and shared is not None:
            entered = shared.get(input)
        else:
            reads.clear()
            whole = input, HeldWhole(grid.features, input.dim() - 1)
            entered = whole if is_whole else grid.enter(input, is_inside=kind == "row")
        weight: Any = module.weight
        return grid.multiply(entered, input, weight, getattr(module, "bias", None), inputs, kind)

    return forward


def _whole(forward: Callable[[Tensor], Tensor], view: GroupView, blocks: int, input: Tensor) -> Tensor:
    """What a product makes, all of it on every rank of a row; grad: the rank's part of the sum over them."""
    part = forward(input)
    made = enter(part, view, part.dim() - 1)
    if blocks == 1:
        return made
    return made.unflatten(-1, (view.size, blocks, -1)).transpose(-3, -2).flatten(-3)


def _lookup_forward(module: nn.Embedding, grid: TensorGrid) -> Callable[..., Any]:
    def look_up(input: Tensor) -> Tensor:
        return grid.look_up(input, module.weight, module.padding_idx)

    if runs(module, nn.Embedding.forward):
        return look_up
    from weft.techniques.tensor.mesh_2d.own_lookups import looking_up  # ranks of few models need it

    return looking_up(module, look_up)
