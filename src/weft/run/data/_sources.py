"""Sources of text: files and folders as an ordered list of segments, each of which yields documents.

A segment is a byte range of a file (row groups for Parquet), so that one huge file is shared out among workers.  A
record belongs to the segment in which its first byte lies.  Everything here is a pure function of the files' contents
and of their sorted names; nothing depends on the number of workers.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.errors import DataError, did_you_mean
from weft.run.data._rows import is_dataset

DOCUMENT_BYTES = 65_536
"""Longer plain text is cut at line ends into documents of about this size, so that a single file can be split into
training and validation documents and into work for several processes."""

_WITHOUT_A_PATH = ("stdlib", "digits", "synthetic")
_NOT_SOURCE = {"__pycache__", "site-packages", "dist-packages"}
_READ_BYTES = 1 << 20

FileFormat = Literal["text", "jsonl", "parquet", "arrow"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: str
    kind: FileFormat
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileSegment:
    """Part of a file: bytes [start, stop); row groups of Parquet, or rows of a data set on disk."""

    path: str
    kind: FileFormat
    start: int
    stop: int
    num_bytes: int
    """Roughly how much work it is."""


@dataclass(frozen=True, slots=True)
class FileListing:
    """The files of some sources, in the order in which their documents are stored."""

    files: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()
    """Lines on files that were left out, for the description of the data."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def list_sources(sources: Sequence[str | Path]) -> FileListing:
    """Find the files of all sources: `stdlib`, a file, or a folder (searched recursively, names sorted).

    Raises:
        DataError: A source does not exist, cannot be read, or has no usable file.
    """
    files: list[SourceFile] = []
    notes: list[str] = []
    for source in sources:
        listing = _standard_library() if str(source) == "stdlib" else _list_path(Path(source).expanduser())
        files.extend(listing.files)
        notes.extend(listing.notes)
    if not sum(file.num_bytes for file in files):
        raise DataError(
            f"The corpus {', '.join(map(str, sources))} is empty: {len(files)} files with 0 bytes. "
            f"Name files or folders that hold text."
        )
    return FileListing(tuple(files), tuple(notes))


def _list_path(path: Path) -> FileListing:
    if is_dataset(path):
        from weft.run.data._arrow import data_bytes, split_folder  # files do without

        folder = split_folder(path, "train")
        return FileListing((SourceFile(str(folder), "arrow", data_bytes(folder)),))
    if path.is_dir():
        return _list_folder(path)
    check_source(path)
    file = _classify(path)
    if file is None:
        raise DataError(
            f"{path} is not text: it contains NUL bytes. Weft reads plain text, .jsonl and .parquet; "
            f"unpack or convert it."
        )
    return FileListing((file,))


def _leads_back(path: Path) -> bool:
    try:
        path.stat()
    except OSError as problem:
        return problem.errno == errno.ELOOP
    return False


def check_source(source: str | Path) -> None:
    """Refuse a path where nothing lies.

    Raises:
        DataError: nothing does; says where it was looked for.
    """
    path = Path(source).expanduser()
    if path.is_symlink() and not path.exists():
        why = "leads back to it: nothing is at its end" if _leads_back(path) else "does not exist"
        raise DataError(f"The data source {path} is a link to {path.readlink()}, which {why}. Mend the link.")
    if str(source) not in _WITHOUT_A_PATH and not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(path.name, [*siblings, *_WITHOUT_A_PATH])
        raise DataError(
            f"The data source {path} does not exist (looked in {path.parent.resolve()}).{near} "
            f"Give a file, a folder, a folder of prepared shards, or one of: {', '.join(_WITHOUT_A_PATH)}."
        )


def _list_folder(folder: Path) -> FileListing:
    files: list[SourceFile] = []
    skipped = 0
    for path in _walk(folder):
        # Opening a named pipe would wait for ever, so only regular files are looked into.
        file = _classify(path) if path.is_file() else None
        if file is None:
            skipped += 1
        else:
            files.append(file)
    if not files:
        raise DataError(
            f"The folder {folder} has no text, .jsonl or .parquet files ({skipped} others were left out; hidden "
            f"ones are never read). Name a folder that holds text."
        )
    return FileListing(tuple(files), (f"{skipped} files left out that are not text",) if skipped else ())


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(
            f"The folder {error.filename} cannot be read: {error.strerror}. Give yourself the right to read it "
            f"(chmod u+rx), or name another folder."
        ) from error

    for current, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in _NOT_SOURCE and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(current, name)


