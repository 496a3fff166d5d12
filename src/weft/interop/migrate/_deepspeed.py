"""DeepSpeed's JSON as a plan and what a recipe says with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from weft.interop.migrate._keys import AUTO, MigratedSettings, keys_of, read_keys

Values = Mapping[str, Any]

_KEYS = keys_of("deepspeed")
_TO = {name: key.to for name, key in _KEYS.items()}
_OFFLOADS = "zero_optimization.offload_optimizer"
_WEIGHTS_OFFLOAD = "zero_optimization.offload_param"
_ACTIVATIONS = "activation_checkpointing.cpu_checkpointing"

_OLD_NAMES = {"bfloat16": "bf16"}
_PRECISIONS = {"bfloat16": "bf16", "bf16": "bf16", "bfp16": "bf16", "float16": "fp16", "fp16": "fp16"}


def read_deepspeed(table: Values, settings: MigratedSettings, processes: int | None, filled: Values) -> None:
    """Note in `settings` what a configuration of DeepSpeed becomes on so many processes."""
    values = read_keys(_as_sections(table), _KEYS, settings, filled)
    for part in (_precision, _gradients, _memory, _optimizer, _schedule, _clipping, _run):
        part(values, settings)
    _mesh(values, settings, processes)
    _permissions(settings)


def _as_sections(table: Values) -> Values:
    """Names and forms that DeepSpeed reads from before: `bfloat16`, `zero_optimization: true`, flags for sections."""
    named = {_OLD_NAMES.get(name, name): value for name, value in table.items()}
    if isinstance(named.get("zero_optimization"), bool):
        named["zero_optimization"] = {"stage": int(named["zero_optimization"])}
    return {
        name: {"enabled": value} if name in ("fp16", "bf16") and value in (True, False, AUTO) else value
        for name, value in named.items()
    }


# ── the batch and the mesh ────────────────────────────────────────────────────────────────────────────────────────────


def _mesh(values: Values, settings: MigratedSettings, processes: int | None) -> None:
    tensor = values.get("tensor_parallel.autotp_size") or values.get("tensor_parallel.tp_size") or 1
    context = values.get("sequence_parallel_size") or 1
    data = _data_ranks(values, settings, processes, tensor * context)
    if data is None:
        return
    # DeepSpeed names the sizes of model axes; data ranks are what the processes leave.
    if tensor > 1:
        settings.set(_TO["tensor_parallel.autotp_size"], tensor, f"tensor_parallel.autotp_size = {tensor}")
    if context > 1:
        settings.set("plan.context_parallel.scheme", "ulysses", "sequence_parallel_size is Ulysses")
    shard = values.get("zero_optimization.mics_shard_size") or 0
    if shard > 0:
        _hybrid(values, settings, data, shard)
    else:
        # A plan's stages 1 and 2 shard over all data ranks, on whichever axis these are; stage 3 over `shard` alone.
        axis = "shard" if values.get("zero_optimization.stage") == 3 else "replicate"
        settings.set(f"plan.mesh.{axis}", data, f"{processes or data} processes / tensor {tensor} / context {context}")
    _batch(values, settings, data)


def _hybrid(values: Values, settings: MigratedSettings, data: int, shard: int) -> None:
    name = "zero_optimization.mics_shard_size"
    if values.get("zero_optimization.stage") != 3:
        settings.refuse(name, "MiCS goes with stage 3 only. Write stage 3, or leave it out.")
    elif data % shard:
        settings.refuse(name, f"{shard} does not divide {data} data ranks. Write a divisor of {data}.")
    else:
        settings.set("plan.mesh.shard", shard, f"{name} = {shard}")
        settings.set("plan.mesh.replicate", data // shard, f"{data} data ranks / {shard}")


def _data_ranks(values: Values, settings: MigratedSettings, processes: int | None, model_ranks: int) -> int | None:
    """Return the number of data ranks, of the processes or else of the three batch keys."""
    if processes is not None:
        if processes % model_ranks:
            settings.refuse(
                "tensor_parallel.autotp_size and sequence_parallel_size",
                f"{processes} processes are no multiple of their product, {model_ranks}.",
            )
            return None
        return processes // model_ranks
    whole, micro, steps = (values.get(name) for name in _BATCH_KEYS)
    if whole and micro and steps and whole % (micro * steps) == 0:
        return whole // (micro * steps)
    settings.problems.append(
        "how many processes there are stands nowhere: the launcher knows it. Give --processes N, or all of"
        f" {', '.join(_BATCH_KEYS)}."
    )
    return None


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(values: Values, settings: MigratedSettings, data: int) -> None:
    """DeepSpeed's rule: batch = microbatch × accumulation × data ranks; what is missing follows from the others."""
    whole, micro, steps = (values.get(name) for name in _BATCH_KEYS)
    if whole is None and micro is None:
        settings.problems.append(
            "train_batch_size: neither it nor train_micro_batch_size_per_gpu is there, and DeepSpeed takes no such"
            " configuration. Write one of them."
        )
        return
    # As `DeepSpeedConfig` does it: two of the three numbers give the third, one alone leaves accumulation at 1.
    if micro is None:
        micro = cast(int, whole) // ((steps or 1) * data)
    if steps is None:
        steps = cast(int, whole) // (micro * data) if whole is not None and micro else 1
    if micro < 1 or steps < 1 or (whole is not None and whole != micro * steps * data):
        size = micro * steps * data
        settings.refuse(
            "train_batch_size",
            f"{whole} is not microbatch {micro} × accumulation {steps} × {data} data ranks = {size}. Write"
            f" {max(size, data)}, or change --processes.",
        )
        return
    product = f"{micro} × {steps} × {data} data ranks"
    settings.set(_TO["train_batch_size"], micro * steps * data, f"train_batch_size: {product}")
    settings.set(_TO["train_micro_batch_size_per_gpu"], micro, "train_micro_batch_size_per_gpu")
    settings.set(_TO["gradient_accumulation_steps"], steps, "gradient_accumulation_steps")


