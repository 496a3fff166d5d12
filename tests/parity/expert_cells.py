"""Cells of ranks that share out experts: `ALL` is for `make parity`, `DRAWN` for every run of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cells import Cell, decoder, plan
from matrix import MIXED, ZERO

from weft.config.plan import Plan
from weft.config.recipe import ModelRecipe

_FACTORY = "expert_models:build_mixtures"
MODELS = {
    "mixture": ModelRecipe(factory=_FACTORY),
    "mixture_dropout": ModelRecipe(factory=_FACTORY, arguments={"dropout": 0.1}),
    "mixture_untied": ModelRecipe(factory=_FACTORY, arguments={"tied": False}),
    "mixture_three": ModelRecipe(factory=_FACTORY, arguments={"experts": 3}),
    "mixture_eight": ModelRecipe(factory=_FACTORY, arguments={"experts": 8}),
    "mixture_six": ModelRecipe(factory=_FACTORY, arguments={"experts": 6, "dropout": 0.1}),
}
"""Mixtures of three to eight experts, of which a token visits two, in all blocks but the first."""


MODELS["mixture_decoder"] = decoder(
    num_experts=6, top_k=2, expert_ffn_size=20, dropout=0.1, shared_experts=1, first_dense_layers=1, num_kv_heads=2
)
MODELS["mixture_losses"] = decoder(
    num_experts=6, top_k=2, expert_ffn_size=20, balance_loss_weight=0.02, z_loss_weight=0.01, shared_experts=1
)
MODELS["mixture_biased"] = decoder(
    num_experts=6, top_k=2, expert_ffn_size=20, router="sigmoid", balance_rate=0.05, dropout=0.1
)


def _cells(model: str, *plans: Plan) -> list[Cell]:
    return [Cell(model, chosen) for chosen in plans]


def alone() -> Iterator[Cell]:
    """Two, three, four and six ranks that have nothing else to do."""
    for zero in ZERO:
        yield from _cells("mixture", plan(expert=2, shard=2, zero=zero), plan(expert=4, shard=4, zero=zero, micro=3))
        yield from _cells("mixture_dropout", plan(expert=2, shard=2, zero=zero, micro=6))
    for zero in (1, 3):
        yield from _cells(
            "mixture_untied", plan(expert=2, shard=2, zero=zero), plan(expert=4, shard=4, zero=zero, micro=1)
        )
        yield from _cells("mixture_six", plan(expert=3, shard=3, zero=zero), plan(expert=6, shard=6, zero=zero))
    for every in ("step", "microbatch"):
        yield from _cells(
            "mixture",
            plan(expert=2, shard=2, zero=3, every=every),
            plan(expert=2, shard=4, zero=2, micro=1, every=every),
        )


def with_data() -> Iterator[Cell]:
    """Ranks that hold the same experts sum their gradients and share out their states."""
    for zero in ZERO:
        yield from _cells("mixture", plan(expert=2, shard=4, zero=zero, micro=1))
        yield from _cells("mixture_six", plan(expert=2, shard=2, replicate=2, zero=zero, micro=3))
    yield from _cells("mixture", plan(expert=2, shard=2, replicate=3, zero=1, micro=1))
    yield from _cells("mixture_dropout", plan(expert=2, shard=2, replicate=3, zero=3, micro=2))


def with_others() -> Iterator[Cell]:
    """Every other axis, and recomputation."""
    for word in ("full", "selective", MIXED):
        yield from _cells("mixture_dropout", plan(expert=2, shard=2, zero=1, recompute=word))
        yield from _cells("mixture_dropout", plan(expert=2, shard=2, zero=3, recompute=word))
    for zero in (0, 1, 3):
        yield from _cells("mixture_dropout", plan(expert=2, shard=2, zero=zero, pipeline=2, micro=1))
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        yield from _cells(
            "mixture_dropout", plan(expert=2, shard=2, zero=1, pipeline=2, schedule=schedule, chunks=2, micro=1)
        )
    yield from _cells(
        "mixture",
        plan(expert=2, shard=2, zero=1, pipeline=2, recompute="full"),
        plan(expert=2, shard=2, zero=1, pipeline=4, micro=1),
    )
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells("mixture_dropout", plan(expert=2, context=2, scheme=scheme))
        yield from _cells("mixture", plan(expert=4, context=2, shard=2, zero=1, scheme=scheme, micro=1))
    for zero in ZERO:
        yield from _cells("mixture_untied", plan(expert=2, context=2, shard=2, zero=zero))
    yield from _cells("mixture", plan(expert=4, context=4), plan(expert=2, context=4, zero=3))
    yield from _cells("mixture_six", plan(expert=3, context=3, replicate=2, zero=1))
    yield from _cells(
        "mixture_dropout", plan(expert=2, context=2, recompute="full"), plan(expert=2, context=2, recompute="selective")
    )
    yield from _cells("mixture_untied", plan(expert=2, shard=2, zero=1, fused=False))


def fourfold() -> Iterator[Cell]:
    """Pipeline 2 × data 2 × context 2 with experts."""
    for zero, experts in ((0, 2), (1, 2), (1, 4), (3, 2), (3, 4)):
        yield from _cells("mixture_dropout", plan(pipeline=2, shard=2, context=2, expert=experts, zero=zero, micro=1))
    yield from _cells("mixture", plan(pipeline=2, replicate=2, context=2, expert=2, zero=1, recompute="full"))


def with_tensor() -> Iterator[Cell]:
    """Tensor ranks that have a part of each of their experts."""
    for zero in ZERO:
        yield from _cells("mixture_decoder", plan(expert=2, shard=2, zero=zero, tensor=2))
    for word in ("none", "full", "selective"):
        sequence = plan(expert=2, shard=2, zero=1, tensor=2, sequence=True, recompute=word)
        yield from _cells("mixture_decoder", sequence)
    for zero in (1, 3):
        yield from _cells("mixture_decoder", plan(expert=2, shard=2, zero=zero, tensor=2, pipeline=2, micro=1))
    yield from _cells("mixture_decoder", plan(expert=3, shard=3, zero=1, tensor=2, sequence=True))
    for micro in (2, 6):  # in several microbatches, auxiliary losses first take one more forward of each
        yield from _cells("mixture_losses", plan(expert=2, shard=2, zero=1, micro=micro, recompute="full"))
    yield from _cells("mixture_losses", plan(expert=2, shard=2, zero=3, tensor=2))


def of_context() -> Iterator[Cell]:
    """The reference decoder's experts on ranks that share a sequence."""
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells("mixture_decoder", plan(context=2, scheme=scheme))
        yield from _cells("mixture_biased", plan(context=2, expert=2, scheme=scheme, micro=3))
    for zero in ZERO:
        yield from _cells("mixture_decoder", plan(context=2, expert=2, shard=2, zero=zero))
    for word in ("full", "selective"):
        yield from _cells(
            "mixture_decoder", plan(context=2, expert=2, shard=2, zero=1, scheme="ulysses", recompute=word)
        )
    yield from _cells("mixture_decoder", plan(context=2, expert=2, tensor=2, sequence=True, zero=3))
    for experts, zero in ((2, 1), (2, 3)):
        yield from _cells("mixture_biased", plan(pipeline=2, shard=2, context=2, expert=experts, zero=zero, micro=1))


