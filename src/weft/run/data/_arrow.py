"""Data sets on disk as the library `datasets` saves them (`Dataset.save_to_disk`), read by pyarrow alone.

A folder has `state.json`, which names its files in order, `dataset_info.json`, which says what the columns are, and
files in Arrow's stream format, which are mapped into memory and never read whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.config.document import JsonObject, read_plain_file
from weft.errors import DataError
from weft.run.data._rows import Row, digest_of_files, import_arrow

_ADVICE = "It must be as Dataset.save_to_disk writes it: save it again."
_MOST_BYTES = 64 << 20
_SPLITS = {"train": ("train",), "validation": ("validation", "test")}
"""Use → names of the split of a `DatasetDict` that serves it, the first that is there."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end mark of an Arrow stream.  A stream that was cut between two of its batches lacks it, and reads well else."""


class ArrowRows:
    """The rows of a data set on disk, in the order of its indices where it has any.

    A column of classes gives their names, as if it had texts; one of images or sounds the bytes of a file, or its path.

    Raises:
        DataError: a file is missing, cut short, or of an older form; names it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        state = _state(folder)
        tables = [_table(file) for file in _data_files(folder, state)]
        self._features = _features(folder)
        # Empty files have no rows to find, but one table must stay: it has the names of the columns.
        self._tables = [table for table in tables if table.num_rows] or tables[:1]
        self._starts = np.cumsum([0, *(table.num_rows for table in self._tables)])
        self._indices = _indices(folder, state, int(self._starts[-1]))
        if any(table.schema.names != tables[0].schema.names for table in tables):
            raise DataError(f"The files of {folder} have different columns. {_ADVICE}")

    @property
    def size(self) -> int:
        return int(self._starts[-1]) if self._indices is None else len(self._indices)

    @property
    def columns(self) -> Sequence[str]:
        return self._tables[0].schema.names

    def classes_of(self, column: str, *, declared: bool = False) -> Sequence[str]:
        feature = _element(self._features.get(column, {}))
        if _kind(feature) == "ClassLabel":
            return tuple(map(str, feature.get("names") or ()))
        values = None if declared else self.texts(column)
        return () if values is None else sorted({text for text in values if text is not None})

    def texts(self, column: str, start: int = 0, stop: int | None = None) -> Sequence[str | None] | None:
        """The texts of rows [start, stop); None: the column has none, or there is no such column."""
        arrow = import_arrow("pyarrow", self._folder)
        table = arrow.concat_tables(self._tables)
        if column not in table.schema.names:
            return None
        kind = table.schema.field(column).type
        if not any(test(kind) for test in (arrow.types.is_string, arrow.types.is_large_string)):
            return None
        values = table.column(column)
        if self._indices is None:
            return values[start : self.size if stop is None else stop].to_pylist()
        return values.take(arrow.array(self._indices[start:stop])).to_pylist()

    @property
    def notes(self) -> Sequence[str]:
        return ()

    def row(self, at: int) -> Row:
        place = at if self._indices is None else int(self._indices[at])
        # The file of a row: the last one that starts at or before it.
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        values = _ArrowRow(self._tables[number], place - int(self._starts[number]), self._features)
        return Row(values, self._folder, f"{self._folder}, row {at}")


class _ArrowRow(Mapping[str, Any]):
    """One row, of which a column is made into Python values when it is asked for."""

    def __init__(self, table: Any, at: int, features: Mapping[str, Mapping[str, Any]]) -> None:
        self._table, self._at, self._features = table, at, features

    def __getitem__(self, name: str) -> Any:
        at = self._table.schema.get_field_index(name)
        if at < 0:
            raise KeyError(name)
        value = self._table.column(at)[self._at].as_py()
        feature = self._features.get(name, {})
        names = _element(feature).get("names")
        if _kind(_element(feature)) == "ClassLabel" and names:
            return [_named(one, names) for one in value] if isinstance(value, list) else _named(value, names)
        if _kind(feature) in ("Image", "Audio") and isinstance(value, dict):
            return value.get("bytes") or value.get("path")
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._table.schema.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.schema.names)

    def __len__(self) -> int:
        return len(self._table.schema.names)


def digest_of_dataset(folder: Path) -> str:
    """Hash of what the columns are, of all files, and of the order in which their rows come."""
    state = _state(folder)
    files = [*_data_files(folder, state), *_index_files(folder, state)]
    return digest_of_files(files, json.dumps(_features(folder), sort_keys=True))


def data_bytes(folder: Path) -> int:
    """Size of the files that have the rows."""
    return sum(file.stat().st_size for file in _data_files(folder, _state(folder)))


def splits_of(folder: Path) -> list[str] | None:
    """Names of the splits of a `DatasetDict`, each of which is a folder within; None: it is none."""
    file = folder / "dataset_dict.json"
    return _read(file).texts("splits") if file.is_file() else None


def split_folder(folder: Path, use: Literal["train", "validation"]) -> Path:
    """Return the folder of the split that serves this use, of a `DatasetDict`; the folder itself where it is none.

    Raises:
        DataError: it has no such split; says which it has.
    """
    splits = splits_of(folder)
    if splits is None:
        return folder
    names = _SPLITS[use]
    chosen = splits[0] if len(splits) == 1 else next((name for name in names if name in splits), None)
    if chosen is None or Path(chosen).name != chosen:
        raise DataError(
            f"{folder} has the splits {', '.join(splits) or 'none at all'}, and none of them is called"
            f" {' or '.join(names)}. Name the folder of the one that is meant: {folder}/{next(iter(splits), '…')}."
        )
    return folder / chosen


def _read(file: Path) -> JsonObject:
    content = read_plain_file(file.resolve(), DataError, _ADVICE, most_bytes=_MOST_BYTES)
    return JsonObject.parse(file, content, DataError, _ADVICE)


def _state(folder: Path) -> Mapping[str, Any]:
    if not (folder / "state.json").is_file():
        raise DataError(f"{folder} has no state.json. {_ADVICE}")
    return _read(folder / "state.json").values


def _features(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the description of each column, by its name."""
    file = folder / "dataset_info.json"
    features = _read(file).values.get("features") if file.is_file() else None
    if not isinstance(features, dict):
        raise DataError(f"{file} does not say what the columns are (`features`). {_ADVICE}")
    return {str(name): feature if isinstance(feature, dict) else {} for name, feature in features.items()}


