"""Accelerate's YAML as a plan and what a recipe says with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.interop.migrate._deepspeed import read_deepspeed
from weft.interop.migrate._keys import AUTO, MigratedSettings, keys_of, read_keys

Values = Mapping[str, Any]

_KEYS = keys_of("accelerate")
_TO = {name: key.to for name, key in _KEYS.items()}

BATCH_SIZE = "batch_size"
"""Key of `--fill` for the batch of a process: a configuration of Accelerate leaves it to the script's DataLoader."""
_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")


def read_accelerate(
    table: Values,
    settings: MigratedSettings,
    processes: int | None,
    filled: Values,
    read_file: Callable[[str], Values],
) -> None:
    """Note in `settings` what a configuration of Accelerate becomes; `read_file` reads the DeepSpeed file it names."""
    own = {name: value for name, value in filled.items() if name == BATCH_SIZE}
    values = read_keys(table, _KEYS, settings, own)
    kind = values.get("distributed_type", "NO")
    if kind not in _TYPES:
        known = ", ".join(_TYPES)
        settings.refuse("distributed_type", f"Weft runs on CPUs and CUDA devices, and not as {kind}. Known: {known}.")
        return
    _refuse_other_sections(table, kind, settings)
    ranks = processes or values.get("num_processes", 1 if kind == "NO" else None)
    if ranks is None or ranks < 1:
        settings.refuse("num_processes", "is missing. Give --processes N.")
        return
    _compilation(values, settings)
    if kind == "DEEPSPEED":
        read_deepspeed(_as_deepspeed(values, settings, read_file), settings, ranks, filled)
        return
    _precision(values, settings)
    if kind == "FSDP":
        _fsdp(values, settings, ranks)
    elif kind == "MEGATRON_LM":
        _megatron(values, settings, ranks)
    else:
        settings.set(_TO["distributed_type"], 0, f"distributed_type = {kind}")
        settings.set("plan.mesh.replicate", ranks, f"num_processes = {ranks}")
    if not settings.problems:
        _batch(values, settings, filled, ranks)


_SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}


def _refuse_other_sections(table: Values, kind: str, settings: MigratedSettings) -> None:
    for section, of in _SECTIONS.items():
        if table.get(section) and of != kind:
            settings.refuse(
                section, f"has no effect with distributed_type = {kind}. Leave it out, or write distributed_type: {of}."
            )


def _precision(values: Values, settings: MigratedSettings) -> None:
    word = values.get("mixed_precision", "fp16" if values.get("fp16") else "no")
    word = "no" if word in (False, None) else word  # YAML reads `no` as false
    if word not in ("no", "fp16", "bf16"):
        settings.refuse("mixed_precision", f"Weft does not compute in {word}. Write bf16, fp16 or no.")
    elif word != "no":
        settings.set(_TO["mixed_precision"], word, f"mixed_precision = {word}")
        settings.set("recipe.permit.precision", ["fp32", word], f"mixed_precision = {word}")


def _compilation(values: Values, settings: MigratedSettings) -> None:
    for name in ("dynamo_backend", "dynamo_config.dynamo_backend"):
        backend = str(values.get(name, "no")).lower()
        if backend == "inductor":
            settings.set(_TO[name], True, f"{name} = {backend}, block by block")
        elif backend not in ("no", "false"):
            settings.refuse(name, f"blocks are compiled by inductor, not by {backend}. Write INDUCTOR or NO.")


# ── FSDP ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_STRATEGIES = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_STAGES = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}


