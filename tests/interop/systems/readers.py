"""What a command of another system says, read back: axes, batch, and the model, by hand and not by what wrote it."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from math import prod
from typing import Any

from weft.interop.systems import Emission


@dataclass(frozen=True)
class Read:
    """A command in numbers."""

    world: int
    pipeline: int
    tensor: int
    context: int
    expert: int
    shard: int
    replicate: int
    zero: int
    microbatch: int
    microbatches: int
    global_batch: int
    length: int
    stages: tuple[int, ...]
    model: dict[str, Any]

    @property
    def data(self) -> int:
        return self.shard * self.replicate


def read(emission: Emission) -> Read:
    """Return what a command says."""
    return {
        "megatron": _megatron,
        "torchtitan": _torchtitan,
        "deepspeed": _deepspeed,
        "accelerate": _accelerate,
    }[emission.system](emission)


def _options(words: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            after = words[place + 1] if place + 1 < len(words) else "--"
            options[word] = "" if after.startswith("--") else after
    return options


def _world(options: dict[str, str]) -> int:
    return int(options["--nnodes"]) * int(options["--nproc-per-node"])


def _megatron(emission: Emission) -> Read:
    given = _options(emission.command)

    def size(name: str, default: int = 1) -> int:
        return int(given.get(name, default))

    tensor, pipeline = size("--tensor-model-parallel-size"), size("--pipeline-model-parallel-size")
    context = size("--context-parallel-size")
    world = _world(given)
    data = world // (tensor * pipeline * context)
    stages = given.get("--pipeline-model-parallel-layout", "").split("|")
    batch, micro = size("--global-batch-size"), size("--micro-batch-size")
    biases = {"": "all", "--disable-bias-linear": "none"}["--disable-bias-linear" * ("--disable-bias-linear" in given)]
    model = {
        "layers": size("--num-layers"),
        "hidden": size("--hidden-size"),
        "heads": size("--num-attention-heads"),
        "kv_heads": size("--num-query-groups", size("--num-attention-heads")),
        "vocabulary": size("--vocab-size") + 1,
        "norm": {"RMSNorm": "rms", "LayerNorm": "layer"}[given["--normalization"]],
        "epsilon": float(given["--norm-epsilon"]),
        "biases": "qkv" if "--add-qkv-bias" in given else biases,
        "dropout": (float(given["--hidden-dropout"]), float(given["--attention-dropout"])),
        "tied": "--untie-embeddings-and-output-weights" not in given,
        "rotary": float(given["--rotary-base"]) if given["--position-embedding-type"] == "rope" else None,
        "fraction": float(given.get("--rotary-percent", 1)),
        "window": int(given["--window-size"].split(",")[0]) + 1 if "--window-size" in given else None,
        "experts": (size("--num-experts", 0), size("--moe-router-topk", 1), size("--moe-ffn-hidden-size", 0)),
        "latent": size("--kv-lora-rank", 0),
        "gated": "--swiglu" in given,
        "qk_norm": "--qk-layernorm" in given,
    }
    return Read(
        world=world,
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        expert=size("--expert-model-parallel-size"),
        shard=1,
        replicate=data,
        zero=int("--use-distributed-optimizer" in given),
        microbatch=micro,
        microbatches=batch // (micro * data),
        global_batch=batch,
        length=size("--seq-length"),
        stages=tuple(stage.count("t") for stage in stages) if pipeline > 1 else (),
        model=model,
    )


def _torchtitan(emission: Emission) -> Read:
    (text,) = emission.files.values()
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        and node.targets[0].id in ("SIZES", "TRAINING", "PARALLELISM")
    }  # fmt: skip
    training, axes, sizes = tables["TRAINING"], tables["PARALLELISM"], tables["SIZES"]
    shard, replicate = axes["data_parallel_shard_degree"], axes["data_parallel_replicate_degree"]
    pipeline = axes["pipeline_parallel_degree"]
    micro = axes.get("pipeline_parallel_microbatch_size", training["local_batch_size"])
    parts = axes.get("module_fqns_per_model_part", [])
    model: dict[str, Any] = {"vocabulary": sizes["vocabulary_size"]}
    if "num_layers" in sizes:
        model |= {
            "layers": sizes["num_layers"],
            "hidden": sizes["hidden_size"],
            "heads": sizes["num_heads"],
            "kv_heads": sizes["num_kv_heads"],
            "epsilon": sizes["norm_epsilon"],
            "rotary": sizes["rotary_base"],
            "tied": sizes["tied"],
            "qk_norm": sizes["qk_norm"],
            "norm": "rms",
            "biases": "none",
            "dropout": (0.0, 0.0),
            "fraction": 1.0,
            "window": None,
            "gated": True,
            "latent": 0,
            "experts": (0, 1, 0),
        }
    return Read(
        world=_world(_options(emission.command)),
        pipeline=pipeline,
        tensor=axes["tensor_parallel_degree"],
        context=axes["context_parallel_degree"],
        expert=axes["expert_parallel_degree"],
        shard=shard,
        replicate=replicate,
        zero=3 if shard * axes["context_parallel_degree"] > 1 else 0,
        microbatch=micro,
        microbatches=training["global_batch_size"] // (micro * shard * replicate),
        global_batch=training["global_batch_size"],
        length=training["seq_len"],
        stages=tuple(sum(name.startswith("layers.") for name in part) for part in parts),
        model=model,
    )


def _constants(emission: Emission) -> dict[str, Any]:
    """The numbers at the top of the script."""
    for node in ast.parse(emission.files["train.py"]).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [name.id for name in node.targets[0].elts if isinstance(name, ast.Name)]
            return dict(zip(names, ast.literal_eval(node.value), strict=True))
    raise AssertionError(emission.files["train.py"])


def _deepspeed(emission: Emission) -> Read:
    given, config = _options(emission.command), json.loads(emission.files["deepspeed.json"])
    tensor = config.get("tensor_parallel", {}).get("autotp_size", 1)
    world = int(given["--num_nodes"]) * int(given["--num_gpus"])
    constants, zero = _constants(emission), config["zero_optimization"]["stage"]
    assert constants["MICROBATCH"] == config["train_micro_batch_size_per_gpu"]
    assert constants["ACCUMULATION"] == config["gradient_accumulation_steps"]
    assert constants["TENSOR"] == tensor
    if "hostfile" in emission.files:
        slots = [int(line.partition("slots=")[2]) for line in emission.files["hostfile"].splitlines()]
        assert sum(slots) == world
    return Read(
        world=world,
        pipeline=1,
        tensor=tensor,
        context=1,
        expert=1,
        shard=world // tensor if zero == 3 else 1,
        replicate=1 if zero == 3 else world // tensor,
        zero=zero,
        microbatch=config["train_micro_batch_size_per_gpu"],
        microbatches=config["gradient_accumulation_steps"],
        global_batch=config["train_batch_size"],
        length=constants["LENGTH"],
        stages=(),
        model=_hugging_face(emission),
    )


def _accelerate(emission: Emission) -> Read:
    config, constants = json.loads(emission.files["accelerate.json"]), _constants(emission)
    world, sharded = config["num_processes"], config["distributed_type"] == "FSDP"
    axes = config.get("parallelism_config", {})
    shard = axes.get("parallelism_config_dp_shard_size", world) if sharded else 1
    replicate = axes.get("parallelism_config_dp_replicate_size", 1) if sharded else world
    assert prod((shard, replicate)) == world
    micro, accumulation = constants["MICROBATCH"], constants["ACCUMULATION"]
    return Read(
        world=world,
        pipeline=1,
        tensor=1,
        context=1,
        expert=1,
        shard=shard,
        replicate=replicate,
        zero=3 if sharded else 0,
        microbatch=micro,
        microbatches=accumulation,
        global_batch=micro * accumulation * world,
        length=constants["LENGTH"],
        stages=(),
        model=_hugging_face(emission),
    )


def _hugging_face(emission: Emission) -> dict[str, Any]:
    """The vocabulary and sizes; the rest is compared with the built model (`test_hugging_face.py`)."""
    config = json.loads(emission.files["model/config.json"])
    model = {
        "vocabulary": config["vocab_size"],
        "tied": config["tie_word_embeddings"],
        "layers": config.get("num_hidden_layers", config.get("n_layer")),
        "hidden": config.get("hidden_size", config.get("n_embd")),
        "heads": config.get("num_attention_heads", config.get("n_head")),
    }
    if "rope_parameters" in config:
        model["rotary"] = config["rope_parameters"]["rope_theta"]
    if "rms_norm_eps" in config:
        model["epsilon"] = config["rms_norm_eps"]
    return model
