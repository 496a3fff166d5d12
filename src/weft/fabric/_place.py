"""A Fabric's place among the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.api import Session, SessionInternals
from weft.errors import LaunchError, RecipeError
from weft.fabric._arguments import Arguments, started
from weft.fabric.loggers import InFolder
from weft.fabric.strategies import Strategy
from weft.run.launch import RankInfo

_LONGER = 2**32
"""Bound above torch's own seeds of a script that has set none."""


class FabricPlace:
    """The parts of a Fabric that do not depend on models. The ranks are joined when they are first asked for."""

    def __init__(self, arguments: Arguments, callbacks: Sequence[Any], loggers: Sequence[Any]) -> None:
        self._arguments, self._callbacks, self._loggers = arguments, [*callbacks], [*loggers]
        self._optimizers: list[torch.optim.Optimizer] = []
        self._loaders: list[Any] = []
        self._has_set_up = False
        self._said = set[int]()
        """Batch sizes whose shares were said."""

    @cached_property
    def _session(self) -> Session:
        session, strategy = self._arguments.join(), self._arguments.strategy
        strategy.root_device, strategy.global_rank = session.device, session.rank
        strategy.world_size = session.num_data_ranks
        for logger in self._loggers:
            if isinstance(logger, InFolder):  # other ranks may look when rank 0 has begun to write
                logger.version = session.broadcast(logger.version)
        return session

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it, with those keywords that it takes."""
        raise NotImplementedError(hook_name)

    def _take_seed(self) -> None:
        """Key what models and data sets draw by the seed that the script has set, which is rank 0's."""
        seed = self._session.broadcast(torch.initial_seed())
        if seed < _LONGER:
            SessionInternals(self._session).settle(seed=seed)

    @property
    def strategy(self) -> Strategy:
        """How the ranks share the work."""
        return self._arguments.strategy

    @property
    def accelerator(self) -> str:
        """The kind of this rank's device."""
        return self.device.type

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._session.device

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self._session.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its host."""
        return self._session.local_rank

    @property
    def node_rank(self) -> int:
        """This host among all."""
        info = RankInfo.from_environment()
        return 0 if info is None else info.rank // info.local_world_size

    @property
    def world_size(self) -> int:
        """Ranks that have different samples: all, unless a plan splits the model over some."""
        return self._session.num_data_ranks

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._session.rank == 0

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks that `devices` asks for, each with the whole script, and go on in them alone; then call
        `function(fabric, …)`.  Where they were started by `weft launch` or torchrun, nothing is started.

        Raises:
            LaunchError: there is no script that ranks could run.
        """
        processes = self._arguments.processes or 1
        if started() is None and processes > 1:
            self._start(processes)
        if function is not None and not callable(function):
            raise RecipeError(f"fabric.launch({function!r}) cannot be called. Give a function, as launch(train).")
        _ = self._session
        return None if function is None else function(self, *args, **kwargs)

    def close(self) -> None:
        """Leave the ranks.  The end of the script does it."""
        if "_session" in vars(self):
            self._session.close()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The method that a class of the script's own overrides."""

    def _start(self, ranks: int) -> None:
        main = sys.modules["__main__"]
        script = getattr(main, "__file__", None)
        if script is None or getattr(main, "__spec__", None) is not None:
            raise LaunchError(
                f"fabric.launch() can start {ranks} processes of a script that Python was given by its path, and this"
                f" is none. Use `weft launch -n {ranks} script.py`, or weft.spawn in a notebook."
            )
        from weft.run.launch.launcher import launch_script  # loaded where ranks are started

        raise SystemExit(launch_script(str(Path(script)), sys.argv[1:], ranks))
