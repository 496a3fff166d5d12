"""torchtitan: a configuration in Python, which its `--module` and `--config` name."""

from __future__ import annotations

import pprint
from collections.abc import Iterator, Mapping
from typing import Any

from weft.interop.systems._contract import Emission, SystemJob
from weft.interop.systems._facts import broken_checks, section_problems
from weft.interop.systems._system import System, model_lacks, place_notes, rate_notes, torchrun
from weft.interop.systems._template import filled
from weft.model.profile import ModelSizes
from weft.model.profile.known import KNOWN_MODELS
from weft.planning.search import Space
from weft.techniques.pipeline.settings import TORCH_SCHEDULES

FILE = "weft_titan.py"
_RECOMPUTE = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
_FLAVORS = {
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "gpt-oss-20b": ("gpt_oss", "20b"),
    "gpt-oss-120b": ("gpt_oss", "120b"),
}
"""Mixtures of which it brings the whole configuration."""
_DENSE: Mapping[bool, Mapping[str, str]] = {
    False: {
        "FAMILY": "llama3",
        "MODEL": "Llama3Model",
        "BLOCK": "Llama3TransformerBlock",
        "PARALLELIZE": "parallelize_llama",
        "ADAPTER": "Llama3StateDictAdapter",
        "ROPE": "ComplexRoPE",
    },
    True: {
        "FAMILY": "qwen3",
        "MODEL": "Qwen3Model",
        "BLOCK": "Qwen3TransformerBlock",
        "PARALLELIZE": "parallelize_qwen3",
        "ADAPTER": "Qwen3StateDictAdapter",
        "ROPE": "CosSinRoPE",
    },
}
"""Dense models by whether heads of queries and keys have norms."""


class Torchtitan(System):
    """FSDP2 with replicas or without, and axes for tensors, pipelines, contexts and experts."""

    name = "torchtitan"
    precisions = ("bf16", "fp32")

    def parts(self, sizes: ModelSizes, space: Space) -> Iterator[Mapping[str, Any]]:
        common: dict[str, Any] = {
            "schedules": tuple(TORCH_SCHEDULES),
            "recomputes": ("none", "selective", "full"),
            "offloads": ("none",),
            "fused_losses": (True,),
            "context_schemes": ("all_gather",),
            "expert_exchanges": ("all_to_all",),
            "zeros": (0, 3),
            "tensors": tuple(size for size in space.tensors if sizes.kv_heads % size == 0),
        }
        if sizes.tied:  # its stages hold no copy of the other end's weight
            common["pipelines"] = (1,)
        yield {**common, "experts": (1,), "contexts": (1,)}
        # FSDP shards over the context ranks as well, where there are any (`fsdp = dp_shard * cp` in parallel_dims.py).
        yield {**common, "experts": (1,), "zeros": (3,)}
        if sizes.num_experts:
            yield {**common, "tensors": (1,), "zeros": (3,)}

    def lacks(self, sizes: ModelSizes) -> Iterator[str]:
        if (known := KNOWN_MODELS.get(sizes.name)) and sizes.name in _FLAVORS and known.sizes == sizes:
            return
        yield from model_lacks(sizes)
        if sizes.num_experts or sizes.kv_rank:
            has = ", ".join(_FLAVORS)
            yield f"this mixture or latent attention (it brings {has})"
        if sizes.norm != "rms" or sizes.norm_width == 2 or sizes.norm_placement != "before" or sizes.stem_norm:
            yield "norms other than RMSNorm before attention and feed-forward"
        if sizes.activation != "swiglu":
            yield f"the activation {sizes.activation}"
        if sizes.qkv_bias or sizes.output_bias or sizes.ffn_bias or sizes.head_bias:
            yield "biases on linear layers"
        if sizes.dropout or sizes.attention_dropout:
            yield f"dropout (the model's: {sizes.dropout} and {sizes.attention_dropout} in attention)"
        if sizes.window is not None or sizes.attention_sinks:
            yield "windowed attention"
        if not sizes.rotary or sizes.rotary_fraction != 1:
            yield "positions other than rotary ones on whole heads"
        if sizes.qk_norm == "full" or sizes.value_size != sizes.query_size:
            yield "norms over all features of queries and keys, or value heads of another size"

    def layout_lacks(self, job: SystemJob) -> Iterator[str]:
        layout, sizes = job.layout, job.sizes
        if layout.gathers_after_step and layout.data > 1:
            yield f"{layout.stage_name}: it has ZeRO-3 (FSDP) and replicas"
        if layout.context > 1 and not layout.shards_weights:
            yield f"{layout.stage_name} with a context axis: its FSDP shards over the context ranks, too"
        if layout.pipeline > 1 and layout.torch_schedule is None:
            yield f"schedule {layout.schedule_line}: emitted are {', '.join(TORCH_SCHEDULES)}"
        if layout.pipeline > 1 and sizes.tied:
            yield "a pipeline for a model whose embedding and head share a weight"
        rounds = max(1, layout.microbatches // layout.pipeline)
        if layout.chunks > 1 and layout.microbatches % rounds:
            yield f"{layout.microbatches} microbatches in {rounds} rounds of {layout.pipeline} with interleaved chunks"
        if layout.gradient_bytes != 4:
            yield "gradients reduced in bf16: it reduces in fp32"
        if layout.offloads:
            yield "an offloaded optimizer: it offloads parameters, gradients and states together"
        if sizes.kv_heads % layout.tensor:
            yield f"tensor = {layout.tensor}, which must divide {sizes.kv_heads} key heads"
        if layout.expert > 1 and (layout.tensor > 1 or (_shard(job) * layout.context) % layout.expert):
            yield f"expert = {layout.expert}: emitted are experts over the ranks that shard, without a tensor axis"
        if layout.context > 1 and layout.context_scheme != "all_gather":
            yield f"context by {layout.context_scheme}: it gathers keys and values"

    def emission(self, job: SystemJob) -> Emission:
        module = FILE.removesuffix(".py")
        words = ("-m", "torchtitan.train", "--module", module, "--config", "plan")
        return Emission(
            system=self.name,
            version=self.facts.version,
            command=(*torchrun(job), *words),
            environment={"PYTHONPATH": ".", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            files={FILE: _module(job, self.facts.title)},
            notes=tuple(_notes(job)),
        )

    def check(self, emission: Emission, job: SystemJob) -> Iterator[str]:
        tables = {"training": _training(job), "parallelism": _parallelism(job)}
        for name, table in tables.items():
            yield from section_problems(self.facts, name, table)
        # Its configuration is Python, which no parser of options checks: it must compile at least.
        compile(emission.files[FILE], FILE, "exec")
        values = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
        parts = tables["parallelism"].get("module_fqns_per_model_part") or [()]
        data = values["parallelism.data_parallel_replicate_degree"] * values["parallelism.data_parallel_shard_degree"]
        derived = {"world": job.nodes * job.per_node, "data": data, "parts": len(parts), "tied": job.sizes.tied}
        yield from broken_checks(self.facts, {**values, **derived})


def _shard(job: SystemJob) -> int:
    return job.layout.shard if job.layout.shards_weights else 1


def _training(job: SystemJob) -> dict[str, Any]:
    layout = job.layout
    # With a pipeline it cuts its local batch into microbatches itself; without one a local batch is a microbatch, and
    # the global batch size says how many are accumulated.
    in_flight = layout.microbatches if layout.pipeline > 1 else 1
    return {
        "local_batch_size": layout.microbatch_size * in_flight,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.sequence_length,
        "max_norm": job.optimizer.max_grad_norm or 0.0,
        "steps": job.steps,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16" if layout.precision == "bf16" else "float32",
        "mixed_precision_reduce": "float32",
        "disable_cuda_graphs": True,
    }


def _parallelism(job: SystemJob) -> dict[str, Any]:
    layout = job.layout
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.data // _shard(job),
        "data_parallel_shard_degree": _shard(job),
        "tensor_parallel_degree": layout.tensor,
        "enable_sequence_parallel": layout.sequence_parallel,
        "context_parallel_degree": layout.context,
        "expert_parallel_degree": layout.expert,
        "pipeline_parallel_degree": layout.pipeline,
    }
    if layout.context > 1:
        table["context_parallel_load_balancer"] = "ptrr"
    if layout.pipeline > 1:
        # Stages by names of modules: its own rule would give each as many layers as it can, where Weft's may differ.
        parts = [[f"layers.{block}" for block in blocks] for blocks in job.stages]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "lm_head"]
        table |= {
            "pipeline_parallel_schedule": layout.torch_schedule,
            "pipeline_parallel_microbatch_size": layout.microbatch_size,
            "module_fqns_per_model_part": parts,
        }
    return table