def _classify(path: Path) -> SourceFile | None:
    """Return the file with its kind, or None when it is neither text nor a known format."""
    kinds: dict[str, FileFormat] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
    try:
        with path.open("rb") as stream:
            head = stream.read(8192)
            num_bytes = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Give yourself the right to read it (chmod u+r), or leave it out."
        ) from error
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        if b"\0" in head:  # no text has one, and nearly all binary formats have some at their beginning
            return None
        kind = "text"
    return SourceFile(str(path), kind, num_bytes)


def _standard_library() -> FileListing:
    """Every `.py` file of the running Python's standard library, its tests included, installed packages excluded.

    The few files that are not UTF-8 exist to test codecs; they are left out and counted.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[SourceFile] = []
    skipped = 0
    for path in _walk(root):
        if path.suffix != ".py":
            continue
        try:
            data = path.read_bytes()
            data.decode("utf-8")
        except UnicodeDecodeError:
            skipped += 1
            continue
        files.append(SourceFile(str(path), "text", len(data)))
    if not files:
        raise DataError(f"The standard library at {root} has no source files. Name files or folders of your own.")
    return FileListing(tuple(files), (f"{skipped} files left out that are not UTF-8",) if skipped else ())


def cut(files: Sequence[SourceFile], segment_bytes: int) -> list[FileSegment]:
    """Cut files into segments of at most about `segment_bytes`, in order."""
    segments: list[FileSegment] = []
    for file in files:
        if file.kind == "parquet":
            segments.extend(_row_groups(file))
            continue
        if file.kind == "arrow":
            segments.extend(_runs_of_rows(file, segment_bytes))
            continue
        for start in range(0, file.num_bytes, segment_bytes):
            stop = min(start + segment_bytes, file.num_bytes)
            segments.append(FileSegment(file.path, file.kind, start, stop, stop - start))
    return segments


def _parquet_file(path: str) -> Any:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path} is Parquet, which needs pyarrow. Install it: pip install 'weft[parquet]'.") from error
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises several unrelated families
        raise DataError(f"{path} is not a readable Parquet file: {error}. Write it again, or leave it out.") from error


def _row_groups(file: SourceFile) -> Iterator[FileSegment]:
    with _parquet_file(file.path) as parquet:
        for group in range(parquet.num_row_groups):
            num_bytes = int(parquet.metadata.row_group(group).total_byte_size)
            yield FileSegment(file.path, "parquet", group, group + 1, num_bytes)


def _runs_of_rows(file: SourceFile, segment_bytes: int) -> Iterator[FileSegment]:
    from weft.run.data._arrow import ArrowRows

    size = ArrowRows(Path(file.path)).size
    pieces = max(1, -(-file.num_bytes // segment_bytes))
    rows = max(1, -(-size // pieces))
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        yield FileSegment(file.path, "arrow", start, stop, file.num_bytes * (stop - start) // size)


def read_documents(segment: FileSegment, text_field: str) -> Iterator[str]:
    """Yield the documents whose first byte lies in the segment; empty ones are left out.

    Raises:
        DataError: A file changed, is not UTF-8, or has a record without text; names file and line.
    """
    if segment.kind == "text":
        yield from _text_documents(segment)
    elif segment.kind == "jsonl":
        yield from _jsonl_documents(segment, text_field)
    elif segment.kind == "arrow":
        yield from _arrow_documents(segment, text_field)
    else:
        yield from _parquet_documents(segment, text_field)


def _lines(segment: FileSegment) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of each line that starts in the segment."""
    with open(segment.path, "rb") as stream:
        # One byte back: if the segment begins just behind a newline, its first line is its own, and the read ends at
        # once.
        if segment.start:
            stream.seek(segment.start - 1)
            stream.readline()
        offset = stream.tell()
        while offset < segment.stop and (line := stream.readline()):
            yield offset, line
            offset += len(line)


