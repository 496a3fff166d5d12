"""The shape of a user's batch: which of its entries are tensors with a row for each sample, which have an entry for
each sample in another form (texts, tensors of several sizes), and which belong to the batch as a whole.

Ranks share out and send tensors alone.  What has an entry for each sample in another form stays where the loader has
put it, and a tensor field of row numbers says which rows a share or a microbatch has of it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_map

from weft.errors import DataError

FILLER = "is_filler"
"""Field of a microbatch that a rank runs for the others' sake, and that does not count."""
ROWS = "rows_of_batch"
"""Field (samples, 2), int64: the number of a sample's row in what is no tensor, and a digest of it and of all that
belongs to the whole batch."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, Enum, Path, torch.dtype, torch.device)
_GIVE = "Give a tensor, or a dictionary, list, tuple or dataclass of tensors, texts and numbers."


@dataclass(frozen=True, slots=True)
class _SampleTensor:
    """A tensor with a row for each sample."""

    name: str


@dataclass(frozen=True, slots=True)
class _SampleList:
    """A list with an entry for each sample."""

    values: Sequence[Any]

    def take(self, rows: Sequence[int]) -> Any:
        taken = [self.values[row % len(self.values)] for row in rows]  # of a trace, which makes rows up
        return tuple(taken) if isinstance(self.values, tuple) else taken


@dataclass(frozen=True, slots=True)
class _BatchWide:
    """An entry that belongs to the batch as a whole."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Container:
    """A container, by the names of its entries."""

    entries: Mapping[str, Any]
    keys: Sequence[Any]
    make: Callable[[Mapping[Any, Any]], Any]


@dataclass(slots=True)
class BatchShape:
    """How a batch is put together, and what it holds beside its tensors."""

    root: Any
    spare: BatchShape | None = None
    """Shape of a batch whose first row stands in where a rank has no sample."""

    @property
    def has_rows(self) -> bool:
        """Whether a sample has something that is no tensor with a row for each."""
        return any(isinstance(leaf, _SampleList) for leaf in _leaves(self.root))

    def restored(self, fields: Mapping[str, Tensor]) -> Any:
        """Return a batch of this shape, of rows that may be fewer."""
        return _built(self._whose(fields).root, fields, _rows_of(fields))

    def first(self, fields: Mapping[str, Tensor]) -> BatchShape:
        """Return the shape of the first sample alone, which keeps nothing of the others."""
        return (
            taken_apart(self.restored({name: value[:1] for name, value in fields.items()}))[1]
            if self.has_rows
            else self
        )

    def part(self, name: str, fields: Mapping[str, Tensor]) -> Any:
        """Return one entry of the batch by its name, such as "image.boxes" or "1", in the same way."""
        entry = _entry(self._whose(fields).root, name)
        return None if entry is None else _built(entry, fields, _rows_of(fields))

    def _whose(self, fields: Mapping[str, Tensor]) -> BatchShape:
        return self.spare if self.spare is not None and FILLER in fields else self

    def has(self, name: str) -> bool:
        """Whether the batch has an entry of this name."""
        return _entry(self.root, name) is not None

    @property
    def names(self) -> list[str]:
        """Names of the entries, as far as they can be named one by one."""
        return list(_names(self.root, ""))


class CountedBatch(dict[str, Any]):
    """A batch that says how many samples it has."""

    def __init__(self, entries: Mapping[str, Any], samples: int) -> None:
        super().__init__(entries)
        self.samples = samples


def taken_apart(batch: Any) -> tuple[dict[str, Tensor], BatchShape]:
    """Return the tensors of a batch by name, each with a row for each sample, and the batch's shape.

    Raises:
        DataError: it has no samples, or it cannot be told where they lie.
    """
    size = samples_in(batch)
    fields: dict[str, Tensor] = {}
    if _is_list_of_samples(batch):
        root: Any = _Container({"0": _SampleList(cast(Sequence[Any], batch))}, ("0",), lambda entries: entries["0"])
    else:
        root = (
            _Container({"0": _SampleTensor("0")}, ("0",), lambda entries: entries["0"])
            if isinstance(batch, Tensor)
            else None
        )
        if isinstance(batch, Tensor):
            fields["0"] = batch
    root = root if root is not None else _looked_at(batch, "", size, fields)
    shape = BatchShape(root)
    beside = [leaf for leaf in _leaves(root) if not isinstance(leaf, _SampleTensor)]
    if beside:
        # Entries that are no tensors cannot be cut as tensors are: each row gets its number, and a digest of what
        # stands in it, for comparing ranks.
        fields[ROWS] = _numbered(beside, size)
    return fields, shape


