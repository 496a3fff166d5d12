"""What stands against ranks that share a sequence: one sentence for contract, price and search.  No torch."""

from __future__ import annotations

from weft.config.recipe import Recipe
from weft.techniques.context.token_runs import exchanging_ranks

_TOKEN_BY_TOKEN = frozenset({"use_dora", "use_rslora"})
"""Settings of low-rank adapters under which they work token by token."""
TOKEN_LOSS = "tokens"
"""Built-in loss that is a sum over tokens."""


def heads_problem(heads: int, *, tensor: int, ranks: int) -> str:
    """Return why `ranks` cannot exchange heads for tokens, each having as many; empty: they can.  Heads of keys are
    copied where there are too few."""
    own = heads // tensor
    return "" if own % ranks == 0 else f"gives no equal shares of {own} heads to {ranks} ranks under ulysses."


def mixed_problem(heads: tuple[int, int] | None, *, tensor: int, ranks: int, exchanging: int) -> str:
    """Return why `ranks` cannot exchange heads among `exchanging` neighbours (0: as many as fit) and let keys go round
    between these; empty: they can.  `heads`: of queries and of keys, in all of the model; None: nobody knows."""
    if exchanging and (ranks % exchanging or not 1 < exchanging < ranks):
        return f"is no several groups of {exchanging} neighbours, as usp needs."
    if heads is None:
        what = "needs a model whose attention has the same heads everywhere, of which something tells"
        if exchanging:
            return ""
        said = " (context_parallel.ulysses = 2 would say so)" if ranks % 2 == 0 and ranks > 2 else ""
        return f"{what}, to choose how many ranks exchange them under usp{said}."
    own, keys = heads[0] // tensor, max(1, heads[1] // tensor)
    if exchanging:
        return "" if own % exchanging == 0 else f"gives no equal shares of {own} heads to {exchanging} ranks."
    if exchanging_ranks(ranks, own, keys):
        return ""
    return f"is no product of ranks that share {own} heads and of groups of these, as usp needs."


def length_problem(length: int, *, ranks: int, tensor: int, sequence: bool) -> str:
    """Return why `ranks` cannot share out `length` tokens, each two runs of them, and under sequence parallelism every
    tensor rank its part; empty: they can."""
    least = 2 * ranks * (tensor if sequence else 1)
    if length >= least:
        return ""
    parts = f" and {tensor} tensor ranks under sequence parallelism" if sequence and tensor > 1 else ""
    return f"needs samples of {least} tokens or more, two runs for each of {ranks} ranks{parts}: they have {length}."


def recipe_problem(recipe: Recipe) -> str:
    """Return what a recipe asks for that ranks which share a sequence have not got: the beginning of a sentence; empty:
    nothing."""
    adapter = recipe.model.adapter
    if adapter is not None and not (adapter.method == "lora" and _TOKEN_BY_TOKEN.issuperset(adapter.settings)):
        named = " ".join((adapter.method, *sorted(set(adapter.settings) - _TOKEN_BY_TOKEN)))
        return (
            f"cannot be had with model.adapter of {named}: it has been shown for lora alone, with or without use_dora"
        )
    if recipe.model.loss not in (None, TOKEN_LOSS):
        return (
            f'cannot be had with model.loss = "{recipe.model.loss}": a rank that has some of the tokens gets its sum'
            f' only of a loss that is a sum over tokens, as "{TOKEN_LOSS}" is'
        )
    return ""
