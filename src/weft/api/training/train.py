"""`weft.train`: from a recipe to a trained, exported model, in fresh processes."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch.distributed as dist

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.api.planning.describe import calibration_for, describe_blueprint, machine_for
from weft.api.planning.first_looks import branches_by_first_looks, refuse_by_first_looks
from weft.api.planning.requested import requested_plan
from weft.api.preflight.conditional_blocks import conditional_blocks_note
from weft.api.preflight.proof import check_prove
from weft.api.ranks.agreement import check_same_on_all_ranks
from weft.api.ranks.own_rings import open_rank_ring
from weft.api.ranks.recording import create_folder, folder_of_rank_0, run_name
from weft.api.saving.export import processor_files
from weft.api.training.memory_fit import MeasurePeak, fit_microbatch, measure_peak_in_job, measure_peak_in_processes
from weft.api.training.replanning import Replanner
from weft.api.training.supervised import HostsOfTraining, SupervisedTraining
from weft.api.training.time_trials import decide_by_trials
from weft.comm.device import backend_for, device_for_rank
from weft.config.cluster import Cluster, KnownMachine
from weft.config.plan import ModelFacts, Plan, PlanKeywords, complete_plan, dump_plan, over_ranks
from weft.config.recipe import OnFailure, Recipe, check_group_globs, dump_recipe, load_recipe
from weft.errors import CheckpointError, LaunchError, PlanError, RecipeError, WeftError
from weft.events import RunFolder, format_duration, format_loss
from weft.events.folder_lock import FolderLock
from weft.model.blueprint import Blueprint
from weft.planning.search import choose_plan
from weft.run.checkpoint.export import export_checkpoint
from weft.run.data import PreparedData, data_shape
from weft.run.data.preparation import ConsoleProgress, prepare_data, silent
from weft.run.engine import TrainingResult
from weft.run.engine.proof import ProveMode
from weft.run.launch import RankInfo, initialise_distributed, threads_of_user
from weft.run.launch.launcher import ForkServer, RankError, open_fork_server
from weft.run.worker import train_rank
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.describe import describe_plan
from weft.verify.dry_run import plan_and_measured
from weft.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(TrainingResult):
    """How a run ended, and what it left behind."""

    folder: Path
    """Recipe, plan, metrics, logs, checkpoints and export."""
    export: Path | None
    """Weights as safetensors with their config; None when the run stopped early."""


def train(
    recipe: Recipe | str | Path,
    plan: Plan | str | Path | None = None,
    *,
    processes: int | None = None,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    name: str | None = None,
    reasons: Mapping[str, str] | None = None,
    note: str = "",
    trials: bool = True,
    try_memory: bool | None = None,
    prove: ProveMode = "auto",
    quiet: bool = False,
    fork_server: ForkServer | None = None,
    **keywords: Unpack[PlanKeywords],
) -> RunResult:
    """Train a recipe under a plan and return what came of it.

    Started by plain Python, in a notebook or from the command line, the ranks are fresh processes on this machine that
    end with this call.  Under torchrun or `weft launch` this process is one of the ranks: call it on all of them.

    Args:
        recipe: a recipe, or the path of one.
        plan: a plan, the path of one, or by default `auto`.
        processes: how many ranks; by default what the plan says, or what `auto` chooses.  Where a plan leaves an axis
            of data ranks open, they are one for each accelerator of this machine.
        folder: the run's folder, which must be new; by default `runs/<name>-<date>-<n>`.
        resume: a run's folder to go on with (in that folder), or `latest` for the newest one in `runs/`.
        name: of the run; by default that of the recipe's file.
        reasons: why settings of the plan have their values, to be printed.
        note: what is to be said below the plan.
        trials: with `auto`, let a few steps decide between plans that predictions cannot tell apart, where the run is
            long enough for that to pay.
        try_memory: let every rank take a step by itself before the run, and make the microbatches smaller, and more
            of them, until it finds memory.  By default where `auto` has chosen a plan that is predicted to fill more
            than four fifths of it.
        prove: compare two steps of a few samples under the plan with plain PyTorch on one process, before the run:
            `auto` where that takes no longer than 10 s or 5 % of the run, and once for the same code, recipe, plan and
            versions; `always`; or `never`.
        quiet: print nothing.
        fork_server: process that forks the ranks, where several runs share one
            (`weft.run.launch.launcher.ForkServer`); by default one that ends with this call.  Under torchrun or
            `weft launch` the ranks are there already, and none is needed.
        keywords: the plan by single keywords, those of `weft.Plan.fsdp(…)`: `weft.train("recipe.toml", zero=3)`.

    Raises:
        WeftError: what was wrong, of its own class; a rank's error is raised here as itself.

    Example::

        result = weft.train("recipe.toml", processes=2)
        print(result.losses[-1], result.export)
    """
    plan = requested_plan("weft.train", plan, keywords, _ARGUMENTS)
    if name is None:
        name = run_name(Path(recipe)) if isinstance(recipe, str | Path) else "run"
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if plan == "auto" and keywords:
        raise PlanError(
            f"weft.train({next(iter(keywords))}=…) does not say how to split. Add a keyword that does, such as zero=3,"
            " or let the recipe permit what auto may choose."
        )
    if processes is not None and type(processes) is not int:
        raise PlanError(f"processes = {processes!r} is no number of processes. Give a whole number from 1 on.")
    prove = check_prove(prove)
    with open_fork_server(fork_server) as warm:
        job = check_training(recipe, plan, processes, reasons or {}, note, trials, try_memory, prove, quiet, warm)
        if RankInfo.from_environment() is not None:
            return job.run_as_rank(name, folder, resume)
        return job.run_as_parent(name, folder, resume)


_ARGUMENTS = tuple(name for name, each in inspect.signature(train).parameters.items() if each.kind != each.VAR_KEYWORD)
"""Arguments of `train` beside keywords of a plan, for a did-you-mean."""


def check_training(
    recipe: Recipe,
    plan: Plan | Literal["auto"],
    processes: int | None,
    reasons: Mapping[str, str],
    note: str,
    trials: bool,
    try_memory: bool | None,
    prove: ProveMode,
    quiet: bool,
    fork_server: ForkServer | None,
    machine: KnownMachine | None = None,
) -> TrainingJob:
    """Build the model, choose or read the plan, and check that all fits: what a rank would refuse is refused before
    anything is prepared or written.  `machine`: all hosts of the job; by default this one, or those of torchrun."""
    rank_info = RankInfo.from_environment()
    world = rank_info.world_size if rank_info is not None else processes
    blueprint = build_blueprint(recipe)
    facts = facts_of_blueprint(blueprint, recipe)
    machine = machine or machine_for(rank_info)
    tight = False
    is_auto = plan == "auto"
    is_chosen = is_auto or bool(reasons)
    if plan == "auto":
        description, prices = describe_blueprint(blueprint, recipe), calibration_for(machine, rank_info)
        choice = choose_plan(recipe, machine.cluster, facts, world, profile=description.profile, calibration=prices)
        if trials:
            log = _keep_quiet if quiet else print
            choice = decide_by_trials(recipe, choice, machine.cluster, log=log, fork_server=fork_server)
        plan, reasons = choice.plan, choice.reasons
        note = "; ".join([*description.notes, *([machine.note] if machine.note and choice.rivals else [])])
        tight = trials and choice.is_tight
    else:
        plan = over_ranks(plan, world, num_accelerators=machine.cluster.num_accelerators)
    plan, reasons = complete_plan(plan, recipe, reasons, threads_of_user(), is_chosen=is_auto)
    check_plan(plan, recipe, facts, world)
    check_runnable(plan)
    device = device_for_rank(plan.compute.device, rank_info.local_rank if rank_info is not None else 0)
    backend_for(device, wanted=plan.compute.backend)
    check_group_globs(recipe.optimizer, [n for n, p in blueprint.module.named_parameters() if p.requires_grad])
    if try_memory and blueprint.example is None:
        raise RecipeError(
            "try_memory = True needs samples to take a step with, and the model brings no example batch. Leave"
            " try_memory out, or use a model whose inputs Weft knows (a reference, or a Hugging Face model)."
        )
    tight = tight if try_memory is None else try_memory
    return TrainingJob(
        recipe, plan, is_chosen, blueprint, facts, machine.cluster, reasons, note, tight, prove, quiet, fork_server
    )


def _keep_quiet(_line: str) -> None: ...


@dataclass(slots=True)
class TrainingJob:
    """A training that has been checked and may begin."""

    recipe: Recipe
    plan: Plan
    is_chosen: bool
    """Whether a search has chosen the plan: then another number of devices may have a very different one."""
    blueprint: Blueprint
    facts: ModelFacts
    cluster: Cluster
    reasons: Mapping[str, str]
    note: str
    try_memory: bool
    prove: ProveMode
    quiet: bool
    fork_server: ForkServer | None
    faults: dict[str, Any] | None = None  # what `weft chaos` injects

    def run_as_parent(self, name: str, folder: str | Path | None, resume: str | Path | None) -> RunResult:
        """Prepare, launch the ranks, and export what they trained."""
        earlier = _check_folder(folder, resume, self.recipe.run.checkpoints)
        with ExitStack() as stack:
            # An earlier run's folder is locked before anything is tried; a new one is only made once nothing can be
            # refused any more.
            lock = self._locked(earlier, stack) if earlier is not None else None
            self._fit_memory(partial(measure_peak_in_processes, fork_server=self.fork_server))
            prepared = self._prepare()
            run = earlier or create_folder(name, folder)
            lock = lock or self._locked(run, stack, is_new=True)
            return self._launched(run, lock, prepared, resumes=resume is not None)

    def run_on_hosts(self, run: RunFolder, lock: FolderLock, hosts: HostsOfTraining, *, resumes: bool) -> RunResult:
        """Prepare, start ranks on all hosts, and export what they trained.  Call on the host that leads, which owns the
        run's folder."""
        return self._launched(run, lock, self._prepare(), resumes=resumes, hosts=hosts)

    def _locked(self, run: RunFolder, stack: ExitStack, *, is_new: bool = False) -> FolderLock:
        """Make this process the owner of the run's folder.

        Raises:
            LaunchError: another is.
        """
        lock = stack.enter_context(FolderLock(run.path, silent_seconds=2 * self.plan.compute.timeout_seconds))
        if note := lock.acquire():
            self.note = f"{self.note}; {note}" if self.note else note
        if is_new and lock.token is not None and lock.token.owner.token > 1:
            raise LaunchError(f"another run has just begun in {run.path}. Give a new folder.")
        return lock

    def _launched(
        self,
        run: RunFolder,
        lock: FolderLock,
        prepared: PreparedData,
        *,
        resumes: bool,
        hosts: HostsOfTraining | None = None,
    ) -> RunResult:
        """Launch the ranks, and export what they trained."""
        with self._kept_with_run(run, prepared), _told_how_to_go_on(run):
            self._announce(run, prepared)
            training = SupervisedTraining(
                recipe=self.recipe,
                plan=self.plan,
                run=run,
                lock=lock,
                prepared=prepared,
                prove=self.prove,
                quiet=self.quiet,
                fork_server=self.fork_server,
                replanner=Replanner(
                    recipe=self.recipe,
                    blueprint=self.blueprint,
                    facts=self.facts,
                    cluster=self.cluster,
                    prepared=prepared,
                ),
                is_chosen=self.is_chosen,
                hosts=hosts,
                faults=self.faults,
            )
            outcome = training.train(resumes=resumes)
            self.plan = training.plan
        return self._finalise(run, outcome)

    def run_as_rank(self, name: str, folder: str | Path | None, resume: str | Path | None) -> RunResult:
        """Take part as one of the ranks that somebody else has started.  All hosts must see the run's folder."""
        if self.recipe.run.checkpoints is not None:
            raise LaunchError(
                f"run.checkpoints = {self.recipe.run.checkpoints} needs the process of weft train beside the ranks,"
                " which sends saves there, and another program has started these ranks. Leave the setting out (saves"
                " then last in the run's folder), or let weft train start the ranks."
            )
        compute = self.plan.compute
        with initialise_distributed(
            compute.device, backend=compute.backend, timeout_seconds=compute.timeout_seconds
        ) as distributed:
            check_same_on_all_ranks(self.recipe, self.plan)
            self._fit_memory(measure_peak_in_job(distributed.rank_info))
            first = distributed.rank == 0
            self.quiet = self.quiet or not first
            prepared = self._prepare()
            with ExitStack() as stack:
                locks: list[FolderLock] = []
                run = folder_of_rank_0(lambda: self._own_folder(name, folder, resume, stack, locks))
                if first:
                    self._note_unused_policies()
                    stack.enter_context(self._kept_with_run(run, prepared))
                    self._announce(run, prepared)
                outcome = train_rank(
                    self.recipe,
                    self.plan,
                    run,
                    distributed.rank_info,
                    prepared,
                    token=locks[0].token if locks else None,
                    resume=None if resume is None else "latest",
                    prove=self.prove,
                    quiet=self.quiet,
                    ring=open_rank_ring(distributed.rank_info, run.path, stack, self.recipe.run),
                )
                result = self._finalise(run, outcome, export=first)
                if dist.is_initialized():
                    dist.barrier()  # no rank returns a result before its export is there
                return result

    def _note_unused_policies(self) -> None:
        """Say that the recipe's policies do nothing here: whoever started the ranks starts them again, or does not."""
        if self.recipe.run.on_failure != OnFailure():
            note = (
                "run.on_failure is not used, since another program started these ranks: set its own restarts"
                " (torchrun --max-restarts), or let weft train start the ranks"
            )
            self.note = f"{self.note}; {note}" if self.note else note

    def _own_folder(
        self,
        name: str,
        folder: str | Path | None,
        resume: str | Path | None,
        stack: ExitStack,
        locks: list[FolderLock],
    ) -> RunFolder:
        """Return the run's folder; this process, rank 0, owns it until the stack is left."""
        earlier = _check_folder(folder, resume, None)
        run = earlier or create_folder(name, folder)
        locks.append(self._locked(run, stack, is_new=earlier is None))
        return run

    def _fit_memory(self, measure_peak: MeasurePeak) -> None:
        log = _keep_quiet if self.quiet else print
        if self.try_memory and self.blueprint.example is None:
            log("memory    not tried, though it may be short: the model brings no example batch to take a step with")
        elif self.try_memory:
            self.plan, reason = fit_microbatch(self.recipe, self.plan, log, measure_peak, facts=self.facts)
            self.reasons = {**self.reasons, "microbatch.size": reason}

    def _prepare(self) -> PreparedData:
        progress = silent if self.quiet else ConsoleProgress(sys.stderr)
        prepared = prepare_data(self.recipe, data_shape(self.blueprint, self.recipe), progress=progress)
        looked = self.recipe, self.plan, self.blueprint, prepared
        refuse_by_first_looks(*looked)
        return replace(prepared, branches=branches_by_first_looks(*looked))

    @contextmanager
    def _kept_with_run(self, run: RunFolder, prepared: PreparedData) -> Generator[None]:
        """Write recipe, plan and tokenizer into the run's folder.  A resumed run that saves nothing keeps its own."""
        texts = {run.recipe: dump_recipe(self.recipe).encode(), run.plan: dump_plan(self.plan).encode()}
        tokenizer = run.path / "tokenizer.json"
        if prepared.tokenizer is not None and not tokenizer.exists():
            texts[tokenizer] = Path(prepared.tokenizer).read_bytes()
        # A resumed run that fails before its first save must leave the folder as it was: its saves belong to the recipe
        # that wrote them.
        before = {path: path.read_bytes() for path in texts if path.is_file()}
        saved = _saves(run)
        for path, text in texts.items():
            path.write_bytes(text)
        try:
            yield
        except WeftError:
            if _saves(run) == saved:
                for path, text in before.items():
                    path.write_bytes(text)
            raise

    def _announce(self, run: RunFolder, prepared: PreparedData) -> None:
        if self.quiet:
            return
        parameters = sum(parameter.numel() for parameter in self.blueprint.module.parameters())
        batch = self.recipe.batch.global_batch_size
        length = self.blueprint.sequence_length
        size = f"{batch * length:,} tokens" if length is not None else f"{batch:,} samples"
        model = self.recipe.model.reference or type(self.blueprint.module).__name__
        print(f"weft {VERSION}  ·  {self.cluster.summary}")
        print(f"recipe    {model}, {parameters / 1e6:.1f} M parameters, batches of {size}")
        for line in prepared.description:
            print(f"data      {line}")
        for line in describe_plan(self.plan, self.reasons, self.facts, self.cluster):
            print(line)
        if self.note:
            print(f"note      {self.note}")
        for note in (*self.blueprint.notes, conditional_blocks_note(prepared.branches, self.plan)):
            if note:
                print(f"note      {note}")
        print(f"run       {run.path}/", flush=True)

    def _finalise(self, run: RunFolder, outcome: TrainingResult, *, export: bool = True) -> RunResult:
        """Export, say how it went, and return the result."""
        is_exported = not outcome.stopped_early and outcome.checkpoint is not None
        if outcome.checkpoint is not None and is_exported and export:
            self._export(run, outcome.checkpoint)
        known = {field.name: getattr(outcome, field.name) for field in fields(outcome)}
        result = RunResult(**known, folder=run.path, export=run.export if is_exported else None)
        if not self.quiet:
            if outcome.traffic:
                prediction = plan_and_measured(self.recipe, self.plan, self.blueprint, outcome.traffic)
                print(f"sent      {prediction}")
            print(_last_line(result), flush=True)
        return result

    def _export(self, run: RunFolder, checkpoint: Path) -> None:
        if run.export.exists():
            shutil.rmtree(run.export)
        tokenizer = run.path / "tokenizer.json"
        tokenizer = tokenizer if tokenizer.exists() else None
        export_checkpoint(
            checkpoint,
            self.blueprint,
            run.export,
            use_average=self.recipe.optimizer.average_decay is not None,
            tokenizer=tokenizer,
            processors=processor_files(self.recipe, tokenizer),
        )


