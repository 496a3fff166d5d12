"""DeepSpeed: its launcher, its JSON, and a short script around a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.interop.systems._contract import Emission, SystemJob
from weft.interop.systems._facts import broken_checks, read_arguments, section_problems
from weft.interop.systems._transformers import COMMON, SCRIPT, TOKENS, TransformersSystem, transformers_notes
from weft.model.profile import ModelSizes
from weft.planning.search import Space


class DeepSpeed(TransformersSystem):
    """ZeRO 0 to 3, an optimizer on the host, and a tensor axis (AutoTP) beside stages 0 to 2."""

    name = "deepspeed"
    precisions = ("bf16", "fp16", "fp32")
    configuration = "deepspeed.json"

    def parts(self, sizes: ModelSizes, space: Space) -> Iterator[Mapping[str, Any]]:
        common: dict[str, Any] = {**COMMON, "sequence_parallels": (False,), "replicas": False}
        split = tuple(size for size in space.tensors if size > 1 and _splits(sizes, size))
        host = {"offloads": ("none", "optimizer")}
        # Three parts, because AutoTP goes with stages 0 to 2, and the host takes optimizer states of stages 1 to 3.
        yield {**common, "offloads": ("none",), "tensors": (1, *split), "zeros": (0,)}
        yield {**common, **host, "tensors": (1,), "zeros": (1, 2, 3)}
        yield {**common, **host, "tensors": split, "zeros": (1, 2)}

    def layout_lacks(self, job: SystemJob) -> Iterator[str]:
        layout, sizes = job.layout, job.sizes
        yield from super().layout_lacks(job)
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

    def emission(self, job: SystemJob) -> Emission:
        layout = job.layout
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(layout.precision, "float32")
        words = {"TENSOR": layout.tensor, "SHARDED": layout.shards_weights, "DTYPE": dtype}
        files = self.files(job, _config(job), words)
        launcher = ["--num_nodes", str(job.nodes), "--num_gpus", str(job.per_node)]
        if job.nodes > 1:
            files["hostfile"] = "".join(f"node-{node} slots={job.per_node}\n" for node in range(job.nodes))
            launcher += ["--hostfile", "hostfile", "--master_addr", "$HEAD_NODE", "--master_port", "29500"]
        return Emission(
            system=self.name,
            version=self.facts.version,
            command=("deepspeed", *launcher, SCRIPT, *TOKENS),
            files=files,
            notes=tuple(_notes(job)),
        )

    def check(self, emission: Emission, job: SystemJob) -> Iterator[str]:
        command = emission.command
        launcher, problems = read_arguments(self.facts, command[1 : command.index(SCRIPT)])
        yield from problems
        config = self.read(emission)
        yield from self.unknown_keys(config)
        values: dict[str, Any] = {"world": int(launcher["num_nodes"]) * int(launcher["num_gpus"]), **config}
        for section in ("zero_optimization", "tensor_parallel"):
            table = dict(config.get(section, {}))
            yield from section_problems(self.facts, section, table)
            values |= {f"{section}.{key}": value for key, value in table.items()}
        for precision in ("fp16", "bf16"):
            values[f"{precision}.enabled"] = config.get(precision, {}).get("enabled", False)
        values["kv_heads"] = job.sizes.kv_heads
        yield from broken_checks(self.facts, values)


def _splits(sizes: ModelSizes, tensor: int) -> bool:
    return not sizes.num_experts and sizes.kv_heads % tensor == 0


def _config(job: SystemJob) -> dict[str, Any]:
    layout = job.layout
    sharding: dict[str, Any] = {"stage": layout.stage}
    if layout.shards_states:
        sharding |= {"overlap_comm": True, "contiguous_gradients": True}
        # It counts elements, Weft bytes.
        sharding["reduce_bucket_size"] = max(1, layout.bucket_limits[1] // layout.gradient_bytes)
    if layout.offloads_optimizer:
        sharding["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.microbatch_size,
        "gradient_accumulation_steps": layout.microbatches,
        "gradient_clipping": job.optimizer.max_grad_norm or 0.0,
        "zero_optimization": sharding,
        "data_types": {"grad_accum_dtype": "bf16" if layout.gradient_bytes == 2 else "fp32"},
        "optimizer": {"type": "AdamW", "params": job.adamw},
    }
    if layout.precision in ("bf16", "fp16"):
        config[layout.precision] = {"enabled": True}
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor}
    return config


def _notes(job: SystemJob) -> Iterator[str]:
    yield from transformers_notes(job)
    if job.layout.tensor > 1:
        yield "AutoTP leaves the embedding and the head whole on every rank"
    if job.nodes > 1:
        yield "to be started on one node; node-0, node-1, … in hostfile stand for yours, $HEAD_NODE for the first"
