"""Mistakes that are easily made where attention that a model writes out is read; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.models import scores, written
from weft.techniques.context import dropped, form, visibility

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


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "scale of written attention lost": _scale_lost,
    "window of written attention lost": _window_lost,
    "dropout of written attention lost": _dropout_lost,
    "bias of a rank's own places": _bias_of_own_places,
    "bias of the first heads": _bias_of_first_heads,
    "dropped pairs of a rank's own places": _pairs_of_own_places,
}
