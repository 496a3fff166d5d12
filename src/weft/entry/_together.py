"""Values that the ranks of a loop tell one another: what rank 0 knows, what each has, what all have together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.entry._agreement import gather_texts
from weft.entry._calls import Calls
from weft.entry._json_forms import NoFormError, read_form, write_form
from weft.errors import DataError
from weft.plan import MeshPlan, axis_coordinates

Operation = Literal["sum", "mean", "min", "max"]
_ASKED = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_REFUSED = "refused"


@final
class Together:
    """Collectives of a loop.  Ranks of one data rank have the same samples, so they count once.

    Every method is called on every rank.
    """

    def __init__(self, calls: Calls, device: torch.device, world: dist.ProcessGroup | None, mesh: MeshPlan) -> None:
        self._calls, self._device, self._world = calls, device, world
        ranks = mesh.world_size
        self._first = [rank for rank in range(ranks) if _is_first(axis_coordinates(mesh, rank))]
        """One rank of each data rank."""
        self._copies = ranks // len(self._first)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that share out the batches."""
        return len(self._first)

    def wait(self) -> None:
        """Go on when all ranks are here."""
        with self._calls.call("session.wait()", meets=True):
            pass

    def broadcast(self, value: Any, source: int) -> Any:
        """Return what the rank `source` has given.

        Raises:
            DataError: on every rank; it is nothing that JSON and tensors can hold.
        """
        with self._calls.call("session.broadcast()", meets=True):
            if self._world is None:
                return value
            return self._told(value, source)

    def _told(self, value: Any, source: int) -> Any:
        own: dict[str, Tensor] = {}
        text = ""
        if dist.get_rank() == source:
            try:
                form = write_form(value, "value", own)
                kinds = [[name, str(each.dtype).removeprefix("torch."), [*each.shape]] for name, each in own.items()]
                text = json.dumps([form, kinds])
            except NoFormError as problem:
                text = json.dumps([_REFUSED, f"{problem.place} is a {type(problem.value).__name__}"])
        form, kinds = json.loads(gather_texts(text, self._device, self._world)[source])
        if form == _REFUSED and isinstance(kinds, str):
            raise DataError(
                f"session.broadcast() was given what cannot be told to other ranks: {kinds}. Give tensors, numbers and"
                " texts, and lists, tuples and dictionaries of such."
            )
        told = {str(name): self._sent(own.get(name), dtype, shape, source) for name, dtype, shape in kinds}
        return value if dist.get_rank() == source else read_form(form, told, self._device)

    def _sent(self, own: Tensor | None, dtype: str, shape: list[int], source: int) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        raw = torch.empty(torch.Size(shape).numel() * kind.itemsize, dtype=torch.uint8, device=self._device)
        if own is not None:
            raw = _bytes_of(own.to(self._device))
        dist.broadcast(raw, src=source, group=self._world)
        return raw.view(kind).view(shape)

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Return what each data rank has given, in their order; shapes may differ."""
        with self._calls.call("session.all_gather()", meets=True):
            value = value.detach().to(self._device)
            if self._world is None:
                return [value]
            told = json.dumps([str(value.dtype).removeprefix("torch."), [*value.shape]])
            kinds = [json.loads(each) for each in gather_texts(told, self._device, self._world)]
            sizes = [torch.Size(shape).numel() * getattr(torch, dtype).itemsize for dtype, shape in kinds]
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
            padded[: sizes[dist.get_rank()]] = _bytes_of(value)
            gathered = [torch.empty_like(padded) for _ in kinds]
            dist.all_gather(gathered, padded, group=self._world)
            return [
                gathered[rank][: sizes[rank]].clone().view(getattr(torch, kinds[rank][0])).view(kinds[rank][1])
                for rank in self._first
            ]

    def all_reduce(self, value: Tensor, operation: Operation) -> Tensor:
        """Return the sum, mean, smallest or largest of what the data ranks have given, element by element.

        Raises:
            DataError: there is no such operation.
        """
        if operation not in _ASKED:
            raise DataError(f"session.all_reduce() cannot {operation!r}. Use {', '.join(map(repr, _ASKED))}.")
        with self._calls.call("session.all_reduce()"):
            made = value.detach().to(self._device).clone()
            if self._world is None:
                return made
            dist.all_reduce(made, _ASKED[operation], group=self._world)
            if operation == "mean":
                return made / dist.get_world_size(self._world)
            if operation == "sum" and self._copies > 1:
                return made / self._copies if _is_real(made) else made // self._copies
            return made


def _is_first(coordinates: Mapping[Any, int]) -> bool:
    return not any(coordinates.get(axis, 0) for axis in ("tensor", "context", "pipeline"))


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _bytes_of(value: Tensor) -> Tensor:
    return value.detach().contiguous().view(-1).view(torch.uint8)
