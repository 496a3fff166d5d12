"""DeepSpeed: its launcher, its JSON, and a short script around a model of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from weft.profile import ModelSizes
from weft.search import Space
from weft.systems._common import joined, layout_refusals, narrowed, optimizer_refusals
from weft.systems._contract import Emission, Job
from weft.systems._facts import Facts, broken_checks, facts_of, read_arguments, section_problems
from weft.systems._hugging_face import hugging_face_config, hugging_face_lacks
from weft.systems._template import filled

CONFIG, SCRIPT = "deepspeed.json", "train.py"


class DeepSpeed:
    """ZeRO 0 to 3, an optimizer on the host, and a tensor axis (AutoTP) beside stages 0 to 2."""

    @property
    def facts(self) -> Facts:
        return facts_of("deepspeed")

    def spaces(self, sizes: ModelSizes, space: Space) -> tuple[Space, ...]:
        if any(self.lacks(sizes)):
            return ()
        common: dict[str, Any] = {
            "pipelines": (1,),
            "contexts": (1,),
            "experts": (1,),
            "recomputes": ("none", "full"),
            "per_block_recompute": False,
            "precisions": ("bf16", "fp16", "fp32"),
            "fused_losses": (False,),
            "sequence_parallels": (False,),
            "replicas": False,
        }
        split = tuple(size for size in space.tensors if size > 1 and _splits(sizes, size))
        device, host = {"offloads": ("none",)}, {"offloads": ("none", "optimizer")}
        return joined(
            narrowed(space, **common, **device, tensors=(1, *split), zeros=(0,)),
            narrowed(space, **common, **host, tensors=(1,), zeros=(1, 2, 3)),
            narrowed(space, **common, **host, tensors=split, zeros=(1, 2)),
        )

    def lacks(self, sizes: ModelSizes) -> Iterator[str]:
        yield from hugging_face_lacks(sizes)

    def refusals(self, job: Job) -> Iterator[str]:
        layout, sizes = job.layout, job.sizes
        yield from self.lacks(sizes)
        yield from layout_refusals(job)
        yield from optimizer_refusals(job)
        if layout.pipeline > 1:
            yield "a pipeline: its stages are written in code (PipelineModule), not in its configuration"
        if layout.context > 1 or layout.expert > 1:
            yield "context or expert axes from its configuration alone"
        if layout.shards_weights and layout.replicate > 1:
            yield "hybrid sharding with replicas: there it is hpZ or MiCS, with other semantics"
        if not layout.shards_states and layout.offloads_optimizer:
            yield "an optimizer on the host without ZeRO"
        if layout.tensor > 1 and layout.shards_weights:
            yield "a tensor axis beside ZeRO-3: AutoTP goes with stages 0 to 2"
        if layout.tensor > 1 and not _splits(sizes, layout.tensor):
            yield f"tensor = {layout.tensor} for {sizes.kv_heads} key heads, or for experts"
        if layout.sequence_parallel and layout.tensor > 1:
            yield "sequence parallelism beside its tensor axis"
        if layout.recomputes_selectively:
            yield "selective recomputation: transformers recomputes whole blocks"
        if layout.precision not in ("bf16", "fp16", "fp32"):
            yield f"{layout.precision}: emitted are bf16, fp16 and fp32"
        if layout.fuses_loss:
            yield "a loss fused with the head: transformers writes out all logits"

    def emission(self, job: Job) -> Emission:
        layout = job.layout
        words = {
            "TITLE": f"{job.sizes.name} for {self.facts.title}",
            "STEPS": str(job.steps),
            "MICROBATCH": str(layout.microbatch_size),
            "ACCUMULATION": str(layout.microbatches),
            "LENGTH": str(job.sequence_length),
            "TENSOR": str(layout.tensor),
            "SHARDED": str(layout.shards_weights),
            "DTYPE": {"bf16": "bfloat16", "fp16": "float16"}.get(layout.precision, "float32"),
            "RECOMPUTE": str(layout.recomputes_whole_blocks),
        }
        files = {
            CONFIG: json.dumps(_config(job), indent=2) + "\n",
            "model/config.json": model_text(job),
            SCRIPT: filled("train_deepspeed", words),
        }
        launcher = ["--num_nodes", str(job.nodes), "--num_gpus", str(job.per_node)]
        if job.nodes > 1:
            files["hostfile"] = "".join(f"node-{node} slots={job.per_node}\n" for node in range(job.nodes))
            launcher += ["--hostfile", "hostfile", "--master_addr", "$HEAD_NODE", "--master_port", "29500"]
        return Emission(
            system="deepspeed",
            version=self.facts.version,
            command=("deepspeed", *launcher, SCRIPT, "--tokens", "tokens.bin"),
            files=files,
            notes=tuple(_notes(job)),
        )

    def check(self, emission: Emission, job: Job) -> Iterator[str]:
        command = emission.command
        launcher, problems = read_arguments(self.facts, command[1 : command.index(SCRIPT)])
        yield from problems
        config: dict[str, Any] = json.loads(emission.files[CONFIG])
        compile(emission.files[SCRIPT], SCRIPT, "exec")
        for key in config.keys() - self.facts.keys - self.facts.sections.keys():
            yield f"{key} is no key of {self.facts.title}"
        values: dict[str, Any] = {"world": int(launcher["num_nodes"]) * int(launcher["num_gpus"]), **config}
        for section in ("zero_optimization", "tensor_parallel"):
            table = dict(config.get(section, {}))
            yield from section_problems(self.facts, section, table)
            values |= {f"{section}.{key}": value for key, value in table.items()}
        values["fp16.enabled"] = config.get("fp16", {}).get("enabled", False)
        values["bf16.enabled"] = config.get("bf16", {}).get("enabled", False)
        values["kv_heads"] = job.sizes.kv_heads
        yield from broken_checks(self.facts, values)


def model_text(job: Job) -> str:
    """`config.json` of a job's model, long enough for its samples."""
    config = dict(hugging_face_config(job.sizes) or {})
    if "max_position_embeddings" in config and not job.sizes.learned_positions:
        config["max_position_embeddings"] = job.sequence_length
    return json.dumps(config, indent=2) + "\n"


