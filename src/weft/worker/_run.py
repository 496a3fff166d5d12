"""What each rank of `weft train` does.  Everything it needs lies in the run's folder: recipe, plan, prepared data."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import Checkpointer, Peers
from weft.comm import Mesh
from weft.data import PreparedData, data_shape, open_data
from weft.describe import build_blueprint
from weft.engine import Outcome, Trainer, create_training
from weft.errors import CollectiveError
from weft.launch import Place, initialise_distributed
from weft.plan import Plan, check_plan, load_plan
from weft.recipe import Recipe, load_recipe
from weft.record import MetricsWriter, Recorder, RunFolder, rank_logging
from weft.worker._facts import facts_of_blueprint


def run_rank(place: Place, *, folder: str, prepared: str, resume: str | None, quiet: bool) -> dict[str, Any] | None:
    """Train on one rank and return rank 0's outcome.  `prepared` is `PreparedData` as JSON; `resume` names a
    checkpoint or a run, or is `latest` for this run's own newest."""
    run = RunFolder.open(Path(folder))
    recipe, plan = load_recipe(run.recipe), load_plan(run.plan)
    outcome = train_rank(recipe, plan, run, place, PreparedData.from_json(prepared), resume=resume, quiet=quiet)
    if place.rank != 0:
        return None
    return {**asdict(outcome), "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint)}


@contextmanager
def _own_groups() -> Generator[None]:
    """Leave out of errors what a program is told that forms its groups itself: here Weft does."""
    try:
        yield
    except CollectiveError as error:
        raise CollectiveError(error.fault, status=error.status) from error


def train_rank(
    recipe: Recipe,
    plan: Plan,
    run: RunFolder,
    place: Place | None,
    prepared: PreparedData,
    *,
    resume: str | None,
    quiet: bool,
) -> Outcome:
    """Train on this rank.  Call on every rank of the plan's world."""
    torch.set_num_threads(plan.compute.threads_per_rank)
    with ExitStack() as stack:
        patience = plan.compute.collective_timeout_seconds
        joining = initialise_distributed(
            plan.compute.device, place, backend=plan.compute.backend, timeout_seconds=patience
        )
        distributed = stack.enter_context(joining)
        stack.enter_context(rank_logging(run.log(distributed.rank), distributed.rank))
        mesh = Mesh(plan.mesh, distributed.device, timeout_seconds=patience)
        blueprint = build_blueprint(recipe)
        check_plan(plan, recipe, facts_of_blueprint(blueprint, recipe), distributed.world_size)
        recorder = Recorder()
        training = create_training(recipe, plan, blueprint, mesh, recorder)
        data = open_data(
            recipe,
            data_shape(blueprint, recipe),
            microbatch=plan.microbatch,
            data_ranks=plan.mesh.data,
            data_index=mesh.index("data"),
            prepared=prepared,
        )
        stack.callback(data.close)
        first = distributed.rank == 0
        trainer = Trainer(
            recipe,
            training,
            data.batches,
            mesh,
            recorder,
            checkpointer=Checkpointer(
                run.checkpoints,
                Peers.of_group(mesh["world"]),
                provenance={"recipe": recipe.digest, "plan": plan.digest, "run": run.path.name},
            ),
            metrics=stack.enter_context(MetricsWriter(run.metrics)) if first else None,
            stream=sys.stdout if first and not quiet else None,
        )
        if resume is not None:
            trainer.resume(None if resume == "latest" else Path(resume))
        with _own_groups():
            outcome = trainer.run()
        training.close()  # not after an error, when others may be gone whose messages it would wait for
        return outcome
