"""Values that the ranks of a loop tell one another: what rank 0 knows, what each has, what all have together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.api.ranks.agreement import gather_texts
from weft.api.ranks.calls import RankCalls
from weft.api.ranks.json_values import NoFormError, read_form, write_form
from weft.config.plan import MeshPlan, axis_coordinates
from weft.errors import DataError

Operation = Literal["sum", "mean", "min", "max"]
_ASKED = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_REFUSED = "refused"


@final
class RankExchange:
    """Collectives of a loop.  Ranks of one data rank have the same samples, so they count once.

    Every method is called on every rank.
    """

    def __init__(self, calls: RankCalls, device: torch.device, world: dist.ProcessGroup | None, mesh: MeshPlan) -> None:
        self._calls, self._device, self._world = calls, device, world
        ranks = mesh.world_size
        self._first = [rank for rank in range(ranks) if _is_first(axis_coordinates(mesh, rank))]
        """The first rank of each data rank."""
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
        text = _text_of(value, own) if dist.get_rank() == source else ""
        form, kinds = _read_told(gather_texts(text, self._device, self._world)[source], "session.broadcast()")
        if dist.get_rank() == source:
            message = _packed(own.values(), self._device)
        else:
            message = torch.empty(_size_of(kinds), dtype=torch.uint8, device=self._device)
        if message.numel():
            dist.broadcast(message, src=source, group=self._world)
        return value if dist.get_rank() == source else read_form(form, _unpacked(message, kinds), self._device)

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Return what each data rank has given, in their order; shapes may differ."""
        with self._calls.call("session.all_gather()", meets=True):
            value = value.detach().to(self._device)
            return [value] if self._world is None else self._exchanged(value, "session.all_gather()")

    def exchange(self, value: Any) -> list[Any]:
        """Return what each data rank has given, in their order.

        Raises:
            DataError: on every rank; it is nothing that JSON and tensors can hold.
        """
        with self._calls.call("the exchange of values", meets=True):
            return [value] if self._world is None else self._exchanged(value, "the exchange of values")

    def exchange_of_ranks(self, value: Any) -> list[Any]:
        """Return what each rank has given, data rank or not; within a call that all ranks meet in."""
        return [value] if self._world is None else self._exchanged(value, "", range(dist.get_world_size(self._world)))

    def _exchanged(self, value: Any, call: str, ranks: Iterable[int] | None = None) -> list[Any]:
        """All tensors of a rank go in one message."""
        own: dict[str, Tensor] = {}
        texts = gather_texts(_text_of(value, own), self._device, self._world)
        values = [_read_told(text, call) for text in texts]
        longest = max(_size_of(kinds) for _, kinds in values)
        gathered = [torch.zeros(longest, dtype=torch.uint8, device=self._device) for _ in values]
        if longest:
            message, packed = torch.zeros_like(gathered[0]), _packed(own.values(), self._device)
            message[: len(packed)] = packed
            dist.all_gather(gathered, message, group=self._world)
        chosen = [(values[rank], gathered[rank]) for rank in (self._first if ranks is None else ranks)]
        return [read_form(form, _unpacked(message, kinds), self._device) for (form, kinds), message in chosen]

    def all_reduce(self, value: Tensor | float, operation: Operation) -> Tensor:
        """Return the sum, mean, smallest or largest of what the data ranks have given, element by element.

        Raises:
            DataError: there is no such operation.
        """
        if operation not in _ASKED:
            raise DataError(f"session.all_reduce() cannot {operation!r}. Use {', '.join(map(repr, _ASKED))}.")
        with self._calls.call("session.all_reduce()"):
            made = torch.as_tensor(value).detach().to(self._device).clone()
            if self._world is None:
                return made
            dist.all_reduce(made, _ASKED[operation], group=self._world)
            if operation == "mean":
                return made / dist.get_world_size(self._world)
            if operation == "sum" and self._copies > 1:
                return made / self._copies if _is_real(made) else made // self._copies
            return made


def _text_of(value: Any, own: dict[str, Tensor]) -> str:
    """A value as text; its tensors are put into `own`."""
    try:
        form = write_form(value, "value", own)
    except NoFormError as problem:
        own.clear()
        return json.dumps([_REFUSED, f"{problem.place} is a {type(problem.value).__name__}"])
    kinds = [[name, str(value.dtype).removeprefix("torch."), [*value.shape]] for name, value in own.items()]
    return json.dumps([form, kinds])


def _read_told(text: str, call: str) -> tuple[Any, list[Any]]:
    """The form of a value, and names, types and shapes of its tensors.

    Raises:
        DataError: the rank that has told it has given something else.
    """
    form, kinds = json.loads(text)
    if form == _REFUSED and isinstance(kinds, str):
        raise DataError(
            f"{call} was given what cannot be told to other ranks: {kinds}. Give tensors, numbers and texts, and lists,"
            " tuples and dictionaries of such."
        )
    return form, kinds


def _size_of(kinds: Iterable[tuple[str, str, list[int]]]) -> int:
    """Bytes of the message that holds such tensors."""
    return sum(_room_of(getattr(torch, dtype), shape) for _, dtype, shape in kinds)


def _room_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor in a message, where tensors begin at multiples of 16: the largest elements have so many."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // 16) * 16


def _packed(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Tensors as one message."""
    parts = [torch.empty(0, dtype=torch.uint8, device=device)]
    for tensor in tensors:
        raw = tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)
        parts.append(nn.functional.pad(raw, (0, _room_of(tensor.dtype, tensor.shape) - len(raw))))
    return torch.cat(parts)


def _unpacked(message: Tensor, kinds: Iterable[tuple[str, str, list[int]]]) -> dict[str, Tensor]:
    """The tensors of a message by name, each with storage of its own."""
    tensors, start = dict[str, Tensor](), 0
    for name, dtype, shape in kinds:
        kind: torch.dtype = getattr(torch, dtype)
        stop = start + torch.Size(shape).numel() * kind.itemsize
        tensors[name] = message[start:stop].clone().view(kind).view(shape)
        start += _room_of(kind, shape)
    return tensors


def _is_first(coordinates: Mapping[Any, int]) -> bool:
    return not any(coordinates.get(axis, 0) for axis in ("tensor", "context", "pipeline"))


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
