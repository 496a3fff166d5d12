"""The base of all groups of an Accelerator's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.accelerate._job import GradientState, SharedJob, job_of
from weft.accelerate._places import Places
from weft.accelerate._plans import SessionRequest, asked_of
from weft.accelerate.state import AcceleratorState
from weft.accelerate.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
)
from weft.errors import PlanError, RecipeError


class AcceleratorCore(Places):
    """The job, and what was given to the Accelerator."""

    project_configuration: ProjectConfiguration
    dataloader_config: DataLoaderConfiguration
    step_scheduler_with_optimizer: bool
    scaler = None
    """Plans in fp16 scale losses by themselves."""
    is_fsdp2 = is_composable_parallelism_enabled = False
    """Scripts need no case for how Weft shards weights."""

    def _open(self, **given: Any) -> None:
        """Open the script's session, or share it."""
        handlers = _handlers_of(given["kwargs_handlers"])
        precision = str(given["mixed_precision"] or "no")
        if precision not in PrecisionType.list():
            raise ValueError(f"mixed_precision = {precision!r} is none of {', '.join(PrecisionType.list())}.")
        if precision == "fp8":
            raise PlanError("mixed_precision='fp8': Weft does not compute in fp8. Write bf16, fp16 or no.")
        self._asked: SessionRequest = asked_of(given, precision, handlers)
        self._job: SharedJob = job_of(self._asked.session)
        self.plan = self._job.settings.get("plan", "auto")
        """How the job is split, as it was given or as plugins say it."""
        self._job.mixed_precision = self.mixed_precision = precision
        self._job.plugins.update({name: plugin for name, plugin in self._asked.plugins.items() if plugin is not None})
        self.native_amp = precision != "no" and not self._asked.computes_in
        self.autocast_handler: AutocastKwargs = handlers.get(AutocastKwargs) or AutocastKwargs()
        self.profile_handler: ProfileKwargs = handlers.get(ProfileKwargs) or ProfileKwargs()
        self._take_accumulation(given["gradient_accumulation_plugin"], given["gradient_accumulation_steps"])
        self.state = AcceleratorState()
        self.fsdp_plugin, self.deepspeed_plugin = self.state.fsdp_plugin, self.state.deepspeed_plugin
        self.parallelism_config = self.state.parallelism_plugin
        self.multi_device = self.use_distributed
        for name in vars(self.dataloader_config):
            setattr(self, name, getattr(self.dataloader_config, name))
        self.step = 0
        self._forget()

    def _take_accumulation(self, plugin: GradientAccumulationPlugin | None, steps: int) -> None:
        if plugin is not None and steps != 1:
            raise ValueError("the gradient_accumulation_plugin says gradient_accumulation_steps, too. Leave them out.")
        own = plugin or GradientAccumulationPlugin(num_steps=int(self._asked.accumulates or steps))
        self.gradient_state = GradientState(own)

    def _forget(self) -> None:
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._dataloaders: list[Any] = []

    @property
    def project_dir(self) -> str | None:
        """The folder of the script's saves."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next save with an automatic name."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether a model is written where it is saved: on rank 0."""
        return self.is_main_process

    @property
    def data_parallel_rank(self) -> int:
        """This process's place among those that see different samples."""
        return self.process_index


def _handlers_of(arguments: Sequence[Any] | None) -> Mapping[type, Any]:
    """Handlers by their class."""
    handlers: dict[type, Any] = {}
    for handler in arguments or ():
        if type(handler) in handlers:
            raise ValueError(f"kwargs_handlers has two {type(handler).__name__}. Give one.")
        handlers[type(handler)] = handler
        if isinstance(handler, GradScalerKwargs) and (named := handler.to_kwargs()):
            raise RecipeError(
                f"GradScalerKwargs({next(iter(named))}=…) is not had: plans in fp16 choose their scale by themselves,"
                " from the overflows that they meet. Leave it out."
            )
        if isinstance(handler, DistributedDataParallelKwargs) and str(handler.comm_hook) != DDPCommunicationHookType.NO:
            raise RecipeError(
                f"DistributedDataParallelKwargs(comm_hook={str(handler.comm_hook)!r}) compresses gradients: name it in"
                " a plan, as data_parallel.compression, or as data_parallel.reduce_precision for 16 bits."
            )
    return handlers
