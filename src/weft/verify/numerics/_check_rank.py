"""A rank of `weft check`: it runs one trial after another, and writes each into a file."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.analysis.blueprint import build_blueprint
from weft.comm.mesh import Mesh
from weft.config.plan import parse_plan
from weft.config.recipe import Precision, parse_recipe
from weft.run.launch import RankInfo, initialise_distributed
from weft.verify.numerics import (
    STEPS,
    CheckCase,
    InnerCasts,
    ModuleOutputs,
    outputs_file,
    perturb_constants,
    run_trial,
    write_trial,
)

TIMEOUT_SECONDS = 60.0
"""Timeout of a collective: one that not all ranks enter must not keep anybody waiting for long."""
COMPILING_SECONDS = 600.0
"""The same, where ranks may be minutes apart because they compile."""


def run_rank(
    rank_info: RankInfo,
    *,
    recipe: str,
    plan: str,
    cases: list[tuple[Precision, bool]],
    label_range: int | None,
    folder: str,
    watch: bool,
    inside: InnerCasts,
) -> None:
    """Run the cases (precision, whether to compile) of a plan; `recipe` and `plan` are TOML.

    With `watch`, rank 0 also leaves what its modules return.  `inside`: what becomes of the model's casts in fp64.
    """
    what, how = parse_recipe(recipe), parse_plan(plan)
    torch.set_num_threads(how.compute.num_threads)
    timeout_seconds = COMPILING_SECONDS if any(compiled for _, compiled in cases) else TIMEOUT_SECONDS
    with initialise_distributed(
        "cpu", rank_info, backend=how.compute.backend, timeout_seconds=timeout_seconds
    ) as distributed:
        mesh = Mesh(how.mesh, distributed.device, timeout_seconds=timeout_seconds)
        outputs = ModuleOutputs()
        for case in (CheckCase(precision, compiled) for precision, compiled in cases):
            trial = run_trial(
                what,
                case.plan(how),
                lambda: perturb_constants(build_blueprint(what, how)),
                steps=STEPS,
                label_range=label_range,
                mesh=mesh,
                inspect=outputs.watch if watch else None,
                inside=inside,
            )
            write_trial(case.trial_file(Path(folder), rank_info.rank), trial)
        if watch and rank_info.rank == 0:
            outputs.write(outputs_file(Path(folder)))
