"""Accelerate: its configuration file, and a short script around a model of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from weft.profile import ModelSizes
from weft.search import Space
from weft.systems._common import joined, layout_refusals, narrowed, optimizer_refusals, place_notes
from weft.systems._contract import Emission, Job
from weft.systems._facts import Facts, broken_checks, facts_of, read_arguments
from weft.systems._hugging_face import hugging_face_lacks
from weft.systems._template import filled
from weft.systems.deepspeed import hugging_face_notes, model_text

CONFIG, SCRIPT = "accelerate.json", "train.py"


class Accelerate:
    """FSDP2, with replicas or without, and DDP."""

    @property
    def facts(self) -> Facts:
        return facts_of("accelerate")

    def spaces(self, sizes: ModelSizes, space: Space) -> tuple[Space, ...]:
        """Its tensor axis takes models that are loaded, not built; its ZeRO-1 and 2 are DeepSpeed's."""
        if any(self.lacks(sizes)):
            return ()
        common: dict[str, Any] = {
            "pipelines": (1,),
            "tensors": (1,),
            "contexts": (1,),
            "experts": (1,),
            "recomputes": ("none", "full"),
            "per_block_recompute": False,
            "offloads": ("none",),
            "precisions": ("bf16", "fp32"),
            "fused_losses": (False,),
        }
        return joined(narrowed(space, **common, zeros=(0, 3)))

    def lacks(self, sizes: ModelSizes) -> Iterator[str]:
        yield from hugging_face_lacks(sizes)

    def refusals(self, job: Job) -> Iterator[str]:
        layout = job.layout
        yield from self.lacks(job.sizes)
        yield from layout_refusals(job)
        yield from optimizer_refusals(job)
        if layout.pipeline > 1 or layout.context > 1 or layout.expert > 1 or layout.tensor > 1:
            yield "pipeline, tensor, context or expert axes of a model that is built, not loaded"
        if layout.gathers_after_step and layout.data > 1:
            yield f"{layout.stage_name} of its own: emit it for deepspeed"
        if layout.recomputes_selectively:
            yield "selective recomputation: transformers recomputes whole blocks"
        if layout.offloads_optimizer:
            yield "an offloaded optimizer"
        if layout.precision not in ("bf16", "fp32"):
            yield f"{layout.precision}: emitted are bf16 and fp32"
        if layout.gradient_bytes != 4 and not layout.shards_weights:
            yield "gradients reduced in bf16 between replicas"
        if layout.fuses_loss:
            yield "a loss fused with the head: transformers writes out all logits"

    def emission(self, job: Job) -> Emission:
        layout, optimizer = job.layout, job.optimizer
        adamw = {
            "lr": optimizer.learning_rate,
            "betas": optimizer.betas,
            "eps": optimizer.epsilon or 1e-8,
            "weight_decay": optimizer.weight_decay,
        }
        words = {
            "TITLE": f"{job.sizes.name} for {self.facts.title}",
            "STEPS": str(job.steps),
            "MICROBATCH": str(layout.microbatch_size),
            "ACCUMULATION": str(layout.microbatches),
            "LENGTH": str(job.sequence_length),
            "RECOMPUTE": str(layout.recomputes_whole_blocks),
            "CLIP": str(optimizer.max_grad_norm),
            "ADAMW": str(adamw),
        }
        launcher = ["--config_file", CONFIG]
        if job.nodes > 1:
            launcher += ["--machine_rank", "$NODE_RANK", "--main_process_ip", "$HEAD_NODE"]
        files = {
            CONFIG: json.dumps(_config(job), indent=2) + "\n",
            "model/config.json": model_text(job),
            SCRIPT: filled("train_accelerate", words),
        }
        return Emission(
            system="accelerate",
            version=self.facts.version,
            command=("accelerate", "launch", *launcher, SCRIPT, "--tokens", "tokens.bin"),
            files=files,
            notes=(*hugging_face_notes(job), *place_notes(job)),
        )

    def check(self, emission: Emission, job: Job) -> Iterator[str]:
        command = emission.command
        words = [word.replace("$NODE_RANK", "0") for word in command[2 : command.index(SCRIPT)]]
        _, problems = read_arguments(self.facts, words)
        yield from problems
        compile(emission.files[SCRIPT], SCRIPT, "exec")
        config: dict[str, Any] = json.loads(emission.files[CONFIG])
        for key in config.keys() - self.facts.keys:
            yield f"{key} is no key of {self.facts.title}"
        nested = {**config.get("fsdp_config", {}), **config.get("parallelism_config", {})}
        for key, value in nested.items():
            _, problems = read_arguments(self.facts, [f"--{key}", str(value)])
            yield from problems
        values = {**config, **nested, "per_node": job.per_node, "world": job.nodes * job.per_node}
        yield from broken_checks(self.facts, values)


def _config(job: Job) -> dict[str, Any]:
    layout = job.layout
    sharded = layout.shards_weights and layout.data > 1
    kind = "FSDP" if sharded else ("MULTI_GPU" if layout.world_size > 1 else "NO")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "bf16" if layout.precision == "bf16" else "no",
        "num_machines": job.nodes,
        "num_processes": layout.world_size,
        "machine_rank": 0,
        "main_process_ip": None,
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "debug": False,
        "main_training_function": "main",
    }
    if sharded:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            # The script asks the model itself to recompute.
            "fsdp_activation_checkpointing": False,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if layout.replicate > 1:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": layout.replicate,
                "parallelism_config_dp_shard_size": layout.shard,
            }
    return config
