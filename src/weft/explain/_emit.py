"""`--emit`: the same plan in the words of another launcher, as far as it has words for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import PlanError, did_you_mean
from weft.explain._text import layout_line
from weft.price import Layout
from weft.profile import ModelSizes

TARGETS = ("megatron", "torchtitan", "deepspeed", "accelerate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a launcher must be told besides the layout."""

    layout: Layout
    global_batch_size: int
    sequence_length: int
    devices_per_node: int
    sizes: ModelSizes | None = None
    """Of a transformer; None where the model is none, and only the layout is emitted."""

    @property
    def nodes(self) -> int:
        return -(-self.layout.world_size // self.devices_per_node)

    @property
    def per_node(self) -> int:
        return min(self.layout.world_size, self.devices_per_node)


def emit(target: str, launch: Launch) -> str:
    """Return what another system must be started with to run the same layout.

    Sources of the names: Megatron-LM `megatron/training/arguments.py`, torchtitan `torchtitan/config/job_config.py`,
    DeepSpeed's configuration JSON, Accelerate's `FullyShardedDataParallelPlugin` and config file.

    Raises:
        PlanError: an unknown system, or a layout that it cannot run; every reason is listed.
    """
    if target not in TARGETS:
        hint = did_you_mean(target, TARGETS) or f" Known are {', '.join(TARGETS)}."
        raise PlanError(f'--emit "{target}" is no launcher that Weft knows.{hint}')
    writer, refuse = _WRITERS[target]
    reasons = list(refuse(launch))
    if reasons:
        listed = "\n".join(f"- {reason}" for reason in reasons)
        raise PlanError(f"{target} cannot run {layout_line(launch.layout)}:\n{listed}\nUse --runnable, or --eject.")
    return writer(launch)


# ── Megatron-LM ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _megatron(launch: Launch) -> str:
    flags = [*_megatron_model(launch), *_megatron_layout(launch.layout)]
    flags += [
        f"--micro-batch-size {launch.layout.microbatch_size}",
        f"--global-batch-size {launch.global_batch_size}",
    ]
    return _command(f"{_torchrun(launch)} pretrain_gpt.py", flags)


def _megatron_model(launch: Launch) -> Iterator[str]:
    sizes = launch.sizes
    yield f"--seq-length {launch.sequence_length}"
    yield f"--max-position-embeddings {launch.sequence_length}"
    if sizes is None:
        return
    yield f"--num-layers {sizes.num_layers}"
    yield f"--hidden-size {sizes.hidden_size}"
    yield f"--num-attention-heads {sizes.num_heads}"
    if sizes.num_kv_heads not in (None, sizes.num_heads):
        yield "--group-query-attention"
        yield f"--num-query-groups {sizes.num_kv_heads}"
    if sizes.ffn_size:
        yield f"--ffn-hidden-size {sizes.ffn_size}"
    if sizes.activation == "swiglu":
        yield "--swiglu"
    if sizes.norm == "rms":
        yield "--normalization RMSNorm"
    if sizes.rotary:
        yield "--position-embedding-type rope"
    if not sizes.tied:
        yield "--untie-embeddings-and-output-weights"
    if sizes.num_experts:
        yield f"--num-experts {sizes.num_experts}"
        yield f"--moe-router-topk {sizes.top_k}"
        yield f"--moe-ffn-hidden-size {sizes.expert_ffn_size}"


def _megatron_layout(layout: Layout) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {layout.tensor}"
    yield f"--pipeline-model-parallel-size {layout.pipeline}"
    if layout.chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.chunks}"
    if layout.context > 1:
        yield f"--context-parallel-size {layout.context}"
        comm = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}[layout.context_scheme]
        yield f"--cp-comm-type {comm}"
    if layout.expert > 1:
        yield f"--expert-model-parallel-size {layout.expert}"
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    if layout.zero == 1:
        yield "--use-distributed-optimizer"
        yield "--overlap-grad-reduce"
        yield "--overlap-param-gather"
    elif layout.data > 1:
        yield "--overlap-grad-reduce"
    if layout.precision in ("bf16", "fp16"):
        yield f"--{layout.precision}"
    elif layout.precision == "fp8":
        yield from ("--bf16", "--fp8-format hybrid")
    if layout.recompute == "selective":
        yield "--recompute-granularity selective"
    elif layout.recompute == "full":
        yield from ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")
    if layout.offload == "optimizer":
        yield "--optimizer-cpu-offload"


