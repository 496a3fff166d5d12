"""Cells of ZeRO-3 over the ranks that hold the same experts: `ALL` is for `make parity`, `DRAWN` for every run."""

from __future__ import annotations

from collections.abc import Iterator

from cells import Cell, plan
from matrix import MIXED

from weft.config.plan import Plan


def _cells(model: str, *plans: Plan) -> list[Cell]:
    return [Cell(model, chosen) for chosen in plans]


def of_reference() -> Iterator[Cell]:
    """Experts that divide over the ranks, fewer than them, and numbers that do not divide."""
    for every in ("auto", "step"):
        yield from _cells("mixture", plan(expert=2, shard=4, zero=3, micro=1, every=every))
    yield from _cells("mixture_six", plan(expert=2, shard=4, zero=3, micro=1), plan(expert=3, shard=6, zero=3))
    yield from _cells("mixture_three", plan(expert=3, shard=6, zero=3, micro=1))
    yield from _cells("mixture_eight", plan(expert=2, shard=6, zero=3, micro=1))
    yield from _cells("mixture", plan(expert=2, shard=6, zero=3, micro=1))
    yield from _cells("mixture_dropout", plan(expert=2, shard=2, context=2, replicate=2, zero=3, micro=1))
    yield from _cells("mixture_untied", plan(expert=2, shard=4, zero=3, micro=1, fused=False))
    for word in ("full", "selective", MIXED):
        yield from _cells("mixture_dropout", plan(expert=2, shard=4, zero=3, micro=1, recompute=word))
    yield from _cells("mixture_dropout", plan(expert=2, shard=4, zero=3, pipeline=2, micro=1))
    yield from _cells("mixture", plan(expert=2, shard=4, zero=3, pipeline=2, micro=1, every="microbatch"))
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        yield from _cells(
            "mixture_dropout", plan(expert=2, shard=4, zero=3, pipeline=2, schedule=schedule, chunks=2, micro=1)
        )
    yield from _cells("mixture_dropout", plan(expert=2, context=2, shard=2, zero=3), plan(expert=2, context=4, zero=3))
    yield from _cells("mixture", plan(expert=2, context=2, shard=2, zero=3, recompute="full", micro=1))
    for sequence in (False, True):
        yield from _cells("mixture_decoder", plan(expert=2, shard=4, zero=3, tensor=2, sequence=sequence, micro=1))
    yield from _cells("mixture_losses", plan(expert=2, shard=4, zero=3, micro=1, recompute="full"))
    yield from _cells("mixture_biased", plan(expert=2, shard=4, zero=3, micro=3))


def of_library() -> Iterator[Cell]:
    for model in ("mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"):
        yield from _cells(model, plan(expert=2, shard=4, zero=3, micro=1))
    yield from _cells("mixtral", plan(expert=2, context=2, shard=2, zero=3), plan(expert=2, shard=6, zero=3))
    yield from _cells("qwen3_moe", plan(expert=4, context=2, shard=4, zero=3, micro=1))
    yield from _cells("gpt_oss", plan(expert=2, shard=6, zero=3, micro=1))
    yield from _cells("mixtral", plan(expert=2, shard=4, zero=3, tensor=2, sequence=True, recompute="full", micro=1))
    yield from _cells("qwen3_moe", plan(expert=2, shard=4, zero=3, pipeline=2, micro=1))
    yield from _cells("deepseek_v3", plan(expert=2, shard=4, zero=3, micro=1, recompute="selective"))


ALL = tuple(dict.fromkeys(of_reference()))
LIBRARY = tuple(dict.fromkeys(of_library()))
DRAWN = (
    Cell("mixture_dropout", plan(expert=2, shard=4, zero=3, micro=1, recompute="full")),
    Cell("mixture_three", plan(expert=3, shard=6, zero=3, micro=1)),
    Cell("mixture_eight", plan(expert=2, shard=6, zero=3, micro=1)),
    Cell("mixture", plan(expert=2, shard=6, zero=3, micro=1)),
    Cell("mixture_decoder", plan(expert=2, shard=4, zero=3, tensor=2, sequence=True, micro=1)),
)
