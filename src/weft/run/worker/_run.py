"""A rank of `weft train`.  Everything it needs lies in the run's folder: recipe, plan, prepared data."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.document import plain
from weft.config.plan import Plan, load_plan
from weft.config.recipe import Recipe, load_recipe
from weft.errors import CollectiveError
from weft.events import (
    FolderToken,
    Listening,
    MessageEvent,
    Run,
    RunFolder,
    Sink,
    WarningEvent,
    loggers_to,
    sinks_of,
)
from weft.events.loss_board import LossSink
from weft.events.ring import RankRing
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.tiers import TieredCheckpointer
from weft.run.data import PreparedData, data_shape, open_data
from weft.run.engine import Trainer, TrainingResult, create_training
from weft.run.launch import FAILURE_SECONDS, Distributed, RankInfo, initialise_distributed
from weft.techniques.check import check_plan

if TYPE_CHECKING:
    from weft.run.engine.proof import ProveMode
    from weft.run.worker.faults import FaultInjector


def run_rank(
    rank_info: RankInfo,
    *,
    folder: str,
    owner: dict[str, Any],
    prepared: str,
    resume: str | None,
    prove: ProveMode,
    quiet: bool,
    losses: str,
    peak_flops: float | None,
    memory: str | None,
    failure_seconds: float,
    devices: list[int] | None,
    faults: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train on one rank and return rank 0's `TrainingResult`, as JSON.  `owner` is that of the folder, and `prepared`
    is `PreparedData`, as JSON; `resume` names a checkpoint or a run, or is `latest` for this run's own newest;
    `losses` is the file of the launcher's `LossBoard`, `peak_flops` what an earlier generation has measured, `memory`
    the launcher's folder in memory for saves, `failure_seconds` the mean time between failures, `devices` the
    accelerators that are left, where some are not used any more, and `faults` what `weft chaos` injects."""
    if devices is not None:
        rank_info = replace(rank_info, device=devices[rank_info.local_rank % len(devices)])
    run = RunFolder.open(Path(folder))
    recipe, plan = load_recipe(run.recipe), load_plan(run.plan)
    token = FolderToken.of_json(run.path, owner)
    data = PreparedData.from_json(prepared)
    sinks = [LossSink(Path(losses))] if rank_info.rank == 0 else []
    injector = None
    if faults is not None:
        from weft.run.worker.faults import FaultInjector  # loaded under `weft chaos` alone

        injector = FaultInjector.of_json(faults, rank_info.rank, run.path, None if memory is None else Path(memory))
        injector.reach("init")
    outcome = train_rank(
        recipe,
        plan,
        run,
        rank_info,
        data,
        token=token,
        resume=resume,
        prove=prove,
        quiet=quiet,
        sinks=sinks,
        peak_flops=peak_flops,
        memory=None if memory is None else Path(memory),
        injector=injector,
        failure_seconds=failure_seconds,
    )
    return plain(outcome) if rank_info.rank == 0 else None


@contextmanager
def _own_groups() -> Generator[None]:
    """Leave out of errors what a program is told that forms its groups itself: here Weft does."""
    try:
        yield
    except CollectiveError as error:
        raise CollectiveError(error.fault, status=error.status) from error


@contextmanager
def _events_of(listening: Listening) -> Generator[Run]:
    """Open the event stream of this rank: into the run's folder, and on rank 0 to the terminal.  The error that ends
    the rank is one of the events."""
    with Run(listening.rank) as events, loggers_to(events, all_of_process=True):
        for sink in sinks_of(listening):  # one that cannot open its file says so to those before it
            events.attach(sink)
        try:
            yield events
        except Exception as error:
            events.fail(error)
            raise


