"""Tokenize one shard, here or in a helper process, and write it whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer

from weft.config.document import typed
from weft.errors import DataError
from weft.files import digest_of_file, write_whole
from weft.run.data._corpus import ShardRecord, check_shard, shard_path
from weft.run.data._sources import FileSegment, read_documents
from weft.run.data._tokenizer import load_tokenizer

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """Everything that decides a shard's bytes; plain values, so that it travels as JSON."""

    index: int
    folder: str
    fingerprint: str
    dtype: str
    separator: int
    text_field: str
    segments: tuple[FileSegment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


def finished_shard(task: ShardTask) -> ShardRecord | None:
    """Return the record of a shard that an earlier preparation finished, if it is whole and of the same corpus."""
    path = shard_path(Path(task.folder), task.index, "json")
    try:
        fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if fields.pop("fingerprint") != task.fingerprint:
            return None
        record = ShardRecord(**fields)
        check_shard(Path(task.folder), task.index, record, task.dtype, digest=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        return None
    return record


def write_shard(task: ShardTask, tokenizer: Tokenizer, advance: Callable[[int], None]) -> ShardRecord:
    """Tokenize the task's documents and write the shard: its files, then its record.

    Args:
        advance: Called with the bytes of text done since the last call.
    """
    folder = Path(task.folder)
    paths = [shard_path(folder, task.index, part) for part in ("tokens", "documents")]
    asides = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in paths]
    largest = num_tokens = num_documents = 0
    with asides[0].open("wb") as tokens_file, asides[1].open("wb") as documents_file:
        for texts in _batches(task.segments, task.text_field):
            tokens, table = _encode(texts, tokenizer, task.separator)
            tokens_file.write(tokens.astype(task.dtype).tobytes())
            documents_file.write(table.astype("<u8").tobytes())
            largest = max(largest, int(tokens.max(initial=0)))
            num_tokens, num_documents = (num_tokens + len(tokens), num_documents + len(table))
            advance(sum(map(len, texts)))
        for stream in (tokens_file, documents_file):
            stream.flush()
            os.fsync(stream.fileno())
    # Files first, then the record that names their digests: a shard without a record, or with one that does not fit, is
    # made again.
    record = ShardRecord(num_tokens, num_documents, largest, *(digest_of_file(aside) for aside in asides))
    for aside, path in zip(asides, paths, strict=True):
        os.replace(aside, path)
    fields = {**dataclasses.asdict(record), "fingerprint": task.fingerprint}
    write_whole(shard_path(folder, task.index, "json"), json.dumps(fields), durable=True)
    return record


def _batches(segments: Sequence[FileSegment], text_field: str) -> Iterator[list[str]]:
    texts: list[str] = []
    size = 0
    for segment in segments:
        for text in read_documents(segment, text_field):
            texts.append(text)
            size += len(text)
            if size >= _BATCH_CHARACTERS:
                yield texts
                texts, size = [], 0
    if texts:
        yield texts


def _encode(texts: list[str], tokenizer: Tokenizer, separator: int) -> tuple[Any, Any]:
    """Return the documents' tokens, each with its separator, and the table (length, hash of the text)."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    # A document without tokens leaves no separator: an empty document would train the model to predict two in a row.
    pieces: list[list[int]] = []
    table: list[tuple[int, int]] = []
    for text, ids in zip(texts, encoded, strict=True):
        if ids:
            pieces.extend((ids, [separator]))
            table.append((len(ids) + 1, xxhash.xxh3_64_intdigest(text.encode())))
    tokens = np.concatenate([np.asarray(piece, np.int64) for piece in pieces]) if pieces else np.empty(0, np.int64)
    return tokens, np.array(table, np.uint64).reshape(-1, 2)


def main(tokenizer_path: str) -> None:
    """Do the tasks on stdin, a JSON line each, and say on stdout, in JSON lines too, how far they are."""
    tokenizer = load_tokenizer(tokenizer_path)

    def say(**message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    try:
        for line in sys.stdin.buffer:
            task = typed(ShardTask, json.loads(line))
            record = write_shard(task, tokenizer, lambda count: say(bytes=count))
            say(index=task.index, record=dataclasses.asdict(record))
    except BrokenPipeError:  # the parent is gone
        os._exit(1)
    except (DataError, OSError) as error:
        say(error=str(error))