def _text_documents(segment: FileSegment) -> Iterator[str]:
    parts: list[bytes] = []
    start = size = 0
    for offset, line in _lines(segment):
        if parts and size + len(line) > DOCUMENT_BYTES:
            yield _decode(b"".join(parts), segment.path, start)
            parts, size = [], 0
        if not parts:
            start = offset
        parts.append(line)
        size += len(line)
    if size:
        yield _decode(b"".join(parts), segment.path, start)


def _decode(data: bytes, path: str, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise DataError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {at}, line {_line_number(path, at)}. "
            f"Convert it (iconv -f latin1 -t utf-8), or leave it out."
        ) from error


def _line_number(path: str, offset: int) -> int:
    """Line, from 1, of a byte; only errors need it."""
    count = 1
    with open(path, "rb") as stream:
        while offset > 0 and (data := stream.read(min(offset, _READ_BYTES))):
            count += data.count(b"\n")
            offset -= len(data)
    return count


def _jsonl_documents(segment: FileSegment, text_field: str) -> Iterator[str]:
    for offset, line in _lines(segment):
        if not line.strip():
            continue
        text = _text_of(line, segment.path, offset, text_field)
        if text:
            yield text


def _text_of(line: bytes, path: str, offset: int, text_field: str) -> str:
    decoded = _decode(line, path, offset)
    try:
        record: Any = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(
            f"{path}, line {_line_number(path, offset)}{column}: not JSON ({reason}). "
            f'Each line must be one object such as {{"{text_field}": "…"}}; repair or remove this line.'
        ) from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if isinstance(text, str):
        _check_encodable(text, path, offset)
        return text
    if isinstance(record, dict) and text_field in record:
        raise DataError(
            f'{path}, line {_line_number(path, offset)}: the field "{text_field}" holds {_spoken(text)}, and a text is'
            " wanted. Put it in quotes, remove this line, or name another text field."
        )
    keys = [str(key) for key in record] if isinstance(record, dict) else []
    has = f"it has {', '.join(keys[:8]) or 'no fields'}" if isinstance(record, dict) else "it is no object"
    raise DataError(
        f'{path}, line {_line_number(path, offset)}: there is no string in the field "{text_field}" ({has}).'
        f"{did_you_mean(text_field, keys)} Repair this line, or name another text field."
    )


def _spoken(value: object) -> str:
    """Return the type of a JSON value in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "an object"


def _check_encodable(text: str, path: str, offset: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, line {_line_number(path, offset)}: the text has half a character "
            f"(\\u{ord(text[error.start]):04x} without its partner), which is no Unicode. Repair or remove this line."
        ) from error


def _parquet_documents(segment: FileSegment, text_field: str) -> Iterator[str]:
    with _parquet_file(segment.path) as parquet:
        names = list(parquet.schema_arrow.names)
        if text_field not in names:
            raise DataError(
                f'{segment.path} has no column "{text_field}"; its columns are {", ".join(names)}.'
                f"{did_you_mean(text_field, names)} Name another text field, or rename the column."
            )
        row = 0
        groups = list(range(segment.start, segment.stop))
        for batch in parquet.iter_batches(batch_size=1024, row_groups=groups, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is not None and not isinstance(text, str):
                    raise DataError(
                        f'{segment.path}, row group {segment.start}, row {row}: column "{text_field}" holds '
                        f"{type(text).__name__}, not text. Name a column of strings."
                    )
                if text:
                    yield text


def _arrow_documents(segment: FileSegment, text_field: str) -> Iterator[str]:
    from weft.run.data._arrow import ArrowRows

    rows = ArrowRows(Path(segment.path))
    texts = rows.texts(text_field, segment.start, segment.stop)
    if texts is None:
        raise DataError(
            f'{segment.path} has no column "{text_field}" of texts; its columns are {", ".join(rows.columns)}.'
            f'{did_you_mean(text_field, rows.columns)} Name another: data.columns = {{ text = "…" }}.'
        )
    yield from (text for text in texts if text)
