"""Mistakes that are easily made where attention that a model writes out is read; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.model.attention import scores, written
from weft.techniques.context import attention, dropped, form, partial, reading, visibility

Patch = tuple[Any, str, Any]


def _scale_lost() -> list[Patch]:
    """Scores are what they are before they are divided."""
    return [(written.AttentionReader, "_scaled", lambda self, scores, number: self._changed(scores))]


def _window_lost() -> list[Patch]:
    """A mask that shows a window is taken for one that shows all earlier tokens."""
    seen = written.seen_in

    def without_window(mask: Tensor, **how: Any) -> Any:
        sight = seen(mask, **how)
        return None if sight is None else replace(sight, window=None)

    return [(written, "seen_in", without_window)]


def _dropout_lost() -> list[Patch]:
    """Probabilities are not dropped."""
    return [(scores.Scores, "dropped_by", lambda self, dropout: self)]


def _bias_of_own_places() -> list[Patch]:
    """What is added is that of samples of as many tokens as a rank has, over and over."""
    bias = visibility.Visibility.bias

    def local(self: Any, source: int, *of: Any) -> Any:
        held = self.tokens.held
        places = torch.arange(self.tokens.length) % held
        moved = replace(self.form, bias=None if self.form.bias is None else self.form.bias[:, :, places])
        return bias(replace(self, form=moved), source, *of)

    return [(visibility.Visibility, "bias", local)]


def _bias_of_first_heads() -> list[Patch]:
    """Ranks that have exchanged heads add what the first of them get."""
    of_heads = form.AttentionForm.of_heads

    def first(self: Any, start: int, heads: int) -> Any:
        return replace(of_heads(self, start, heads), bias=of_heads(self, 0, heads).bias)

    return [(form.AttentionForm, "of_heads", first)]


def _pairs_of_own_places() -> list[Patch]:
    """What functions drop of samples as long as what a rank has."""
    by_function = dropped.DroppedAttention.by_function

    def shorter(draw: Any, rate: float, heads: int, length: int) -> Any:
        return by_function(draw, rate, heads, length // 2)

    return [(dropped.DroppedAttention, "by_function", staticmethod(shorter))]


def _left_out_window_lost() -> list[Patch]:
    """Ranks take masks that they do not make for causal ones."""
    made = reading.AttentionReader
    return [(reading, "AttentionReader", lambda tokens, *, windows, **how: made(tokens, windows={}, **how))]


def _slope_of_cap_lost() -> list[Patch]:
    """Gradients are those of scores that nothing bends."""
    bent = partial._scores  # pyright: ignore[reportPrivateUsage]
    return [(partial, "_scores", lambda *of: (bent(*of)[0], None))]


def _cap_of_own_keys() -> list[Patch]:
    """A rank bends the scores of its own keys alone."""
    attend = attention.attend

    def half(query: Tensor, key: Tensor, *of: Any, softcap: float | None, **how: Any) -> Any:
        own = key.shape[2] == query.shape[2]
        return attend(query, key, *of, softcap=softcap if own else None, **how)

    return [(attention, "attend", half)]


def _sinks_by_source() -> list[Patch]:
    """Sinks stand beside the keys of each rank, and not beside those of all."""
    attend, with_sinks = attention.attend_to_all, attention.with_sinks

    def often(query: Tensor, key: Tensor, value: Tensor, exchange: Any, who: Any) -> Any:
        whole = attend(query, key, value, exchange, who)
        return whole if who.form.sinks is None else with_sinks(whole, who.form.sinks)

    return [(attention, "attend_to_all", often)]


def _sinks_of_first_heads() -> list[Patch]:
    """Ranks that have exchanged heads take the sinks of the first of them."""
    of_heads = form.AttentionForm.of_heads

    def first(self: Any, start: int, heads: int) -> Any:
        return replace(of_heads(self, start, heads), sinks=of_heads(self, 0, heads).sinks)

    return [(form.AttentionForm, "of_heads", first)]


def _gradient_of_sinks_by_share() -> list[Patch]:
    """What each rank's queries say of sinks counts as if all ranks said the same."""
    of_sinks = attention.gradient_of_sinks
    return [(attention, "gradient_of_sinks", lambda *of: of_sinks(*of) / 2)]


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "scale of written attention lost": _scale_lost,
    "window of written attention lost": _window_lost,
    "dropout of written attention lost": _dropout_lost,
    "bias of a rank's own places": _bias_of_own_places,
    "bias of the first heads": _bias_of_first_heads,
    "dropped pairs of a rank's own places": _pairs_of_own_places,
    "window of masks that are left out lost": _left_out_window_lost,
    "slope of a cap lost": _slope_of_cap_lost,
    "cap of a rank's own keys": _cap_of_own_keys,
    "sinks beside the keys of each rank": _sinks_by_source,
    "sinks of the first heads": _sinks_of_first_heads,
    "gradient of sinks by share": _gradient_of_sinks_by_share,
}
