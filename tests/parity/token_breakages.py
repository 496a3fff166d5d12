"""Pieces of draws of shared sequences, deliberately broken; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.randomness import draws

Patch = tuple[Any, str, Any]


def _of_other_tokens(change: Callable[[LocalTokens], LocalTokens]) -> list[Patch]:
    mode: Any = getattr(draws, "_Keyed")  # noqa: B009  # a piece that is not for others
    plain = mode._parts

    def parts(self: Any, held: Any, layout: Any) -> Any:
        state = self._state
        if state.tokens is None:
            return plain(self, held, layout)
        self._state = replace(state, tokens=change(state.tokens))
        try:
            return plain(self, held, layout)
        finally:
            self._state = state

    return [(mode, "_parts", parts)]


def _of_a_shorter_sample() -> list[Patch]:
    """A rank takes its tokens for all tokens of the sample."""
    return _of_other_tokens(lambda own: LocalTokens(length=own.held, runs=((0, own.held),)))


def _of_the_first_tokens() -> list[Patch]:
    """Every rank draws what is for the first tokens of the sample."""
    return _of_other_tokens(lambda own: LocalTokens(length=own.length, runs=((0, own.held),)))


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "draws of a shorter sample": _of_a_shorter_sample,
    "draws of the first tokens": _of_the_first_tokens,
}
