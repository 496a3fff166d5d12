"""What stands against tensor ranks that form a grid: one sentence each, for contract, price and search.  No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.config.recipe import Recipe
from weft.techniques.contract import Case
from weft.techniques.tensor.mesh_2d.shape import GridShape, grid_of_plan, grid_shape

_POWERS = {"2d": 2, "3d": 3}
_WHOLE = ("adafactor", "lamb", "lars", "muon")
"""Optimizers that look at whole tensors."""


def check_grid(case: Case) -> None:
    """Raise `PlanError` where a plan's grid is none, or does not join the rest of the plan."""
    path, plan = ("tensor_parallel", "scheme"), case.plan
    if problem := shape_problem(plan.tensor_parallel.scheme, plan.mesh.tensor):
        raise case.refuse(path, problem)
    shape = grid_of_plan(plan)
    assert shape is not None, "it has no problem"
    if problem := samples_problem(shape, plan.microbatch.size):
        raise case.refuse(("microbatch", "size"), problem)
    if plan.tensor_parallel.sequence:
        problem = f'cannot join scheme = "{plan.tensor_parallel.scheme}", under which no activation is on two ranks.'
        raise case.refuse(("tensor_parallel", "sequence"), f"{problem}\nUse false.")
    for problem in _not_joined(case, shape):
        raise case.refuse(path, f'cannot join {problem}.\nUse "1d", or leave the other out.')


def _not_joined(case: Case, shape: GridShape) -> Iterator[str]:
    """Yield what of a plan a grid does not join, with the reason."""
    plan, untried = case.plan, "the two have not been put together"
    for axis, ranks in (("context", plan.mesh.context), ("expert", plan.mesh.expert)):
        if ranks > 1:
            yield f"mesh.{axis} = {ranks}: {untried}"
    if plan.mesh.pipeline > 1 and plan.pipeline_parallel.splits_backward:
        yield f"{plan.pipeline_parallel.schedule_setting}: {untried}"
    if plan.data_parallel.compresses:
        yield f"{plan.data_parallel.compression_setting}: {untried}"
    if plan.data_parallel.replicas_step_alone:
        yield f"local steps: {untried}"
    if plan.memory.offloads:
        yield f"what waits outside of the device: {untried}"
    if plan.compute.compile:
        yield "compute.compile: products that wait for other ranks are no code for a compiler"
    if shape.is_cube and plan.memory.fuses_loss:
        yield "a fused loss: logits are sums over ranks, whole when all of them are there"


def check_grid_model(case: Case) -> None:
    """Raise `PlanError` where no grid can stand in a plan for a model, whatever else is chosen."""
    path, facts, shape = ("tensor_parallel", "scheme"), case.facts, grid_of_plan(case.plan)
    is_cube = case.plan.tensor_parallel.scheme == "3d"  # also where a search has yet to choose the ranks
    if problem := model_problem(case, is_cube=is_cube):
        raise case.refuse(path, f'{problem}.\nUse "1d".')
    if case.plan.mesh.pipeline > 1 and (reason := facts.why_not("sequence")):
        problem = f"cannot join mesh.pipeline = {case.plan.mesh.pipeline} for this model: {reason}"
        raise case.refuse(path, f'{problem}.\nUse "1d", or no pipeline.')
    sizes = facts.divisible
    if shape is not None and sizes and (problem := sizes_problem(shape, sizes, facts.hidden_size)):
        raise case.refuse(path, problem)


def shape_problem(scheme: str, ranks: int) -> str:
    """Return why so many ranks form no grid of a scheme, with the change to make; empty: they do."""
    if ranks == 1:
        return 'has no effect with mesh.tensor = 1.\nUse "1d", or more tensor ranks.'
    shape = grid_shape(scheme, ranks)
    if scheme == "2.5d":
        if shape is None:
            problem = f"makes no grid of {ranks} ranks: depth · side², with a side of 2 or more."
            return f'{problem}\nUse mesh.tensor = 8, or "1d".'
        return "" if shape.depth > 1 else f'makes a grid of one layer of {ranks} ranks.\nUse "2d".'
    if shape is not None:
        return ""
    power = _POWERS[scheme]
    side = max(2, round(ranks ** (1 / power)))
    what = "square" if power == 2 else "cube"
    return f'needs a {what}, and {ranks} ranks are none.\nUse mesh.tensor = {side**power}, or "1d".'


def samples_problem(shape: GridShape, size: int) -> str:
    """Return why a microbatch of `size` samples cannot be cut over a grid, with the change to make; empty: it can."""
    parts = shape.sample_parts
    if size % parts == 0:
        return ""
    return (
        f"does not share out over the {parts} parts that the grid cuts samples into.\nUse {-(-size // parts) * parts}."
    )


def sizes_problem(shape: GridShape, sizes: Mapping[str, int], hidden_size: int | None) -> str:
    """Return which sizes of a model the side of a grid does not divide, with the change to make; empty: none."""
    every = dict(sizes) | ({} if hidden_size is None else {"hidden_size": hidden_size})

    def parts(name: str, side: int) -> int:
        return side * side if shape.is_cube and name in _INPUTS else side

    wrong = [name for name, size in every.items() if size % parts(name, shape.side)]
    if not wrong:
        return ""
    listed = " and ".join(f"{name} = {every[name]} into {parts(name, shape.side)}" for name in wrong)
    sides = [n for n in range(2, _MOST_SIDE) if not any(size % parts(name, n) for name, size in every.items())]
    fix = f"A side of {' or '.join(map(str, sides))} can" if sides else "No side can"
    return f'makes a grid of side {shape.side}, which cannot cut {listed} parts.\n{fix}; or use scheme = "1d".'


def forms_grid(scheme: str, ranks: int, sizes: Mapping[str, int], hidden_size: int | None) -> bool:
    """Return whether so many ranks form a grid whose side divides the sizes of a model."""
    shape = None if shape_problem(scheme, ranks) else grid_shape(scheme, ranks)
    return shape is not None and not sizes_problem(shape, sizes, hidden_size)


_MOST_SIDE = 33
"""Larger grids are not named as a change to make."""
_INPUTS = ("hidden_size", "ffn_size", "intermediate_size", "n_inner")
"""Sizes that are inputs of products, which a cube cuts twice."""


def model_problem(case: Case, *, is_cube: bool) -> str:
    """Return why tensor ranks cannot form a grid for a model, whatever else is chosen: the beginning of a sentence;
    empty: they can."""
    if problem := _recipe_problem(case.recipe, is_cube=is_cube):
        return problem
    problem = case.facts.why_not("mesh_2d", "mesh_3d") if is_cube else case.facts.why_not("mesh_2d")
    return f"cannot be had for this model: {problem}" if problem else ""


def _recipe_problem(recipe: Recipe, *, is_cube: bool) -> str:
    """What a recipe asks for that a grid has not got."""
    if is_cube and recipe.data.documents != "packed":
        return (
            f'cannot be had with data.documents = "{recipe.data.documents}": inside of a layer a rank has other samples'
            " than those whose documents it is given"
        )
    model, optimizer = recipe.model, recipe.optimizer
    if model.adapter is not None:
        return "cannot be had with model.adapter: the two have not been put together"
    if model.split:
        return "cannot be had with model.split, which says how layers split in one dimension"
    if model.loss not in (None, "tokens"):
        return f'cannot be had with model.loss = "{model.loss}": ranks have parts of the logits, which "tokens" knows'
    if optimizer.name in _WHOLE:
        return f'cannot be had with optimizer.name = "{optimizer.name}", which looks at whole tensors'
    return ""
