"""Make a plan from an Accelerator's plugins: each is read as the peer's own configuration file is, key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any

import torch.distributed as dist

from weft.accelerate.utils.dataclasses import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
    TorchDynamoPlugin,
)
from weft.api import session_arguments
from weft.config.plan import MicrobatchPlan, Plan
from weft.errors import PlanError
from weft.interop.migrate import Migration, read_settings
from weft.run.launch import RankInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """The session that an Accelerator asks for."""

    session: Mapping[str, Any]
    """Arguments of `weft.session`."""
    plugins: Mapping[str, Any]
    computes_in: str = ""
    """The plan's precision, where a plugin says it; empty: forwards run under torch.autocast."""
    clips: float = 0.0
    """The norm that a configuration clips gradients to."""
    accumulates: int = 0
    """Batches to a step, where a configuration says it."""
    optimizer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the optimizer and its schedule in a configuration, as settings of a recipe."""


def asked_of(arguments: Mapping[str, Any], precision: str, handlers: Mapping[type, Any]) -> SessionRequest:
    """Read what an Accelerator was given.

    Raises:
        WeftError: something cannot be done; each key is named.
    """
    waits = getattr(handlers.get(InitProcessGroupKwargs), "timeout", None)
    seconds = waits.total_seconds() if isinstance(waits, timedelta) else waits
    asked = session_arguments("auto", seconds)
    asked |= {"device": "cpu"} if arguments["cpu"] else {}
    plugins = _plugins_of(arguments)
    if arguments["plan"] is not None:
        asked |= session_arguments(arguments["plan"], seconds)
        computes_in = _precision_of(asked.get("plan", "auto"))
        if precision == "fp16" != computes_in:
            raise PlanError(
                "mixed_precision='fp16' beside a plan in another precision: nobody would scale the losses."
                ' Write compute.precision = "fp16" in the plan, or mixed_precision="bf16".'
            )
        return SessionRequest(session=asked, plugins=plugins, computes_in=computes_in)
    compiles = _compiles(plugins["dynamo"])
    table = _table_of(plugins, precision)
    half = "fp16" if precision == "fp16" else ""  # under torch.autocast alone small gradients would be lost
    if not table:
        settings = ({"compute.compile": True} if compiles else {}) | ({"compute.precision": half} if half else {})
        asked |= {"settings": settings} if settings else {}
        asked |= {"permit": ("fp32", half)} if half else {}
        return SessionRequest(session=asked, plugins=plugins, computes_in=half)
    request = _read(table)
    plan = replace(request.plan, microbatch=MicrobatchPlan())
    compute = replace(plan.compute, compile=plan.compute.compile or compiles)
    plan = replace(plan, compute=replace(compute, precision="fp16") if half else compute)
    asked |= session_arguments(plan, seconds)
    return SessionRequest(
        session=asked,
        plugins=plugins,
        computes_in=_precision_of(plan),
        clips=float(request.recipe.get("optimizer.max_grad_norm") or 0.0),
        accumulates=_accumulates(plugins["deepspeed"]),
        optimizer=request.recipe,
    )


def _precision_of(plan: Plan | str) -> str:
    known = plan.compute.precision if isinstance(plan, Plan) else "fp32"
    return known if known in ("bf16", "fp16") else ""


def _plugins_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    deepspeed = arguments["deepspeed_plugins"] or arguments["deepspeed_plugin"]
    if isinstance(deepspeed, dict):
        if len(deepspeed) > 1:
            raise PlanError(
                f"{len(deepspeed)} DeepSpeedPlugins would be {len(deepspeed)} plans, and an Accelerator has one. Give"
                " one; a model that is not trained stays whole on every rank."
            )
        deepspeed = next(iter(deepspeed.values()))
    if arguments["megatron_lm_plugin"] is not None:
        raise PlanError(
            "megatron_lm_plugin: Megatron-LM's engine is not had. Give Accelerator(plan=…) with mesh.tensor,"
            " tensor_parallel.sequence and the like; weft migrate reads its settings from a configuration file."
        )
    tensor, parallelism = arguments["torch_tp_plugin"], arguments["parallelism_config"]
    if tensor is not None and parallelism is None:
        parallelism = ParallelismConfig(tp_size=tensor.tp_size)
    dynamo = arguments["dynamo_plugin"] or (
        arguments["dynamo_backend"] and TorchDynamoPlugin(backend=arguments["dynamo_backend"])
    )
    return {
        "deepspeed": deepspeed,
        "fsdp": arguments["fsdp_plugin"],
        "parallelism": parallelism,
        "dynamo": dynamo or None,
    }


def _compiles(plugin: TorchDynamoPlugin | None) -> bool:
    backend = "NO" if plugin is None or plugin.disable else str(plugin.backend or "NO").upper()
    if backend not in ("NO", "INDUCTOR"):
        raise PlanError(f"dynamo_backend = {backend}: blocks are compiled by inductor. Write inductor or no.")
    return backend == "INDUCTOR"


def _accumulates(plugin: DeepSpeedPlugin | None) -> int:
    if plugin is None:
        return 0
    said = plugin.deepspeed_config.get("gradient_accumulation_steps", plugin.gradient_accumulation_steps)
    return 0 if said in (None, "auto") else int(said)


# ── as a configuration file ───────────────────────────────────────────────────────────────────────────────────────────


def _table_of(plugins: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The configuration that says the same; empty where no plugin says how to split."""
    if plugins["deepspeed"] is not None:
        return _of_deepspeed(plugins["deepspeed"], precision)
    table: dict[str, Any] = {}
    if plugins["fsdp"] is not None:
        table = {"distributed_type": "FSDP", "fsdp_config": _of_fsdp(plugins["fsdp"])}
    if plugins["parallelism"] is not None:
        table["parallelism_config"] = _of_parallelism(plugins["parallelism"])
        table.setdefault("distributed_type", "FSDP")
    return table


