"""The constants at the top of a script: everything that the recipe and the plan say, under names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.config.plan import ModelFacts, Plan, default_ffn_size
from weft.config.recipe import DecoderShape, Recipe, decay_start, peak_learning_rate

_LINE_LENGTH = 120


def constants(recipe: Recipe, plan: Plan, facts: ModelFacts, token_dtype: str, cuts: Sequence[int]) -> str:
    """Return the section of constants."""
    groups = (_model(recipe, facts), _data(recipe, plan, token_dtype), _training(recipe), _layout(plan, facts, cuts))
    return "\n".join("\n".join(group) for group in groups)


def axes(plan: Plan) -> dict[str, int]:
    """Return the script's mesh axes, outermost first: replicate and shard are one, except in hybrid sharding."""
    mesh, sizes = plan.mesh, dict[str, int]()
    # torch's mesh needs two data dimensions for hybrid sharding alone; otherwise one is easier to read.
    hybrid = plan.data_parallel.shards_weights and mesh.replicate > 1
    for axis in mesh.order:
        if axis in ("pipeline", "tensor"):
            sizes[axis] = mesh.pipeline if axis == "pipeline" else mesh.tensor
        elif axis in ("replicate", "shard"):
            own = mesh.replicate if axis == "replicate" else mesh.shard
            sizes[axis if hybrid else "data"] = own if hybrid else mesh.data  # the second of the two changes nothing
    return {axis: size for axis, size in sizes.items() if size > 1}


def _model(recipe: Recipe, facts: ModelFacts) -> Iterator[str]:
    shape = recipe.model.shape
    if isinstance(shape, DecoderShape):
        heads, kv_heads = shape.num_heads, shape.num_kv_heads or shape.num_heads
        head_size = shape.hidden_size // heads
        yield f"NUM_LAYERS, HIDDEN_SIZE, FFN_SIZE = {shape.num_layers}, {shape.hidden_size}, {default_ffn_size(shape)}"
        yield f"NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = {heads}, {kv_heads}, {head_size}"
        yield f"VOCABULARY_SIZE, SEQUENCE_LENGTH = {shape.vocabulary_size}, {shape.sequence_length}"
        yield f"ROPE_THETA, NORM_EPSILON = {shape.rope_theta!r}, {shape.norm_epsilon!r}"
        if shape.dropout > 0:
            yield f"DROPOUT = {shape.dropout!r}"
        return
    if recipe.model.hf is not None:
        yield _long(f"CONFIG = {quoted(recipe.model.hf)}")
    if facts.num_blocks is not None:
        sizes = (facts.num_blocks, facts.hidden_size, facts.vocabulary_size)
        yield f"NUM_LAYERS, HIDDEN_SIZE, VOCABULARY_SIZE = {', '.join(map(str, sizes))}"
    yield f"SEQUENCE_LENGTH = {facts.sequence_length}"


def _data(recipe: Recipe, plan: Plan, token_dtype: str) -> Iterator[str]:
    yield "HERE = Path(__file__)  # beside it: .tokens, all documents in a row, and .order.npy, where samples begin"
    yield f"TOKEN_DTYPE = {quoted(token_dtype)}"
    batch, size, shares = recipe.batch.global_batch_size, plan.microbatch.size, plan.microbatch.shares(plan.mesh.data)
    per_rank = shares if plan.microbatch.has_unequal_shares else shares[0]
    whose = "" if plan.mesh.data == 1 else " on each data rank" if isinstance(per_rank, int) else ", by data rank"
    yield f"GLOBAL_BATCH_SIZE, MICROBATCH_SIZE, MICROBATCHES = {batch}, {size}, {per_rank}  # the last per step{whose}"
    yield "TOKENS_PER_STEP = GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH"


def _training(recipe: Recipe) -> Iterator[str]:
    optimizer, run, start = recipe.optimizer, recipe.run, decay_start(recipe)
    yield f"SEED, NUM_STEPS, LOG_EVERY = {run.seed}, {run.steps}, {run.log_every}"
    yield f"LEARNING_RATE, WARMUP_STEPS = {peak_learning_rate(recipe)!r}, {optimizer.warmup_steps}"
    if start is not None:
        yield f"DECAY_START, FINAL_LEARNING_RATE_RATIO = {start}, {optimizer.final_learning_rate_ratio!r}"
    if optimizer.name == "adamw":
        yield f"BETAS, EPSILON = {optimizer.betas!r}, {1e-8 if optimizer.epsilon is None else optimizer.epsilon!r}"
    else:
        yield f"MOMENTUM = {optimizer.momentum!r}"
    if optimizer.max_grad_norm is None:
        yield f"WEIGHT_DECAY = {optimizer.weight_decay!r}"
    else:
        yield f"WEIGHT_DECAY, MAX_GRAD_NORM = {optimizer.weight_decay!r}, {optimizer.max_grad_norm!r}"


def _layout(plan: Plan, facts: ModelFacts, cuts: Sequence[int]) -> Iterator[str]:
    if plan.mesh.world_size > 1:
        sizes = ", ".join(f'"{axis}": {size}' for axis, size in axes(plan).items())
        yield f"MESH = {{{sizes}}}  # outermost first"
    if plan.mesh.pipeline > 1:
        yield f"STAGES = {(0, *cuts, facts.num_blocks)}  # stage i has the blocks from STAGES[i] to STAGES[i + 1] - 1"
    yield f"THREADS_PER_RANK = {plan.compute.num_threads}  # of CPU computation"


def quoted(text: str) -> str:
    """Return a string literal with double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _long(line: str) -> str:
    return line if len(line) <= _LINE_LENGTH else f"{line}  # noqa: E501"
