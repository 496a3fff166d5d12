"""Opens a source for reading row by row, and reads JSON lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import DataError
from weft.run.data._rows import Row, SourceRows, digest_of_files, import_arrow, is_dataset

_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of JSON lines and Parquet, in memory."""

    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def size(self) -> int:
        return len(self.rows)

    def classes_of(self, column: str, *, declared: bool = False) -> Sequence[str]:
        if declared:
            return ()
        return sorted({value for row in self.rows if isinstance(value := row.values.get(column), str)})

    def row(self, at: int) -> Row:
        return self.rows[at]


def open_rows(path: Path) -> SourceRows:
    """Open whatever lies there: a file or folder of rows, a data set on disk, a folder of images by class.

    Raises:
        DataError: it is none of these, or broken.
    """
    if is_dataset(path):
        from weft.run.data._arrow import ArrowRows  # the others do without

        return ArrowRows(path)
    if files := _files(path):
        return FileRows([row for file in files for row in _rows(file)])
    from weft.run.data._image_folder import ImageFolder

    return ImageFolder(path)


def digest_of(path: Path) -> str:
    """Hash of what a source holds; of a folder of images, of names, sizes, and both ends of every file."""
    if is_dataset(path):
        from weft.run.data._arrow import digest_of_dataset

        return digest_of_dataset(path)
    if files := _files(path):
        return digest_of_files(files)
    from weft.run.data._image_folder import digest_of_images

    return digest_of_images(path)


def has_rows(source: str) -> bool:
    """Whether a source is a file, or a folder of files, of samples with named fields, or a data set on disk."""
    path = Path(source).expanduser()
    return is_dataset(path) or bool(_files(path))


def is_of_folders(source: str) -> bool:
    """Whether a source may be a folder of images by class: a folder, and nothing else that has rows."""
    return Path(source).expanduser().is_dir() and not has_rows(source)


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
