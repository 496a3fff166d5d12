"""Put together a model's outputs for samples that are spread over ranks, in the order of the samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from weft.api.batches.batch_shape import samples_in
from weft.api.ranks.agreement import gather_texts
from weft.comm.mesh import Mesh
from weft.errors import DataError, RecipeError
from weft.model.blueprint import logits_of

Select = Callable[[Any, Any], Any]
"""`select(outputs, batch)` of a microbatch: a tensor with samples along dim 0, or a tuple or dictionary of such."""
Fields = dict[str, Tensor]


def logits_alone(outputs: Any, batch: Any) -> Any:
    """The logits, or all that the model returns where that is one tensor."""
    del batch
    return logits_of(outputs)


def logits_and_labels(outputs: Any, batch: Any) -> Any:
    """Predictions and targets: the logits, and the batch's `labels` or last entry."""
    if isinstance(batch, Mapping):
        named = cast(Mapping[str, Any], batch)
        return logits_of(outputs), named["labels"] if "labels" in named else list(named.values())[-1]
    return logits_of(outputs), batch if isinstance(batch, Tensor) else batch[-1]


class GatheredOutputs:
    """Collects what `select` makes of this rank's microbatches, and puts that of all ranks together.

    The result has the shape that `select` returns, tensors are on the CPU.
    """

    def __init__(self, select: Select, mesh: Mesh) -> None:
        if not callable(select):
            raise RecipeError(f"outputs = {select!r} cannot be called. Give a function of (model outputs, batch).")
        self._select, self._mesh = select, mesh
        self._shape = ""
        """`tensor`, `tuple` or `dict`; empty where nothing was seen."""
        self._own: list[Fields] = []
        self._whole: list[Fields] = []

    def look(self, outputs: Any, batch: Any) -> None:
        """Take a microbatch.  Raises `DataError` where samples do not lie along dim 0."""
        self.take(self._select(outputs, batch), samples_in(batch))

    def take(self, outputs: Any, size: int | None = None) -> None:
        """Take what was selected of a microbatch of `size` samples; None: as many as its first field has rows."""
        shape, fields = _taken_apart(outputs)
        if not fields:
            raise DataError(
                f"what is to be put together is an empty {shape}. Give tensors with one row for each sample."
            )
        first = next(iter(fields.values()), None)
        if size is None:
            size = len(first) if isinstance(first, Tensor) and first.ndim else 1
        for name, value in fields.items():
            if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != size:
                what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                where = "" if shape == "tensor" else f" as {name}"
                raise DataError(
                    f"what is to be put together is {what}{where} for {size} samples. Give tensors with one row for"
                    " each sample, such as outputs.logits.argmax(-1)."
                )
        self._shape = shape
        self._own.append({name: value.detach().cpu() for name, value in cast(Fields, fields).items()})

    def join(self) -> Any:
        """Return what all ranks have taken since the last call, in the order of samples.  Call on every rank.

        Raises:
            DataError: on every rank; ranks selected other things.
        """
        own, has_some, self._own = _joined(self._own), bool(self._own), []
        view = self._mesh["world"]
        if view.group is None:
            self._whole.append(own)
            return _put_together(own, self._shape)
        said = {"place": self._mesh.data_index, "shape": self._shape, "fields": _described(own)} if has_some else None
        of_ranks = [json.loads(text) for text in gather_texts(json.dumps(said), self._mesh.device, view.group)]
        _check_alike(of_ranks)
        # Of ranks that have the same samples (tensor ranks; stages, all of which a loop gives its batch) one is enough.
        holders = {one["place"]: rank for rank, one in reversed(list(enumerate(of_ranks))) if one is not None}
        having = sorted(holders.items())
        whole: list[Fields] = []
        # Rank by rank in the order of data ranks, which is that of the samples.
        for _, rank in having:
            self._shape = of_ranks[rank]["shape"]
            whole.append(self._sent(own if rank == view.index else None, of_ranks[rank]["fields"], rank))
        joined = _joined(whole)
        self._whole.append(joined)
        return _put_together(joined, self._shape)

    def _sent(self, own: Fields | None, described: Mapping[str, Any], source: int) -> Fields:
        """The fields of one rank, on all."""
        fields: Fields = {}
        for name, (shape, dtype) in described.items():
            kind = getattr(torch, dtype)
            value = torch.empty(shape, dtype=kind) if own is None else own[name].contiguous()
            moved = value.view(torch.uint8) if kind == torch.bool else value  # not every backend carries bool
            moved = moved.to(self._mesh.device)
            dist.broadcast(moved, src=source, group=self._mesh["world"].group)
            fields[name] = moved.cpu().view(kind)
        return fields

    def all(self) -> Any:
        """Everything that `join` has returned, one after another.

        Raises:
            DataError: batches gave rows of other shapes, as where each is padded to its own longest sample.
        """
        return _put_together(_joined(self._whole), self._shape)


def _check_alike(of_ranks: Sequence[Mapping[str, Any] | None]) -> None:
    """Compare what ranks have selected: fields, their types and the shapes of their rows; of ranks that have the same
    samples the number of rows, too.

    Raises:
        DataError: the first two that differ are named.
    """
    known: dict[Any, tuple[int, str]] = {}
    for rank, one in enumerate(of_ranks):
        if one is None:
            continue
        rows = {name: shape[:1] for name, (shape, _) in one["fields"].items()}
        kinds = {name: [shape[1:], dtype] for name, (shape, dtype) in one["fields"].items()}
        listed = {
            "all": f"a {one['shape']} with rows of {_spelt(kinds)}",
            one["place"]: f"rows by field {_spelt(rows)}",
        }
        for place, text in listed.items():
            other, first = known.setdefault(place, (rank, text))
            if first != text:
                raise DataError(
                    f"the ranks have put different things together: {first} on rank {other}, {text} on rank {rank}."
                    " Select the same on every rank, with one row for each of its samples."
                )


def _spelt(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items())


def _taken_apart(outputs: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(outputs, Mapping):
        return "dict", {str(name): value for name, value in cast(Mapping[Any, Any], outputs).items()}
    if isinstance(outputs, tuple | list):
        return "tuple", {str(place): value for place, value in enumerate(cast(Sequence[Any], outputs))}
    return "tensor", {"0": outputs}


def _put_together(fields: Fields, shape: str) -> Any:
    if shape == "dict":
        return fields
    if shape == "tuple":
        return tuple(fields[str(place)] for place in range(len(fields)))
    return fields.get("0")


def _described(fields: Fields) -> dict[str, Any]:
    return {name: [list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in fields.items()}


def _joined(parts: Sequence[Fields]) -> Fields:
    if not parts:
        return {}
    fields: Fields = {}
    for name in parts[0]:
        shapes = {tuple(part[name].shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise DataError(
                f"the selected outputs have rows of other shapes in other microbatches ({', '.join(map(str, shapes))}),"
                " so they make up no tensor. Select what has one shape for every sample, or pad it."
            )
        fields[name] = torch.cat([part[name] for part in parts])
    return fields