def _fsdp(values: Values, settings: MigratedSettings, ranks: int) -> None:
    key, strategy = _strategy(values)
    if strategy not in _STAGES:
        settings.refuse(
            key,
            f"{strategy} is none of {', '.join(_STAGES)}"
            + (": ZeRO-2 shares out over all data ranks. Write HYBRID_SHARD." if strategy.endswith("ZERO2") else "."),
        )
        return
    said = f"{key} = {strategy}"
    settings.set(_TO[key], _STAGES[strategy], said)
    # A parallelism_config has said the axes already; it wins over what the strategy would make of all ranks.
    if any(name in settings.plan for name in ("mesh.shard", "mesh.replicate", "mesh.tensor", "mesh.context")):
        _fill_mesh(settings, ranks)
        return
    machines = values.get("num_machines") or 1
    if strategy != "HYBRID_SHARD":
        settings.set(
            f"plan.mesh.{'shard' if _STAGES[strategy] == 3 else 'replicate'}", ranks, f"num_processes = {ranks}"
        )
    elif ranks % machines:
        settings.refuse("num_processes", f"{ranks} is no multiple of num_machines = {machines}.")
    else:
        settings.set("plan.mesh.shard", ranks // machines, f"{said}: the ranks of a machine")
        settings.set("plan.mesh.replicate", machines, f"{said}: num_machines")


def _strategy(values: Values) -> tuple[str, str]:
    """Return the key that says how weights are shared out, and FSDP 1's word for it."""
    # FSDP 1 names a strategy; FSDP 2 has a flag, for which configurations that were converted may still hold FSDP 1's
    # word.
    prefix = "fsdp_config.fsdp_"
    reshards = values.get(f"{prefix}reshard_after_forward")
    if f"{prefix}sharding_strategy" in values and not isinstance(reshards, bool):
        word = str(values[f"{prefix}sharding_strategy"])
        return f"{prefix}sharding_strategy", _STRATEGIES.get(word, word)
    if isinstance(reshards, str) and reshards.lower() not in ("true", "false"):
        return f"{prefix}reshard_after_forward", _STRATEGIES.get(reshards, reshards)
    keeps = str(reshards).lower() == "false"
    return f"{prefix}reshard_after_forward", "SHARD_GRAD_OP" if keeps else "FULL_SHARD"


def _fill_mesh(settings: MigratedSettings, ranks: int) -> None:
    """Axes of parallelism_config; Accelerate gives the shard axis what they leave."""
    axes = {name: settings.plan.get(f"mesh.{name}", 1) for name in ("replicate", "shard", "tensor", "context")}
    known = 1
    for size in axes.values():
        known *= size
    if "mesh.shard" not in settings.plan and ranks % known == 0:
        settings.set("plan.mesh.shard", ranks // known, f"num_processes = {ranks}, over the other axes")
    elif known != ranks:
        settings.refuse(
            "parallelism_config",
            f"its axes ({', '.join(f'{name} {size}' for name, size in axes.items())}) make {known} ranks, and"
            f" num_processes is {ranks}. Make them equal.",
        )


# ── DeepSpeed, Megatron-LM and the batch ──────────────────────────────────────────────────────────────────────────────


def _as_deepspeed(values: Values, settings: MigratedSettings, read_file: Callable[[str], Values]) -> Values:
    """Return the DeepSpeed configuration of Accelerate's section: the file that it names, or a small one."""
    prefix = "deepspeed_config."
    own_values = {name[len(prefix) :]: value for name, value in values.items() if name.startswith(prefix)}
    named = own_values.pop("deepspeed_config_file", None)
    if named is not None:
        for name in sorted(own_values):
            if _KEYS[f"{prefix}{name}"].outcome == "translated" and name in _CLASHING:
                settings.refuse(
                    f"{prefix}{name}",
                    f"has no effect beside deepspeed_config_file. Write it in {named}, or leave it out.",
                )
        return read_file(named)
    sharding: dict[str, Any] = {"stage": own_values.get("zero_stage", 2)}
    for section in ("offload_optimizer", "offload_param"):
        if f"{section}_device" in own_values:
            device = {"device": own_values[f"{section}_device"], "nvme_path": own_values.get(f"{section}_nvme_path")}
            sharding[section] = {name: value for name, value in device.items() if value is not None}
    table: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": _number(own_values.get("gradient_accumulation_steps", 1)),
        "gradient_clipping": _number(own_values.get("gradient_clipping", 0)),
        "zero_optimization": sharding,
    }
    word = values.get("mixed_precision", "no")
    if word in ("fp16", "bf16"):
        table[word] = {"enabled": True}
    elif word not in ("no", False, None):
        settings.refuse("mixed_precision", f"Weft does not compute in {word}. Write bf16, fp16 or no.")
    return table


_CLASHING = (
    *("zero_stage", "gradient_accumulation_steps", "gradient_clipping"),
    *("offload_optimizer_device", "offload_param_device"),
)


def _number(value: Any) -> Any:
    """Accelerate's questions leave numbers as text."""
    try:
        return float(value) if "." in str(value) else int(value)
    except ValueError:
        return value


def _megatron(values: Values, settings: MigratedSettings, ranks: int) -> None:
    axes = [settings.plan.get(f"mesh.{name}", 1) for name in ("tensor", "pipeline", "context")]
    product = axes[0] * axes[1] * axes[2]
    if ranks % product:
        settings.refuse("num_processes", f"{ranks} is no multiple of tensor × pipeline × context ranks = {product}.")
        return
    settings.set("plan.mesh.replicate", ranks // product, f"num_processes = {ranks}, over the other axes")
    norm = values.get("megatron_lm_config.megatron_lm_gradient_clipping")
    if norm:
        settings.set(
            _TO["megatron_lm_config.megatron_lm_gradient_clipping"], float(norm), "megatron_lm_gradient_clipping"
        )


def _batch(values: Values, settings: MigratedSettings, filled: Values, ranks: int) -> None:
    """The batch of a process is the script's own; what is missing is asked for."""
    size = filled.get(BATCH_SIZE)
    if size is None:
        settings.problems.append(
            f"{BATCH_SIZE}: an Accelerate configuration does not say it: it is DataLoader(batch_size=…) of the script,"
            f" on each process. Give --fill {BATCH_SIZE}=8."
        )
        return
    mesh = {name: settings.plan.get(f"mesh.{name}", 1) for name in ("tensor", "pipeline", "context")}
    data = ranks // (mesh["tensor"] * mesh["pipeline"] * mesh["context"])
    steps = values.get("megatron_lm_config.megatron_lm_num_micro_batches") or 1
    settings.set("plan.microbatch.size", size, f"{BATCH_SIZE} = {size} of a process")
    settings.set(
        _TO["megatron_lm_config.megatron_lm_num_micro_batches"],
        steps,
        "gradient_accumulation_steps of the script, where it has them",
    )
    settings.set("recipe.batch.global_batch_size", size * steps * data, f"{size} × {steps} × {data} data ranks")