def _sizes(sizes: ModelSizes) -> dict[str, Any]:
    return {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.kv_heads,
        "head_size": sizes.query_size,
        "ffn_size": sizes.ffn_size,
        "vocabulary_size": sizes.vocabulary_size,
        "tied": sizes.tied,
        "qk_norm": sizes.qk_norm == "head",
        "rotary_base": sizes.rotary_base,
        "norm_epsilon": sizes.norm_epsilon,
    }


def _module(job: SystemJob, title: str) -> str:
    flavor = _FLAVORS.get(job.sizes.name)
    words = {
        "TITLE": f"{job.sizes.name} for {title}",
        "SIZES": _shown({"vocabulary_size": job.sizes.vocabulary_size} if flavor else _sizes(job.sizes)),
        "TRAINING": _shown(_training(job)),
        "PARALLELISM": _shown(_parallelism(job)),
        "ADAMW": _shown(job.adamw),
        "RECOMPUTE": _RECOMPUTE[job.layout.block_words[0]],
        **({"FAMILY": flavor[0], "FLAVOR": flavor[1]} if flavor else _DENSE[job.sizes.qk_norm == "head"]),
    }
    first = "torchtitan_flavor" if flavor else "torchtitan_dense"
    return filled(first, words) + filled("torchtitan_plan", words)


def _shown(table: Mapping[str, Any]) -> str:
    return pprint.pformat(dict(table), width=110, sort_dicts=False)


def _notes(job: SystemJob) -> Iterator[str]:
    yield 'dataset "c4" and ./tokenizer stand for yours: HuggingFaceTextDataLoader and hf_assets_path in the file'
    yield "documents are isolated: attention does not reach over their ends, whatever the recipe says"
    yield "initial weights and the order of samples are torchtitan's: other losses than Weft's, alike"
    if job.layout.recomputes_selectively:
        yield (
            "selective recomputation computes every second matrix product again as well, which Weft keeps: less memory"
            " is held here than the plan says, and more is computed"
        )
    if job.sizes.name in _FLAVORS:
        yield f"the model is torchtitan's own {'/'.join(_FLAVORS[job.sizes.name])}, its router included"
    if job.layout.tensor > 1 and not job.layout.sequence_parallel:
        yield "sequence parallelism is off, as in the plan; torchtitan has it on by default"
    if job.optimizer.weight_decay:
        yield "weight decay reaches norms too"
    yield from rate_notes(job)
    yield from place_notes(job)
