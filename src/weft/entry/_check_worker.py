"""What each rank of `weft check` does: one trial after another, each written into a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport] - autograd imports it in every rank, for 2 s; so by fork

from weft.comm import Mesh
from weft.launch import Place, initialise_distributed
from weft.models import Blueprint, build_model
from weft.plan import Plan, parse_plan
from weft.prove import STEPS, awaken, run_trial, write_trial
from weft.recipe import Precision, Recipe, parse_recipe

TIMEOUT_SECONDS = 60.0
"""Of a collective: one that not all ranks enter must not keep anybody waiting for long."""


def run_rank(
    place: Place, *, recipe: str, plan: str, cases: list[list[str | bool]], label_range: int | None, folder: str
) -> None:
    """Run the cases (precision, whether to compile) of a plan; `recipe` and `plan` are TOML."""
    what, how = parse_recipe(recipe), parse_plan(plan)
    torch.set_num_threads(how.compute.threads_per_rank)
    with initialise_distributed("cpu", place, timeout_seconds=TIMEOUT_SECONDS) as distributed:
        mesh = Mesh(how.mesh, distributed.device)
        for precision, compiled in cases:
            chosen = with_precision(how, precision, compiled=bool(compiled))  # pyright: ignore[reportArgumentType]
            trial = run_trial(what, chosen, lambda: awake_model(what), steps=STEPS, label_range=label_range, mesh=mesh)
            write_trial(trial_path(Path(folder), place.rank, str(precision)), trial)


def with_precision(plan: Plan, precision: Precision, *, compiled: bool) -> Plan:
    """The plan in another precision."""
    return replace(plan, compute=replace(plan.compute, precision=precision, compile=compiled))


def awake_model(recipe: Recipe) -> Blueprint:
    """The recipe's model, with no parameter that starts constant."""
    return awaken(build_model(recipe))


def trial_path(folder: Path, rank: int, precision: str) -> Path:
    """Where a rank leaves a trial."""
    return folder / f"{precision}-rank{rank}.safetensors"
