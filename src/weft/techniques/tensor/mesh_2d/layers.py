"""Layers on a grid of tensor ranks: between them a rank has its samples and its part of the features.

Every product is cut in both dimensions, so that what a layer returns lies as what it was given, and the model's own
forward runs on it: sums of residuals and activations feature by feature, attention on the heads of a part of the
features.  Norms, the embedding and the loss over the vocabulary sum over a row of the grid.  A microbatch is cut along
its samples, so no rank holds an activation that another has, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.plain_layers import is_conv1d, localise
from weft.techniques.core import GridSplit, ModelPart, NestedSplit, fill_layout, first_names, is_own
from weft.techniques.runtime import Build
from weft.techniques.tensor.cuts import check_sizes, mark_partial
from weft.techniques.tensor.layers import check_embedding
from weft.techniques.tensor.mesh_2d.mesh import TensorGrid, check_grid_ties, grid_splits
from weft.techniques.tensor.mesh_2d.norms import norm_forward
from weft.techniques.tensor.mesh_2d.roles import Kind, kind_of_product, role_of
from weft.techniques.tensor.mesh_2d.shape import GridShape
from weft.techniques.tensor.mesh_2d.summa import Gathered


def apply_grid(part: ModelPart, build: Build, shape: GridShape) -> None:
    """Cut `part` over the grid in place, enter its parameters in the layout, and let its layers work on what they get.

    Call it on every rank, before anything else that installs hooks.  `part` may be on meta or hold real, equal data.
    Attributes go on describing whole layers, but those that the table localises.

    Raises:
        PlanError: a model, a module or a size that no grid fits.
    """
    blueprint, mesh = build.blueprint, build.mesh
    _check_built(build, shape)
    check_sizes(blueprint, shape.side)
    grid = _create_grid(mesh, shape)
    splits = grid_splits(blueprint, grid)
    names = first_names(part.module) | first_names(blueprint.module)
    check_grid_ties(names, splits)
    # The layout is filled before parameters are cut: it keeps the full shapes.
    fill_layout(
        part.layout, part.module, names, {n: split for n, split in splits.items() if isinstance(split, GridSplit)}
    )
    _install(part.module, blueprint, grid)
    _cut(part, splits)
    # Reshapes that name heads or features must see a rank's numbers of them, in the model's own forward.
    localise(part.module, blueprint, shape.side)
    part.grid = grid
    # A microbatch is cut along its samples by the mechanism that cuts tokens for context ranks.
    build.context.sequence_shard = grid.shares(mesh.index("tensor"), blueprint.inputs.values())
    mesh.set_loss_replicas(grid.heads)


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
    problem = blueprint.why_not("mesh_2d") or (blueprint.why_not("mesh_3d") if shape.is_cube else "")
    fields = sorted({*blueprint.inputs.values()} - {"tokens"})
    if not problem and shape.is_cube and fields:
        problem = f"its forward reads {' and '.join(fields)} beside tokens, of other samples than its layers work on"
    if not problem and (drawing := build.draws.modules):
        problem = f"{drawing[0] or 'its forward'} draws random numbers by functions"
    if problem:
        raise PlanError(
            f'plan.tensor_parallel.scheme = "{scheme}" cannot be had for this model: {problem}. Use scheme = "1d".'
        )


def _cut(part: ModelPart, splits: Mapping[str, GridSplit | Literal["partial"]]) -> None:
    """Replace every parameter by this rank's part: on meta an empty one, else sliced data.  Ties stay ties."""
    made: dict[int, nn.Parameter] = {}  # by the identity of the full parameter, so that a tie is cut once
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
    """The gathered input of the products that read one tensor (query, key, value; gate, up).

    One gather then serves all of them, as `layers._SharedInput` does in one dimension.  The next product of another
    kind empties the slot, so that it does not keep the gathered activation alive.
    """

    grid: TensorGrid
    source: Tensor | None = None
    version: int = -1
    entered: tuple[Tensor, Gathered] | None = None

    def get(self, x: Tensor) -> tuple[Tensor, Gathered]:
        # The same tensor with the same version: a change in place between two readers must gather again.
        version = 0 if x.is_inference() else x._version
        entered, wants = self.entered, torch.is_grad_enabled() and x.requires_grad
        if entered is None or self.source is not x or self.version != version or entered[0].requires_grad != wants:
            entered = self.grid.enter(x, is_inside=False)
            self.source, self.version, self.entered = x, version, entered
        return entered

    def clear(self) -> None:
        self.source = self.entered = None


def _install(part: nn.Module, blueprint: Blueprint, grid: TensorGrid) -> None:
    done: set[int] = set()
    reads = _Reads(grid)
    for name, module in part.named_modules(remove_duplicate=False):
        if id(module) in done or not is_own(part, blueprint, name):  # a tied module once, another stage's never
            continue
        done.add(id(module))
        match role_of(blueprint, name, module):
            case "product":
                # No product comes after a head to empty the slot.
                shared = None if name == blueprint.vocabulary_head else reads
                module.forward = _product_forward(module, grid, kind_of_product(blueprint, name), reads, shared)
            case "vocabulary":
                module.forward = _lookup_forward(check_embedding(name, module), grid)
            case "norm":
                module.forward = norm_forward(module, grid.features)
            case _:
                pass


def _product_forward(
    module: nn.Module, grid: TensorGrid, kind: Kind, reads: _Reads, shared: _Reads | None
) -> Callable[[Tensor], Tensor]:
    inputs = 0 if is_conv1d(module) else 1

    def forward(input: Tensor) -> Tensor:
        if kind == "column" and shared is not None:
            entered = shared.get(input)
        else:
            reads.clear()
            entered = grid.enter(input, is_inside=kind == "row")
        weight: Any = module.weight
        return grid.multiply(entered, input, weight, getattr(module, "bias", None), inputs, kind)

    return forward


def _lookup_forward(module: nn.Embedding, grid: TensorGrid) -> Callable[..., Any]:
    def look_up(input: Tensor) -> Tensor:
        return grid.look_up(input, module.weight, module.padding_idx)

    return look_up
