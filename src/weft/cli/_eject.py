"""`weft plan --eject`: the script and what lies beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import PlanError, RecipeError

if TYPE_CHECKING:
    from weft.config.plan import Plan
    from weft.config.recipe import Recipe
    from weft.model.blueprint import Blueprint


def eject_script(recipe: Recipe, plan: Plan, target: Path) -> None:
    """Write a plain PyTorch script to `target`, and beside it the tokens, their order and, if need be, initial weights.

    Raises:
        RecipeError, PlanError: what the script would have to do is beyond plain PyTorch, or a file cannot be written.
        DataError: the data cannot be prepared.
    """
    from weft.interop.eject import check_ejectable, eject

    check_ejectable(recipe, plan)
    if target.suffix != ".py":
        better = target.with_suffix(".py") if target.name else target / "train.py"
        raise PlanError(f"--eject {target}: a script's name ends in .py. Use {better}.")
    from weft.model.build import build_model

    blueprint = build_model(recipe)
    _check_factory(recipe, blueprint)
    try:
        written, token_dtype = _write_companions(recipe, blueprint, target)
        text = eject(recipe, plan, name=target.name, token_dtype=token_dtype, cuts=_cuts(blueprint, plan))
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{error.filename or target} cannot be written: {error.strerror or error}.") from None
    for path in (target, *written):
        print(f"written to {path}  {path.stat().st_size:,} bytes", file=sys.stderr)


def _check_factory(recipe: Recipe, blueprint: Blueprint) -> None:
    """A factory's model goes into the script if it is a plain module that takes tokens and nothing else."""
    if recipe.model.factory is None:
        return
    if blueprint.initialise is not None or blueprint.cut is not None:
        raise RecipeError(
            f'model.factory = "{recipe.model.factory}" returns a Blueprint, which is a part of Weft. '
            f"Eject with a factory that returns the module itself."
        )
    if blueprint.task != "causal_lm" or list(blueprint.inputs.values()) != ["tokens"]:
        raise RecipeError(
            f'model.factory = "{recipe.model.factory}" does {blueprint.task} on '
            f"{', '.join(blueprint.inputs.values())}: "
            f"the script gives a model tokens and asks for the next."
        )


def _write_companions(recipe: Recipe, blueprint: Blueprint, target: Path) -> tuple[list[Path], str]:
    from weft.run.data import data_shape
    from weft.run.data.preparation import ConsoleProgress, prepare_data, write_samples

    tokens, order = target.with_suffix(".tokens"), target.with_suffix(".order.npy")
    prepared = prepare_data(recipe, data_shape(blueprint, recipe), progress=ConsoleProgress())
    samples = write_samples(prepared, recipe.run.steps, tokens, order)
    written = [tokens, order]
    if recipe.model.reference is None:
        written.append(target.with_suffix(".weights.safetensors"))
        _write_weights(blueprint, recipe.run.seed, written[-1])
    return written, samples.token_dtype


def _write_weights(blueprint: Blueprint, seed: int, path: Path) -> None:
    """Write the initial weights that every plan starts from."""
    import copy

    import torch
    from safetensors.torch import save_model

    from weft.techniques.core import ModelLayout, ParameterLayout, materialise

    module = blueprint.module
    if blueprint.initialise is not None:
        module = copy.deepcopy(module)
        named = dict(module.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in reversed(named.items())}
        layout = ModelLayout({name: ParameterLayout(name=first[id(p)], shape=p.shape) for name, p in named.items()})
        materialise(module, blueprint, layout, seed, torch.device("cpu"), torch.float32)
    save_model(module, str(path))


def _cuts(blueprint: Blueprint, plan: Plan) -> tuple[int, ...]:
    if plan.mesh.pipeline == 1 or blueprint.cut is None:
        return ()
    from weft.techniques.pipeline.stages import choose_cuts

    return choose_cuts(blueprint.block_costs, len(blueprint.cut.blocks), plan.num_stages, plan.pipeline_parallel.cuts)