def _megatron_refuses(launch: Launch) -> Iterator[str]:
    layout = launch.layout
    if layout.zero > 1:
        yield f"ZeRO-{layout.zero}: its distributed optimizer is ZeRO-1"
    if layout.schedule not in ("1f1b", "interleaved_1f1b"):
        yield f"schedule {layout.schedule}: it has 1f1b and interleaved_1f1b"
    if layout.tensor_scheme != "1d":
        yield f"tensor scheme {layout.tensor_scheme}: it splits matrices in one dimension"
    if not isinstance(layout.recompute, str):
        yield "recomputation that differs from block to block"
    if layout.offload == "activations":
        yield "offloaded activations"
    yield from _compression(layout)


# ── torchtitan ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _torchtitan(launch: Launch) -> str:
    layout = launch.layout
    sharded = layout.zero == 3
    tables: dict[str, Mapping[str, Any]] = {
        "training": {
            "local_batch_size": layout.microbatch_size * (layout.microbatches if layout.pipeline > 1 else 1),
            "global_batch_size": launch.global_batch_size,
            "seq_len": launch.sequence_length,
            "mixed_precision_param": {"bf16": "bfloat16"}.get(layout.precision, "float32"),
            "mixed_precision_reduce": "float32" if layout.gradient_bytes == 4 else "bfloat16",
        },
        "parallelism": {
            "data_parallel_replicate_degree": layout.replicate if sharded else layout.data,
            "data_parallel_shard_degree": layout.shard if sharded else 1,
            "tensor_parallel_degree": layout.tensor,
            "context_parallel_degree": layout.context,
            "pipeline_parallel_degree": layout.pipeline,
            "expert_parallel_degree": layout.expert,
            **_titan_pipeline(layout),
        },
        "activation_checkpoint": {"mode": str(layout.recompute)},
    }
    lines = [f"# {_torchrun(launch)} -m torchtitan.train --job.config_file plan.toml"]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines)


def _titan_pipeline(layout: Layout) -> Mapping[str, Any]:
    if layout.pipeline == 1:
        return {}
    names = {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "interleaved_1f1b": "Interleaved1F1B",
        "interleaved_zero_bubble": "InterleavedZeroBubble",
        "zbv": "ZBVZeroBubble",
        "dualpipev": "DualPipeV",
    }
    return {
        "pipeline_parallel_schedule": names[layout.schedule],
        "pipeline_parallel_microbatch_size": layout.microbatch_size,
    }


def _titan_refuses(launch: Launch) -> Iterator[str]:
    layout = launch.layout
    if layout.zero in (1, 2) and layout.data > 1:
        yield f"ZeRO-{layout.zero}: it replicates (ZeRO-0) or shards everything (ZeRO-3)"
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "a tensor axis without sequence parallelism: there the two come together"
    if layout.tensor_scheme != "1d":
        yield f"tensor scheme {layout.tensor_scheme}: it splits matrices in one dimension"
    if not isinstance(layout.recompute, str):
        yield "recomputation that differs from block to block"
    if layout.offload != "none":
        yield f"offloaded {layout.offload}"
    if layout.precision not in ("bf16", "fp32"):
        yield f"{layout.precision}: it has bf16 and fp32, and fp8 by converters that a plan does not name"
    yield from _compression(layout)


# ── DeepSpeed ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _deepspeed(launch: Launch) -> str:
    layout = launch.layout
    zero: dict[str, Any] = {"stage": layout.zero, "reduce_bucket_size": layout.bucket_bytes // layout.gradient_bytes}
    zero["overlap_comm"] = True
    if layout.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": launch.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.microbatch_size,
        "gradient_accumulation_steps": layout.microbatches,
        "zero_optimization": zero,
    }
    if layout.precision in ("bf16", "fp16"):
        config[layout.precision] = {"enabled": True}
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor}
    if layout.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": layout.tensor > 1}
    return json.dumps(config, indent=2)


