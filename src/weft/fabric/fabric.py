"""`Fabric`: what Lightning Fabric's scripts call, answered by a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.config.plan import Plan
from weft.fabric._arguments import arguments_of
from weft.fabric._exchanging import Exchanging
from weft.fabric._noting import ScriptNotes
from weft.fabric._saving import FabricSaves
from weft.fabric._setting_up import SettingUp
from weft.fabric._stepping import FabricSteps
from weft.fabric.utilities.seed import seed_everything


class Fabric(ScriptNotes, SettingUp, FabricSteps, Exchanging, FabricSaves):
    """In place of Lightning's `Fabric`: the script stays as it is, and runs under any plan with one process's losses.

    Args:
        accelerator: `auto`, `cpu`, `cuda` or `gpu`.
        strategy: `auto` (the fastest plan that is found), `ddp`, `fsdp`, `deepspeed_stage_1` to `3`, or an object of
            `weft.fabric.strategies`.
        devices: processes on each host; a launcher's number holds.
        num_nodes: hosts.
        precision: `32-true`, `64-true`, `bf16-mixed`, `bf16-true`, `16-mixed` or `16-true`.
        plugins: none are had.
        callbacks: objects whose methods `fabric.call` calls.
        loggers: what `fabric.log` writes to.
        plan: a plan of Weft's own, or its file, in place of a strategy.

    Raises:
        WeftError: something of it is not had.
    """

    seed_everything = staticmethod(seed_everything)

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
        plan: Plan | str | Path = "auto",
    ) -> None:
        arguments = arguments_of(accelerator, strategy, devices, num_nodes, precision, plugins, plan)
        super().__init__(arguments, _listed(callbacks), _listed(loggers))


def _listed(given: Any) -> list[Any]:
    return [] if given is None else [*given] if isinstance(given, list | tuple) else [given]