# ── precision, gradients and memory ───────────────────────────────────────────────────────────────────────────────────


def _precision(values: Values, settings: MigratedSettings) -> None:
    names = [name for name in ("fp16", "bf16", "torch_autocast") if values.get(f"{name}.enabled")]
    if len(names) > 1:
        settings.refuse(f"{names[0]}.enabled", f"and {names[1]}.enabled: a plan has one precision. Leave one on.")
    for name in names[:1]:
        word = _PRECISIONS[values.get("torch_autocast.dtype", "bf16")] if name == "torch_autocast" else name
        settings.set(_TO[f"{name}.enabled"], word, f"{name}.enabled")


def _gradients(values: Values, settings: MigratedSettings) -> None:
    computed = settings.plan.get(_TO["bf16.enabled"].partition(".")[2], "fp32")
    for name in ("data_types.grad_accum_dtype", "communication_data_type"):
        word = values.get(name)
        if word is None:
            continue
        if word == "fp32":
            settings.set(_TO["data_types.grad_accum_dtype"], "fp32", f"{name} = {word}")
        elif _PRECISIONS[word] == computed:
            settings.set(_TO["data_types.grad_accum_dtype"], "compute", f"{name} = {word}")
        elif name == "communication_data_type" and _PRECISIONS[word] == "bf16":
            settings.set(_TO["communication_data_type"], "bf16", f"{name} = {word}")
        else:
            settings.refuse(name, f"gradients are summed in fp32, or in the plan's {computed}. Write one of them.")
    elements = values.get("zero_optimization.reduce_bucket_size")
    if elements:
        reason = f"zero_optimization.reduce_bucket_size = {int(elements):,} elements of 4 bytes"
        settings.set(_TO["zero_optimization.reduce_bucket_size"], int(elements) * 4, reason)


def _memory(values: Values, settings: MigratedSettings) -> None:
    """One word of a plan for what waits elsewhere, which three keys say here, and one place."""
    optimizer, weights = (values.get(f"{section}.device", "none") for section in (_OFFLOADS, _WEIGHTS_OFFLOAD))
    if weights != "none" and not _may_leave(weights, values, settings):
        return
    # A plan keeps masters and states where the weights are, so weights that leave take the optimizer with them.
    words = [f"{_WEIGHTS_OFFLOAD}.device = {weights}"] if weights != "none" else []
    words += [f"{_OFFLOADS}.device = {optimizer}"] if optimizer != "none" else []
    what = ["parameters" if weights != "none" else "optimizer"] if words else []
    if values.get(_ACTIVATIONS):
        what.append("activations")
        words.append(f"{_ACTIVATIONS} = true")
    if not what:
        return
    said = " and ".join(words)
    if weights != "none" and optimizer == "none":
        said += ": masters and optimizer states go with them"
    settings.set(_TO[f"{_OFFLOADS}.device"], "+".join(what), said)
    if "nvme" in (weights, optimizer):
        settings.set(_TO[f"{_OFFLOADS}.device"] + "_to", "disk", f"{said}; all of it has one place")
        for section, device in ((_WEIGHTS_OFFLOAD, weights), (_OFFLOADS, optimizer)):
            if device == "nvme" and f"{section}.nvme_path" in values:
                settings.set(_TO[f"{section}.nvme_path"], values[f"{section}.nvme_path"], f"{section}.nvme_path")