def _looked_at(value: Any, name: str, size: int, fields: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return _BatchWide(value)
        if value.shape[0] != size:
            raise DataError(
                f"entry {name} of the batch has {value.shape[0]} rows, and others hold {size} samples. Samples must lie"
                " along dim 0 of every tensor; put what belongs to the batch as a whole elsewhere (the model, the"
                " loss), or give a row to each sample."
            )
        fields[name] = value
        return _SampleTensor(name)
    if isinstance(value, _PLAIN):
        return _BatchWide(value)
    entries = _entries_of(value)
    if entries is None:
        where = f"entry {name} of the batch" if name else "the batch"
        raise DataError(f"{where} is a {type(value).__name__}, which cannot be shared out over ranks. {_GIVE}")
    if name and _is_sequence(value) and (entries_of_samples := _list_of(value, name, size)) is not None:
        return entries_of_samples
    inner = {str(key): _looked_at(entry, _joined(name, key), size, fields) for key, entry in entries.items()}
    return _Container(inner, tuple(entries), _maker(value))


def _list_of(value: Sequence[Any], name: str, size: int) -> Any:
    """Return an inner list as a list with an entry for each sample, or as batch-wide; None: it is a container."""
    tensors = [tensor for tensor in tensors_of(value) if tensor.ndim]
    # A list as long as the batch may have an entry per sample, or happen to have as many parts: rows of its tensors
    # decide.
    stacked = bool(tensors) and all(tensor.shape[0] == size for tensor in tensors)
    if len(value) != size or not len(value):
        return None if tensors else _BatchWide(value)
    if stacked and all(isinstance(item, Tensor) for item in value):
        raise DataError(
            f"entry {name} of the batch is a list of {size} tensors with {size} rows each: it cannot be told whether it"
            " has a tensor for each sample or parts of all of them. Name the parts (a dictionary), or stack them."
        )
    return None if stacked else _SampleList(value)


def samples_in(batch: Any) -> int:
    """Return the number of samples of a batch.

    Raises:
        DataError: its entries disagree about it, or none says it.
    """
    if isinstance(batch, CountedBatch):
        return batch.samples
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            raise DataError(f"the batch is one number, without samples along dim 0. {_GIVE}")
        return batch.shape[0]
    if _entries_of(batch) is None:
        raise DataError(f"the batch is a {type(batch).__name__}. {_GIVE}")
    if _is_list_of_samples(batch):
        return len(batch)
    sizes = dict(_sizes(batch, "", outside=True))
    if not sizes:
        # No tensor says it: lists of texts do.
        sizes = dict(_lengths(batch, ""))
    if not sizes:
        raise DataError(f"the batch is empty, or has nothing in it with an entry for each sample. {_GIVE}")
    if len(set(sizes.values())) != 1:
        raise DataError(
            f"the batch's entries hold different numbers of samples: {sizes}. Samples must lie along dim 0 of all."
        )
    return next(iter(sizes.values()))


def _sizes(value: Any, name: str, *, outside: bool) -> Iterator[tuple[str, int]]:
    """Rows of the tensors that stand in no inner list."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield name, value.shape[0]
    elif (entries := _entries_of(value)) is not None and (outside or not _is_sequence(value)):
        for key, entry in entries.items():
            yield from _sizes(entry, _joined(name, key), outside=False)


def _lengths(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Lengths of the inner lists."""
    for key, entry in (_entries_of(value) or {}).items():
        inner = _joined(name, key)
        if _is_sequence(entry):
            yield inner, len(entry)
        else:
            yield from _lengths(entry, inner)


def _is_list_of_samples(batch: Any) -> bool:
    """Whether a loader's collate function has left the samples in a list, one behind the other."""
    if not isinstance(batch, list) or not batch:
        return False
    entries = cast(list[Any], batch)
    if all(isinstance(entry, _PLAIN) for entry in entries):
        return True
    keys = {tuple(entry) if isinstance(entry, Mapping) else None for entry in entries}
    if len(keys) != 1 or None in keys:
        return False
    # Samples have tensors of their own sizes; parts of one batch all have as many rows as it has samples.
    rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_of(entries)}
    return len(rows) != 1 or rows == {0}


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(cast(Any, value), "_fields")


