"""Ranks for a function of a notebook's cell, or of a script that nobody has launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import LaunchError
from weft.run.launch import RankInfo
from weft.run.launch.launcher import ForkServer, launch_cells


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
