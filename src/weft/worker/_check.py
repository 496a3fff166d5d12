"""What each rank of `weft check` does: one trial after another, each written into a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from weft.blueprint import build_blueprint
from weft.comm import Mesh
from weft.launch import RankInfo, initialise_distributed
from weft.models import Blueprint
from weft.numerics import STEPS, Outputs, perturb_constants, run_trial, write_trial
from weft.plan import Plan, parse_plan
from weft.recipe import Precision, Recipe, parse_recipe

TIMEOUT_SECONDS = 60.0
"""Timeout of a collective: one that not all ranks enter must not keep anybody waiting for long."""
COMPILING_SECONDS = 600.0
"""The same, where ranks may be minutes apart because they compile."""


def run_rank(
    rank_info: RankInfo,
    *,
    recipe: str,
    plan: str,
    cases: list[list[str | bool]],
    label_range: int | None,
    folder: str,
    watch: bool,
) -> None:
    """Run the cases (precision, whether to compile) of a plan; `recipe` and `plan` are TOML.

    With `watch`, rank 0 also leaves what its modules return.
    """
    what, how = parse_recipe(recipe), parse_plan(plan)
    torch.set_num_threads(how.compute.num_threads)
    timeout_seconds = COMPILING_SECONDS if any(compiled for _, compiled in cases) else TIMEOUT_SECONDS
    with initialise_distributed(
        "cpu", rank_info, backend=how.compute.backend, timeout_seconds=timeout_seconds
    ) as distributed:
        mesh = Mesh(how.mesh, distributed.device, timeout_seconds=timeout_seconds)
        outputs = Outputs()
        for precision, compiled in cases:
            trial = run_trial(
                what,
                with_precision(how, precision, compiled=bool(compiled)),  # pyright: ignore[reportArgumentType]
                lambda: perturbed_model(what),
                steps=STEPS,
                label_range=label_range,
                mesh=mesh,
                inspect=outputs.watch if watch else None,
            )
            write_trial(trial_path(Path(folder), rank_info.rank, case_name(str(precision), bool(compiled))), trial)
        if watch and rank_info.rank == 0:
            outputs.write(outputs_path(Path(folder)))


def with_precision(plan: Plan, precision: Precision, *, compiled: bool) -> Plan:
    """The plan in another precision."""
    return replace(plan, compute=replace(plan.compute, precision=precision, compile=compiled))


def perturbed_model(recipe: Recipe) -> Blueprint:
    """The recipe's model, with no parameter that starts constant."""
    return perturb_constants(build_blueprint(recipe))


def case_name(precision: str, compiled: bool) -> str:
    """How a case is called in files and in reports."""
    return f"{precision} compiled" if compiled else precision


def trial_path(folder: Path, rank: int, case: str) -> Path:
    """Where a rank leaves a trial."""
    return folder / f"{case.replace(' ', '-')}-rank{rank}.safetensors"


def outputs_path(folder: Path) -> Path:
    """Where rank 0 leaves what its modules return."""
    return folder / "outputs.safetensors"