def _entries_of(value: Any) -> dict[Any, Any] | None:
    """Entries of a container by key, position or field; None: it is none."""
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return dict(zip(cast(Any, value)._fields, cast(tuple[Any, ...], value), strict=True))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return dict(enumerate(cast(Sequence[Any], value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return None


def _maker(value: Any) -> Callable[[Mapping[Any, Any]], Any]:
    if isinstance(value, Mapping):
        return dict
    if isinstance(value, tuple):
        kind = cast(Any, type(cast(Any, value)))
        return lambda entries: kind(*entries.values()) if hasattr(kind, "_fields") else tuple(entries.values())
    if isinstance(value, Sequence):
        return lambda entries: list(entries.values())

    def of_dataclass(entries: Mapping[Any, Any]) -> Any:
        made = copy.copy(value)
        for name, entry in entries.items():
            object.__setattr__(made, name, entry)
        return made

    return of_dataclass


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value and in the containers that it holds."""
    if isinstance(value, Tensor):
        yield value
    else:
        for entry in (_entries_of(value) or {}).values():
            yield from tensors_of(entry)


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, _Container):
        for entry in node.entries.values():
            yield from _leaves(entry)
    else:
        yield node


def _names(node: Any, name: str) -> Iterator[str]:
    if isinstance(node, _Container):
        for key, entry in node.entries.items():
            yield from _names(entry, _joined(name, key))
    else:
        yield name


def _entry(node: Any, name: str) -> Any:
    if not isinstance(node, _Container):
        return None
    if name in node.entries:
        return node.entries[name]
    for key, entry in node.entries.items():
        if name.startswith(f"{key}."):
            return _entry(entry, name[len(key) + 1 :])
    return None


def _rows_of(fields: Mapping[str, Tensor]) -> Sequence[int]:
    if ROWS not in fields:
        return ()
    rows = fields[ROWS][:, 0]
    return [0] * len(rows) if rows.is_meta else rows.tolist()


def _built(node: Any, fields: Mapping[str, Tensor], rows: Sequence[int]) -> Any:
    if isinstance(node, _Container):
        made = [_built(entry, fields, rows) for entry in node.entries.values()]
        return node.make(dict(zip(node.keys, made, strict=True)))
    if isinstance(node, _SampleTensor):
        return fields[node.name]
    device = fields[ROWS].device
    value = node.value if isinstance(node, _BatchWide) else node.take(rows)

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return tree_map(move, value)


def _numbered(beside: Sequence[Any], size: int) -> Tensor:
    whole = xxhash.xxh3_64()
    for leaf in beside:
        if isinstance(leaf, _BatchWide):
            add_to_digest(whole, leaf.value)
    numbers: list[list[int]] = []
    lists = [leaf for leaf in beside if isinstance(leaf, _SampleList)]
    for row in range(size):
        digest = whole.copy()
        for entries in lists:
            add_to_digest(digest, entries.values[row])
        # 52 bits: the number stays positive in an int64, and exact in a float64.
        numbers.append([row, digest.intdigest() >> 12])
    return torch.tensor(numbers, dtype=torch.int64).reshape(size, 2)


def add_to_digest(digest: Any, value: Any) -> None:
    """Add a value to a digest of xxhash: tensors, arrays, texts, numbers, and containers of them."""
    if isinstance(value, Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    elif (entries := _entries_of(value)) is not None:
        for key, entry in entries.items():
            digest.update(str(key).encode())
            add_to_digest(digest, entry)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.shape} {value.dtype}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, _PLAIN):  # others say where they lie in memory
        digest.update(repr(value).encode())
