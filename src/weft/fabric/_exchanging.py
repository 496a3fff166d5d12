"""Gather, reduce and broadcast values over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from weft.api import SessionInternals
from weft.errors import DataError, RecipeError
from weft.fabric._place import FabricPlace

_OPERATIONS: Mapping[str, str] = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


class Exchanging(FabricPlace):
    """Collectives, and what rank 0 does alone or first.  Call them on every rank."""

    _is_warned = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 alone."""
        if self.is_global_zero:
            print(*args, flush=kwargs.pop("flush", True), **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Go on when all ranks have come here."""
        del name
        self._session.wait()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what the rank `src` has: tensors, numbers, texts, and lists, tuples and dictionaries of such."""
        return self._session.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return tensors with those of all ranks along a new dim 0; on one rank, as they are.

        Raises:
            DataError: ranks gave other shapes: an uneven last batch's, as nothing is padded.
        """
        _refuse_group(group)
        if sync_grads and self.world_size > 1:
            raise RecipeError(
                "fabric.all_gather(sync_grads=True) would put other ranks' samples into this rank's loss. Compute the"
                " loss of this rank's samples alone, and leave it out."
            )
        return _mapped(data, self.device, self._gathered) if self.world_size > 1 else _mapped(data, self.device)

    def _gathered(self, value: Tensor) -> Tensor:
        gathered = self._session.all_gather(value)
        shapes = [str(tuple(value.shape)) for value in gathered]
        if len({*shapes}) > 1:
            raise DataError(
                f"fabric.all_gather() was given {', '.join(shapes)} by the ranks, which make no one tensor: a last"
                " batch is shared out as it is, and not padded. Use fabric.all_reduce of sums and counts, or"
                " drop_last=True."
            )
        return torch.stack(gathered)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors over the ranks, in place where that can be, and return them."""
        _refuse_group(group)
        word = str(getattr(reduce_op, "name", reduce_op)).rpartition(".")[2].lower()
        if word not in _OPERATIONS:
            raise RecipeError(f"fabric.all_reduce(reduce_op={reduce_op!r}) is not had. Use {', '.join(_OPERATIONS)}.")
        return _mapped(data, self.device, lambda value: self._reduced(value, _OPERATIONS[word]))

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        if self.world_size == 1:
            return value
        batch = SessionInternals(self._session).batch
        if operation == "mean" and batch is not None and batch.size % self.world_size and not self._is_warned:
            self._is_warned = True
            self._session.print(
                f"fabric    all_reduce took a mean over {self.world_size} ranks that share out {batch.size} samples"
                " unevenly: it is not that of the samples. Sums and counts are exact, and so is drop_last=True"
            )
        reduced = self._session.all_reduce(value, operation)
        return reduced if value.requires_grad or reduced.dtype is not value.dtype else value.copy_(reduced)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """A section that rank 0 goes through before the others; with `local`, the first rank of each host."""
        return self._session.first(per_host=local)


def _refuse_group(group: Any) -> None:
    if group is not None:
        raise RecipeError("Fabric's collectives are over all ranks. Leave group= out.")


def _mapped(data: Any, device: torch.device, made: Callable[[Tensor], Tensor] = lambda value: value) -> Any:
    """Numbers as tensors, all on the device, and what `made` makes of them."""

    def one(each: Any) -> Any:
        return made(torch.as_tensor(each, device=device)) if isinstance(each, bool | int | float | Tensor) else each

    return tree_map(one, data)
