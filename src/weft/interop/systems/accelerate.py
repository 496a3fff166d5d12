"""Accelerate: its configuration file, and a short script around a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.interop.systems._contract import Emission, SystemJob
from weft.interop.systems._facts import broken_checks, read_arguments
from weft.interop.systems._system import place_notes
from weft.interop.systems._transformers import COMMON, SCRIPT, TOKENS, TransformersSystem, transformers_notes
from weft.model.profile import ModelSizes
from weft.planning.search import Space


class Accelerate(TransformersSystem):
    """FSDP2, with replicas or without, and DDP."""

    name = "accelerate"
    precisions = ("bf16", "fp32")
    configuration = "accelerate.json"

    def parts(self, sizes: ModelSizes, space: Space) -> Iterator[Mapping[str, Any]]:
        """Its tensor axis takes models that are loaded, not built; its ZeRO-1 and 2 are DeepSpeed's."""
        yield {**COMMON, "tensors": (1,), "offloads": ("none",), "zeros": (0, 3)}

    def layout_lacks(self, job: SystemJob) -> Iterator[str]:
        layout = job.layout
        yield from super().layout_lacks(job)
        if layout.pipeline > 1 or layout.context > 1 or layout.expert > 1 or layout.tensor > 1:
            yield "pipeline, tensor, context or expert axes of a model that is built, not loaded"
        if layout.gathers_after_step and layout.data > 1:
            yield f"{layout.stage_name} of its own: emit it for deepspeed"
        if layout.offloads_optimizer:
            yield "an offloaded optimizer"
        if layout.gradient_bytes != 4 and not layout.shards_weights:
            yield "gradients reduced in bf16 between replicas"

    def emission(self, job: SystemJob) -> Emission:
        launcher = ["--config_file", self.configuration]
        if job.nodes > 1:
            launcher += ["--machine_rank", "$NODE_RANK", "--main_process_ip", "$HEAD_NODE"]
        return Emission(
            system=self.name,
            version=self.facts.version,
            command=("accelerate", "launch", *launcher, SCRIPT, *TOKENS),
            files=self.files(job, _config(job), {"CLIP": job.optimizer.max_grad_norm, "ADAMW": job.adamw}),
            notes=(*transformers_notes(job), *place_notes(job)),
        )

    def check(self, emission: Emission, job: SystemJob) -> Iterator[str]:
        command = emission.command
        # The placeholder stands where its parser wants a number.
        words = [word.replace("$NODE_RANK", "0") for word in command[2 : command.index(SCRIPT)]]
        _, problems = read_arguments(self.facts, words)
        yield from problems
        config = self.read(emission)
        yield from self.unknown_keys(config)
        # Accelerate reads the entries of these sections by the names of its own options, so its parser can check them.
        nested = {**config.get("fsdp_config", {}), **config.get("parallelism_config", {})}
        for key, value in nested.items():
            _, problems = read_arguments(self.facts, [f"--{key}", str(value)])
            yield from problems
        values = {**config, **nested, "per_node": job.per_node, "world": job.nodes * job.per_node}
        yield from broken_checks(self.facts, values)


def _config(job: SystemJob) -> dict[str, Any]:
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