def _may_leave(device: str, values: Values, settings: MigratedSettings) -> bool:
    """Whether weights can wait where `offload_param` wants them; else it is refused."""
    name = f"{_WEIGHTS_OFFLOAD}.device (Accelerate calls it offload_param_device)"
    if values.get("zero_optimization.stage") != 3:
        settings.refuse(name, "weights can wait elsewhere where stage 3 shares them out. Write stage 3, or none here.")
    elif device == "cpu":
        settings.refuse(
            name,
            "weights do not wait in the memory of the host. Write nvme, which keeps them, their gradients and the"
            " optimizer on a disk where ranks compute on CPUs; or none: the optimizer can wait there"
            " (offload_optimizer).",
        )
    else:
        return True
    return False


def _permissions(settings: MigratedSettings) -> None:
    """Add the permissions that a recipe must give for what the plan does to numerics."""
    for to, always in ((_TO["bf16.enabled"], ["fp32"]), (_TO["communication_data_type"], [])):
        name, value = to.rpartition(".")[2], settings.plan.get(to.partition(".")[2])
        if value not in (None, "fp32", "none"):
            settings.set(f"recipe.permit.{name}", [*always, value], settings.reasons[to])


# ── what is trained ───────────────────────────────────────────────────────────────────────────────────────────────────

_ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")
_NO_OPTIMIZERS = {
    "lion": "Lion",
    "adagrad": "Adagrad",
    "lamb": "LAMB with a bounded trust ratio (max_coeff, min_coeff)",
    "onebitlamb": "1-bit LAMB",
    "zerooneadam": "0/1 Adam",
    "muon": "Muon",
    "muadam": "MuAdam",
    "muadamw": "MuAdamW",
    "musgd": "MuSGD",
}


def _optimizer(values: Values, settings: MigratedSettings) -> None:
    kind = values.get("optimizer.type")
    if kind is None:
        _refuse_without_type("optimizer", "AdamW", values, settings)
        return
    word = kind.lower().replace("_", "")
    if word in _ADAM or word == "onebitadam":
        _adamw(values, settings, kind)
        # 1-bit Adam is AdamW whose gradients are compressed after a warm-up; in a plan that is a compression.
        if word == "onebitadam":
            settings.set(_TO["communication_data_type"], "onebit", f"optimizer.type = {kind}")
            steps = values.get("optimizer.params.freeze_step", 100_000)
            settings.set(_TO["optimizer.params.freeze_step"], steps, "optimizer.params.freeze_step")
    elif word == "sgd":
        _sgd(values, settings, kind)
    else:
        name = _NO_OPTIMIZERS.get(word, kind)
        settings.refuse(
            "optimizer.type",
            f"a recipe has no {name}. Write AdamW, SGD or OneBitAdam; or give the torch optimizer of your own to"
            " weft.session, and leave the section out here.",
        )


def _adamw(values: Values, settings: MigratedSettings, kind: str) -> None:
    """`Adam` is AdamW there, too: adam_w_mode is true by default."""
    said = f"optimizer.type = {kind}"
    decay = values.get("optimizer.params.weight_decay", 0.0)
    if not values.get("optimizer.params.adam_w_mode", True) and decay:
        settings.refuse(
            "optimizer.params.adam_w_mode", "a recipe's AdamW decays weights beside the gradient. Write true."
        )
    _refuse_unused(values, settings, kind, ("momentum", "nesterov"))
    betas = values.get("optimizer.params.betas", [0.9, 0.999])
    settings.set(_TO["optimizer.type"], "adamw", f"{said}: DeepSpeed's Adam is AdamW unless adam_w_mode is false")
    _common(values, settings, said)
    settings.set(_TO["optimizer.params.betas"], list(betas), "optimizer.params.betas")
    settings.set(_TO["optimizer.params.eps"], values.get("optimizer.params.eps", 1e-8), "optimizer.params.eps")


def _sgd(values: Values, settings: MigratedSettings, kind: str) -> None:
    said = f"optimizer.type = {kind}"
    _refuse_unused(values, settings, kind, ("betas", "eps", "adam_w_mode"))
    settings.set(_TO["optimizer.type"], "sgd", said)
    _common(values, settings, said)
    momentum = values.get("optimizer.params.momentum", 0.0)
    settings.set(_TO["optimizer.params.momentum"], momentum, "optimizer.params.momentum, which torch has as 0")
    if values.get("optimizer.params.nesterov"):
        settings.set(_TO["optimizer.params.nesterov"], True, "optimizer.params.nesterov")


