"""This rank's rows of batches that the loop makes itself, equally on every rank: by offsets that it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.api.batches.sharded_loader import HandedOut, Handing
from weft.api.ranks.agreement import check_same_facts
from weft.errors import DataError

_COMPARED = 3
"""Calls whose tensors ranks compare at once; those of later ones are looked at in the agreement of the step."""


@final
class SharedRows:
    """What `session.share` hands out."""

    def __init__(self, handing: Handing) -> None:
        self._handing = handing
        self._calls = self._samples = 0

    def rows(self, values: Sequence[Any], dim: int) -> list[Any]:
        """Return this rank's rows of all tensors in `values`, on the device.

        Raises:
            DataError: there is none, they have not equally many rows, or other ranks gave others.
        """
        handing, leaves = self._handing, [each for each in tree_leaves(values) if isinstance(each, Tensor)]
        size = _size_of(leaves, dim)
        handed = handing.share_of(size, self._samples, source=-size)
        if handing.world is not None:
            self._compare(leaves)
        self._calls += 1
        self._samples += handed.size
        handing.hand_out(handed, is_made=True)
        found = [tree_map_only(Tensor, lambda each: self._part(each, handed, dim), value) for value in values]
        handing.know(found, handed)
        return found

    def _part(self, tensor: Tensor, handed: HandedOut, dim: int) -> Tensor:
        rows = handed.stop - handed.start
        part = tensor.narrow(dim, handed.start, rows) if rows else tensor.narrow(dim, 0, 1)  # a filler, counted 0
        return part.to(self._handing.device, non_blocking=True)

    def _compare(self, leaves: Sequence[Tensor]) -> None:
        """Note what was given, which must be equal on all ranks."""
        handing, early = self._handing, self._calls < _COMPARED
        digest = xxhash.xxh64(handing.shared.encode())
        digest.update(torch.get_rng_state().numpy().tobytes())  # by which most loops make their batches
        for each in leaves:
            digest.update(f"{each.dtype} {[*each.shape]}".encode())
            if early or each.device.type == "cpu":  # to read it from another device would wait for that
                digest.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        handing.shared = digest.hexdigest()
        if early:
            with handing.calls.call("session.share()", meets=True):
                check_same_facts({"data: what session.share was given": handing.shared}, handing.device)


def _size_of(leaves: Sequence[Tensor], dim: int) -> int:
    if not leaves:
        raise DataError("session.share() was given no tensor. Give it the tensors of a whole batch.")
    short = next((each for each in leaves if not -each.ndim <= dim < each.ndim), None)
    if short is not None:
        raise DataError(
            f"session.share(dim={dim}) was given a tensor of shape {tuple(short.shape)}, which has no such dim. Share"
            " tensors whose samples lie along it, and leave others out."
        )
    sizes = sorted({each.shape[dim] for each in leaves})
    if len(sizes) > 1 or not sizes[0]:
        raise DataError(
            f"session.share(dim={dim}) was given tensors of {' and '.join(map(str, sizes))} samples. Give it the"
            " tensors of one batch, before they are flattened; dim= says where samples lie."
        )
    return sizes[0]
