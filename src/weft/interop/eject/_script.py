"""Writes a recipe and a plan as a script: chooses flags and values for the fragments, and their order."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import PurePath

from weft.config.plan import DataParallelPlan, ModelFacts, Plan
from weft.config.recipe import DecoderShape, Recipe, decay_start, read_hf_config
from weft.interop.eject._compose import Composer, join
from weft.interop.eject._constants import axes, constants
from weft.interop.eject._refuse import check_ejectable
from weft.model.description import facts_of
from weft.techniques.zero.contract import reduces_every_microbatch

FLAGS = (
    *("world", "data", "pipeline", "deep", "tensor", "sequence"),
    *("zero0", "zero1", "fsdp", "hybrid", "once", "cuts", "counted", "master", "unequal"),
    *("decoder", "tied", "gqa", "dropout", "recomputes", "compile", "cpu", "narrow", "fp64"),
    *("clip", "warmup", "decays", "cosine"),
)


def eject(
    recipe: Recipe, plan: Plan, *, name: str = "train.py", token_dtype: str = "<u2", cuts: Sequence[int] = ()
) -> str:
    """Return a plain PyTorch script that trains `recipe` under `plan` to the same losses as Weft.

    Args:
        name: of the script.  Beside it, it wants the training documents in one file `.tokens`, an array `.order.npy` of
            where in it each sample begins, and `.weights.safetensors` for a model that it does not write out.
        token_dtype: of the tokens, `<u2` or `<u4`.
        cuts: first blocks of the later pipeline stages.

    Raises:
        PlanError, RecipeError: a script for this plan or recipe would not be plain, or not reach the same losses.
    """
    check_ejectable(recipe, plan)
    facts = facts_of(recipe)
    flags = frozenset(flag for flag, is_set in _flags(recipe, plan, facts).items() if is_set)
    # Conditions are decided here, once: the script has no branch that its plan does not take.
    composer = Composer(flags, FLAGS, _values(recipe, plan, flags))
    sections = [constants(recipe, plan, facts, token_dtype, cuts)]
    sections += [composer.render(fragment) for fragment in _fragments(recipe, flags)]
    imports = composer.render("imports")
    if recipe.model.factory is not None:
        module, _, function = recipe.model.factory.partition(":")
        imports += f"\nfrom {module} import {function.partition('.')[0]}"
    return join(_header(recipe, plan, facts, name, flags), imports, sections)


def _flags(recipe: Recipe, plan: Plan, facts: ModelFacts) -> Mapping[str, bool]:
    mesh, states, shape = plan.mesh, plan.data_parallel, recipe.model.shape
    data, tensor, pipeline = mesh.data > 1, mesh.tensor > 1, mesh.pipeline > 1
    # `fully_shard` does ZeRO-2 and 3.  ZeRO-1 is torch's `ZeroRedundancyOptimizer`, over gradients that are summed as
    # without ZeRO.
    fsdp = data and states.shards_gradients
    zero1, zero0 = data and states.gathers_after_step and not fsdp, data and not states.shards_states
    hybrid = fsdp and states.shards_weights and mesh.replicate > 1
    narrow = plan.compute.precision == "bf16"
    tied, optimizer = bool(facts.tied), recipe.optimizer
    return {
        "world": mesh.world_size > 1,
        "data": data,
        "pipeline": pipeline,
        "deep": mesh.pipeline > 2,
        "tensor": tensor,
        "sequence": plan.tensor_parallel.sequence,
        "zero0": zero0,
        "zero1": zero1,
        "fsdp": fsdp,
        "hybrid": hybrid,
        "once": not reduces_every_microbatch(plan),
        "cuts": tensor or fsdp,
        # `fully_shard` keeps fp32 masters and casts by itself; elsewhere the script keeps them, as Weft does.
        "master": not fsdp and (narrow or tensor),
        "unequal": len(set(plan.microbatch.shares(mesh.data))) > 1,
        "counted": tensor or (pipeline and tied),
        "decoder": shape is not None,
        "tied": tied,
        "gqa": isinstance(shape, DecoderShape) and (shape.num_kv_heads or shape.num_heads) != shape.num_heads,
        "dropout": isinstance(shape, DecoderShape) and shape.dropout > 0,
        "recomputes": plan.memory.recomputes_whole_blocks,
        "compile": plan.compute.compile,
        "cpu": plan.compute.device == "cpu",
        "narrow": narrow,
        "fp64": plan.compute.precision == "fp64",
        "clip": optimizer.max_grad_norm is not None,
        "warmup": optimizer.warmup_steps > 0,
        "decays": decay_start(recipe) is not None,
        "cosine": optimizer.falls_along_cosine,
    }


def _values(recipe: Recipe, plan: Plan, flags: frozenset[str]) -> dict[str, str]:
    return {**_model_values(recipe, plan), **_optimizer_values(recipe), **_layout_values(recipe, plan, flags)}


def _model_values(recipe: Recipe, plan: Plan) -> dict[str, str]:
    model, pipeline = recipe.model, plan.mesh.pipeline > 1
    blocks = "model.model.layers" if model.hf is not None else f"model.blocks{'.values()' if pipeline else ''}"
    return {
        "blocks": blocks,
        "units": f"(*{blocks}, model)" if model.factory is None else "(model,)",
        "logits": ".logits" if model.hf is not None else "",
        "function": (model.factory or ":").partition(":")[2],
        "arguments": ", ".join(f"{key}={value!r}" for key, value in model.arguments.items()),
        "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}.get(plan.compute.precision, ""),
    }


def _optimizer_values(recipe: Recipe) -> dict[str, str]:
    optimizer, decay = recipe.optimizer, _decay_words(recipe)
    adamw = optimizer.name == "adamw"
    return {
        "decay": f"; {decay}" if decay else ", then stays",
        "Decay": f"{decay[:1].upper()}{decay[1:]}" if decay else "Always the same",
        "vector_decay": "WEIGHT_DECAY" if optimizer.decay_one_dimensional else "0.0",
        "class": "torch.optim.AdamW" if adamw else "torch.optim.SGD",
        "settings": "betas=BETAS, eps=EPSILON, fused=True"
        if adamw
        else f"lr=0.0, momentum=MOMENTUM, nesterov={optimizer.nesterov}, fused=True",
    }


def _layout_values(recipe: Recipe, plan: Plan, flags: frozenset[str]) -> dict[str, str]:
    mesh, data, pipeline = plan.mesh, plan.data_parallel, plan.mesh.pipeline > 1
    even = not plan.microbatch.has_unequal_shares
    # A stage's weights serve many microbatches, so a pipeline gathers them once per step, as Weft's plan does.
    regather = data.shards_weights and not pipeline
    cut = "cuts" in flags
    world = " and dist.get_rank() == 0" if "world" in flags else ""
    head = "head.weight" if recipe.model.shape is not None else "lm_head.weight"
    # Parameters that several ranks hold count once in the gradient norm: norms on the first tensor rank, and a tied
    # head, which the last stage has a copy of, on the first stage.
    counts = ['(leads or "norm" not in name)'] if "tensor" in flags else []
    counts += [f'name != "{head}"'] if {"pipeline", "tied"} <= flags else []
    words = ["norms count on the first tensor rank only"] if "tensor" in flags else []
    words += ["the shared weight on the first stage"] if {"pipeline", "tied"} <= flags else []
    return {
        "data_mesh": 'mesh["replicate", "shard"]' if "hybrid" in flags else 'mesh["data"]',
        "reshard": "unit is not model" if regather else "False",
        "sharding": _sharding_words(data, hybrid="hybrid" in flags, pipeline=pipeline),
        "schedule_class": f"Schedule{plan.pipeline_parallel.torch_schedule}",
        "count": "MICROBATCHES" if even else "count",
        "grad": "local(weight.grad)" if "fsdp" in flags else "weight.grad",
        "w_grad": "local(w.grad)" if "fsdp" in flags else "w.grad",
        "parameter_grad": "local(parameter.grad, parameter)" if cut else "parameter.grad",
        "p_local": "local(p, p)" if cut else "p",
        "copied": "local(parameters[name], parameters[name])" if cut else "parameters[name]",
        "normed": "counted" if "counted" in flags else "weights.values()",
        "embedding": "embedding.weight" if recipe.model.shape is not None else "model.embed_tokens.weight",
        "head": head,
        "counted": " and ".join(words),
        "counts_here": " and ".join(counts) if len(counts) > 1 else "".join(counts).strip("()"),
        "loss_share": ' / MESH["tensor"]' if mesh.tensor > 1 else "",
        "square_share": ' / MESH["data"]'
        if flags & {"zero0", "zero1"}
        else ' / MESH["replicate"]'
        if "hybrid" in flags
        else "",
        "reports": f"(step + 1) % LOG_EVERY == 0{world}",
        "save": _save_statement(plan, flags),
    }


def _save_statement(plan: Plan, flags: frozenset[str]) -> str:
    weights = "trained" if "cuts" in flags else "parameters"
    if "pipeline" in flags:
        save = f'save_file({weights}, HERE.with_suffix(f".stage-{{index}}.safetensors"))'
        others = [axis for axis in axes(plan) if axis != "pipeline"]
        if not others:
            return save
        first = " + ".join(f'mesh.get_local_rank("{axis}")' for axis in others)
        return f"if {first} == 0:\n        {save}"
    save = f'save_file({weights}, HERE.with_suffix(".trained.safetensors"))'
    return f"if dist.get_rank() == 0:\n        {save}" if "world" in flags else save


def _decay_words(recipe: Recipe) -> str:
    start = decay_start(recipe)
    if start is None:
        return ""
    how = "falls along a cosine" if recipe.optimizer.falls_along_cosine else "falls linearly"
    wait = "stays, then " if recipe.optimizer.stays_before_decay else ""
    return f"{wait}{how} in the end"


def _sharding_words(data: DataParallelPlan, *, hybrid: bool, pipeline: bool) -> str:
    if not data.shards_weights:
        return "ZeRO-2: data ranks share gradients and optimizer; weights stay gathered from forward to backward"
    over = "Hybrid: ZeRO-3 over `shard`, copies over `replicate`" if hybrid else "ZeRO-3 over the data ranks"
    if pipeline:
        return f"{over}; a stage gathers its weights once per step"
    return f"{over}; a block's weights are gathered just before it computes"


def _fragments(recipe: Recipe, flags: frozenset[str]) -> Iterator[str]:
    """Names of the fragments, from top to bottom."""
    model = recipe.model
    kind = "decoder" if model.shape is not None else "hf" if model.hf is not None else "factory"
    yield kind
    if kind == "decoder":
        yield "initial"
    if "tensor" in flags:
        yield f"tensor_{kind}"
    if "fsdp" in flags:
        yield "fsdp"
    if "pipeline" in flags:
        yield "pipeline"
        if {"tied", "deep"} <= flags:
            yield "shared"
    if "cuts" in flags:
        yield "local"
    if "narrow" in flags and "fsdp" not in flags:
        yield "narrow"
    yield from ("loss", "rate", "main")


def _header(recipe: Recipe, plan: Plan, facts: ModelFacts, name: str, flags: frozenset[str]) -> str:
    """The script's docstring: what it does, how it is started, what it reads, what it leaves out."""
    world, stem = plan.mesh.world_size, PurePath(name).stem
    size = f" of {facts.num_parameters:,} parameters" if facts.num_parameters else ""
    ranks = "one process" if world == 1 else f"{world} processes: {_mesh_words(plan, flags)}"
    start = f"python {name}" if world == 1 else f"torchrun --nproc-per-node {world} {name}"
    files = [f"{stem}.tokens", f"{stem}.order.npy"]
    if recipe.model.shape is None:
        files.append(f"{stem}.weights.safetensors")
    needs = ["torch", "numpy", "safetensors", *(("transformers",) if recipe.model.hf is not None else ())]
    text = (
        f"Plain PyTorch, ejected by Weft {version('weft')} (recipe {recipe.digest}, plan {plan.digest}). It needs "
        f"{_listed(needs)}, and beside it {_listed(files)}. {_equality_words(recipe, facts)} "
        f"Left out: {_listed(_left_out(recipe, plan))}."
    )
    lines = [
        f'"""Train a {facts.name}{size} for {recipe.run.steps:,} steps on {ranks}.',
        "",
        f"    {start}",
        "",
        *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False),
        '"""',
    ]
    return "\n".join(lines)


