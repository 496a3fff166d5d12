"""Megatron-LM: `pretrain_gpt.py` and its command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.interop.systems._contract import Emission, SystemJob
from weft.interop.systems._facts import broken_checks, read_arguments
from weft.interop.systems._system import System, model_lacks, narrowed, place_notes, rate_notes, torchrun
from weft.model.profile import ModelSizes
from weft.planning.search import Space

_ACTIVATIONS = {"swiglu": ("--swiglu",), "gelu": (), "squared_relu": ("--squared-relu",)}
_CONTEXT = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a"}
_SCHEDULES = ("1F1B", "Interleaved1F1B")
"""Schedules as torch calls them."""
_SCRIPT = "pretrain_gpt.py"


class Megatron(System):
    """Its pipelines, distributed optimizer (ZeRO-1), and axes for tensors, contexts and experts."""

    name = "megatron"
    precisions = ("bf16", "fp16", "fp32")

    def parts(self, sizes: ModelSizes, space: Space) -> Iterator[Mapping[str, Any]]:
        """Interleaved chunks take whole rounds of microbatches, which no space can say: such plans are refused."""
        common: dict[str, Any] = {
            "zeros": (0, 1),
            "recomputes": ("none", "selective", "full"),
            "offloads": ("none",),
            "fused_losses": (True,),
            "context_schemes": ("ring", "all_gather", "ulysses"),
            "expert_exchanges": ("all_to_all",),
            "tensors": tuple(size for size in space.tensors if _splits(sizes, size)),
        }
        # Experts beside a tensor axis need sequence parallelism there.
        sequence = {"sequence_parallels": (True,) if sizes.num_experts else (False, True)}
        plain = {**common, **sequence, "schedules": ("1f1b",)}
        yield plain
        # A part of its own: an interleaved plan that would be refused for its microbatches must not hide the best plain
        # one.
        yield {**common, **sequence, "schedules": ("interleaved_1f1b",)}
        # Where no tensor axis is left that goes with sequence parallelism, plans without a tensor axis still are.
        if narrowed(space, **plain) is None:
            yield {**common, "tensors": (1,), "schedules": ("1f1b",)}

    def lacks(self, sizes: ModelSizes) -> Iterator[str]:
        yield from model_lacks(sizes)
        if sizes.norm_placement != "before" or sizes.stem_norm:
            yield f"norms placed {sizes.norm_placement}" + (", and one behind the embedding" * sizes.stem_norm)
        if sizes.norm == "layer" and sizes.norm_width == 1:
            yield "LayerNorm without bias"
        if sizes.norm == "rms" and sizes.norm_width == 2:
            yield "RMSNorm with bias"
        if sizes.activation not in _ACTIVATIONS:
            yield f"the activation {sizes.activation}"
        if sizes.num_experts and sizes.activation != "swiglu":
            yield f"experts with the activation {sizes.activation}"
        if _biases(sizes) is None:
            yield "biases on some of the linear layers (it has all, none, or those of query, key and value)"
        if sizes.qk_norm == "full":
            yield "norms over all features of queries and keys"
        if sizes.attention_sinks or sizes.head_bias:
            yield "attention sinks, or a head with a bias"
        if not sizes.rotary and not sizes.learned_positions:
            yield "positions by a bias on scores (ALiBi)"
        if sizes.rotary and not float(sizes.rotary_base).is_integer():
            yield f"the rotary base {sizes.rotary_base}: it takes whole numbers"
        if not sizes.kv_rank and sizes.value_size != sizes.query_size:
            yield "value heads of another size than key heads"
        if sizes.router_bias and not sizes.kv_rank:
            yield "a bias on the router's linear layer"

    def layout_lacks(self, job: SystemJob) -> Iterator[str]:
        layout, sizes = job.layout, job.sizes
        if layout.shards_gradients:
            yield f"{layout.stage_name}: its distributed optimizer is ZeRO-1"
        if layout.pipeline > 1 and layout.torch_schedule not in _SCHEDULES:
            yield f"schedule {layout.schedule_line}: it has {' and '.join(_SCHEDULES)}"
        if layout.chunks > 1 and layout.microbatches % layout.pipeline:
            yield f"{layout.microbatches} microbatches in rounds of {layout.pipeline} with interleaved chunks"
        if layout.offloads:
            yield "an offloaded optimizer, which there is one of other numerics"
        if not _splits(sizes, layout.tensor):
            yield f"tensor = {layout.tensor}, which must divide {sizes.kv_heads} groups of queries and the vocabulary"
        if layout.tensor > 1 and sizes.num_experts and not layout.sequence_parallel:
            yield "experts beside a tensor axis without sequence parallelism"
        if (
            layout.context > 1
            and layout.context_scheme == "ulysses"
            and sizes.kv_heads % (layout.tensor * layout.context)
        ):
            yield f"{sizes.kv_heads} groups of queries over {layout.context} context ranks by all-to-all"

    def emission(self, job: SystemJob) -> Emission:
        words = [*_model(job), *_positions(job), *_experts(job), *_layout(job), *_training(job)]
        return Emission(
            system=self.name,
            version=self.facts.version,
            command=(*torchrun(job), _SCRIPT, *words),
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            notes=tuple(_notes(job)),
        )

    def check(self, emission: Emission, job: SystemJob) -> Iterator[str]:
        command = emission.command
        values, problems = read_arguments(self.facts, command[command.index(_SCRIPT) + 1 :])
        if problems:
            yield from problems
            return
        # The same numbers that Megatron-LM derives from its arguments; its own conditions are written in terms of them.
        world = job.nodes * job.per_node
        model = values["tensor_model_parallel_size"] * values["pipeline_model_parallel_size"]
        data = world // (model * values["context_parallel_size"])
        pipes = str(values["pipeline_model_parallel_layout"] or "").count("|") + 1
        derived: dict[str, Any] = {
            "world": world,
            "data": data,
            "stages": pipes,
            "chunks": pipes // values["pipeline_model_parallel_size"],
            "microbatches": values["global_batch_size"] // max(1, data * values["micro_batch_size"]),
            "environment.CUDA_DEVICE_MAX_CONNECTIONS": emission.environment.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        }
        yield from broken_checks(self.facts, {**values, **derived})


def _splits(sizes: ModelSizes, tensor: int) -> bool:
    heads = sizes.num_heads if sizes.kv_rank else sizes.kv_heads
    return heads % tensor == 0 and sizes.vocabulary_size % tensor == 0


def _biases(sizes: ModelSizes) -> tuple[str, ...] | None:
    # Its flags can say these three cases alone; None means that the model is none of them.
    has = (sizes.qkv_bias, sizes.output_bias, sizes.ffn_bias)
    every: Mapping[tuple[bool, bool, bool], tuple[str, ...]] = {
        (True, True, True): (),
        (False, False, False): ("--disable-bias-linear",),
        (True, False, False): ("--disable-bias-linear", "--add-qkv-bias"),
    }
    return every.get(has)


def _model(job: SystemJob) -> Iterator[str]:
    sizes = job.sizes
    yield from ("--num-layers", str(sizes.num_layers), "--hidden-size", str(sizes.hidden_size))
    yield from ("--num-attention-heads", str(sizes.num_heads))
    if sizes.kv_rank:
        yield from _latent(sizes)
    else:
        yield from ("--kv-channels", str(sizes.query_size))
        if sizes.kv_heads != sizes.num_heads:
            yield from ("--group-query-attention", "--num-query-groups", str(sizes.kv_heads))
        if sizes.qk_norm == "head":
            yield "--qk-layernorm"
    if sizes.window is not None:
        # It counts the tokens before the present one; Weft's window includes it.
        yield from ("--window-size", f"{sizes.window - 1},0")
        if sizes.full_attention_every:
            yield from ("--window-attn-skip-freq", str(sizes.full_attention_every))
    if sizes.ffn_size:
        yield from ("--ffn-hidden-size", str(sizes.ffn_size))
    yield from _ACTIVATIONS[sizes.activation]
    yield from ("--normalization", "RMSNorm" if sizes.norm == "rms" else "LayerNorm")
    yield from ("--norm-epsilon", str(sizes.norm_epsilon))
    yield from _biases(sizes) or ()
    yield from ("--hidden-dropout", str(sizes.dropout), "--attention-dropout", str(sizes.attention_dropout))
    if not sizes.tied:
        yield "--untie-embeddings-and-output-weights"


def _latent(sizes: ModelSizes) -> Iterator[str]:
    yield "--multi-latent-attention"
    if sizes.query_rank:
        yield from ("--q-lora-rank", str(sizes.query_rank))
    yield from ("--kv-lora-rank", str(sizes.kv_rank))
    yield from ("--qk-head-dim", str(sizes.query_size - sizes.rope_head_size))
    yield from ("--qk-pos-emb-head-dim", str(sizes.rope_head_size), "--v-head-dim", str(sizes.value_size))
    # Its fused rotary kernel for latent attention knows another kind of positions (YaRN) alone.
    yield from ("--rope-type", "rope", "--no-rope-fusion", "--qk-layernorm")


def _positions(job: SystemJob) -> Iterator[str]:
    sizes = job.sizes
    # A table of learned positions has its trained length, whatever the sequences are.
    length = sizes.learned_positions or job.sequence_length
    yield from ("--max-position-embeddings", str(length))
    if sizes.rotary:
        yield from ("--position-embedding-type", "rope", "--rotary-base", str(int(sizes.rotary_base)))
        yield from ("--rotary-percent", str(sizes.rotary_fraction))
    else:
        yield from ("--position-embedding-type", "learned_absolute")


def _experts(job: SystemJob) -> Iterator[str]:
    sizes, layout = job.sizes, job.layout
    if not sizes.num_experts:
        return
    yield from ("--num-experts", str(sizes.num_experts), "--moe-router-topk", str(sizes.top_k))
    yield from ("--moe-ffn-hidden-size", str(sizes.expert_ffn_size), "--moe-grouped-gemm")
    # Weft's plans price an all-to-all exchange, and a balancing loss would change the training; the notes name the
    # flags.
    yield from ("--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "none")
    if sizes.shared_ffn_size:
        yield from ("--moe-shared-expert-intermediate-size", str(sizes.shared_ffn_size))
        if sizes.shared_gate:
            yield "--moe-shared-expert-gate"
    if sizes.router_bias:
        yield from ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    kinds = [int(sizes.is_mixture(layer)) for layer in range(sizes.num_layers)]
    if not all(kinds):
        yield from ("--moe-layer-freq", f"[{','.join(map(str, kinds))}]")
    yield from ("--expert-model-parallel-size", str(layout.expert))
    yield from ("--expert-tensor-parallel-size", str(layout.tensor))


def _layout(job: SystemJob) -> Iterator[str]:
    layout = job.layout
    yield from ("--tensor-model-parallel-size", str(layout.tensor))
    yield from ("--pipeline-model-parallel-size", str(layout.pipeline))
    if layout.pipeline > 1:
        # By layout and not by a number of layers per stage: Weft's stages may differ in length.
        yield from ("--pipeline-model-parallel-layout", stage_layout(job))
    yield from ("--context-parallel-size", str(layout.context))
    if layout.context > 1:
        yield from ("--cp-comm-type", _CONTEXT[layout.context_scheme])
    if layout.sequence_parallel and layout.tensor > 1:
        yield "--sequence-parallel"
    if layout.gathers_after_step:
        yield from ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    elif layout.data > 1:
        yield "--overlap-grad-reduce"
    if layout.precision in ("bf16", "fp16"):
        yield f"--{layout.precision}"
        if layout.gradient_bytes == 2:
            yield "--grad-reduce-in-bf16"
    if layout.fuses_loss:
        yield from ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native")
    if layout.recomputes_selectively:
        yield from ("--recompute-granularity", "selective")
    elif layout.recomputes_whole_blocks:
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def stage_layout(job: SystemJob) -> str:
    """Stages in the order of the model: `E` the embedding, `t` a block, `L` head and loss."""
    texts = ["t" * len(blocks) for blocks in job.stages]
    texts[0], texts[-1] = "E" + texts[0], texts[-1] + "L"
    return "|".join(texts)


def _training(job: SystemJob) -> Iterator[str]:
    layout, optimizer = job.layout, job.optimizer
    yield from ("--seq-length", str(job.sequence_length), "--micro-batch-size", str(layout.microbatch_size))
    yield from ("--global-batch-size", str(job.global_batch_size), "--train-iters", str(job.steps))
    yield from ("--optimizer", "adam", "--lr", str(optimizer.learning_rate), "--lr-decay-style", "constant")
    yield from ("--weight-decay", str(optimizer.weight_decay), "--clip-grad", str(optimizer.max_grad_norm or 0.0))
    yield from ("--adam-beta1", str(optimizer.betas[0]), "--adam-beta2", str(optimizer.betas[1]))
    yield from ("--adam-eps", str(optimizer.epsilon or 1e-8), "--eval-iters", "0")
    yield from ("--transformer-impl", "transformer_engine", "--tokenizer-type", "NullTokenizer")
    # Its null tokenizer adds a token of its own, and its tables are padded to a multiple of this.
    yield from ("--vocab-size", str(job.sizes.vocabulary_size - 1), "--make-vocab-size-divisible-by", "1")
    yield "--mock-data"


def _notes(job: SystemJob) -> Iterator[str]:
    sizes, optimizer = job.sizes, job.optimizer
    yield "--mock-data and NullTokenizer stand for yours: --data-path, --split, --tokenizer-type, --tokenizer-model"
    yield "initial weights, the order of samples and dropout are drawn by Megatron-LM: other losses, alike"
    yield "tensor and context axes want CUDA_DEVICE_MAX_CONNECTIONS=1 on devices before Blackwell"
    if job.layout.recomputes_selectively:
        yield (
            "selective recomputation is of core attention alone (--recompute-modules core_attn); Weft's is of norms and"
            " activation functions besides, so more memory is held here than the plan says"
        )
    yield from rate_notes(job)
    if optimizer.weight_decay and not optimizer.decay_one_dimensional:
        yield "weight decay leaves out biases and norms, as Weft does"
    if sizes.norm == "layer" and sizes.activation == "squared_relu":
        yield "LayerNorm with weights around 1: add --apply-layernorm-1p for those around 0 (Nemotron)"
    if sizes.num_experts:
        yield "no loss balances the experts: add --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff for one"
        yield f"router: the {sizes.top_k} highest scores of a token, normalised over them"
    if sizes.kv_rank and sizes.num_experts:
        yield "groups of experts and factors on scores, where the model has them, are not known to Weft: --moe-router-*"
    yield from place_notes(job)
