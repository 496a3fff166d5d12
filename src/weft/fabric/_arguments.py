"""Read the arguments of `Fabric(…)`, key by key: obeyed, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist

import weft.api
from weft.api import Session
from weft.config.plan import Plan, load_plan
from weft.errors import LaunchError, RecipeError
from weft.fabric._precision import FabricPrecision, numbers_of
from weft.fabric.strategies import Strategy, strategy_of
from weft.run.launch import RankInfo

_DEVICES: Mapping[str, Literal["auto", "cpu", "cuda"]] = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a Fabric."""

    device: Literal["auto", "cpu", "cuda"]
    processes: int | None
    """None: as many as were started."""
    strategy: Strategy
    numbers: FabricPrecision
    plan: Plan | str | Path

    def join(self) -> Session:
        """Open the session.

        Raises:
            LaunchError: nobody has started the ranks that were asked for.
        """
        processes, ranks = self.processes or 1, started()
        if ranks is None and processes > 1:
            raise LaunchError(
                f"Fabric was asked for {processes} processes, and this is one: call fabric.launch() before, or start"
                f" them by `weft launch -n {processes} script.py`."
            )
        plan = self._plan(ranks or 1)
        session = weft.api.session(
            plan,
            device=self.device,
            permit=(plan.compute.precision if isinstance(plan, Plan) else self.numbers.plan,),
            settings=None if isinstance(plan, Plan) else {"compute.precision": self.numbers.plan},
        )
        if self.processes not in (None, ranks or 1):
            session.print(f"fabric    {processes} processes were asked for, and {ranks} started: the plan is for these")
        if self.numbers.said:
            session.print(f'fabric    precision "{self.numbers.name}" is {self.numbers.said}')
        return session

    def _plan(self, ranks: int) -> Plan | str | Path:
        plan = self.plan if self.plan != "auto" else self.strategy.plan(ranks)
        if plan is None or plan == "auto":
            return "auto"
        plan = plan if isinstance(plan, Plan) else load_plan(plan)
        if self.plan != "auto" and self.numbers.name == "32-true":
            return plan
        return replace(plan, compute=replace(plan.compute, precision=self.numbers.plan))


def started() -> int | None:
    """Return how many ranks there are; None: nobody has started any."""
    if dist.is_initialized():
        return dist.get_world_size()
    info = RankInfo.from_environment()
    return None if info is None else info.world_size


def arguments_of(
    accelerator: Any, strategy: Any, devices: Any, num_nodes: int, precision: Any, plugins: Any, plan: Plan | str | Path
) -> Arguments:
    """Return what a Fabric is asked for.

    Raises:
        RecipeError: something of it is not had.
    """
    name = str(getattr(accelerator, "name", accelerator))
    if name not in _DEVICES:
        raise RecipeError(f"Fabric(accelerator={name!r}) is not had. Use {', '.join(map(repr, _DEVICES))}.")
    if plugins:
        listed = cast(Sequence[object], plugins) if isinstance(plugins, list | tuple) else [plugins]
        kinds = ", ".join(type(value).__name__ for value in listed)
        raise RecipeError(f"Fabric(plugins={kinds}) is not had. Say precisions by precision=, and leave it out.")
    if plan != "auto" and strategy != "auto":
        raise RecipeError(f"Fabric(plan=…, strategy={strategy!r}) says twice how to split. Leave one out.")
    number = _number_of(devices)
    return Arguments(
        _DEVICES[name],
        None if number is None else number * num_nodes,
        strategy_of(strategy),
        numbers_of(precision),
        plan,
    )


def _number_of(devices: Any) -> int | None:
    """How many devices of a host are asked for; None: all."""
    if devices in ("auto", -1, "-1"):
        return None
    text = str(devices).strip("[](), ")
    if text == str(devices) and text.isdigit():
        return int(text)
    listed = [int(number) for number in text.split(",") if number.strip().isdigit()]
    if listed != list(range(len(listed))) or not listed:
        raise RecipeError(
            f"Fabric(devices={devices!r}) is no number of devices. Give one; CUDA_VISIBLE_DEVICES chooses which."
        )
    return len(listed)
