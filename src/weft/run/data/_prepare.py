"""Turn text into a prepared corpus: fingerprint, tokenizer, shards by several processes, manifest.

Every file is written aside and renamed, a shard's record after its files, the manifest last; so a preparation that was
killed goes on where it stopped and ends with the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import xxhash

from weft.errors import DataError
from weft.files import cache_folder, digest_of_file, write_whole
from weft.run.data._corpus import FORMAT, MANIFEST, CorpusManifest, PreparedCorpus, open_corpus, read_manifest
from weft.run.data._files import locked, make_folder, remove_strays
from weft.run.data._progress import Progress, silent
from weft.run.data._shards import ShardTask
from weft.run.data._sources import FileListing, FileSegment, SourceFile, cut, list_sources
from weft.run.data._tokenizer import digest_tokenizer, load_tokenizer, mask_of, separator_of, span_of, train_tokenizer
from weft.run.data._workforce import WorkerProcesses

_SMALLEST_SHARD_BYTES = 4 << 20
_MOST_SHARDS = 256


def prepare(
    sources: Sequence[str | Path],
    *,
    vocabulary_size: int,
    tokenizer: str | Path | None = None,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    text_field: str = "text",
    workers: int | None = None,
    progress: Progress = silent,
) -> PreparedCorpus:
    """Tokenize sources into memory-mapped shards, or return those that an earlier call prepared.

    Several processes may prepare the same corpus at once: one works, the others wait.

    Args:
        sources: `stdlib`, text, `.jsonl` and `.parquet` files, folders of them, and what `datasets` saved to disk.
        vocabulary_size: Size of the byte-level BPE to train; with `tokenizer`, the most tokens it may have.
        tokenizer: A `tokenizer.json` to use instead of training one.
        folder: Where to write; by default `<cache>/<fingerprint>`.
        cache: By default `~/.cache/weft`.
        text_field: Field or column that holds the text, where there are fields.
        workers: Processes that tokenize; by default one per core, at most 16.
        progress: Told about every stage; see `ConsoleProgress`.

    Raises:
        DataError: A source is missing, empty or broken, the tokenizer does not fit, or the folder has other data.

    Example:
        >>> corpus = prepare(["stdlib"], vocabulary_size=8192)  # doctest: +SKIP
    """
    _refuse_arguments(sources, vocabulary_size, workers, tokenizer=tokenizer, folder=folder, cache=cache)
    base = Path(folder or cache or cache_folder()).expanduser()
    if tokenizer is None:
        tokenizer = shared_tokenizer(
            sources, vocabulary_size=vocabulary_size, cache=base, text_field=text_field, progress=progress
        )
    progress("reading", 0, 0)
    listing = list_sources(sources)
    loaded = load_tokenizer(tokenizer)
    check_vocabulary(span_of(loaded), vocabulary_size, str(tokenizer))
    # The folder is named by what decides its content, so that runs with equal data share it, and none meets other data.
    fingerprint = _fingerprint(listing, text_field, digest_tokenizer(loaded))
    target = base if folder else base / fingerprint
    make_folder(target)
    with locked(target, lambda: progress("waiting for another process that prepares the same data", 0, 0)) as lock:
        # Looked for under the lock: the process that was waited for has usually written it.
        if (target / MANIFEST).is_file():
            return _reuse(target, fingerprint)
        try:
            remove_strays(target)
            write_whole(target / "tokenizer.json", loaded.to_str(pretty=False), durable=True)
            return _write(target, listing, fingerprint, text_field, workers, progress, lock)
        except OSError as error:
            raise DataError(
                f"Prepared data could not be written to {target}: {error.strerror or error}. They need about "
                f"{listing.num_bytes / 1e6:,.1f} MB; free some space or name another folder. Finished shards are kept."
            ) from error


def path_of(what: str, value: object, error: type[Exception]) -> Path:
    """Return the path that a user's value names; raises `error` for one that is none, and for an empty one, which would
    mean the present folder."""
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise error(f"{what} = {value!r} is no path. Give one as a text without NUL, or a pathlib.Path.")
    if not str(value):
        raise error(f'{what} = "" names nothing. Give a path; the present folder is ".".')
    return Path(value)


def _refuse_arguments(
    sources: Sequence[str | Path], vocabulary_size: object, workers: object, **paths: str | Path | None
) -> None:
    if isinstance(sources, str | Path):
        raise DataError(f"sources = {str(sources)!r} is one name, not a list of them. Write [{str(sources)!r}].")
    for source in sources:
        path_of("a source", source, DataError)
    for name, path in paths.items():
        if path is not None:
            path_of(name, path, DataError)
    if type(vocabulary_size) is not int:
        raise DataError(f"vocabulary_size = {vocabulary_size!r} is not a whole number. Give one, such as 8192.")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise DataError(
            f"workers = {workers!r} is no number of processes. Give a whole number from 1 on, or leave it out."
        )


def _fingerprint(listing: FileListing, text_field: str, tokenizer: str) -> str:
    """Digest the content of all files in order, never their paths, with every setting that decides the result."""
    digest = xxhash.xxh3_128(json.dumps([FORMAT, text_field, tokenizer]).encode())
    for file in listing.files:
        try:
            digest.update(f"{file.kind} {_digest(file)}\n".encode())
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error.strerror}. Restore it, or leave it out.") from error
    return digest.hexdigest()


def _digest(file: SourceFile) -> str:
    if file.kind != "arrow":
        return digest_of_file(file.path)
    from weft.run.data._arrow import digest_of_dataset

    return digest_of_dataset(Path(file.path))


def _reuse(folder: Path, fingerprint: str) -> PreparedCorpus:
    stored = read_manifest(folder).fingerprint
    if stored != fingerprint:
        raise DataError(
            f"{folder} already holds other prepared data (fingerprint {stored}, now {fingerprint}: the sources, the "
            f"tokenizer or the vocabulary changed). Name another folder, or delete this one."
        )
    return open_corpus(folder)


def shared_tokenizer(
    sources: Sequence[str | Path],
    *,
    vocabulary_size: int,
    cache: str | Path | None = None,
    text_field: str = "text",
    progress: Progress = silent,
) -> Path:
    """Train one byte-level BPE on all sources, or find the one that an earlier call trained.

    Raises:
        DataError: A source is missing, empty or broken, or the vocabulary cannot hold all bytes.
    """
    listing = list_sources(sources)
    fingerprint = _fingerprint(listing, text_field, f"byte-level BPE {vocabulary_size}")
    folder = Path(cache or cache_folder()).expanduser() / f"tokenizer-{fingerprint}"
    make_folder(folder)
    path = folder / "tokenizer.json"
    with locked(folder, lambda: progress("waiting for another process that trains the same tokenizer", 0, 0)):
        if not path.is_file():
            progress("tokenizer", 0, 0)
            train_tokenizer(listing.files, vocabulary_size, path, text_field)
    return path


def _write(
    folder: Path,
    listing: FileListing,
    fingerprint: str,
    text_field: str,
    workers: int | None,
    progress: Progress,
    lock: int,
) -> PreparedCorpus:
    tokenizer = load_tokenizer(folder)
    span = span_of(tokenizer)
    dtype: Literal["<u2", "<u4"] = "<u2" if span <= 1 << 16 else "<u4"
    separator = separator_of(tokenizer)
    tasks = [
        ShardTask(
            index=index,
            folder=str(folder),
            fingerprint=fingerprint,
            dtype=dtype,
            separator=separator,
            text_field=text_field,
            segments=tuple(segments),
        )
        for index, segments in enumerate(_share_out(listing))
    ]
    records = WorkerProcesses(tasks, folder / "tokenizer.json", progress, lock).run(workers)
    if not sum(record.num_tokens for record in records):
        raise DataError(f"The corpus has {listing.num_bytes} bytes but no text. Name files that hold text.")
    manifest = CorpusManifest(
        format=FORMAT,
        fingerprint=fingerprint,
        tokenizer_digest=digest_tokenizer(tokenizer),
        dtype=dtype,
        vocabulary_size=span,
        separator=separator,
        mask=mask_of(tokenizer),
        num_files=len(listing.files),
        text_bytes=listing.num_bytes,
        notes=listing.notes,
        shards=tuple(records),
    )
    write_whole(folder / MANIFEST, manifest.to_json(), durable=True)
    return PreparedCorpus(folder, manifest)


def check_vocabulary(span: int, vocabulary_size: int, tokenizer: str) -> None:
    """Refuse a tokenizer with tokens that the model has no embedding for.

    Raises:
        DataError: `span` tokens do not fit.
    """
    if span > vocabulary_size:
        raise DataError(
            f"The tokenizer {tokenizer} has {span} tokens, but the model's vocabulary_size is {vocabulary_size}. "
            f"Set vocabulary_size = {-(-span // 128) * 128} (or any number from {span}), or use a smaller tokenizer."
        )


def _share_out(listing: FileListing) -> list[list[FileSegment]]:
    """Group segments into shards of similar size.  Depends on the files alone, so that restarts agree."""
    # Not by the number of workers: the same files must give the same shards on every machine.
    shard_bytes = max(_SMALLEST_SHARD_BYTES, -(-listing.num_bytes // _MOST_SHARDS))
    shards: list[list[FileSegment]] = [[]]
    size = 0
    for segment in cut(listing.files, shard_bytes):
        if shards[-1] and size + segment.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(segment)
        size += segment.num_bytes
    return shards