@contextmanager
def _told_how_to_go_on(run: RunFolder) -> Generator[None]:
    """Add to the error of a run whose rank died how to go on from its saves."""
    try:
        yield
    except RankError as error:
        if further := run.how_to_go_on():
            error.args = (f"{error.args[0]}\n{further}", *error.args[1:])
        raise


def _last_line(result: RunResult) -> str:
    path = os.path.relpath(result.folder)
    if result.stopped_early:
        command = f"weft train {path}/recipe.toml --plan {path}/plan.toml --resume {path}"
        return f"stopped   at step {result.steps}, saved. Go on with: {command}"
    losses = f"loss {format_loss(result.losses[0])} → {format_loss(result.losses[-1])} " if result.losses else ""
    return f"done      {losses}in {format_duration(result.seconds)}   {path}/"


def _check_folder(folder: str | Path | None, resume: str | Path | None, checkpoints: str | None) -> RunFolder | None:
    """Return the run to go on with, None for a new one.  Writes nothing.  `checkpoints` is the URL of the store that
    saves last in; None: in the run's folder.

    Raises:
        LaunchError: the folder cannot be used, or holds no run.
        CheckpointError: the run has saved nothing.
    """
    if resume is not None and folder is not None:
        raise LaunchError(
            f"resume = {resume} goes on in its own folder, so folder = {folder} cannot be used. Leave one out."
        )
    if resume is not None:
        run = RunFolder.open(_newest_run(Path("runs")) if str(resume) == "latest" else Path(resume))
        if not _saves(run) and not (checkpoints is not None and _saved_in_store(run.store_url(checkpoints))):
            raise CheckpointError(
                f"{run.path} has nothing to go on with: no save has finished in {run.checkpoints}."
                " Give the folder of a run that saved, or leave resume out to begin anew."
            )
        return run
    if checkpoints is not None:
        _saved_in_store(checkpoints)  # one that cannot be used is refused before anything is prepared
    path = Path(folder) if folder is not None else None
    if path is not None and path.is_dir() and any(path.iterdir()):
        raise LaunchError(
            f"{path} is there already and not empty. Give a new folder, or go on with it by resume = {path}."
        )
    if path is not None and path.exists() and not path.is_dir():
        raise LaunchError(f"{path} is a file, and a run needs a folder. Give a new folder.")
    return None


def _saved_in_store(url: str) -> int:
    """Finished steps of the newest save below a URL; 0 where there is none.  Raises `CheckpointError`."""
    from weft.run.checkpoint.store import CheckpointStore  # what it stands on need not be installed

    return CheckpointStore(url).newest_step()


def _saves(run: RunFolder) -> set[str]:
    return {path.name for path in run.checkpoints.glob("step-*")}


def _newest_run(root: Path) -> Path:
    runs = [path for path in root.glob("*") if (path / "checkpoints").is_dir()] if root.is_dir() else []
    if not runs:
        raise LaunchError(f"no run in {root.resolve()}/ has saved anything yet. Name the run's folder.")
    return max(runs, key=lambda path: (path / "checkpoints").stat().st_mtime_ns)