def _deepspeed_refuses(launch: Launch) -> Iterator[str]:
    layout = launch.layout
    if layout.pipeline > 1:
        yield "a pipeline: its stages are written in code (PipelineModule), not in its configuration"
    if layout.zero == 3 and layout.replicate > 1:
        yield "hybrid sharding with replicas: there it is hpZ or MiCS, with other semantics"
    if layout.schedule != "1f1b" or layout.tensor_scheme != "1d":
        yield f"schedule {layout.schedule} with tensor scheme {layout.tensor_scheme}"
    if layout.recompute == "selective" or not isinstance(layout.recompute, str):
        yield "selective recomputation, or one that differs from block to block"
    if launch.global_batch_size != layout.microbatch_size * layout.microbatches * layout.data:
        yield "unequal shares of the batch"
    if layout.offload == "activations":
        yield "offloaded activations from its configuration alone"
    if layout.context > 1 or layout.expert > 1:
        yield "context or expert axes from its configuration alone"
    yield from _compression(layout)


# ── Accelerate ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _accelerate(launch: Launch) -> str:
    layout = launch.layout
    precision = {"bf16": "bf16", "fp16": "fp16"}.get(layout.precision, "no")
    lines = [
        "# accelerate launch --config_file plan.yaml train.py",
        f"# in train.py: gradient_accumulation_steps = {layout.microbatches}, batches of {layout.microbatch_size}",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if layout.zero == 3 else 'MULTI_GPU'}",
        f"mixed_precision: '{precision}'",
        f"num_machines: {launch.nodes}",
        f"num_processes: {layout.world_size}",
    ]
    if layout.zero == 3:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_reshard_after_forward: true",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {str(layout.recompute == 'full').lower()}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    if layout.tensor > 1 or (layout.zero == 3 and layout.replicate > 1):
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {layout.replicate}",
            f"  parallelism_config_dp_shard_size: {layout.shard}",
            f"  parallelism_config_tp_size: {layout.tensor}",
        ]
    return "\n".join(lines)


def _accelerate_refuses(launch: Launch) -> Iterator[str]:
    layout = launch.layout
    if layout.pipeline > 1 or layout.context > 1 or layout.expert > 1:
        yield "pipeline, context or expert axes"
    if layout.zero in (1, 2) and layout.data > 1:
        yield f"ZeRO-{layout.zero} of its own: emit it for deepspeed, which Accelerate can start"
    if layout.tensor > 1 and layout.zero != 3 and layout.data > 1:
        yield "a tensor axis beside replicated data ranks: it joins tensor with sharded ones"
    if layout.recompute == "selective" or not isinstance(layout.recompute, str):
        yield "selective recomputation, or one that differs from block to block"
    if layout.recompute == "full" and layout.zero != 3:
        yield "recomputation outside of FSDP: it is the model's own gradient_checkpointing_enable() there"
    if layout.offload != "none":
        yield f"offloaded {layout.offload}"
    if launch.global_batch_size != layout.microbatch_size * layout.microbatches * layout.data:
        yield "unequal shares of the batch"
    yield from _compression(layout)


# ── common ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _compression(layout: Layout) -> Iterator[str]:
    if layout.compression != "none":
        yield f"gradients compressed by {layout.compression}"
    if layout.local_steps:
        yield f"replicas that average every {layout.local_steps} steps"


def _torchrun(launch: Launch) -> str:
    where = f"--nnodes {launch.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if launch.nodes > 1 else ""
    return " ".join(["torchrun", f"--nproc-per-node {launch.per_node}", *([where] if where else [])])


def _command(start: str, flags: list[str]) -> str:
    return " \\\n    ".join([start, *flags])


_WRITERS = {
    "megatron": (_megatron, _megatron_refuses),
    "torchtitan": (_torchtitan, _titan_refuses),
    "deepspeed": (_deepspeed, _deepspeed_refuses),
    "accelerate": (_accelerate, _accelerate_refuses),
}
