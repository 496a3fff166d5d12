"""Mistakes that are easily made where rows of squares compute a module whole; see `breakages`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.techniques.tensor.mesh_2d import computed_whole
from weft.techniques.tensor.mesh_2d import layers as grid_layers

Change = Callable[[Tensor], Tensor]


Wrap = Callable[[Any, Change, Change | None], Any]


def _at_ranks(wrap: Wrap) -> list[tuple[Any, str, Any]]:
    """Ranks wrap forwards otherwise; what looks at a model goes on as it is."""
    install = grid_layers.compute_whole

    def broken(*given: Any) -> None:
        computed_whole.computed_whole = wrap
        try:
            install(*given)
        finally:
            computed_whole.computed_whole = _OWN

    return [(grid_layers, "compute_whole", broken)]


_OWN = computed_whole.computed_whole


def _parts_for_all() -> list[tuple[Any, str, Any]]:
    """Each rank takes its own part of the features for the others."""
    return _at_ranks(
        lambda forward, gather, cut: _OWN(
            forward, lambda x: torch.cat([x] * (gather(x).shape[-1] // x.shape[-1]), -1), cut
        )
    )


def _unmarked(layout: Any, name: str) -> None:
    """Nothing says that a gradient is a part of a sum."""


def _own_gradients_of_weights() -> list[tuple[Any, str, Any]]:
    """What the ranks of a square find for a weight that each has whole is not summed."""
    return [(grid_layers, "mark_partial", _unmarked)]


def _own_gradients_of_inputs() -> list[tuple[Any, str, Any]]:
    """What ranks of a row find for what they have gathered is not summed."""

    def unsummed(forward: Any, gather: Change, cut: Change | None) -> Any:
        def gathered(x: Tensor) -> Tensor:
            whole = gather(x).detach()
            parts = [*whole.chunk(whole.shape[-1] // x.shape[-1], -1)]
            mine = next(at for at, part in enumerate(parts) if torch.equal(part, x.detach()))
            parts[mine] = x
            return torch.cat(parts, -1)

        return _OWN(forward, gathered, cut)

    return _at_ranks(unsummed)


def _results_of_another() -> list[tuple[Any, str, Any]]:
    """A rank goes on with the part of another."""

    def turned(forward: Any, gather: Change, cut: Change | None) -> Any:
        return _OWN(forward, gather, None if cut is None else lambda x: cut(x.roll(x.shape[-1] // 2, -1)))

    return _at_ranks(turned)


PATCHES: Mapping[str, Callable[[], list[tuple[Any, str, Any]]]] = {
    "experts see a part": _parts_for_all,
    "own gradients of experts": _own_gradients_of_weights,
    "own gradients of tokens": _own_gradients_of_inputs,
    "experts of another part": _results_of_another,
}
