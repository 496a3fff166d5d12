"""Writes one rank's files of a checkpoint, and checks all ranks' files before the save is committed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from torch import Tensor

from weft.errors import CheckpointError
from weft.run.checkpoint._files import TensorEntry, grouped, write_tensors, write_text
from weft.run.checkpoint._format import (
    DTYPE_NAMES,
    RankIndex,
    StoredFile,
    StoredRange,
    digest_of,
    index_name,
    parse_index,
)
from weft.techniques.core import CheckpointShard


def write_rank(folder: Path, rank: int, shards: Sequence[CheckpointShard], file_bytes: int) -> None:
    """Write the runs of this rank that count, in files of at most `file_bytes` of tensors, and their index.

    Raises:
        OSError: the disk is full or not writable.
    """
    files: list[StoredFile] = []
    runs: list[StoredRange] = []
    for number, group in enumerate(grouped(_cut(shards, file_bytes), lambda shard: shard.tensor.nbytes, file_bytes)):
        name = f"rank-{rank:05d}-{number:04d}.safetensors"
        entries = list[TensorEntry]()
        for shard in group:
            run = _run_of(shard, name, {entry.key for entry in entries})
            shape = run.local_shape if run.length == run.local_shape.numel() else (run.length,)
            entries.append(TensorEntry(run.key, shape, run.dtype, partial(_tensor_of, shard), shard.let_go))
            runs.append(run)
        files.append(write_tensors(folder / name, entries, {"format": "pt", "written_by": "weft"}))
    write_text(folder / index_name(rank), RankIndex(files=tuple(files), runs=tuple(runs)).to_text())


def check_ranks(folder: Path, world: int) -> tuple[StoredFile, ...]:
    """Check that all ranks' files are there and hold every element of every tensor once; return the indexes' digests.

    Raises:
        CheckpointError: a file is missing or short, or the runs overlap or leave a gap.
    """
    stored = list[StoredFile]()
    runs = list[StoredRange]()
    for rank in range(world):
        path = folder / index_name(rank)
        content = path.read_bytes()
        index = parse_index(path, content)
        for file in index.files:
            # Size only: digests were taken while the bytes were written, and a save must not
            # read every byte back.  Loading verifies them.
            if (size := (folder / file.name).stat().st_size) != file.size_bytes:
                raise CheckpointError(f"{folder / file.name} has {size:,} bytes; {file.size_bytes:,} were written.")
        stored.append(StoredFile(name=path.name, size_bytes=len(content), digest=digest_of(content)))
        runs.extend(index.runs)
    runs_by_name(runs)
    return tuple(stored)


def runs_by_name(runs: Iterable[StoredRange]) -> dict[str, list[StoredRange]]:
    """Group runs by tensor, checking that they hold every element once.

    Raises:
        CheckpointError: runs of one tensor disagree, overlap or leave a gap.
    """
    by_name: dict[str, list[StoredRange]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    # Ranks decide for themselves which elements they write.  Two that both took themselves for the first replica, or
    # none that did, show here as an overlap or a gap, before the save is committed.
    for name, group in by_name.items():
        _check_cover(name, group)
    return by_name


def _check_cover(name: str, runs: list[StoredRange]) -> None:
    where = f"{_index_of(runs[0])}: {name}"
    forms = {(run.shape, run.dtype, run.split.form) for run in runs}
    if len(forms) > 1:
        raise CheckpointError(
            f"{where}: the ranks disagree on shape, dtype or split of it: {sorted(map(str, forms))[:3]}."
        )
    parts = runs[0].split.parts
    size = math.prod(runs[0].local_shape)
    runs.sort(key=lambda run: (run.split.index, run.start, run.length))
    # Sorted by part and start, the ranges of a part must follow one another without gap from 0 to its size.
    groups = {part: list(group) for part, group in groupby(runs, key=lambda run: run.split.index)}
    if size and len(groups) < parts:
        missing = next(part for part in range(parts) if part not in groups)
        raise CheckpointError(f"{where} lacks {size:,} elements of part {missing} of {parts}: they count nowhere.")
    for part, group in groups.items():
        reached = 0
        for run in group:
            if run.start != reached:
                what = "has a gap" if run.start > reached else "is written twice"
                at = f"part {part} of {parts}, element {min(run.start, reached):,}"
                raise CheckpointError(f"{where} {what} ({at}): its shards do not count every element once.")
            reached += run.length
        if reached != size:
            missing = f"{size - reached:,} elements of part {part} of {parts}"
            raise CheckpointError(f"{where} lacks {missing}: they count nowhere.")


def _index_of(run: StoredRange) -> str:
    """Name of the index that a run stands in."""
    return f"{run.file[: len(index_name(0)) - len('.json')]}.json"


def _cut(shards: Iterable[CheckpointShard], file_bytes: int) -> Iterator[CheckpointShard]:
    """Yield the shards that count, cut so that each fits into a file."""
    for shard in shards:
        if not shard.counts or (not shard.tensor.numel() and shard.shape.numel()):
            continue
        if shard.tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{shard.name} has dtype {shard.tensor.dtype}, which a checkpoint cannot hold.")
        longest = max(1, file_bytes // shard.tensor.element_size())
        if shard.tensor.numel() <= longest:
            yield shard
            continue
        for offset in range(0, shard.tensor.numel(), longest):
            yield replace(shard, tensor=shard.tensor[offset : offset + longest], start=shard.start + offset)


def _tensor_of(shard: CheckpointShard) -> Tensor:
    return shard.tensor


def _run_of(shard: CheckpointShard, file: str, taken: set[str]) -> StoredRange:
    # A file may hold several ranges of one tensor (segments of different buckets), and its keys must differ.
    key, number = shard.stored_name, 1
    while key in taken:
        number += 1
        key = f"{shard.stored_name}#{number}"
    return StoredRange(
        name=shard.stored_name,
        shape=shard.shape,
        dtype=shard.tensor.dtype,
        split=shard.split,
        start=shard.start,
        length=shard.tensor.numel(),
        file=file,
        key=key,
    )
