"""Samples as a source has them, row by row: what reads JSON lines and Parquet, and who reads which source."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from weft.errors import DataError

_SUFFIXES = (".jsonl", ".parquet")
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


class Rows(Protocol):
    """The rows of a source."""

    @property
    def size(self) -> int: ...

    def classes_of(self, column: str) -> Sequence[str]:
        """The classes that a column names, in their order: those that the source declares, or else all its texts,
        sorted.  Empty: it has numbers, or there is no such column."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What was left out, for the start of a run."""
        ...

    def row(self, at: int) -> Row: ...


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of JSON lines and Parquet, in memory."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def size(self) -> int:
        return len(self.rows)

    def classes_of(self, column: str) -> Sequence[str]:
        return sorted({value for row in self.rows if isinstance(value := row.values.get(column), str)})

    def row(self, at: int) -> Row:
        return self.rows[at]


def open_rows(path: Path) -> Rows:
    """Open whatever lies there: a file or folder of rows, a data set on disk, a folder of images by class.

    Raises:
        DataError: it is none of these, or broken.
    """
    if is_dataset(path):
        from weft.data._arrow import ArrowRows  # the others do without

        return ArrowRows(path)
    if files := _files(path):
        return FileRows([row for file in files for row in _rows(file)])
    from weft.data._image_folder import ImageFolder

    return ImageFolder(path)


def digest_of(path: Path) -> str:
    """Hash of what a source holds; of a folder of images, of names, sizes, and both ends of every file."""
    if is_dataset(path):
        from weft.data._arrow import digest_of_dataset

        return digest_of_dataset(path)
    if files := _files(path):
        return digest_of_files(files)
    from weft.data._image_folder import digest_of_images

    return digest_of_images(path)


def digest_of_files(files: Sequence[Path], also: str = "") -> str:
    """Hash of the contents of files one after another, behind `also`."""
    digest = xxhash.xxh3_128(also.encode())
    for file in files:
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def has_rows(source: str) -> bool:
    """Whether a source is a file, or a folder of files, of samples with named fields, or a data set on disk."""
    path = Path(source).expanduser()
    return is_dataset(path) or bool(_files(path))


def is_of_folders(source: str) -> bool:
    """Whether a source may be a folder of images by class: a folder, and nothing else that has rows."""
    return Path(source).expanduser().is_dir() and not has_rows(source)


def is_dataset(path: Path) -> bool:
    """Whether this is a folder that the library `datasets` saved."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for suffix in _SUFFIXES for file in path.glob(f"*{suffix}"))
    return [path] if path.is_file() and path.suffix in _SUFFIXES else []


def _rows(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        yield from (Row(values, file.parent, f"{file}:{number}") for number, values in enumerate(_parquet(file), 1))
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
        yield Row(values, file.parent, f"{file}:{number}")


def _parquet(file: Path) -> list[dict[str, Any]]:
    parquet = import_arrow("pyarrow.parquet", file)
    try:
        return parquet.read_table(file).to_pylist()
    except Exception as problem:  # pyarrow has errors of its own for what is no Parquet
        raise DataError(f"{file} is not readable as Parquet ({problem}). Write it again.") from None


def import_arrow(module: str, file: Path) -> Any:
    """Return a module of pyarrow.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise DataError(f"{file} needs pyarrow, which is not installed. Install it with: pip install pyarrow") from None
