"""`weft launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

_VALUE_OPTIONS = ("-n", "--processes", "--threads", "--logs")


def launch(
    script: str,
    /,
    *arguments: str,
    processes: Annotated[int, Parameter(name=("--processes", "-n"))],
    module: Annotated[bool, Parameter(name=("--module", "-m"), negative=())] = False,
    accelerate: Annotated[bool, Parameter(negative=())] = False,
    threads: int | None = None,
    logs: Path | None = None,
) -> int:
    """Run a script on several processes of this machine.

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
    """
    from weft.run.launch.launcher import launch_script

    under = "weft.accelerate" if accelerate else None
    return launch_script(script, arguments, processes, module=module, under=under, threads_per_rank=threads, logs=logs)


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