def hugging_face_notes(job: Job) -> Iterator[str]:
    """What both systems that build models of transformers say."""
    yield "tokens.bin stands for your data: 32-bit tokens, one after another, samples in their order"
    yield "initial weights are those of transformers: other losses than Weft's, alike"
    if job.sizes.num_experts:
        yield "the experts are transformers': no axis splits them, and no loss balances them"
    config = hugging_face_config(job.sizes) or {}
    if config.get("model_type") in ("gemma", "gemma2"):
        yield "transformers scales the embedding and, in Gemma 2, caps scores and logits: Weft's sizes know of neither"
    if config.get("model_type") == "deepseek_v3":
        yield "groups of experts and the factor on scores are 1 here: set n_group, topk_group and routed_scaling_factor"
    if job.optimizer.weight_decay:
        yield "weight decay reaches norms and biases too"
    if not job.optimizer.is_constant_rate:
        yield f"the learning rate is constant here; yours: {job.optimizer.schedule_line}"


def _splits(sizes: ModelSizes, tensor: int) -> bool:
    return not sizes.num_experts and sizes.kv_heads % tensor == 0


def _config(job: Job) -> dict[str, Any]:
    layout, optimizer = job.layout, job.optimizer
    sharding: dict[str, Any] = {"stage": layout.stage}
    if layout.shards_states:
        sharding |= {"overlap_comm": True, "contiguous_gradients": True}
        sharding["reduce_bucket_size"] = max(1, layout.bucket_limits[1] // layout.gradient_bytes)
    if layout.offloads_optimizer:
        sharding["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.microbatch_size,
        "gradient_accumulation_steps": layout.microbatches,
        "gradient_clipping": optimizer.max_grad_norm or 0.0,
        "zero_optimization": sharding,
        "data_types": {"grad_accum_dtype": "bf16" if layout.gradient_bytes == 2 else "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": list(optimizer.betas),
                "eps": optimizer.epsilon or 1e-8,
                "weight_decay": optimizer.weight_decay,
            },
        },
    }
    if layout.precision in ("bf16", "fp16"):
        config[layout.precision] = {"enabled": True}
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor}
    return config


def _notes(job: Job) -> Iterator[str]:
    yield from hugging_face_notes(job)
    if job.layout.tensor > 1:
        yield "AutoTP leaves the embedding and the head whole on every rank"
    if job.nodes > 1:
        yield "to be started on one node; node-0, node-1, … in hostfile stand for yours, $HEAD_NODE for the first"
