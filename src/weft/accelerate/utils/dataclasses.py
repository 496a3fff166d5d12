"""Arguments of an Accelerator: enumerations, plugins and arguments of what it opens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.profiler import schedule as when

from weft.errors import did_you_mean


class _TextEnum(StrEnum):
    """A word that compares and prints as its text."""

    @classmethod
    def list(cls) -> Sequence[str]:
        """Return the values of all members."""
        return [str(member.value) for member in cls]


class DistributedType(_TextEnum):
    """How a job is shared out."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(_TextEnum):
    """Mixed precisions by name."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(_TextEnum):
    """Trackers by name."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


class DynamoBackend(_TextEnum):
    """Compilers by name."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"


class DDPCommunicationHookType(_TextEnum):
    """How gradients are sent."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class KwargsHandler:
    """Arguments of something that an Accelerator opens."""

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults."""
        plain = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if plain.get(name) != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of torch's DistributedDataParallel, which a plan says by itself; a hook of gradients is refused."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = DDPCommunicationHookType.NO
    comm_wrapper: Any = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of a gradient scaler: fp16 plans scale by themselves."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How ranks are joined; `timeout` is how long they wait for one another."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: Any = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, and where its traces go."""

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> profile:
        """Make the profiler."""
        known = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
        arguments = {
            name: value for name, value in vars(self).items() if name != "output_trace_dir" and value is not None
        }
        if self.activities is not None:
            arguments["activities"] = [known[activity] for activity in self.activities]
        if self.schedule_option is not None:
            arguments["schedule_option"] = when(**self.schedule_option)
        return profile(**{name.removesuffix("_option"): value for name, value in arguments.items()})


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate."""

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DataLoaderConfiguration:
    """How loaders are shared out.  A batch is the global one (`split_batches`), which is shared out over the processes;
    False makes it each process's, so that the mathematics depend on their number."""

    split_batches: bool = True
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """The folder of a script's saves, and how its saves are named."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Save there, and log there where nothing else is said."""
        self.project_dir = None if project_dir is None else str(project_dir)
        self.logging_dir = self.project_dir if self.logging_dir is None else self.logging_dir


# ── plugins: each is read as a configuration file of the peer would be (`weft.accelerate._plans`) ─────────────────────


class _Plugin:
    """Settings by the peer's names, None where nothing is said."""

    _names: Sequence[str] = ()
    _plain: Mapping[str, Any] = {}
    """Settings that are not None by default."""

    def __init__(self, *values: Any, **given: Any) -> None:
        given |= dict(zip(self._names, values, strict=False))
        for name in given.keys() - {*self._names}:
            raise TypeError(f"{type(self).__name__} has no {name}.{did_you_mean(name, self._names)}")
        vars(self).update({**dict.fromkeys(self._names), **self._plain, **given})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def said(self) -> dict[str, Any]:
        """Settings that are not as they are by default."""
        plain = vars(type(self)())
        return {name: value for name, value in vars(self).items() if value != plain[name]}


class FullyShardedDataParallelPlugin(_Plugin):
    """How weights are sharded, which becomes a plan's ZeRO stage and mesh."""

    _names = (
        *("fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch", "mixed_precision_policy"),
        *("auto_wrap_policy", "cpu_offload", "ignored_modules", "state_dict_type", "state_dict_config"),
        *("optim_state_dict_config", "limit_all_gathers", "use_orig_params", "param_init_fn", "sync_module_states"),
        *("forward_prefetch", "activation_checkpointing", "activation_checkpointing_offload"),
        *("cpu_ram_efficient_loading", "transformer_cls_names_to_wrap", "min_num_params"),
    )
    _plain = {"limit_all_gathers": True}


class DeepSpeedPlugin(_Plugin):
    """DeepSpeed's settings, or its own configuration (a dictionary or a file), which become a plan."""

    _names = (
        *("hf_ds_config", "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "is_train_batch_min"),
        *("offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path"),
        *("offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model", "transformer_moe_cls_names"),
        *("enable_msamp", "msamp_opt_level"),
    )
    _plain = {"is_train_batch_min": True}

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration, where one was given."""
        config = getattr(self.hf_ds_config, "config", self.hf_ds_config)
        if isinstance(config, str | os.PathLike):
            from weft.interop.migrate import read_table

            return dict(read_table(Path(config)))
        return dict(config or {})


class TorchTensorParallelConfig(_Plugin):
    """How tensor ranks work."""

    _names = ("enable_async_tp",)
    _plain = {"enable_async_tp": False}


class TorchTensorParallelPlugin(_Plugin):
    """How many ranks share each matrix."""

    _names = ("tp_size", "torch_device_mesh")
    _plain = {"tp_size": 1}


class TorchDynamoPlugin(_Plugin):
    """Whether blocks are compiled."""

    _names = ("backend", "mode", "fullgraph", "dynamic", "options", "disable", "use_regional_compilation")
    _plain = {"disable": False}


class ParallelismConfig(_Plugin):
    """Sizes of the mesh's axes."""

    _names = (
        *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend"),
        *("tp_handler", "cp_handler", "sp_handler"),
    )
