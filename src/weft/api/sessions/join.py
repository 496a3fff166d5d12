"""The ways into a job: `weft.session`, and `weft.spawn` for a function in a notebook's cell."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from weft.api.planning.arguments import check_session, run_folder_of
from weft.api.planning.requested import requested_plan
from weft.api.planning.session_plan import Planning, with_timeout
from weft.api.planning.settings import PlanSettings
from weft.api.preflight.proof import check_prove
from weft.api.ranks.recording import SessionRuns
from weft.api.ranks.supervision import SupervisedSession
from weft.api.sessions.session import Session
from weft.config.plan import Plan, PlanKeywords, over_ranks
from weft.config.recipe import PermitRecipe, Precision
from weft.errors import LaunchError, RecipeError
from weft.events import OnEvent, Track
from weft.run.engine.proof import ProveMode
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.launch.generation import ScriptGeneration
from weft.run.launch.launcher import ForkServer, launch_cells


def session(
    plan: Plan | str | Path | None = None,
    *,
    seed: int = 1234,
    permit: Sequence[Precision] = ("fp32",),
    compression: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    local_steps: int = 0,
    folder: str | Path | None = None,
    record: bool = True,
    ledger: bool = False,
    track: Track | None = None,
    on_event: OnEvent | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    collective_timeout_seconds: float | None = None,
    prove: ProveMode = "auto",
    quiet: bool = False,
    **keywords: Unpack[PlanKeywords],
) -> Session:
    """Join this process to its job (torchrun, `weft launch`, or alone in plain Python).

    Leave it by `with`, by `session.close()`, or with the script: what comes first.

    Args:
        plan: how to split: a `weft.Plan`, the path of one, or by default `auto`.  `auto` is the fastest predicted split
            of the data over the job's ranks: ZeRO stage, microbatch, recomputation and precision.  It never splits the
            model, because a loop of one's own may use the model, or several, as it likes: name a plan for that.
        seed: of data order and of dropout.
        permit: precisions that a plan may choose from.
        compression: lossy compressions of gradients that a plan may name.
        settings: of the plan by dotted key, such as `{"data_parallel.zero": 3, "compute.compile": True}`: laid over the
            plan, or what `auto` must leave as it is.
        local_steps: steps that each data rank may take by itself before all average their weights, which is other
            mathematics than that of one process (0: none).  Beside `auto` they take so many, and the average is plain
            (local SGD), unless `settings` say otherwise (DiLoCo's `data_parallel.outer_momentum`); one process has
            nobody to average with.  A plan of your own says how many it takes, at most these.
        folder: of the run, as that of `weft train`: plan, metrics, logs, and what `save` writes.  By default
            `runs/<script>-<date>-<n>`; to go on with an earlier run, give its folder and call `load`.
        record: keep plan, metrics and logs; False leaves nothing in the folder (then by default `runs/session`) but
            what `save` writes.
        ledger: keep which samples each step has trained on, in `ledger/` of the run's folder; `weft data ledger RUN`
            proves by it that each sample of an epoch was used once, whatever failed.  For a data set that is read by
            index, and steps by `state.step`.
        track: `track(name, value, step)` is called on rank 0 with every number that the run reports (`train/loss`,
            `evaluation/accuracy`, `rate/samples_per_second`, …), such as `SummaryWriter(…).add_scalar`; of further
            models with names that begin with `model-2/`.  One that raises is asked no more, with a warning.
        on_event: `on_event(event, model)` is called on every rank with everything that happens to the session's models
            (counted from 1): `StepEvent`, `EpochEvent`, `EvaluationEvent`, `CheckpointEvent`, … of `weft.events`, each
            with its `kind`.  It is called when the call that it is about is through (`state.step`, …), may call the
            state itself where all ranks do, and what it raises comes out of that call.
        device: of this job's ranks.
        collective_timeout_seconds: how long ranks wait for one another; by default the plan's own
            (`compute.collective_timeout_seconds`), 600 s under `auto`.
        prove: compare two steps of every prepared model under its plan with plain PyTorch on one process, before the
            first real one: `auto` where it takes no longer than 10 s, and once for the same code, plan and versions;
            `always`; or `never`.
        quiet: do not print the plan, the batch and the proof.
        keywords: the plan by single keywords, those of `weft.Plan.fsdp(…)`: `weft.session(zero=3, tensor=2)`.  What
            they leave out follows from the job's ranks and the loader's batch.  `microbatches` (of a rank in a step;
            the global batch stays the loader's) and `precision` also go with `auto`, and narrow its choice.

    Raises:
        WeftError: the plan cannot be read, a keyword is unknown or contradicts `plan`, or the ranks cannot be joined.

    Example::

        with weft.session(plan="auto") as session:
            state = session.prepare(model, optimizer, loader, loss=loss_fn)
            for batch in state.batches():
                step = state.step(batch)
    """
    check_session(permit, compression, settings, device, track, record=record, ledger=ledger, quiet=quiet)
    if ledger and not record:
        raise RecipeError("ledger=True keeps its files in the folder that record=False leaves empty. Leave one out.")
    own_folder = run_folder_of(folder)
    supervised = _supervised(record=record)
    requested = requested_plan("weft.session", plan, keywords, _ARGUMENTS)
    precision = keywords.get("precision")
    if precision is not None:
        permit = (*permit, precision)  # who names it permits it
        settings = {**(settings or {}), "compute.precision": precision} if requested == "auto" else settings
    plan_settings = PlanSettings(
        settings=settings or {}, microbatches=keywords.get("microbatches"), local_steps=local_steps
    )
    if type(seed) is not int or seed < 0:
        raise RecipeError(f"seed = {seed!r} is no seed. Give a whole number from 0 on.")
    if supervised is not None and supervised.folder is not None:
        own_folder = supervised.folder
        if supervised.is_set:
            quiet, prove = True, "never"
    if supervised is not None and supervised.plan is not None:
        requested, plan_settings = supervised.plan, PlanSettings(local_steps=local_steps)
    requested = plan_settings.over(requested) if isinstance(requested, Plan) else requested
    if isinstance(requested, Plan) and requested.compute.device != "auto":
        device = requested.compute.device
    own_plan = with_timeout(requested if isinstance(requested, Plan) else Plan(), collective_timeout_seconds)
    if supervised is not None:
        supervised.reach("init")
    timeout_seconds, backend = own_plan.compute.timeout_seconds, own_plan.compute.backend
    with ExitStack() as stack:
        distributed = stack.enter_context(
            initialise_distributed(device, backend=backend, timeout_seconds=timeout_seconds)
        )
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if supervised is not None:
            supervised.reach("rendezvous")
        planning = Planning(
            plan=over_ranks(own_plan, distributed.world_size) if isinstance(requested, Plan) else None,
            given=plan_settings,
            rank_info=RankInfo.from_environment(),
            rank=distributed.rank,
            world_size=distributed.world_size,
            device=distributed.device,
            timeout_seconds=timeout_seconds,
            seed=seed,
            permit=PermitRecipe(
                precision=tuple(permit), compression=tuple(compression), local_steps=plan_settings.most_local_steps
            ),
            quiet=quiet,
        )
        runs = SessionRuns(
            own_folder,
            distributed.rank_info,
            record=record,
            keeps_ledger=ledger,
            track=track,
            on_event=on_event,
            supervised=supervised,
        )
        stack.callback(runs.close)
        return Session(distributed, planning, runs, check_prove(prove), stack)


def _supervised(*, record: bool) -> SupervisedSession | None:
    """Return the session's part in a job that `weft launch` starts again; None under other launchers."""
    rank_info = RankInfo.from_environment()
    generation = ScriptGeneration.read(rank_info)
    return (
        SupervisedSession(generation, rank_info)
        if generation is not None and rank_info is not None and record
        else None
    )


_ARGUMENTS = tuple(
    name for name, each in inspect.signature(session).parameters.items() if each.kind != each.VAR_KEYWORD
)
"""Arguments of `session` beside keywords of a plan, for a did-you-mean."""


def spawn(
    function: Callable[..., Any],
    *,
    processes: int,
    arguments: Mapping[str, Any] | None = None,
    threads_per_rank: int | None = None,
    fork_server: ForkServer | None = None,
) -> list[Any]:
    """Call a function on ranks of this machine, and return what each returned, by rank.

    The function may stand in a cell of a notebook, and so may the functions and classes that it uses, the modules that
    it needs be imported there, and numbers and texts be set there: all that is handed to the ranks as source.  Objects
    are not: models and data are made inside.  In it `weft.session()` joins all ranks.  What they print appears below
    the cell; Ctrl-C, or a notebook's interrupt, ends them.  Nothing of them is left when this returns.

    Args:
        function: written at the left margin of a cell, or of a file.
        processes: how many ranks.
        arguments: of the function, by name: what JSON can hold.
        threads_per_rank: OpenMP threads of each; by default the cores are shared out.
        fork_server: process that forks the ranks, where several calls share one
            (`weft.run.launch.launcher.ForkServer`), so that torch is imported once.

    Raises:
        LaunchError: the function uses an object that lives in this process alone; or a rank failed
            (`weft.run.launch.launcher.RankError`): its text is the report, with the cell's line.
        KeyboardInterrupt: the ranks were interrupted.

    Example::

        def train(lr):
            with weft.session() as session:
                ...
                return state.step(batch).loss

        losses = weft.spawn(train, processes=2, arguments={"lr": 1e-3})
    """
    if RankInfo.from_environment() is not None:
        raise LaunchError(
            "this process is a rank already (RANK is set), and ranks start no others. Call the function itself."
        )
    return launch_cells(
        function, arguments or {}, processes, threads_per_rank=threads_per_rank, fork_server=fork_server
    )
