"""`Accelerator`: Weft by the names that people know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, final

from weft.accelerate._states import SavedStates
from weft.accelerate.tracking import Tracking, trackers_of
from weft.accelerate.unsupported import METHODS, OWNER
from weft.accelerate.utils.dataclasses import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)
from weft.errors import not_had


@final
class Accelerator(Tracking, SavedStates):
    """A training loop of one's own under any plan, by the names of Hugging Face's Accelerate.

    It joins this process to its job (`weft launch`, torchrun, or alone), and stands on `weft.session`.  A loader's
    batch is the global one, whatever the number of processes, and losses do not depend on it.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        plan: Any = None,
    ) -> None:
        """All but the last are the peer's own.

        Args:
            plan: how to split, as a file or `weft.Plan`; by default what plugins say, and without any `auto`, the
                fastest predicted split of the data.

        Raises:
            WeftError: something that was given cannot be done; it is named.
        """
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config.split_batches = split_batches
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = rng_types or ["generator"]
        self._said = set[int]()
        self._custom_objects, self.trackers = [], []
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._open(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            cpu=cpu,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=parallelism_config,
            plan=plan,
        )
        self.log_with = trackers_of(log_with, self.logging_dir)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return not_had(f"accelerator.{name}", OWNER, METHODS[name])
        raise AttributeError(f"an Accelerator has no {name!r}")
