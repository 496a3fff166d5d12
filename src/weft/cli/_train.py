"""`weft train`."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Annotated, Literal

from weft.cli._options import FLAG, Overrides, PlanFile, RecipeFile
from weft.cli._read import read_choice
from weft.cli._submit import order_of, refuse_beside_on, submit_run
from weft.errors import RecipeError


def train(
    recipe: RecipeFile,
    /,
    *,
    plan: PlanFile = "auto",
    processes: int | None = None,
    overrides: Overrides = (),
    run_folder: Path | None = None,
    resume: str | None = None,
    trials: bool = True,
    prove: Literal["auto", "always", "never"] = "auto",
    nodes: str | None = None,
    rendezvous: str | None = None,
    network: str | None = None,
    processes_per_node: int | None = None,
    on: str | None = None,
    watch: Annotated[bool, FLAG] = False,
    dry_run: Annotated[bool, FLAG] = False,
    time_limit: str | None = None,
) -> int:
    """Train a recipe.

    On several hosts: `--on` a place that starts Weft there, or the same command on each, with `--nodes`.

    Parameters
    ----------
    processes
        How many; by default as the plan needs, and under torchrun those of the job.
    run_folder
        Where the run is kept; by default in runs/.
    resume
        Folder of a run to go on with, or `latest`.
    trials
        With `auto`, let a few steps decide between plans that look equal, where the run is long, and whether memory
        suffices, where that is in doubt.
    prove
        First compare two steps with plain PyTorch: `auto` once for a recipe and plan, where that takes at most 10 s or
        5 % of the run.
    nodes
        Hosts: `4`, or `2..4` where they may come and go.
    rendezvous
        How hosts meet: by the run's `folder` (the default), or `etcd://host:port,…`.
    network
        Network of the hosts, such as `10.0.0.0/24`, where one has several addresses.
    processes_per_node
        Processes of a host; by default one for each accelerator, or core.
    on
        Where to begin or go on: slurm, a pool's name, or PLACE:FILE.toml.
    watch
        Show in a browser where its time goes meanwhile.
    dry_run
        With --on: show what would be submitted.
    time_limit
        With --on: longest time, such as 12:00:00.
    """
    from weft.errors import LaunchError
    from weft.run.launch import RankInfo
    from weft.run.launch.launcher import open_fork_server
    from weft.techniques.check import check_runnable

    if watch and (on is not None or nodes is not None or RankInfo.from_environment() is not None):
        raise LaunchError("--watch shows ranks that this command starts on this machine. For others: weft watch RUN.")
    if on is not None:
        refuse_beside_on(resume, processes, rendezvous, network)
        train_order = order_of(recipe, plan, overrides, processes_per_node, prove)
        return submit_run(train_order, on, nodes or "1", run_folder, dry_run=dry_run, time_limit=time_limit)
    if dry_run or time_limit is not None:
        raise LaunchError("--dry-run and --time-limit say how a run is submitted: they need --on.")
    if nodes is not None:
        if run_folder is None or resume is not None or processes is not None:
            raise LaunchError(
                "--nodes needs --run-folder, a folder that all hosts see: the run begins there, or goes on. It does not"
                " go with --resume or --processes (--processes-per-node says how many a host has)."
            )
        return _train_on_hosts(
            recipe,
            plan,
            overrides,
            run_folder,
            (nodes, rendezvous, network),
            processes_per_node=processes_per_node,
            prove=prove,
        )
    if (unused := rendezvous or network or processes_per_node) is not None:
        raise LaunchError(f"--rendezvous, --network and --processes-per-node ({unused}) need --nodes.")
    rank_info = RankInfo.from_environment()  # of a rank that torchrun has started
    if rank_info is not None and plan == "auto" and processes is None:
        processes = rank_info.world_size
    # The fork server imports torch while this process searches the plan and imports torch itself.
    with open_fork_server() as fork_server, _page_beside(run_folder, resume) if watch else contextlib.nullcontext():
        choice = read_choice(recipe, plan, overrides, processes, trials=trials, fork_server=fork_server)
        check_runnable(choice.plan)  # before torch is imported, so that a refusal comes at once
        from weft.api import run_name
        from weft.api import train as run

        result = run(
            choice.recipe,
            choice.plan,
            processes=processes,
            folder=run_folder,
            resume=resume,
            name=run_name(recipe),
            reasons=choice.reasons,
            try_memory=choice.is_tight,
            note=choice.note,
            prove=prove,
            fork_server=fork_server,
        )
    if result.stopped_early:
        # A job engine starts again later what it has stopped; a person at the terminal knows what to do.
        return 128 + signal.SIGINT if result.stop_signal in (0, signal.SIGINT) else os.EX_TEMPFAIL
    if rank_info is None or rank_info.rank == 0:
        _show_what_it_learnt(result.folder, recipe)
    return 0


def _page_beside(run_folder: Path | None, resume: str | None) -> contextlib.AbstractContextManager[None]:
    """Return what serves the run's page as long as it trains; `weft.watch` is imported only where it is wanted."""
    from weft.watch.beside import page_beside

    return page_beside(run_folder if resume in (None, "latest") else Path(resume))


def _train_on_hosts(
    recipe: Path,
    plan: str,
    overrides: Overrides,
    folder: Path,
    hosts: tuple[str, str | None, str | None],
    *,
    processes_per_node: int | None,
    prove: Literal["auto", "always", "never"],
) -> int:
    """Take part as one of several hosts; `hosts` are `--nodes`, `--rendezvous` and `--network`."""
    from weft.api.training.host_agent import HostsRequest
    from weft.api.training.hosts import train_on_hosts
    from weft.config.plan import Plan, apply_overrides, load_plan
    from weft.config.recipe import load_recipe
    from weft.errors import PlanError

    # Where a host is lost, torch's sockets would print a page of C++ calls; Weft says in a line what it means.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    nodes, rendezvous, network = hosts
    request = HostsRequest.of_nodes(nodes, rendezvous=rendezvous or "folder", network=network)
    given = Plan() if plan == "auto" else load_plan(plan)
    read, given = apply_overrides(load_recipe(recipe), given, list(overrides))
    if plan == "auto" and given != Plan():
        raise PlanError("--set plan.… does not go with --plan auto on several hosts. Write the plan into a file.")
    result = train_on_hosts(
        read,
        "auto" if plan == "auto" else given,
        request,
        folder=folder,
        processes_per_node=processes_per_node,
        prove=prove,
    )
    if result is None:
        return 0
    if result.stopped_early:
        return 128 + signal.SIGINT if result.stop_signal in (0, signal.SIGINT) else os.EX_TEMPFAIL
    _show_what_it_learnt(result.folder, recipe)
    return 0


def _show_what_it_learnt(folder: Path, recipe: Path) -> None:
    """A sample of a language model's text, and what to try next."""
    from weft.api import generate

    path, sample = os.path.relpath(folder), ""
    if (folder / "tokenizer.json").is_file():
        with contextlib.suppress(RecipeError):  # of all models, only causal language models continue text
            sample = generate(folder, "def ", max_new_tokens=60)
    if sample:
        print(f"sample    {sample!r}")
        print(f"next      weft generate {path} --prompt 'class '     more of it")
    print(f"{'          ' if sample else 'next      '}weft plan {recipe} --cluster 4x8xh100")
    print(f"          weft train {recipe} --plan auto")
