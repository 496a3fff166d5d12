"""Pieces of draws of shared sequences, deliberately broken; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.randomness import token_draws

Patch = tuple[Any, str, Any]


def _of_a_shorter_sample() -> list[Patch]:
    """A rank takes its tokens for all tokens of the sample."""
    parts = token_draws.parts_of

    def shorter(held: Any, layout: Any, tokens: LocalTokens, view: Any) -> Any:
        own = LocalTokens(length=tokens.held, runs=((0, tokens.held),))
        return parts(held, layout, own, view)

    return [(token_draws, "parts_of", shorter)]


def _of_the_first_tokens() -> list[Patch]:
    """Every rank draws what is for the first tokens of the sample."""
    parts = token_draws.parts_of

    def first(held: Any, layout: Any, tokens: LocalTokens, view: Any) -> Any:
        return parts(held, layout, LocalTokens(length=tokens.length, runs=((0, tokens.held),)), view)

    return [(token_draws, "parts_of", first)]


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "draws of a shorter sample": _of_a_shorter_sample,
    "draws of the first tokens": _of_the_first_tokens,
}
