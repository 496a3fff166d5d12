"""Samples with named fields: made up by what a model takes, or made of the rows of a source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError, did_you_mean
from weft.model.families import SampleField
from weft.run.data._classes import class_number
from weft.run.data._fields import IGNORED, Fields, Split
from weft.run.data._keyed import normal, uniform
from weft.run.data._media import load
from weft.run.data._open_rows import open_rows
from weft.run.data._processors import SOUNDS, FolderProcessors
from weft.run.data._rows import Row, SourceRows

_KEY = 0xF1E1D


def describe_named(fields: Mapping[str, SampleField]) -> str:
    """The fields in words: `pixel_values (3 × 32 × 32 numbers), labels (one whole number below 10)`."""
    return ", ".join(f"{name} ({_words(field)})" for name, field in fields.items())


def _words(field: SampleField) -> str:
    numbers = "whole number" if field.dtype == "int64" else "number"
    below = f" below {field.below}" if field.below else ""
    if not field.shape:
        return f"one {numbers}{below}"
    return f"{' × '.join(map(str, field.shape))} {numbers}s{below}"


def _all_fields(named: Mapping[str, SampleField]) -> dict[str, SampleField]:
    """Return the fields, and `weights` if labels are numbers: no such label could mark a sample that only fills up a
    batch."""
    labels = named.get("labels")
    weighs = labels is not None and labels.dtype == "float32" and "weights" not in named
    return {**named, "weights": SampleField((), "float32")} if weighs else dict(named)


def _follow(named: Mapping[str, SampleField], values: Fields, fields: Sequence[str]) -> None:
    """Make each of `fields` out of the field that it follows."""
    for name in fields:
        assert (follows := named[name].follows) is not None
        other, start = follows
        before = np.full_like(values[other][:, :1], start)
        moved = np.concatenate([before, values[other][:, :-1]], 1)
        values[name] = np.where(moved == IGNORED, start, moved)


class SyntheticFields:
    """Noise of the right shapes, and integers that the model takes: a pure function of the index."""

    def __init__(self, named: Mapping[str, SampleField], size: int, split: Split) -> None:
        self._named, self._key = named, 2 * _KEY + (split == "validation")
        self.size = size
        self.fields = _all_fields(named)

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        """Return the samples at `index`."""
        values: Fields = {}
        for number, (name, field) in enumerate(self._named.items()):
            if field.follows is None:
                elements = np.arange(math.prod(field.shape), dtype=np.int64)
                values[name] = self._made(field, index[:, None], elements, number).reshape(len(index), *field.shape)
        _follow(self._named, values, [name for name, field in self._named.items() if field.follows is not None])
        if "weights" in self.fields and "weights" not in values:
            values["weights"] = np.ones(len(index), np.float32)
        return values

    def _made(
        self, field: SampleField, index: NDArray[np.int64], elements: NDArray[np.int64], number: int
    ) -> NDArray[Any]:
        if field.dtype == "float32":
            return normal(self._key, number, index, elements).astype(np.float32)
        values = (uniform(self._key, number, index, elements) * max(1, field.below)).astype(np.int64)
        token, count = field.prompt
        if count:
            values[values == token] = (token + 1) % max(2, field.below)
            values[:, :count] = token
        if field.is_mask:  # one place at least has something
            lengths = 1 + (uniform(self._key, number, index) * field.shape[-1]).astype(np.int64)
            values = (elements[None, :] < lengths).astype(np.int64)
        return values


class FileFields:
    """Samples of a source: a row has each field by its name, or what the field is made of.

    A field of numbers may also name a file beside the data, or be its bytes: `.npy`, a wave (`.wav`, 16 bits), or an
    image, which Pillow reads.  An image may be called `image`, a label `label`, which may be the name of a class.  A
    row of labels may be shorter than the model takes: the rest counts for nothing (−100).  Inputs may not, where the
    model gets no mask: it would attend to what fills them up.

    Args:
        classes: Name of a class → its number.
        columns: What is looked for in a row → the column that has it.
        processors: What makes fields of texts, images and sounds; None: what stands in a row is taken as it is.
        rows: What lies at `path`, where it is open already.
    """

    def __init__(
        self,
        path: Path,
        named: Mapping[str, SampleField],
        split: str,
        validation_fraction: float,
        *,
        classes: Mapping[str, int] | None = None,
        columns: Mapping[str, str] | None = None,
        processors: FolderProcessors | None = None,
        rows: SourceRows | None = None,
    ) -> None:
        self._named = named
        self._classes, self._columns, self._processors = classes or {}, columns or {}, processors
        self._rows = open_rows(path) if rows is None else rows
        self._chosen = np.arange(self._rows.size)
        if split != "all" and validation_fraction < 1.0:
            # By row number and not by content: a row has several fields, and its number is its identity in a fixed
            # file.
            is_held = uniform(_KEY, self._chosen) < validation_fraction
            self._chosen = self._chosen[is_held == (split == "validation")]
        self.fields = _all_fields(named)
        if not len(self._chosen):
            raise DataError(f"{path} has no samples for {split}. Give a larger file, or data.validation_fraction = 0.")

    @property
    def size(self) -> int:
        """Samples of the split."""
        return len(self._chosen)

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        """Return the samples at `index`.

        Raises:
            DataError: a row lacks a field, or has it in another shape; names file and line.
        """
        rows = [self._rows.row(at) for at in self._chosen[index].tolist()]
        values: Fields = {}
        made = [self._made(row) for row in rows]
        # Fields that follow from others (masks, positions) are made after them, unless the file has them.
        derived = [name for name, field in self._named.items() if field.follows and name not in rows[0].values]
        for name, field in self._named.items():
            if name not in derived:
                both = zip(rows, made, strict=True)
                values[name] = np.stack([self._field(row, name, field, fields.get(name)) for row, fields in both])
        _follow(self._named, values, derived)
        if "weights" in self.fields and "weights" not in values:
            values["weights"] = np.ones(len(index), np.float32)
        return values

    def num_cut(self, most: int) -> tuple[int, int]:
        """Return how many of the first `most` samples have a text longer than the model takes, and how many samples
        were looked at."""
        chosen = self._chosen[:most].tolist()
        return sum(self._is_cut(self._rows.row(at)) for at in chosen), len(chosen)

    def _is_cut(self, row: Row) -> bool:
        texts = ((name, self._found(row, name, field)) for name, field in self._named.items())
        processors = self._processors
        return processors is not None and any(
            column is not None and processors.is_cut(name, row.values[column]) for name, column in texts
        )

    def _made(self, row: Row) -> Fields:
        """Return the fields that the model's processors make of a row."""
        made: Fields = {}
        if self._processors is None:
            return made
        for name, field in self._named.items():
            column = self._found(row, name, field)
            if column is None or name in made or not self._processors.makes(name, row.values[column]):
                continue
            try:
                made.update(self._processors.make(row, name, row.values[column]))
            except (TypeError, ValueError, OSError, OverflowError) as problem:
                raise _unreadable(row, column, problem, name, field) from None
        return made

    def _field(self, row: Row, name: str, field: SampleField, made: NDArray[Any] | None) -> NDArray[Any]:
        """A field as the model takes it."""
        if made is None and field.is_mask and name not in row.values:
            made = np.ones(field.shape, np.int64)
        column = name if made is not None else self._column(row, name, field)
        try:
            array = self._array(row, name, row.values[column], field) if made is None else made
            array = array.astype(field.dtype, casting="same_kind")
        except (TypeError, ValueError, OSError) as problem:
            raise _unreadable(row, column, problem, name, field) from None
        array = _filled(array, field) if name == "labels" else array
        if array.shape != field.shape:
            raise _wrong(row, f"has a {column} of shape {array.shape}", name, field)
        outside = (array >= field.below) | ((array < 0) & (array != IGNORED)) if field.below else np.zeros(1, np.bool_)
        if outside.any():
            raise _wrong(row, f"has {array[outside].ravel()[0]} in its {column}", name, field)
        return array

    def _column(self, row: Row, name: str, field: SampleField) -> str:
        """Return the column of the row that has a field.

        Raises:
            DataError: none has.
        """
        found = self._found(row, name, field)
        if found is not None:
            return found
        names = self._names(name, field)
        sought = [self._columns.get(one, one) for one in names]
        near = next((hint for one in sought if (hint := did_you_mean(one, row.values))), "")
        problem = f"has no field {' or '.join(sought)} (it has {', '.join(row.values)})"
        fix = f'Add it, or name the column that has it: data.columns = {{ {names[-1]} = "…" }}.{near}'
        raise _wrong(row, problem, name, field, fix)

    def _names(self, name: str, field: SampleField) -> list[str]:
        own = self._processors.names.get(name, ()) if self._processors is not None else ()
        return list(dict.fromkeys((name, *other_names(name, field), *own)))

    def _found(self, row: Row, name: str, field: SampleField) -> str | None:
        sought = (self._columns.get(one, one) for one in self._names(name, field))
        return next((column for column in sought if column in row.values), None)

    def _array(self, row: Row, name: str, value: Any, field: SampleField) -> NDArray[Any]:
        if name == "labels" and field.dtype == "int64" and not field.shape and isinstance(value, str):
            return np.asarray(class_number(value, self._classes))
        if name == "labels" and isinstance(value, list) and any(isinstance(one, str) for one in value):
            return np.asarray([class_number(one, self._classes) if isinstance(one, str) else one for one in value])
        return load(row, value, field) if isinstance(value, str | bytes) else np.asarray(value)


def other_names(name: str, field: SampleField) -> list[str]:
    """Other names of the column that has a field."""
    if len(field.shape) == 3 and field.dtype == "float32":
        return ["image"]
    if name in SOUNDS:
        return ["audio"]
    is_label = name == "labels" and (not field.shape or field.dtype == "float32")
    return ["label"] if is_label else []


def _unreadable(row: Row, column: str, problem: Exception, name: str, field: SampleField) -> DataError:
    value = row.values[column]
    shown = f"{len(value):,} bytes" if isinstance(value, bytes) else repr(str(value)[:60])
    return _wrong(row, f"has {shown} as its {column} ({problem})", name, field)


def _wrong(row: Row, what: str, name: str, field: SampleField, fix: str = "Correct it.") -> DataError:
    return DataError(f"{row.where} {what}, but the model takes {name} as {_words(field)}. {fix}")


def _filled(array: NDArray[Any], field: SampleField) -> NDArray[Any]:
    """A row of labels that is too short, filled up with those that count for nothing."""
    if field.dtype != "int64" or len(field.shape) != 1 or array.ndim != 1 or len(array) >= field.shape[0]:
        return array
    return np.concatenate([array, np.full(field.shape[0] - len(array), IGNORED, array.dtype)])