def _element(feature: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of the elements of a column of lists; of any other column, its own."""
    inner = feature.get("feature")
    return inner if isinstance(inner, dict) else feature


def _named(value: Any, names: Sequence[Any]) -> Any:
    return str(names[value]) if type(value) is int and 0 <= value < len(names) else value


def _kind(feature: Mapping[str, Any]) -> str:
    return str(feature.get("_type", ""))


def _data_files(folder: Path, state: Mapping[str, Any]) -> list[Path]:
    files = _named_files(folder, state, "_data_files")
    if not files:
        raise DataError(f"{folder / 'state.json'} names no files (`_data_files`). {_ADVICE}")
    return files


def _index_files(folder: Path, state: Mapping[str, Any]) -> list[Path]:
    return _named_files(folder, state, "_indices_data_files")


def _named_files(folder: Path, state: Mapping[str, Any], name: str) -> list[Path]:
    files: list[Path] = []
    entries = state.get(name)
    for entry in entries if isinstance(entries, list) else ():
        file = entry.get("filename") if isinstance(entry, dict) else None
        # A name and no path: nothing outside of the folder is read.
        if not isinstance(file, str) or Path(file).name != file or {"skip", "take"} & set(entry):
            raise DataError(f"{folder / 'state.json'} has {entry!r} in {name}, an older form. {_ADVICE}")
        if not (folder / file).is_file():
            raise DataError(f"{folder / 'state.json'} names {file}, which does not exist. {_ADVICE}")
        files.append(folder / file)
    return files


def _table(file: Path) -> Any:
    """Map a file; its pages are read when they are used."""
    arrow = import_arrow("pyarrow", file)
    with file.open("rb") as ended:
        ended.seek(max(0, file.stat().st_size - len(_END)))
        if ended.read() != _END:
            raise DataError(f"{file} is cut short: the mark of its end is missing. {_ADVICE}")
    try:
        with arrow.ipc.open_stream(arrow.memory_map(str(file))) as stream:
            return stream.read_all()
    except (arrow.ArrowException, OSError) as problem:
        raise DataError(f"{file} is not readable as a stream of Arrow ({problem}). {_ADVICE}") from None


def _indices(folder: Path, state: Mapping[str, Any], size: int) -> NDArray[np.int64] | None:
    """Return the rows of a selection, in its order, if one was saved without copying the rows; else None."""
    files = _index_files(folder, state)
    if not files:
        return None
    tables = [_table(file) for file in files]
    if any(table.schema.names != ["indices"] for table in tables):
        raise DataError(f"{files[0]} has other columns than `indices`. {_ADVICE}")
    rows = np.concatenate([table.column(0).to_numpy() for table in tables]).astype(np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= size):
        raise DataError(f"{files[0]} points at row {rows.max()}, and there are {size:,}. {_ADVICE}")
    return rows
