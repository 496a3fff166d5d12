"""Mistakes that are easily made where attention modifies its scores; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.model.attention import call
from weft.techniques.context import attention, dropped, partial, visibility

Patch = tuple[Any, str, Any]


def _window_lost() -> list[Patch]:
    """Ranks take a window for one that shows all earlier tokens."""
    made = attention.AttentionForm

    def without(pattern: Any, **how: Any) -> Any:
        return made(pattern=replace(pattern, window=None), **how)

    return [(attention, "AttentionForm", without)]


def _dropout_lost() -> list[Patch]:
    """Probabilities are not dropped."""
    return [(dropped.DroppedAttention, "of", staticmethod(lambda dropout, heads, length: None))]


def _slope_of_cap_lost() -> list[Patch]:
    """Gradients are those of scores that nothing bends."""
    bent = partial._scores  # pyright: ignore[reportPrivateUsage]
    return [(partial, "_scores", lambda *of: (bent(*of)[0], None))]


def _cap_of_own_keys() -> list[Patch]:
    """A rank bends the scores of its own keys alone."""
    attend = attention.attend

    def half(query: Tensor, key: Tensor, value: Tensor, scoring: Any, kept: Any) -> Any:
        own = key.shape[2] == query.shape[2]
        return attend(query, key, value, scoring if own else replace(scoring, softcap=None), kept)

    return [(attention, "attend", half)]


def _sinks_by_source() -> list[Patch]:
    """Sinks stand beside the keys of each rank, and not beside those of all."""
    attend, with_sinks = attention.attend_to_all, attention.with_sinks

    def often(query: Tensor, key: Tensor, value: Tensor, exchange: Any, who: Any) -> Any:
        whole = attend(query, key, value, exchange, who)
        return whole if who.form.mod.sinks is None else with_sinks(whole, who.form.mod.sinks)

    return [(attention, "attend_to_all", often)]


def _slopes_of_own_places() -> list[Patch]:
    """Slopes are taken times the places that keys have on their rank."""
    scoring = visibility.Visibility.scoring

    def local(self: Any, source: int, pair: Any, heads: Any) -> Any:
        found = scoring(self, source, pair, heads)
        slopes = self.form.mod.slopes
        if slopes is None:
            return found
        places = torch.arange(found.bias.shape[-1], dtype=slopes.dtype)
        return replace(found, bias=slopes[slice(*heads), None, None][None] * places)

    return [(visibility.Visibility, "scoring", local)]


def _numbers_of_first_heads() -> list[Patch]:
    """Ranks that have exchanged heads take the sinks and slopes of the first of them."""
    of_heads = call.ScoreMod.of_heads
    return [(call.ScoreMod, "of_heads", lambda self, start, heads: of_heads(self, 0, heads))]


def _gradient_of_sinks_by_share() -> list[Patch]:
    """What each rank's queries say of sinks counts as if all ranks said the same."""
    of_sinks = attention.gradient_of_sinks
    return [(attention, "gradient_of_sinks", lambda *of: of_sinks(*of) / 2)]


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "window of a call lost": _window_lost,
    "dropout of a call lost": _dropout_lost,
    "slope of a cap lost": _slope_of_cap_lost,
    "cap of a rank's own keys": _cap_of_own_keys,
    "sinks beside the keys of each rank": _sinks_by_source,
    "sinks of the first heads": _numbers_of_first_heads,
    "slopes of a rank's own places": _slopes_of_own_places,
    "slopes of the first heads": _numbers_of_first_heads,
    "gradient of sinks by share": _gradient_of_sinks_by_share,
}
