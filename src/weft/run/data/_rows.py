"""Samples as a source has them, row by row."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from weft.errors import DataError

_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands."""

    values: Mapping[str, Any]
    """Numbers, lists, text; names of classes; paths of files beside the data; a file's bytes."""
    folder: Path
    """Folder of the data, out of which no path may lead."""
    where: str
    """`train.jsonl:7`, for messages."""

    def file(self, name: str) -> Path:
        """Return the path of a file beside the data.

        Raises:
            ValueError: it lies elsewhere.
        """
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise ValueError("it lies outside the folder of the data")
        return path


class SourceRows(Protocol):
    """The rows of a source."""

    @property
    def size(self) -> int: ...

    def classes_of(self, column: str, *, declared: bool = False) -> Sequence[str]:
        """The classes that a column names, in their order: those that the source declares (also of tags, a list to a
        row), or else all its texts, sorted, unless only what is `declared` is asked for.  Empty: it has numbers, or
        there is no such column."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Lines on rows that were left out, for the start of a run."""
        ...

    def row(self, at: int) -> Row: ...


def digest_of_files(files: Sequence[Path], also: str = "") -> str:
    """Hash of the contents of files one after another, behind `also`."""
    digest = xxhash.xxh3_128(also.encode())
    for file in files:
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def is_dataset(path: Path) -> bool:
    """Whether this is a folder that the library `datasets` saved."""
    # Of a folder that may not be read this says no, and whoever reads it says why.
    return any(os.path.isfile(path / name) for name in ("state.json", "dataset_dict.json"))


def import_arrow(module: str, file: Path) -> Any:
    """Return a module of pyarrow.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise DataError(
            f"{file} needs pyarrow, which is not installed. Install it: pip install 'weft[parquet]'."
        ) from None