def train_rank(
    recipe: Recipe,
    plan: Plan,
    run: RunFolder,
    rank_info: RankInfo | None,
    prepared: PreparedData,
    *,
    token: FolderToken | None,
    resume: str | None,
    prove: ProveMode = "never",
    quiet: bool,
    sinks: Sequence[Sink] = (),
    peak_flops: float | None = None,
    memory: Path | None = None,
    injector: FaultInjector | None = None,
    failure_seconds: float = FAILURE_SECONDS,
    ring: RankRing | None = None,
) -> TrainingResult:
    """Train on this rank.  Call on every rank of the plan's world; rank 0 has the token of the folder's owner.

    Args:
        sinks: hear this rank's events beside its log and the terminal.
        peak_flops: FLOP/s of matrix products of all ranks together; by default they are measured first.
        memory: folder in memory for saves, whose owner copies them to the disk; by default training waits for the disk.
        injector: of `weft chaos`, which lets this rank fail.
        failure_seconds: mean time between failures, for the interval of snapshots.
        ring: where this rank records what it does; by default where its launcher, if it has one, collects it.
    """
    torch.set_num_threads(plan.compute.num_threads)
    with ExitStack() as stack:
        timeout_seconds = plan.compute.timeout_seconds
        joining = initialise_distributed(
            plan.compute.device, rank_info, backend=plan.compute.backend, timeout_seconds=timeout_seconds
        )
        distributed = stack.enter_context(joining)
        if distributed.rank == 0:
            distributed.rank_info.report_run_folder(run.path)
        listening = Listening(
            rank=distributed.rank,
            folder=run,
            owner=token,
            prints_steps=not quiet,
            prints_learning_rate=not recipe.optimizer.is_constant_rate,
            prints_warnings=True,
        )
        events = stack.enter_context(_events_of(listening))
        for sink in sinks:
            events.attach(sink)
        if injector is not None:
            injector.reach("rendezvous")
        parts = recipe, plan, distributed, run, prepared, events
        training = training_of(
            *parts,
            prove=prove,
            token=token,
            memory=memory,
            failure_seconds=failure_seconds,
            keeps_ledger=recipe.run.ledger,
            injector=injector,
            ring=ring,
        )
        with training as trainer, _own_groups():
            if resume is not None:
                trainer.resume(None if resume == "latest" else Path(resume))
            return trainer.run(peak_flops=peak_flops)


@contextmanager
def training_of(
    recipe: Recipe,
    plan: Plan,
    distributed: Distributed,
    folder: RunFolder,
    prepared: PreparedData,
    events: Run,
    *,
    prove: ProveMode = "never",
    token: FolderToken | None = None,
    memory: Path | None = None,
    keeps_ledger: bool = False,
    injector: FaultInjector | None = None,
    failure_seconds: float = FAILURE_SECONDS,
    ring: RankRing | None = None,
) -> Generator[Trainer]:
    """Build this rank's share of a training under a plan; at the end leave its groups and let go of the model.

    Call on every rank alike.  The rank and its default group live on, so that another plan of the same world can
    follow in the same process, from what this one has saved (`Trainer.resume`).  An error leaves all as it is: others
    may be gone whose messages closing would wait for.
    """
    mesh = Mesh(plan.mesh, distributed.device, timeout_seconds=plan.compute.timeout_seconds)
    blueprint = build_blueprint(recipe, plan)
    blueprint.sometimes = prepared.branches
    check_plan(plan, recipe, facts_of_blueprint(blueprint, recipe), distributed.world_size)
    if prove != "never":
        _prove(recipe, plan, mesh, folder, prepared, events, prove)
    progress = distributed.rank_info.progress_row()
    if ring is None:
        ring = distributed.rank_info.open_ring(lambda text: events.emit(WarningEvent(text=text, source=__name__)))
    recorder = Recorder(progress=progress if injector is None else injector.progress(progress), ring=ring)
    training = create_training(recipe, plan, blueprint, mesh, recorder, folder.path)
    data = open_data(
        recipe,
        data_shape(blueprint, recipe),
        microbatch=plan.microbatch,
        data_ranks=plan.mesh.data,
        data_index=mesh.data_index,
        prepared=prepared,
    )
    provenance = {"recipe": recipe.digest, "plan": plan.digest, "run": folder.path.name}
    durable = Checkpointer(folder.checkpoints, Peers.of_group(mesh["world"]), provenance=provenance, owned=token)
    local = distributed.rank_info.local_world_size
    # Weft's launcher gives an address to the ranks of a job that has, or may get, other hosts.
    has_hosts = distributed.rank_info.failure_pipe is not None and distributed.rank_info.address is not None
    ledger = None
    if keeps_ledger:
        from weft.run.data.ledger import open_ledger  # loaded where a run keeps one

        # The folder's token grows with every generation, and with every run that goes on in it.  Rank 0 has it.
        (generation,) = durable.peers.share(token.owner.token if token is not None else 0)
        ledger = open_ledger(data, prepared, mesh, folder.path, generation)
    checkpointer = TieredCheckpointer(
        durable, memory, ranks_on_host=local, has_hosts=has_hosts, failure_seconds=failure_seconds
    )
    try:
        parts = recipe, training, data, mesh, recorder
        yield Trainer(*parts, checkpointer=checkpointer, run=events, ledger=ledger, folder=folder)
    finally:
        data.close()
        if ledger is not None:
            ledger.close()
    training.close()
    mesh.leave()


def _prove(
    recipe: Recipe, plan: Plan, mesh: Mesh, folder: RunFolder, prepared: PreparedData, events: Run, prove: ProveMode
) -> None:
    from weft.run.worker._proof import RecipeProof  # loaded where a run proves itself

    proof = RecipeProof(recipe=recipe, plan=plan, mesh=mesh, prepared=prepared, prove=prove, folder=folder.path)
    line = proof.run()
    if mesh.rank == 0:
        events.emit(MessageEvent(text=line, source=__name__))
