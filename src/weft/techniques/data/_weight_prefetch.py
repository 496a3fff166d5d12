"""Weights on their way: gathered in the order in which the next forward reads them, and waited for where it does.

Under ZeRO-1 and 2 each data rank updates its own part of the weights, and every step ends with gathering all of them.
What a forward needs first is gathered first, and the rest travels while it computes (Megatron-LM has the same as
`--overlap-param-gather`; which tensors go first is the point of Jayarajan et al., "Priority-based parameter
propagation", MLSys 2019, arXiv 1905.03960):

    network   │ outside blocks │ block 0 │ block 1 │ block 2 │ …
    forward                    │ …       │ block 0 │ block 1 │ …

What lies outside of the blocks has arrived before the part's forward begins, a block's weights before its own forward,
and those of a block that was left out before the part's forward ends.  Until then a parameter is *away*: it has no
elements, so that a model that computes with a block's weights before that block runs gets an error about shapes, and
never numbers of which some are of the last step.  Nobody else may read weights between two steps, so this is not for
loops of a user's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle


class WeightGatherer(Protocol):
    """The reducer whose buckets are being gathered."""

    def wait_buckets(self, indices: Iterable[int]) -> None:
        """Return when the weights of these buckets are whole."""
        ...


@dataclass(frozen=True, slots=True)
class Need:
    """A module, and the buckets with weights that its forward reads."""

    module: nn.Module
    buckets: tuple[int, ...]


def needs_of(part: nn.Module, blocks: Sequence[str], bucket_of: Mapping[int, int]) -> list[Need]:
    """Return what a forward of `part` needs, in its order: the part itself what lies outside of its blocks, then block
    by block.

    `bucket_of` has the bucket of every parameter that is gathered, by the parameter's identity.  Names of blocks that
    other stages hold are left out.
    """
    present = dict(part.named_modules())
    units = [present[name] for name in blocks if name in present]
    inside = {id(module) for unit in units for module in unit.modules()}
    outside = [
        parameter
        for module in part.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    ]
    # What lies outside of the blocks comes first: embeddings are read before any block, and the part's own hook cannot
    # tell them from the head, whose weights thus arrive earlier than needed.
    needs = [Need(part, _buckets(outside, bucket_of))]
    needs += [Need(unit, _buckets(unit.parameters(), bucket_of)) for unit in units]
    return needs


def _buckets(parameters: Iterable[nn.Parameter], bucket_of: Mapping[int, int]) -> tuple[int, ...]:
    indices = (bucket_of[id(parameter)] for parameter in parameters if id(parameter) in bucket_of)
    return tuple(dict.fromkeys(indices))


@dataclass(frozen=True, slots=True)
class _Await:
    """A hook around a forward.  Weak, so that a model that outlives its training does not keep the process groups."""

    store: weakref.ref[WeightGatherer]
    buckets: tuple[int, ...]

    def __call__(self, *_: object) -> None:
        store = self.store()
        if store is not None:
            store.wait_buckets(self.buckets)


def await_needs(store: WeightGatherer, part: nn.Module, needs: Sequence[Need]) -> list[RemovableHandle]:
    """Let the forwards of `part` wait for what they need.  Returns what removes that again."""
    here = weakref.ref(store)
    handles = [
        need.module.register_forward_pre_hook(_Await(here, need.buckets), prepend=True)
        for need in needs
        if need.buckets
    ]
    every = tuple(dict.fromkeys(index for need in needs for index in need.buckets))
    # The last hook waits for blocks that this forward left out: the optimizer writes into all weights next.
    return [*handles, part.register_forward_hook(_Await(here, every), prepend=True)]


def await_all(
    store: WeightGatherer, parts: Iterable[nn.Module], blocks: Sequence[str], bucket_of: Mapping[int, int]
) -> tuple[list[RemovableHandle], list[int]]:
    """Let the forwards of all parts wait for what they need.  Returns what ends that, and buckets in order of need."""
    handles: list[RemovableHandle] = []
    order: list[int] = []
    for part in parts:
        needs = needs_of(part, blocks, bucket_of)
        handles += await_needs(store, part, needs)
        order += [index for need in needs for index in need.buckets]
    return handles, order
