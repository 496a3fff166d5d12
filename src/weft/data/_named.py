"""Samples with named fields: made up by what a model takes, or read from a file of JSON lines or Parquet."""

from __future__ import annotations

import importlib
import json
import math
import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from weft.data._fields import IGNORED, Fields, Split
from weft.data._keyed import normal, uniform
from weft.errors import DataError
from weft.families import SampleField

_KEY = 0xF1E1D
_SUFFIXES = (".jsonl", ".parquet")


def digest_of(source: str) -> str:
    """Hash of a file, or of the files of a folder."""
    digest = xxhash.xxh3_128()
    for file in _files(Path(source)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


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
    """With the weights of samples whose labels are numbers: nothing else says which only fill up a batch."""
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
        return values


class FileFields:
    """Samples of a file: a row has each field by its name, as a number or as lists of numbers.

    A field of numbers may also name a file beside the data: `.npy`, a wave (`.wav`, 16 bits), or an image, which Pillow
    reads.  A row of labels may be shorter than the model takes: the rest counts for nothing (−100).  Inputs may not:
    the model gets no mask, and would attend to what fills them up.
    """

    def __init__(self, path: Path, named: Mapping[str, SampleField], split: str, validation_fraction: float) -> None:
        self._named = named
        self._rows = [row for file in _files(path) for row in _rows(file)]
        if split != "all" and validation_fraction < 1.0:
            is_held = uniform(_KEY, np.arange(len(self._rows))) < validation_fraction
            self._rows = [row for row, held in zip(self._rows, is_held, strict=True) if held == (split == "validation")]
        self.fields = _all_fields(named)
        if not self._rows:
            raise DataError(f"{path} has no samples for {split}. Give a larger file, or data.validation_fraction = 0.")

    @property
    def size(self) -> int:
        """Samples of the split."""
        return len(self._rows)

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        """Return the samples at `index`.

        Raises:
            DataError: a row lacks a field, or has it in another shape; names file and line.
        """
        rows = [self._rows[at] for at in index.tolist()]
        values: Fields = {}
        derived = [name for name, field in self._named.items() if field.follows and name not in rows[0].values]
        for name, field in self._named.items():
            if name not in derived:
                values[name] = np.stack([row.field(name, field) for row in rows])
        _follow(self._named, values, derived)
        if "weights" in self.fields and "weights" not in values:
            values["weights"] = np.ones(len(index), np.float32)
        return values


@dataclass(frozen=True, slots=True)
class _Row:
    """One row, and where it stands."""

    values: Mapping[str, Any]
    file: Path
    line: int

    def field(self, name: str, field: SampleField) -> NDArray[Any]:
        """A field as the model takes it."""
        if name not in self.values:
            there = ", ".join(self.values)
            raise self._wrong(f"has no field {name} (it has {there})", name, field)
        value = self.values[name]
        try:
            array = self._loaded(value, field) if isinstance(value, str) else np.asarray(value)
            array = array.astype(field.dtype, casting="same_kind")
        except (TypeError, ValueError, OSError) as problem:
            raise self._wrong(f"has {str(value)[:60]!r} as its {name} ({problem})", name, field) from None
        array = _filled(array, field) if name == "labels" else array
        if array.shape != field.shape:
            raise self._wrong(f"has a {name} of shape {array.shape}", name, field)
        outside = (array >= field.below) | ((array < 0) & (array != IGNORED)) if field.below else np.zeros(1, np.bool_)
        if outside.any():
            raise self._wrong(f"has {array[outside].ravel()[0]} in its {name}", name, field)
        return array

    def _loaded(self, name: str, field: SampleField) -> NDArray[Any]:
        path = (self.file.parent / name).resolve()
        if not path.is_relative_to(self.file.parent.resolve()):
            raise ValueError("it lies outside the folder of the data")
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".wav":
            return _wave(path, field)
        return _image(path, field)

    def _wrong(self, what: str, name: str, field: SampleField) -> DataError:
        return DataError(f"{self.file}:{self.line} {what}, but the model takes {name} as {_words(field)}. Correct it.")


def _filled(array: NDArray[Any], field: SampleField) -> NDArray[Any]:
    """A row of labels that is too short, filled up with those that count for nothing."""
    if field.dtype != "int64" or len(field.shape) != 1 or array.ndim != 1 or len(array) >= field.shape[0]:
        return array
    return np.concatenate([array, np.full(field.shape[0] - len(array), IGNORED, array.dtype)])


def _wave(path: Path, field: SampleField) -> NDArray[Any]:
    """A wave in [−1, 1), with silence behind it where the model takes a longer one."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{8 * file.getsampwidth()} bits a sample; 16 are read")
        if file.getnchannels() != 1:
            raise ValueError(f"{file.getnchannels()} channels; one is read. Mix them into one")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    if len(field.shape) != 1:
        raise ValueError("the model takes spectrograms; give them as .npy")
    if len(samples) > field.shape[0]:
        raise ValueError(f"{len(samples):,} values of sound, more than it takes. Cut it into pieces")
    whole = np.zeros(field.shape, np.float32)
    whole[: len(samples)] = samples.astype(np.float32) / 32768
    return whole


def _image(path: Path, field: SampleField) -> NDArray[Any]:
    """An image in [0, 1] of (channels, height, width)."""
    if len(field.shape) != 3:
        raise ValueError("only .npy, .wav and images are read")
    try:
        images: Any = importlib.import_module("PIL.Image")
    except ModuleNotFoundError:
        raise ValueError("reading images needs Pillow: pip install pillow") from None
    channels, height, width = field.shape
    with images.open(path) as image:
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB").resize((width, height)), np.float32) / 255
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def is_of_fields(source: str) -> bool:
    """Whether a source is a file, or a folder of files, of samples with named fields."""
    return bool(_files(Path(source).expanduser()))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}"))
    return [path] if path.is_file() and path.suffix in _SUFFIXES else []


def _rows(file: Path) -> Iterator[_Row]:
    if file.suffix == ".parquet":
        yield from (_Row(values, file, number) for number, values in enumerate(_parquet(file), 1))
        return
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as problem:
            raise DataError(f"{file}:{number} is no JSON ({problem}). Each line is one object.") from None
        if not isinstance(values, dict):
            raise DataError(f"{file}:{number} is no object with named fields. Each line is one object.")
        yield _Row(values, file, number)


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise DataError(f"{file} needs pyarrow, which is not installed. Install it with: pip install pyarrow") from None
    try:
        return parquet.read_table(file).to_pylist()
    except Exception as problem:  # pyarrow has errors of its own for what is no Parquet
        raise DataError(f"{file} is not readable as Parquet ({problem}). Write it again.") from None