def _common(values: Values, settings: MigratedSettings, said: str) -> None:
    rate = values.get("optimizer.params.lr", 1e-3)
    settings.set(_TO["optimizer.params.lr"], rate, f"optimizer.params.lr, or {said}'s own 0.001")
    decay = values.get("optimizer.params.weight_decay", 0.0)
    if decay:
        settings.set(_TO["optimizer.params.weight_decay"], decay, "optimizer.params.weight_decay")
        settings.set(
            "recipe.optimizer.decay_one_dimensional",
            True,
            "DeepSpeed decays every parameter that it is given, biases and norms, too; transformers' Trainer leaves"
            " them out: then false",
        )


def _refuse_unused(values: Values, settings: MigratedSettings, kind: str, names: tuple[str, ...]) -> None:
    for name in names:
        if f"optimizer.params.{name}" in values:
            settings.refuse(f"optimizer.params.{name}", f"{kind} has no such setting. Leave it out.")


def _refuse_without_type(section: str, example: str, values: Values, settings: MigratedSettings) -> None:
    names = [name for name in values if name.startswith(f"{section}.params.")]
    if names:
        settings.refuse(f"{section}.type", f"is missing beside {', '.join(names)}. Write its name, such as {example}.")


_RISE = "Weft's rate rises from its first step, DeepSpeed's stays at the minimum in its first two"
_ENDS: Mapping[str, Callable[[Values], tuple[str, float | None]]] = {
    "warmuplr": lambda _: ("constant", None),
    "warmupdecaylr": lambda _: ("linear", 0.0),
    "warmupcosinelr": lambda values: ("cosine", values.get("scheduler.params.cos_min_ratio", 1e-4)),
}


def _schedule(values: Values, settings: MigratedSettings) -> None:
    kind = values.get("scheduler.type")
    if kind is None:
        _refuse_without_type("scheduler", "WarmupDecayLR", values, settings)
        return
    ends = _ENDS.get(kind.lower())
    if ends is None:
        settings.refuse(
            "scheduler.type",
            f"a recipe has no {kind}. Write WarmupLR, WarmupDecayLR or WarmupCosineLR; or use a torch schedule in a"
            " loop of your own (weft.session), and leave the section out here.",
        )
        return
    steps = values.get("scheduler.params.warmup_num_steps", 1000)
    if steps and values.get("scheduler.params.warmup_type", "log") == "log":
        settings.refuse(
            "scheduler.params.warmup_type",
            'DeepSpeed warms up by a logarithm unless it says otherwise, a recipe linearly. Write "linear".',
        )
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        if values.get(f"scheduler.params.{name}", 0):
            settings.refuse(f"scheduler.params.{name}", "a recipe warms up from 0. Write 0.")
    settings.set(_TO["scheduler.params.warmup_num_steps"], steps, f"scheduler.params.warmup_num_steps; {_RISE}")
    _peak(values, settings, kind)
    schedule, ratio = ends(values)
    settings.set(_TO["scheduler.type"], schedule, f"scheduler.type = {kind}")
    if ratio is not None:
        settings.set(_TO["scheduler.params.cos_min_ratio"], ratio, f"where {kind} ends")
        if "scheduler.params.total_num_steps" in values:
            total = values["scheduler.params.total_num_steps"]
            settings.set(_TO["scheduler.params.total_num_steps"], total, "scheduler.params.total_num_steps")


def _peak(values: Values, settings: MigratedSettings, kind: str) -> None:
    """The schedule's own peak, which stands above the optimizer's rate there."""
    peak = values.get("scheduler.params.warmup_max_lr", 1e-3 if kind.lower() == "warmupdecaylr" else None)
    if peak is not None and kind.lower() != "warmupcosinelr":
        settings.recipe.pop(_TO["optimizer.params.lr"].partition(".")[2], None)
        settings.set(_TO["optimizer.params.lr"], peak, "scheduler.params.warmup_max_lr, which wins over lr")


_NO_NORM = 1e30
"""TOML cannot say that nothing is clipped."""


def _clipping(values: Values, settings: MigratedSettings) -> None:
    norm = values.get("gradient_clipping")
    if norm is None:
        settings.set(_TO["gradient_clipping"], 1.0, "gradient_clipping is not there, and is 1.0 then")
    elif norm > 0:
        settings.set(_TO["gradient_clipping"], float(norm), "gradient_clipping")
    else:
        settings.set(_TO["gradient_clipping"], _NO_NORM, "gradient_clipping = 0: no gradient is so long")


def _run(values: Values, settings: MigratedSettings) -> None:
    every = values.get("steps_per_print")
    if every and every < 10**9:
        settings.set(_TO["steps_per_print"], every, "steps_per_print")