def gathered() -> Iterator[Cell]:
    """Tokens that are gathered instead of sent: every axis, shares of unequal length, and recomputation."""
    for zero in ZERO:
        yield from _cells("mixture_dropout", gathering(expert=2, shard=2, zero=zero))
    yield from _cells("mixture", gathering(expert=4, shard=4, zero=3, micro=3), gathering(expert=4, context=4))
    yield from _cells("mixture_six", gathering(expert=3, shard=3, replicate=2, zero=2, micro=1))
    yield from _cells("mixture_six", gathering(expert=3, context=3, replicate=2, zero=1))
    yield from _cells("mixture_eight", gathering(expert=2, shard=2, replicate=2, zero=1, micro=3))
    for scheme in ("ring", "all_gather", "ulysses"):
        yield from _cells("mixture_untied", gathering(expert=2, context=2, scheme=scheme, micro=3))
        yield from _cells("mixture_decoder", gathering(expert=2, context=2, shard=2, zero=1, scheme=scheme))
    for word in ("full", "selective", MIXED):
        yield from _cells("mixture_dropout", gathering(expert=2, shard=2, zero=1, recompute=word))
        yield from _cells("mixture_decoder", gathering(expert=2, context=2, zero=3, recompute=word))
    for schedule in ("1f1b", "interleaved_zero_bubble", "zbv"):
        chunks = 1 if schedule == "1f1b" else 2
        yield from _cells(
            "mixture_dropout",
            gathering(expert=2, shard=2, zero=1, pipeline=2, schedule=schedule, chunks=chunks, micro=1),
        )
    for sequence in (False, True):
        yield from _cells("mixture_decoder", gathering(expert=2, shard=2, zero=1, tensor=2, sequence=sequence))
    yield from _cells("mixture_losses", gathering(expert=2, shard=2, zero=1, micro=2, recompute="full"))
    yield from _cells("mixture_biased", gathering(expert=2, context=2, micro=3))
    for zero in (1, 3):
        yield from _cells("mixture_dropout", gathering(pipeline=2, shard=2, context=2, expert=4, zero=zero, micro=1))


def gathering(**of: Any) -> Plan:
    """A plan whose ranks gather tokens."""
    return plan(exchange="all_gather", **of)


ALL = tuple(
    dict.fromkeys([*alone(), *with_data(), *with_others(), *fourfold(), *with_tensor(), *of_context(), *gathered()])
)
DRAWN = (
    Cell("mixture_dropout", plan(expert=2, shard=2, zero=1, recompute="full")),
    Cell("mixture", plan(expert=4, shard=4, zero=3, micro=1)),
    Cell("mixture_six", plan(expert=2, shard=2, replicate=2, zero=2, micro=3)),
    Cell("mixture_untied", plan(expert=2, context=2, shard=2, zero=0)),
    Cell("mixture_dropout", plan(pipeline=2, shard=2, context=2, expert=4, zero=1, micro=1)),
    Cell("mixture_decoder", plan(expert=2, shard=2, zero=1, tensor=2, sequence=True, recompute="full")),
    Cell("mixture_six", gathering(expert=3, context=3, zero=1)),
    Cell("mixture_decoder", gathering(expert=2, shard=2, zero=1, tensor=2, sequence=True, recompute="full")),
)
