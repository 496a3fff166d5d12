"""The cells of the parity matrix, each a model under a plan.

`FULL` is what `make parity` runs.  `COVERING` is a part of it, small enough to run with every test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cells import Cell, plan
from window_models import WINDOWED

from weft.config.plan import Plan

ALL_MODELS = (
    "decoder", "decoder_untied", "decoder_dropout", "decoder_grouped", "encoder", "convnet", "mlp", "own", "looked",
    "pairs", "hf_llama", "hf_qwen", "hf_gpt2", "hf_bert",
)  # fmt: skip
TRANSFORMERS = tuple(name for name in ALL_MODELS if name not in ("convnet", "mlp", "own", "looked", "pairs"))
ZERO = (0, 1, 2, 3)
MIXED = ("full", "none", "selective", "full")


def _cells(models: Sequence[str] | str, *plans: Plan) -> list[Cell]:
    names = (models,) if isinstance(models, str) else models
    return [Cell(name, chosen) for name in names for chosen in plans]


def _data(zero: int, ranks: int = 2, **others) -> Plan:
    """Data parallelism over `ranks` under a ZeRO stage."""
    axes = {"replicate": ranks} if zero == 0 else {"shard": ranks}
    return plan(zero=zero, **axes, **others)


def alone() -> Iterator[Cell]:
    """Each technique alone."""
    yield from _cells(("decoder", "own"), plan(micro=4), plan(micro=1))
    yield from _cells("mlp", plan(micro=6))
    for zero in ZERO:
        yield from _cells(("decoder_dropout", "own"), _data(zero))
        yield from _cells("convnet", _data(zero, micro=6))
    yield from _cells("decoder", *(_data(zero, 4, micro=1) for zero in ZERO))
    for zero, micro in ((3, 1), (1, 3)):
        yield from _cells("decoder", plan(replicate=2, shard=2, zero=zero, micro=micro))
    yield from _cells(TRANSFORMERS, plan(tensor=2, micro=12))
    yield from _cells(("mlp", "own"), plan(tensor=2, micro=4))
    yield from _cells(("decoder", "encoder", "hf_bert"), plan(tensor=4, micro=6))
    yield from _cells(("decoder", "decoder_untied", "decoder_dropout", "encoder"), plan(tensor=2, sequence=True))
    yield from _cells(("hf_llama", "hf_gpt2"), plan(tensor=2, sequence=True))
    yield from _cells(tuple(name for name in ALL_MODELS if name not in ("convnet", "pairs")), plan(pipeline=2))
    yield from _cells("convnet", plan(pipeline=2, micro=12))
    yield from _cells(("decoder_dropout", "hf_gpt2"), plan(recompute="full"), plan(recompute="selective"))
    yield from _cells("decoder_dropout", plan(recompute=MIXED))
    yield from _cells(("decoder_untied", "encoder"), plan(fused=False), plan(fused=True))


def seen_whole() -> Iterator[Cell]:
    """A loss that sees the whole batch: data ranks gather their samples."""
    for zero in ZERO:
        yield from _cells("pairs", _data(zero, micro=6))
    yield from _cells("pairs", _data(3, tensor=2, micro=6), plan(replicate=2, shard=2, zero=1, micro=3))
    yield from _cells("pairs", plan(tensor=2, micro=12))


def schedules() -> Iterator[Cell]:
    """The six schedules over two and four ranks; chunks; uneven cuts; three, six and twelve microbatches."""
    for schedule in ("gpipe", "1f1b"):
        yield from _cells("decoder_dropout", plan(pipeline=2, schedule=schedule, micro=4))
        yield from _cells("decoder", plan(pipeline=4, schedule=schedule, micro=1))
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        yield from _cells(("decoder", "decoder_dropout"), plan(pipeline=2, schedule=schedule, chunks=2))
        yield from _cells("decoder_deep", plan(pipeline=4, schedule=schedule, chunks=2, micro=1))
    yield from _cells("decoder", plan(pipeline=2, cuts=(1,)), plan(pipeline=2, cuts=(3,), schedule="gpipe"))
    yield from _cells("decoder_deep", plan(pipeline=2, schedule="zbv", chunks=2, cuts=(1, 2, 6)))
    yield from _cells("encoder", plan(pipeline=2, schedule="interleaved_1f1b", chunks=2, cuts=(1, 2, 3)))


def pairs() -> Iterator[Cell]:
    """Each pair of techniques."""
    yield from _cells(("hf_llama", "hf_gpt2", "hf_bert"), _data(3), _data(3, pipeline=2, micro=6))
    for zero in ZERO:
        yield from _cells("decoder_dropout", _data(zero, tensor=2), _data(zero, pipeline=2, micro=1))
        yield from _cells("decoder", _data(zero, tensor=2, sequence=True))
        yield from _cells("own", _data(zero, recompute="full"))
        yield from _cells("decoder", _data(zero, fused=False, recompute="selective"))
        yield from _cells(("own", "decoder"), _data(zero, shares=(4, 2)))
    yield from _cells("decoder_dropout", plan(tensor=2, pipeline=2), plan(tensor=2, sequence=True, pipeline=2))
    yield from _cells(("hf_qwen", "hf_gpt2", "encoder"), plan(tensor=2, pipeline=2, micro=4))
    yield from _cells("hf_llama", plan(tensor=2, sequence=True, pipeline=2, micro=4))
    yield from _cells("decoder_dropout", plan(tensor=2, recompute=MIXED))
    yield from _cells("decoder_dropout", plan(tensor=2, sequence=True, recompute="full"))
    yield from _cells("encoder", plan(tensor=2, sequence=True, recompute="selective"))
    yield from _cells("decoder_untied", plan(tensor=2, fused=False), plan(tensor=2, sequence=True, fused=False))
    yield from _cells("decoder_untied", plan(pipeline=2, fused=False))
    for schedule in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        yield from _cells("decoder_dropout", plan(pipeline=2, schedule=schedule, chunks=2, recompute="full"))
        yield from _cells("own", plan(pipeline=2, schedule=schedule, chunks=2, micro=4))
    yield from _cells(("decoder_dropout", "own"), plan(pipeline=2, recompute="selective"))
    yield from _cells("convnet", _data(0, pipeline=2, micro=6), _data(3, pipeline=2, micro=6))
    yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, micro=1, fused=False, recompute="full"))
    yield from _cells("decoder", plan(replicate=2, shard=2, zero=2, micro=1))
    yield from _cells("decoder", _data(1, shares=(4, 2), fused=False, recompute=MIXED))
    yield from _cells("decoder", plan(tensor=2, sequence=True, pipeline=2, schedule="zbv", chunks=2, fused=False))
    yield from _cells("decoder", _data(0, pipeline=2, schedule="dualpipev", chunks=2, micro=1))
    yield from _cells("decoder", _data(2, pipeline=2, schedule="interleaved_zero_bubble", chunks=2, micro=1))


def looked() -> Iterator[Cell]:
    """A model without a table, cut where its forward shows it, under everything that works block by block."""
    yield from _cells("looked", plan(pipeline=4, micro=1), plan(recompute="full"), _data(3))
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        yield from _cells("looked", plan(pipeline=2, schedule=schedule, chunks=2, micro=4))
    for zero in ZERO:
        yield from _cells("looked", _data(zero, pipeline=2))
    yield from _cells(
        "looked", plan(tensor=2, micro=4), plan(tensor=2, pipeline=2), _data(1, shares=(4, 2), pipeline=2)
    )
    yield from _cells("looked", plan(pipeline=2, recompute="selective"), plan(pipeline=2, recompute=MIXED))
    yield from _cells("looked", _data(3, tensor=2, pipeline=2), plan(replicate=2, shard=2, zero=3, pipeline=2, micro=1))


def adapted() -> Iterator[Cell]:
    """Frozen weights beside adapters."""
    yield from _cells("lora", _data(0), _data(3, micro=3), plan(tensor=2, micro=6), plan(pipeline=2, micro=3))
    yield from _cells("lora", plan(recompute="full"), _data(2, tensor=2, recompute="full"))
    yield from _cells(
        "dora", _data(1), plan(tensor=2, micro=6), _data(3, tensor=2, micro=3), plan(pipeline=2, tensor=2)
    )


def threefold() -> Iterator[Cell]:
    """Data 2 × tensor 2 × pipeline 2 under each ZeRO stage, hybrid shards beside another axis, and more at once."""
    for zero in ZERO:
        yield from _cells("decoder_dropout", _data(zero, tensor=2, pipeline=2, micro=1))
        yield from _cells("own", _data(zero, tensor=2, pipeline=2))
    yield from _cells("encoder", _data(1, tensor=2, sequence=True, pipeline=2, recompute="full"))
    yield from _cells("hf_qwen", _data(1, tensor=2, pipeline=2), _data(3, tensor=2, pipeline=2))
    yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, tensor=2, micro=1))
    yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, pipeline=2, micro=1))
    yield from _cells("own", plan(replicate=2, shard=2, zero=3, pipeline=2, micro=1))
    yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, pipeline=2, schedule="zbv", chunks=2, micro=1))
    yield from _cells("decoder_dropout", plan(replicate=2, shard=2, zero=3, tensor=2, sequence=True, micro=3))
    yield from _cells("decoder_dropout", _data(2, 4, tensor=2, micro=1), _data(1, 2, tensor=4, micro=2))
    yield from _cells("decoder", plan(replicate=8, micro=1, shares=(2, 2, 2, 2, 1, 1, 1, 1)))
    for schedule in ("interleaved_1f1b", "zbv", "dualpipev"):
        for zero in (1, 3):
            yield from _cells("decoder", _data(zero, pipeline=2, schedule=schedule, chunks=2, micro=1))
    yield from _cells("decoder_dropout", _data(1, tensor=2, pipeline=2, schedule="zbv", chunks=2, recompute="full"))


def unequal() -> Iterator[Cell]:
    """Unequal shares with other axes."""
    for zero in ZERO:
        yield from _cells("decoder", _data(zero, pipeline=2, shares=(4, 2)))
    yield from _cells("decoder_dropout", _data(1, tensor=2, pipeline=2, shares=(5, 1)))
    yield from _cells("decoder", _data(3, tensor=2, shares=(4, 2)), _data(2, tensor=2, sequence=True, shares=(1, 5)))
    yield from _cells("decoder", _data(1, pipeline=2, schedule="zbv", chunks=2, shares=(4, 2)))
    yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, micro=1, shares=(6, 3, 2, 1)))


def algorithms() -> Iterator[Cell]:
    """Collectives by algorithms that are named: whole tensors, parts and hierarchies, at powers of two and beside."""
    yield from _cells("decoder", _data(0, algorithm="tree"), _data(1, 4, micro=1, algorithm="ring"))
    yield from _cells("decoder", _data(0, 4, micro=1, algorithm="halving_doubling"))
    yield from _cells("decoder_dropout", _data(2, 4, micro=1, algorithm="hierarchical"))
    yield from _cells("decoder", _data(2, tensor=2, shares=(4, 2), algorithm="halving_doubling"))
    yield from _cells("own", _data(1, pipeline=2, algorithm="tree:0-2K;direct:2K-4K;ring:4K-max"))


def reductions() -> Iterator[Cell]:
    """Gradients that are reduced after every microbatch, or once, where `auto` would do the other or it is at its
    hardest: pipelines, copies of shards, ties, unequal shares."""
    yield from _cells(("decoder", "decoder_dropout", "own"), _data(3, micro=1, every="step"))
    yield from _cells("decoder", _data(2, micro=1, every="step"), _data(2, shares=(4, 2), every="step"))
    yield from _cells(("decoder", "own"), _data(3, shares=(4, 2), every="step"))
    yield from _cells("decoder", _data(3, 4, micro=1, every="microbatch", recompute="full"))
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)):
        pipelined = _data(3, pipeline=2, schedule=schedule, chunks=chunks, micro=1, every="microbatch")
        yield from _cells(("decoder", "decoder_untied"), pipelined)
    yield from _cells(("own", "hf_qwen"), _data(3, pipeline=2, every="microbatch"))
    yield from _cells("decoder_dropout", _data(3, tensor=2, pipeline=2, micro=1, every="microbatch", recompute=MIXED))
    for every in ("step", "microbatch"):
        yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, micro=1, every=every))
        yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, pipeline=2, micro=1, every=every))
        yield from _cells("decoder", plan(replicate=2, shard=2, zero=3, micro=1, shares=(6, 3, 2, 1), every=every))
        yield from _cells("own", _data(3, tensor=2, shares=(2, 4), every=every))
        yield from _cells("decoder", _data(3, pipeline=2, shares=(4, 2), every=every))


def context() -> Iterator[Cell]:
    """Ranks that share a sequence of 11 tokens, which no number of ranks divides: each scheme, and with all else."""
    for scheme in ("ring", "all_gather"):
        yield from _cells(("decoder", "decoder_grouped"), *(plan(context=c, scheme=scheme) for c in (2, 4)))
        yield from _cells(("encoder_plain", "isolated"), *(plan(context=c, scheme=scheme) for c in (2, 4)))
        yield from _cells("decoder_dropout", plan(context=3, scheme=scheme), plan(context=5, scheme=scheme))
        yield from _cells(("hf_llama", "hf_gpt2_plain", "hf_bert_plain"), plan(context=2, scheme=scheme))
        yield from _cells("decoder_dropout", plan(context=2, scheme=scheme, recompute="full"))
        yield from _cells("decoder_dropout", plan(context=2, scheme=scheme, recompute="selective"))
        for zero in ZERO:
            yield from _cells("decoder_dropout", _data(zero, context=2, scheme=scheme))
        yield from _cells("decoder_dropout", plan(context=2, scheme=scheme, tensor=2, sequence=True))
        yield from _cells("decoder_grouped", plan(context=4, scheme=scheme, tensor=2))
        yield from _cells("decoder_dropout", plan(context=2, scheme=scheme, pipeline=2))
    for model in ("decoder", "decoder_grouped", "encoder_plain", "isolated"):
        yield from _cells(model, *(plan(context=c, scheme="ulysses") for c in (2, 4)))
    yield from _cells(("hf_llama", "hf_gpt2_plain", "hf_bert_plain"), plan(context=2, scheme="ulysses"))
    for more in ({"tensor": 2}, {"tensor": 2, "sequence": True}, {"recompute": "full"}, {"pipeline": 2}):
        yield from _cells("decoder_dropout", plan(context=2, scheme="ulysses", **more))
    yield from _cells("isolated", plan(context=2, scheme="ulysses", recompute="selective"))
    for zero in (1, 3):
        yield from _cells("decoder_dropout", _data(zero, context=2, scheme="ulysses"))
    yield from _cells(("decoder", "encoder_plain", "isolated", "hf_bert"), plan(context=4, scheme="usp"))
    for more in ({"tensor": 2}, {"recompute": "full"}, {"pipeline": 2}):
        yield from _cells("decoder_dropout", plan(context=4, scheme="usp", **more))
    yield from _cells("decoder_grouped", plan(context=4, scheme="usp", recompute="selective"))
    for zero in (1, 3):
        yield from _cells("decoder_dropout", _data(zero, context=4, scheme="usp"))
    for zero in (1, 2, 3):
        yield from _cells(("decoder", "isolated"), plan(context=2, zero=zero))
        yield from _cells("decoder", plan(replicate=2, shard=2, context=2, zero=zero, micro=1))
    yield from _cells(("hf_llama", "hf_qwen"), _data(3, context=2), plan(context=2, tensor=2, sequence=True))
    yield from _cells(("hf_gpt2_plain", "hf_bert_plain"), plan(context=2, tensor=2), plan(context=2, pipeline=2))
    yield from _cells("encoder_plain", _data(1, context=2, recompute="full"), plan(context=2, tensor=2, sequence=True))
    yield from _cells("isolated", plan(context=2, tensor=2), plan(context=2, pipeline=2, recompute="selective"))
    yield from _cells("decoder", _data(1, context=2, shares=(4, 2)), _data(3, context=2, shares=(4, 2)))
    yield from _cells("decoder_untied", plan(context=2, fused=False), plan(context=2, tensor=2, fused=False))
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        yield from _cells("decoder_dropout", plan(context=2, pipeline=2, schedule=schedule, chunks=2, recompute="full"))
    yield from _cells("decoder_dropout", _data(1, context=2, pipeline=2, micro=1), _data(3, context=2, pipeline=2))
    dropping = ("encoder", "hf_gpt2", "hf_bert")
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells(dropping, plan(context=2, scheme=scheme))
        yield from _cells("encoder", _data(3, context=2, scheme=scheme, recompute="full"))
    yield from _cells(dropping, plan(context=2, tensor=2), plan(context=2, tensor=2, scheme="ulysses"))
    yield from _cells("hf_gpt2", plan(context=3), plan(context=2, pipeline=2), plan(context=2, recompute="selective"))
    yield from _cells("decoder_dropout", _data(1, context=2, tensor=2, micro=3), plan(context=2, tensor=2, pipeline=2))


def grids() -> Iterator[Cell]:
    """Tensor ranks that form a square, or several layers of one."""
    square: Any = {"tensor": 4, "grid": "2d"}
    models = ("decoder", "decoder_dropout", "decoder_untied", "decoder_grouped", "encoder", "isolated")
    yield from _cells((*models, "hf_llama", "hf_qwen", "hf_gpt2", "hf_bert"), plan(**square))
    yield from _cells(("decoder_untied", "encoder", "hf_bert"), plan(**square, fused=False))
    yield from _cells(("decoder_dropout", "encoder", "hf_gpt2"), plan(**square, recompute="full"))
    yield from _cells(("decoder_dropout", "hf_llama"), plan(**square, recompute="selective"))
    for zero in (0, 1, 2, 3):
        yield from _cells("decoder_dropout", _data(zero, **square))
    yield from _cells(("encoder", "hf_gpt2"), _data(1, **square), _data(3, **square))
    yield from _cells("decoder_dropout", _data(3, **square, recompute="full"), _data(1, **square, shares=(4, 2)))
    yield from _cells(("decoder_dropout", "encoder", "hf_bert"), plan(**square, pipeline=2))
    yield from _cells("decoder_dropout", plan(**square, pipeline=2, schedule="interleaved_1f1b", chunks=2))
    layers: Any = {"tensor": 8, "grid": "2.5d", "micro": 4}
    yield from _cells(("decoder_dropout", "encoder", "hf_llama", "hf_gpt2"), plan(**layers))
    yield from _cells("decoder_untied", plan(**layers, fused=False), plan(**layers, recompute="full"))
    cube: Any = {"tensor": 8, "grid": "3d", "micro": 4, "fused": False}
    models = ("decoder", "decoder_dropout", "decoder_untied", "encoder_plain", "hf_llama", "hf_gpt2_plain")
    yield from _cells((*models, "hf_bert_plain"), plan(**cube))
    yield from _cells(("decoder_dropout", "encoder_plain"), plan(**cube, recompute="full"))
    yield from _cells("hf_qwen", plan(**cube, recompute="selective"))


def compiled() -> Iterator[Cell]:
    """Compiled blocks, which take a minute each."""
    yield from _cells("decoder_dropout", _data(1, compiled=True), plan(tensor=2, compiled=True))
    yield from _cells("decoder", plan(pipeline=2, compiled=True), _data(3, compiled=True, recompute="full"))
    yield from _cells("decoder_untied", plan(tensor=2, sequence=True, fused=False, compiled=True))
    yield from _cells("decoder_dropout", plan(tensor=2, recompute="selective", compiled=True))
    yield from _cells("decoder_dropout", plan(pipeline=2, recompute="full", compiled=True))
    yield from _cells("decoder_dropout", plan(tensor=2, sequence=True, recompute=MIXED, compiled=True))
    yield from _cells(("hf_gpt2", "encoder"), _data(2, recompute="selective", compiled=True))
    yield from _cells("hf_llama", plan(tensor=2, recompute="full", compiled=True))
    shared: Any = {"context": 2, "compiled": True}
    yield from _cells("decoder_dropout", plan(**shared), plan(**shared, scheme="ulysses", recompute="selective"))
    yield from _cells("encoder", plan(**shared, scheme="all_gather", recompute="full"))
    yield from _cells("hf_gpt2", plan(**shared, scheme="ulysses"))
    yield from _cells(("hf_bert", "hf_llama", "lora"), plan(**shared, recompute="full"))
    yield from _cells("mistral_dropping", plan(**shared), plan(**shared, scheme="ulysses"))
    yield from _cells(("isolated", "mistral_isolated"), plan(**shared, scheme="all_gather"))
    yield from _cells("isolated", plan(**shared, pipeline=2))
    yield from _cells("decoder_grouped", plan(context=4, scheme="usp", recompute="selective", compiled=True))
    yield from _cells("decoder_dropout", _data(3, **shared), _data(1, **shared, scheme="ulysses", recompute="full"))
    yield from _cells("decoder_grouped", plan(**shared, tensor=2, sequence=True, recompute=MIXED))


def _full() -> tuple[Cell, ...]:
    groups = (
        alone(),
        looked(),
        seen_whole(),
        adapted(),
        schedules(),
        pairs(),
        threefold(),
        unequal(),
        algorithms(),
        reductions(),
        context(),
        grids(),
        compiled(),
    )
    return tuple(dict.fromkeys(itertools.chain(*groups)))  # once each, in order


FULL = _full()
NARROW_NORMS = frozenset(("hf_llama", "hf_qwen", "lora", *WINDOWED))
"""Models of `transformers` whose norms compute in fp32 whatever they are given: a compiler rounds otherwise there, so
that compiled fp64 is no nearer to one process than fp32."""


def techniques(cell: Cell) -> frozenset[str]:
    """Names of what a cell uses, for the check that pairs are covered."""
    chosen, mesh = cell.plan, cell.plan.mesh
    zero = f"zero{chosen.data_parallel.zero}" if mesh.data > 1 else ""
    recompute = chosen.memory.recompute
    found = {
        "data": mesh.data > 1,
        zero: bool(zero),
        "hybrid": mesh.replicate > 1 and mesh.shard > 1,
        "tensor": mesh.tensor > 1,
        "grid": chosen.tensor_parallel.scheme != "1d",
        "context": mesh.context > 1,
        "sequence": chosen.tensor_parallel.sequence,
        "pipeline": mesh.pipeline > 1,
        "split_backward": chosen.pipeline_parallel.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev"),
        "recompute": recompute != "none",
        "plain_loss": not chosen.memory.fused_loss,
        "accumulation": max(chosen.microbatch.shares(mesh.data)) > 1,
        "unequal": len(set(chosen.microbatch.shares(mesh.data))) > 1,
        "compile": chosen.compute.compile,
    }
    return frozenset(name for name, used in found.items() if used)


def features(cell: Cell) -> frozenset[str]:
    """What running a cell shows: pairs of techniques, a schedule, a size of the world, its model under each axis, how
    its collectives go."""
    used = sorted(techniques(cell))
    pairs_used = {f"{one} and {other}" for one, other in itertools.combinations(used, 2)}
    axes = {name for name in used if name in ("data", "tensor", "pipeline", "sequence", "unequal")}
    schedule = cell.plan.pipeline_parallel.schedule if "pipeline" in used else "no pipeline"
    ways = f"collectives by {cell.plan.data_parallel.algorithm}"
    every = cell.plan.data_parallel.reduce_every
    beside = [name for name in ("hybrid", "pipeline", "unequal", "zero2", "zero3") if every != "auto" and name in used]
    return frozenset(
        pairs_used
        | {schedule, f"world {cell.world}", ways}
        | {f"{cell.model} under {axis}" for axis in axes}
        | {f"reduced every {every} under {name}" for name in beside}
    )


def covering(cells: Sequence[Cell], shown: Callable[[Cell], frozenset[str]] = features) -> tuple[Cell, ...]:
    """Return cells that together show every feature of all of them, found greedily: most new ones per process first.

    `shown` says what a cell shows.
    """
    missing = set[str]().union(*(shown(cell) for cell in cells))
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(shown(cell) & missing) / (4 + cell.world))
        chosen.append(best)
        missing -= shown(best)
    return tuple(chosen)


_APART = frozenset(("compile", "context", "grid"))
COVERING = covering([cell for cell in FULL if _APART.isdisjoint(techniques(cell))])
"""Of ranks that share a sequence `test_context.py` has some, of those that form a grid `test_tensor_nd.py`."""
