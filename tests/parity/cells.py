"""What the cells of the parity matrix are made of: models, plans and the recipe around them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scored_models import SCORED
from window_models import LENGTH, WINDOWED

from weft.config.plan import (
    ComputePlan,
    ContextParallelPlan,
    DataParallelPlan,
    ExpertParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
)
from weft.config.recipe import (
    AdapterRecipe,
    BatchRecipe,
    ConvNetShape,
    DataRecipe,
    DataSource,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)

BATCH = 12
"""Samples per step, in every cell: two data ranks have six, in microbatches of two or three."""
STEPS = 20

HF_CONFIGS: dict[str, dict[str, Any]] = {
    "hf_llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    },
    "hf_qwen": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
    "hf_gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 4, "n_head": 4,
        "vocab_size": 64, "n_positions": 64, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    },
    "hf_bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    },
}  # fmt: skip
WITHOUT_DROPPED_ATTENTION = {
    "hf_gpt2_plain": ("hf_gpt2", {"attn_pdrop": 0.0}),
    "hf_bert_plain": ("hf_bert", {"attention_probs_dropout_prob": 0.0}),
}
"""Models for ranks that share a sequence → the model of which they are, and what is changed."""


ADAPTED = {
    "lora": ("hf_llama", AdapterRecipe(rank=4, alpha=8.0, targets=("all-linear",))),
    "dora": ("hf_gpt2", AdapterRecipe(dropout=0.1, targets=("c_attn", "c_proj"), settings={"use_dora": True})),
}
"""Model with adapters → the model that has them, and which."""


def decoder(**changes: Any) -> ModelRecipe:
    sizes: dict[str, Any] = {
        "num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 48, "vocabulary_size": 64,
        "sequence_length": 11, "tie_embeddings": True, "dropout": 0.0,
    }  # fmt: skip
    return ModelRecipe(reference="decoder", shape=DecoderShape(**(sizes | changes)))


ISOLATED = decoder(num_kv_heads=2, dropout=0.1)
"""Its samples are several documents that do not see one another."""


def models(folder: Path) -> dict[str, ModelRecipe]:
    """Every model of the matrix; Hugging Face ones from configs written into `folder`."""
    found = {
        "decoder": decoder(),
        "decoder_untied": decoder(tie_embeddings=False),
        "decoder_dropout": decoder(dropout=0.1),
        "decoder_grouped": decoder(num_kv_heads=2, tie_embeddings=False),
        "decoder_deep": decoder(num_layers=8, dropout=0.1),
        "encoder": ModelRecipe(
            reference="encoder",
            shape=EncoderShape(
                num_layers=4, hidden_size=32, num_heads=4, ffn_size=48, vocabulary_size=64, sequence_length=11
            ),
        ),
        "encoder_plain": ModelRecipe(
            reference="encoder",
            shape=EncoderShape(
                num_layers=4,
                hidden_size=32,
                num_heads=4,
                ffn_size=48,
                vocabulary_size=64,
                sequence_length=11,
                dropout=0.0,
            ),  # fmt: skip
        ),
        "isolated": ISOLATED,
        "mixing": ModelRecipe(factory="parity_models:build_mixing", arguments={"convolves": True}),
        "written": ModelRecipe(factory="parity_models:build_mixing", arguments={"convolves": False}),
        "torch_encoder": ModelRecipe(factory="parity_models:build_torch_encoder"),
        "convnet": ModelRecipe(reference="convnet", shape=ConvNetShape(num_layers=4, channels=8)),
        "mlp": ModelRecipe(
            reference="mlp", shape=MlpShape(num_layers=4, input_size=12, hidden_size=16, num_classes=10, dropout=0.1)
        ),
        "own": ModelRecipe(factory="parity_models:build_own"),
        "looked": ModelRecipe(factory="parity_models:build_looked"),
        "pairs": ModelRecipe(factory="pair_models:build_pairs", arguments={"form": "matmul"}),
        "global_heads": ModelRecipe(factory="parity_models:build_global_heads"),
    }
    plain = {name: HF_CONFIGS[base] | changes for name, (base, changes) in WITHOUT_DROPPED_ATTENTION.items()}
    for name, config in (HF_CONFIGS | plain | WINDOWED | SCORED).items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        found[name] = ModelRecipe(hf=str(path), sequence_length=LENGTH if name in WINDOWED | SCORED else 11)
    for name, (base, adapter) in ADAPTED.items():
        found[name] = replace(found[base], adapter=adapter)
    return found


@dataclass(frozen=True, slots=True)
class Cell:
    """A model of `models` under a plan."""

    model: str
    plan: Plan

    @property
    def world(self) -> int:
        return self.plan.mesh.world_size

    def __str__(self) -> str:
        return f"{self.model}-{name_of(self.plan)}"


def plan(
    *,
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    grid: str = "1d",
    sequence: bool = False,
    context: int = 1,
    scheme: str = "ring",
    pipeline: int = 1,
    expert: int = 1,
    exchange: str = "all_to_all",
    schedule: str = "1f1b",
    chunks: int = 1,
    cuts: tuple[int, ...] | None = None,
    zero: int = 0,
    micro: int = 2,
    shares: tuple[int, ...] | None = None,
    recompute: Any = "none",
    fused: bool = True,
    compiled: bool = False,
    bucket_bytes: int = 4096,
    algorithm: str = "auto",
    every: str = "auto",
) -> Plan:
    """A plan by its deviations from one process."""
    data = replicate * shard
    per_step: Any = shares if shares is not None else BATCH // micro // data
    assert micro * (sum(shares) if shares is not None else per_step * data) == BATCH, "the plan loses samples"
    return Plan(
        mesh=MeshPlan(
            replicate=replicate, shard=shard, context=context, tensor=tensor, pipeline=pipeline, expert=expert
        ),
        data_parallel=DataParallelPlan(
            zero=zero,  # type: ignore[arg-type]
            algorithm=algorithm,
            reduce_every=every,  # type: ignore[arg-type]
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=1024,
        ),
        tensor_parallel=TensorParallelPlan(scheme=grid, sequence=sequence),
        context_parallel=ContextParallelPlan(scheme=scheme),  # type: ignore[arg-type]
        expert_parallel=ExpertParallelPlan(exchange=exchange),  # type: ignore[arg-type]
        pipeline_parallel=PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks, cuts=cuts),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=micro, per_step=per_step),
        memory=MemoryPlan(recompute=recompute, fused_loss=fused),
        compute=ComputePlan(precision="fp64", compile=compiled),
    )


def name_of(plan: Plan) -> str:
    """A short name that says what differs from one process."""
    mesh, parts = plan.mesh, list[str]()
    for axis in ("replicate", "shard", "context", "tensor", "pipeline"):
        if getattr(mesh, axis) > 1:
            parts.append(f"{axis[0] if axis != 'shard' else 'h'}{getattr(mesh, axis)}")
    if mesh.expert > 1:
        parts.append(f"e{mesh.expert}" + "_gathered" * (plan.expert_parallel.exchange == "all_gather"))
    if plan.tensor_parallel.scheme != "1d":
        parts.append(plan.tensor_parallel.scheme.replace(".", "_"))
    if mesh.context > 1:
        parts.append(plan.context_parallel.scheme)
    if mesh.pipeline > 1:
        chunks = plan.pipeline_parallel.chunks_per_rank
        parts.append(plan.pipeline_parallel.schedule + (f"x{chunks}" if chunks > 1 else ""))
    if plan.pipeline_parallel.cuts is not None:
        parts.append("cuts" + "_".join(map(str, plan.pipeline_parallel.cuts)))
    parts.append(f"z{plan.data_parallel.zero}")
    if plan.data_parallel.algorithm != "auto":
        parts.append("".join(mark if mark.isalnum() else "_" for mark in plan.data_parallel.algorithm))
    if plan.data_parallel.reduce_every != "auto":
        parts.append(f"every_{plan.data_parallel.reduce_every}")
    if plan.tensor_parallel.sequence:
        parts.append("sp")
    shares = plan.microbatch.per_step
    parts.append(f"m{plan.microbatch.size}x{shares if isinstance(shares, int) else '_'.join(map(str, shares))}")
    if plan.memory.recompute != "none":
        parts.append(plan.memory.recompute if isinstance(plan.memory.recompute, str) else "recompute_mixed")
    if plan.memory.offloads:
        parts.append(f"{plan.memory.offload}_away")
    if not plan.memory.fused_loss:
        parts.append("plain_loss")
    if plan.compute.compile:
        parts.append("compiled")
    return "_".join(parts) or "one"


def _is_isolated(model: ModelRecipe) -> bool:
    return model == ISOLATED or (model.hf or "").endswith("_isolated.json")


def recipe_of(model: ModelRecipe, precision: str, **optimizer: Any) -> Recipe:
    """Clipping bites (norms are above 0.5), decay and warm-up are on, and the permitted precision is the plan's."""
    settings: dict[str, Any] = {
        "learning_rate": 1e-3, "weight_decay": 0.1, "epsilon": 1e-6, "max_grad_norm": 0.5, "warmup_steps": 3,
    }  # fmt: skip
    return Recipe(
        model=model,
        data=DataRecipe(
            train=(DataSource(source="synthetic"),), documents="isolated" if _is_isolated(model) else "packed"
        ),
        batch=BatchRecipe(global_batch_size=BATCH),
        optimizer=OptimizerRecipe(**(settings | optimizer)),
        run=RunRecipe(steps=STEPS, seed=7),
        permit=PermitRecipe(precision=(precision,)),  # type: ignore[arg-type]
    )
