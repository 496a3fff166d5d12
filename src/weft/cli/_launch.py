"""`weft launch`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli._options import FLAG
from weft.cli._submit import submit_script
from weft.errors import LaunchError

if TYPE_CHECKING:
    from weft.run.launched_script import LaunchedScript
    from weft.run.places.submission import LaunchOrder

_VALUE_OPTIONS = (
    *("-n", "--processes", "--threads", "--logs", "--on-failure", "--max-restarts", "--resume", "--nodes"),
    *("--run-folder", "--rendezvous", "--network", "--processes-per-node", "--on", "--time-limit"),
)

_NEED_HOSTS = (
    "--run-folder, --rendezvous, --network, --processes-per-node, --dry-run and --time-limit are of several hosts: they"
    " need --nodes or --on."
)


def launch(
    script: str,
    /,
    *arguments: str,
    processes: Annotated[int | None, Parameter(name=("--processes", "-n"))] = None,
    module: Annotated[bool, Parameter(name=("--module", "-m"), negative=())] = False,
    accelerate: Annotated[bool, Parameter(negative=())] = False,
    threads: int | None = None,
    logs: Path | None = None,
    on_failure: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    max_restarts: int | None = None,
    resume: Path | None = None,
    nodes: str | None = None,
    run_folder: Path | None = None,
    rendezvous: str | None = None,
    network: str | None = None,
    processes_per_node: int | None = None,
    on: str | None = None,
    dry_run: Annotated[bool, FLAG] = False,
    time_limit: str | None = None,
) -> int:
    """Run a script on several processes, again where one fails and a session has saved.

    They find their ranks as under torchrun. Options of Weft stand before the script. On several hosts: --nodes with a
    --run-folder, and --on, as of weft train.

    Parameters
    ----------
    script
        Python file, or module.
    arguments
        The script's own command line.
    processes
        How many, on this machine.
    module
        As python -m.
    accelerate
        Let weft.accelerate stand for accelerate.
    threads
        Of each process; by default the cores are shared out.
    logs
        Folder for what each rank prints.
    on_failure
        As `[run.on_failure]` of a recipe: killed=stop,hang_seconds=60.
    max_restarts
        Restarts without a new saved step; by default 3. If given, a script without a save starts again, too.
    resume
        Folder of an earlier run, whose session goes on from its newest save.
    nodes
        Hosts: `4`, or `2..4` where they may come and go.
    run_folder
        With --nodes or --on: folder of the session's run, which all hosts see.
    rendezvous
        How hosts meet: by the run's `folder`, or `etcd://host:port,…`.
    network
        Network of the hosts, such as `10.0.0.0/24`.
    processes_per_node
        By default one for each accelerator, or core.
    on
        Where: slurm, a pool's name, or PLACE:FILE.toml.
    dry_run
        With --on: show what would be submitted.
    time_limit
        With --on: longest time, such as 12:00:00.
    """
    under = "weft.accelerate" if accelerate else None
    if on is not None or nodes is not None:
        _refuse_on_hosts(processes, resume, run_folder)
        from weft.run.places.submission import LaunchOrder

        order = LaunchOrder(
            script=script if module else str(Path(script).absolute()),
            arguments=arguments,
            module=module,
            under=under,
            processes_per_node=processes_per_node,
            threads=threads,
            logs=None if logs is None else logs.absolute(),
            on_failure=on_failure,
            max_restarts=max_restarts,
        )
        _check(order)
        if on is not None:
            _refuse(rendezvous is not None or network is not None, "the pool of --on says --rendezvous and --network.")
            return submit_script(order, on, nodes or "1", run_folder, dry_run=dry_run, time_limit=time_limit)
        _refuse(
            dry_run or time_limit is not None, "--dry-run and --time-limit say how it is submitted: they need --on."
        )
        assert nodes is not None
        assert run_folder is not None
        return _launch_on_hosts(order, run_folder, nodes, rendezvous, network)
    of_hosts = (run_folder, rendezvous, network, processes_per_node, time_limit)
    _refuse(dry_run or any(each is not None for each in of_hosts), _NEED_HOSTS)
    if processes is None:
        raise LaunchError("say how many processes: weft launch -n 4 SCRIPT, or the hosts: --nodes or --on.")
    from weft.run.launched_script import LaunchedScript

    launched = LaunchedScript(
        script=script,
        arguments=arguments,
        num_processes=processes,
        module=module,
        under=under,
        threads=threads,
        logs=logs,
    )
    return _launch_here(launched, on_failure, max_restarts, resume)


def _launch_here(
    launched: LaunchedScript, on_failure: tuple[str, ...], max_restarts: int | None, resume: Path | None
) -> int:
    """Run a script on this host alone."""
    from weft.run.script_policies import policies_of
    from weft.run.supervised_script import SupervisedScript

    policies = policies_of(on_failure, max_restarts)
    supervised = SupervisedScript(
        launched=launched, policies=policies, restarts_any=max_restarts is not None, resumes=resume
    )
    if not launched.uses_weft:
        return supervised.run()
    from weft.watch.collector import Collecting

    with Collecting(lambda: supervised.run_folder) as collecting:
        supervised.rings = collecting.begin
        return supervised.run()


def _launch_on_hosts(order: LaunchOrder, folder: Path, nodes: str, rendezvous: str | None, network: str | None) -> int:
    """Take part as one of several hosts."""
    from weft.api.training.host_agent import HostsRequest
    from weft.api.training.launch_hosts import launch_on_hosts

    # Where a host is lost, torch's sockets would print a page of C++ calls; Weft says in a line what it means.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    request = HostsRequest.of_nodes(nodes, rendezvous=rendezvous or "folder", network=network)
    end = launch_on_hosts(order, request, folder=folder)
    if end is not None and end.text:
        print(end.text, flush=True)
    return 0 if end is None else end.status


def _check(order: LaunchOrder) -> None:
    """Say what is wrong with a script here, and not on a machine later."""
    from weft.run.script_policies import policies_of

    policies_of(order.on_failure, order.max_restarts)
    _refuse(
        not order.module and not Path(order.script).is_file(),
        f"there is no script {order.script}. Give the path of a Python file.",
    )


def _refuse_on_hosts(processes: int | None, resume: Path | None, run_folder: Path | None) -> None:
    _refuse(
        processes is not None or resume is not None,
        "--nodes and --on do not go with --processes (--processes-per-node says how many a host has) or --resume (the"
        " run goes on by itself).",
    )
    _refuse(
        run_folder is None,
        "--nodes and --on need --run-folder, a folder that all hosts see: the session's run begins there, or goes on.",
    )


def _refuse(is_wrong: bool, sentence: str) -> None:
    if is_wrong:
        raise LaunchError(sentence)


def mark_script(arguments: list[str]) -> list[str]:
    """Put `--` before the script of `weft launch`, so that options after it are the script's, even `--help`."""
    if arguments[:1] != ["launch"]:
        return arguments
    position = 1
    while position < len(arguments) and arguments[position].startswith("-"):
        if arguments[position] == "--":
            return arguments
        position += 2 if arguments[position] in _VALUE_OPTIONS else 1
    return [*arguments[:position], "--", *arguments[position:]] if position < len(arguments) else arguments