def _plain(value: Any) -> Any:
    """A setting as a file holds it."""
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, bool | int | float | str) else getattr(value, "__name__", type(value).__name__)


_FSDP_BY_ITSELF = ("state_dict_config", "optim_state_dict_config", "auto_wrap_policy", "limit_all_gathers")
"""Settings that say how the peer does what a plan does in its own way."""


def _of_fsdp(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in plugin.said().items():
        if name in _FSDP_REFUSED:
            raise PlanError(f"FullyShardedDataParallelPlugin({name}=…) is not had: {_FSDP_REFUSED[name]}")
        match name:
            case "cpu_offload":
                settings["fsdp_offload_params"] = bool(getattr(value, "offload_params", value))
            case "transformer_cls_names_to_wrap":
                settings["fsdp_transformer_layer_cls_to_wrap"] = value if isinstance(value, str) else ",".join(value)
            case "fsdp_version":
                settings[name] = value
            case _ if name not in _FSDP_BY_ITSELF:
                settings[f"fsdp_{name}"] = _plain(value)
            case _:
                pass
    return settings


_FSDP_REFUSED: Mapping[str, str] = {
    "ignored_modules": "ZeRO-3 shards every block. Leave it out, or freeze the modules, or keep them out of the model.",
    "param_init_fn": "models are constructed on the CPU. Leave it out.",
    "mixed_precision_policy": "write Accelerator(mixed_precision=…), or compute.precision in Accelerator(plan=…).",
}


def _of_parallelism(config: ParallelismConfig) -> dict[str, Any]:
    if config.sp_size not in (None, 1):
        raise PlanError("ParallelismConfig(sp_size=…): write cp_size, with context_parallel.scheme in a plan.")
    handlers = [name for name in ("tp_handler", "cp_handler", "sp_handler") if getattr(config, name) is not None]
    async_tp = getattr(config.tp_handler, "enable_async_tp", False)
    if handlers and (async_tp or handlers != ["tp_handler"]):
        raise PlanError(f"ParallelismConfig({handlers[0]}=…) is not had. Say it in Accelerator(plan=…).")
    sizes = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
    named = {name: getattr(config, name) for name in sizes if getattr(config, name) is not None}
    return {f"parallelism_config_{name}": size for name, size in named.items()}


def _of_deepspeed(plugin: DeepSpeedPlugin, precision: str) -> dict[str, Any]:
    """DeepSpeed's own configuration: what was given, or a small one."""
    if plugin.enable_msamp:
        raise PlanError("DeepSpeedPlugin(enable_msamp=True): Weft does not compute in fp8. Leave it out.")
    table = plugin.deepspeed_config
    if not table:
        table |= {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": plugin.gradient_accumulation_steps or 1,
            "zero_optimization": {"stage": 2 if plugin.zero_stage is None else plugin.zero_stage},
        }
        if plugin.gradient_clipping is not None:
            table["gradient_clipping"] = plugin.gradient_clipping
        for part in ("optimizer", "param"):
            device = getattr(plugin, f"offload_{part}_device")
            if device not in (None, "none"):
                path = getattr(plugin, f"offload_{part}_nvme_path")
                table["zero_optimization"][f"offload_{part}"] = {"device": device} | (
                    {"nvme_path": path} if device == "nvme" and path not in (None, "none") else {}
                )
    if precision != "no" and not any(name in table for name in ("bf16", "fp16", "bfloat16")):
        table[precision] = {"enabled": True}
    return table


def _read(table: Mapping[str, Any]) -> Migration:
    info = RankInfo.from_environment()
    processes = dist.get_world_size() if dist.is_initialized() else 1 if info is None else info.world_size
    if "distributed_type" in table:
        return read_settings(table, "the Accelerator's plugins", processes=processes, fill={"batch_size": 1})
    own = {name: value for name, value in table.items() if name != "train_batch_size"}
    own |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}  # the loop's loader says the batch
    return read_settings(own, "DeepSpeedPlugin", processes=processes)
