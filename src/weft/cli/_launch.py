"""`weft launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

_VALUE_OPTIONS = ("-n", "--processes", "--threads", "--logs", "--on-failure", "--max-restarts", "--resume")


def launch(
    script: str,
    /,
    *arguments: str,
    processes: Annotated[int, Parameter(name=("--processes", "-n"))],
    module: Annotated[bool, Parameter(name=("--module", "-m"), negative=())] = False,
    accelerate: Annotated[bool, Parameter(negative=())] = False,
    threads: int | None = None,
    logs: Path | None = None,
    on_failure: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    max_restarts: int | None = None,
    resume: Path | None = None,
) -> int:
    """Run a script on several processes of this machine, again where one fails and a session has saved.

    It finds its rank in the variables that torchrun sets, so torch.distributed.init_process_group() and weft.session()
    work. Options of Weft stand before the script; what follows it is the script's own.

    Parameters
    ----------
    script
        Python file; with --module, the name of a module.
    arguments
        The script's own command line.
    processes
        How many processes.
    module
        Run a module, as python -m does.
    accelerate
        Let weft.accelerate stand where the script, and the libraries that it uses, import accelerate.
    threads
        Threads of each process; by default the cores are shared out.
    logs
        Folder for what each rank prints, instead of the terminal.
    on_failure
        What to do about a kind of failure, as `[run.on_failure]` of a recipe: killed=stop, error=stop, hang=stop,
        host_memory=restart, device_memory=restart, not_finite=restart, hang_seconds=60. Several with commas between.
    max_restarts
        Restarts in a row without a new saved step; by default 3. If it is given, a script is started again, too, for
        which no weft.session has saved.
    resume
        Folder of an earlier run of the script, whose session goes on from its newest save.
    """
    from weft.run.supervised_script import LaunchedScript, SupervisedScript, policies_of

    launched = LaunchedScript(
        script=script,
        arguments=arguments,
        num_processes=processes,
        module=module,
        under="weft.accelerate" if accelerate else None,
        threads=threads,
        logs=logs,
    )
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
