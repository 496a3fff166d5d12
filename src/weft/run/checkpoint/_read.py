"""A checkpoint folder opened for reading: verified first, then read one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weft.config.document import Json
from weft.errors import CheckpointError
from weft.run.checkpoint._files import check_size, verify_file, verify_header
from weft.run.checkpoint._format import Manifest, StoredFile, StoredRange, read_index, read_manifest
from weft.run.checkpoint._tensor_file import TensorFile
from weft.run.checkpoint._write import runs_by_name
from weft.techniques.core import CheckpointShard

_OPEN_FILES = 32


class StoredCheckpoint:
    """One checkpoint folder.  Opening it reads the JSON only; `verify` reads the tensor files, and nothing else should
    be read before it.

    Raises:
        CheckpointError: the manifest or an index is missing or damaged, or the runs do not cover every tensor once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        indexes = [read_index(folder, stored) for stored in self.manifest.indexes]
        self.files: list[StoredFile] = [file for index in indexes for file in index.files]
        try:
            self.runs = runs_by_name(run for index in indexes for run in index.runs)
        except CheckpointError as problem:
            raise CheckpointError(f"{folder / str(problem)}") from None
        self._handles: dict[str, TensorFile] = {}

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Read every `shares`-th tensor file from `share` on, and compare size, digest and header with the index.

        Raises:
            CheckpointError: a file is missing or differs.
        """
        expected = self.runs_by_file()
        for file in self.files[share::shares]:
            verify_file(self.folder, file)
            verify_header(self.folder, file.name, expected.get(file.name, []))

    def verify_headers(self) -> None:
        """Compare sizes and headers of all tensor files with the index, without reading the tensors.

        Raises:
            CheckpointError: a file is missing or differs.
        """
        expected = self.runs_by_file()
        for file in self.files:
            check_size(self.folder, file)
            verify_header(self.folder, file.name, expected.get(file.name, []))

    def runs_by_file(self) -> dict[str, list[StoredRange]]:
        """Return what the indexes say is in each tensor file."""
        by_file: dict[str, list[StoredRange]] = {}
        for run in (run for group in self.runs.values() for run in group):
            by_file.setdefault(run.file, []).append(run)
        return by_file

    def part(self, names: Mapping[str, str], state: Mapping[str, Json]) -> StoredCheckpoint:
        """Return what it holds under some `names`, each with the name that it has in the part, beside a `state`."""
        part = copy(self)
        part.runs = {
            name: [replace(run, name=name) for run in self.runs[stored]] for stored, name in sorted(names.items())
        }
        part.manifest = replace(self.manifest, state=state)
        return part

    def shape(self, name: str) -> torch.Size:
        return self.runs[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.runs[name][0].dtype

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name without prefix, whole tensor) in order of names, one at a time."""
        for name in sorted(self.runs):
            if name.startswith(prefix):
                yield name.removeprefix(prefix), self.whole(name)

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU, with storage of its own."""
        runs = self.runs[name]
        shape, split = runs[0].local_shape, runs[0].split
        parts = [[run for run in runs if run.split.index == index] for index in range(split.parts)]
        return split.join([self._local(part, shape) for part in parts])

    def fill(self, name: str, shards: list[CheckpointShard]) -> None:
        """Copy into the shards of one tensor.  A tensor cut otherwise than they are is joined first."""
        runs = self.runs[name]
        whole: Tensor | None = None
        for shard in shards:
            # Cut alike, the stored ranges and the shard are runs of the same flat tensor, so only what overlaps is
            # read.  Cut otherwise, elements of one run are scattered over the other, so the tensor is joined, once for
            # all.
            if runs[0].split.form == shard.split.form:
                self._copy_overlaps(runs, shard)
                continue
            whole = self.whole(name) if whole is None else whole
            local = shard.split.slice(whole)
            shard.tensor.copy_(local.reshape(-1)[shard.start : shard.start + shard.tensor.numel()])

    def _local(self, runs: list[StoredRange], shape: torch.Size) -> Tensor:
        flat = torch.empty(shape.numel(), dtype=runs[0].dtype)
        for run in runs:
            self._open(run).read(run.key, 0, flat[run.start : run.start + run.length])
        return flat.view(shape)

    def _copy_overlaps(self, runs: list[StoredRange], shard: CheckpointShard) -> None:
        stop = shard.start + shard.tensor.numel()
        for run in runs:
            first, last = max(run.start, shard.start), min(run.start + run.length, stop)
            if run.split.index == shard.split.index and first < last:
                into = shard.tensor[first - shard.start : last - shard.start]
                self._open(run).read(run.key, first - run.start, into)

    def _open(self, run: StoredRange) -> TensorFile:
        if run.file not in self._handles:
            # Dictionaries keep their order, so this closes the file that was opened first.
            while len(self._handles) >= _OPEN_FILES:
                self._handles.pop(next(iter(self._handles))).close()
            try:
                self._handles[run.file] = TensorFile(self.folder / run.file)
            except OSError as error:
                raise CheckpointError(f"{self.folder / run.file} cannot be read: {error}.") from None
        return self._handles[run.file]