def _mesh_words(plan: Plan, flags: frozenset[str]) -> str:
    mesh, settings = plan.mesh, plan.data_parallel
    data = f"replicate {mesh.replicate} × shard {mesh.shard}" if "hybrid" in flags else f"data {mesh.data}"
    stage = f" ({settings.stage_name})" if settings.shards_states and mesh.data > 1 else ""
    axes = [
        (mesh.data, f"{data}{stage}"),
        (mesh.tensor, f"tensor {mesh.tensor}"),
        (mesh.pipeline, f"pipeline {mesh.pipeline}"),
    ]
    return " × ".join(text for size, text in axes if size > 1)


def _equality_words(recipe: Recipe, facts: ModelFacts) -> str:
    shape = recipe.model.shape
    if isinstance(shape, DecoderShape) and shape.dropout > 0:
        return "Dropout is drawn otherwise than in Weft, so losses agree on average, not step by step."
    if recipe.model.hf is not None and _drops(read_hf_config(recipe.model.hf)):
        return "Dropout is drawn otherwise than in Weft, so losses agree on average, not step by step."
    if recipe.model.factory is not None:
        return "Without dropout it reaches the losses of `weft train` to rounding."
    return "It reaches the losses of `weft train` to rounding."


def _drops(config: Mapping[str, object]) -> bool:
    return any(isinstance(value, float) and value > 0 for key, value in config.items() if "drop" in key)


def _left_out(recipe: Recipe, plan: Plan) -> list[str]:
    parts = ["evaluation", "checkpoints to resume from"]
    if plan.memory.fuses_loss:
        parts.append("the fused loss (logits are held whole)")
    if recipe.optimizer.average_decay is not None:
        parts.append("the moving average of the weights")
    return parts


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
