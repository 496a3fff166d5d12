"""Mistakes that are easily made where attention that a model writes out is read; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from weft.models import scores, written

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


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "scale of written attention lost": _scale_lost,
    "window of written attention lost": _window_lost,
    "dropout of written attention lost": _dropout_lost,
}
