"""The files of a checkpoint folder, and a reader of their JSON that trusts nothing.

    step-000120/
        rank-00000-0000.safetensors     runs of tensors, at most a bounded size per file
        rank-00000.json                 which run of which tensor lies where; size and digest of rank 0's files
        rank-00001-0000.safetensors …
        manifest.json                   step, state, versions; size and digest of every rank's index; written last

Every byte is covered by a digest: the manifest by its own, each index by the manifest, each tensor file by its index.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from weft.config.document import LARGEST_COUNT, Json, JsonObject, read_plain_file
from weft.errors import CheckpointError
from weft.techniques.core import NestedSplit

FORMAT = "weft-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names that safetensors gives to the dtypes a checkpoint may hold."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

MOST_RANKS = 100_000
"""Ranks that a checkpoint may come from, at most: their numbers have five digits."""
_TENSOR_FILE = r"rank-\d{5}-\d{4,9}\.safetensors"
_INDEX_FILE = r"rank-\d{5}\.json"
_LARGEST_INDEX_BYTES = 1 << 30
_MOST_DIMENSIONS = 64
_MOST_CUTS = 4
"""Cuts of a tensor, one after another: more axes than that cut none."""
_MANIFEST_FIELDS = frozenset(
    ("format", "version", "step", "sequence", "token", "world", "provenance", "state", "indexes")
)
_RUN_FIELDS = ("name", "shape", "dtype", "split", "start", "length", "file", "key")
ADVICE = "It is damaged, or was not written by Weft: load an earlier checkpoint."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    name: str
    size_bytes: int
    digest: str
    """xxh3-128 of its content, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRange:
    """A stored run of a tensor: elements [start, start + length) of the flattened part that `split` cuts out."""

    name: str
    shape: torch.Size
    """Whole shape."""
    dtype: torch.dtype
    split: NestedSplit
    start: int
    length: int
    file: str
    key: str
    """Name inside the safetensors file."""

    @property
    def local_shape(self) -> torch.Size:
        return self.split.local_shape(self.shape)

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": DTYPE_NAMES[self.dtype],
            "split": list[Json](self.split.numbers) or None,
            "start": self.start,
            "length": self.length,
            "file": self.file,
            "key": self.key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """The files and ranges that one rank wrote."""

    files: tuple[StoredFile, ...]
    runs: tuple[StoredRange, ...]

    def to_text(self) -> str:
        runs = [run.to_json() for run in self.runs]
        return json.dumps({"files": [_file_to_json(file) for file in self.files], "runs": runs}, indent=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The page that makes a folder a checkpoint."""

    step: int
    sequence: int
    """Counts the saves into one folder: the newest checkpoint is the one saved last, whatever its step."""
    token: str
    """Names this save, so that two saves of one step are told apart."""
    world: int
    provenance: Mapping[str, str]
    """Run, recipe and plan digests, versions of the code: for people and for comparison, never needed to load."""
    state: Mapping[str, Json]
    indexes: tuple[StoredFile, ...] = field(default=())

    def to_text(self) -> str:
        """Return JSON that carries its own digest.  Raises `ValueError` for NaN and infinity, which JSON has not."""
        body: dict[str, Json] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "sequence": self.sequence,
            "token": self.token,
            "world": self.world,
            "provenance": dict(self.provenance),
            "state": dict(self.state),
            "indexes": [_file_to_json(file) for file in self.indexes],
        }
        # The digest is of what a reader will have: in JSON tuples are lists and keys are strings.  Its form is
        # canonical (sorted, without blanks), so that a reader can compute it again from the parsed values.
        body = json.loads(_canonical(body))
        return json.dumps({"digest": digest_of(_canonical(body).encode()), "manifest": body}, indent=1, allow_nan=False)


def digest_of(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of one checkpoint folder and check every field of it.

    Raises:
        CheckpointError: it is missing, damaged, or of a format that this Weft does not read.
    """
    path = folder / MANIFEST
    outer = JsonObject.parse(path, read_plain_file(path, CheckpointError, ADVICE), CheckpointError, ADVICE)
    fields = outer.object("manifest")
    # The digest first: a damaged page gives this one error, and not whichever field the damage has hit.
    if outer.text("digest") != digest_of(_canonical(fields.values).encode()):
        raise CheckpointError(f"{path} does not match its own digest: it is damaged. {ADVICE}")
    if fields.text("format") != FORMAT:
        raise CheckpointError(f'{path} is not a checkpoint of Weft: its format is "{fields.text("format"):.80}".')
    if (version := fields.count("version")) != VERSION:
        raise CheckpointError(f"{path} has format version {version}; this Weft reads {VERSION}. Use a newer Weft.")
    outer.only(("digest", "manifest"))
    fields.only(_MANIFEST_FIELDS, optional=("best",))  # which saves of before 2026-11-25 have
    provenance = fields.object("provenance")
    manifest = Manifest(
        step=fields.count("step"),
        sequence=fields.count("sequence"),
        token=fields.text("token", r"[01][0-9a-f]{15}", "16 hexadecimal digits, below 2^61"),
        world=fields.count("world", least=1, most=MOST_RANKS),
        provenance={key: provenance.text(key) for key in provenance.values},
        state=fields.object("state").values,
        indexes=tuple(_file_from_json(item, _INDEX_FILE) for item in fields.objects("indexes")),
    )
    # An index that is missing or named twice would make a smaller checkpoint out of a complete one.
    names = [stored.name for stored in manifest.indexes]
    if names != [index_name(rank) for rank in range(manifest.world)]:
        raise fields.fail("indexes", f"the index of each of its {manifest.world} ranks, once and in order")
    return manifest


def read_index(folder: Path, stored: StoredFile) -> RankIndex:
    """Read one rank's index and check it against the manifest's digest, and every field of it.

    Raises:
        CheckpointError: it is missing, damaged, or names files or runs that cannot be.
    """
    path = folder / stored.name
    content = read_plain_file(path, CheckpointError, ADVICE, most_bytes=min(stored.size_bytes, _LARGEST_INDEX_BYTES))
    if len(content) != stored.size_bytes or digest_of(content) != stored.digest:
        raise CheckpointError(f"{path} does not match its digest in {MANIFEST}: it is damaged.")
    return parse_index(path, content)


def parse_index(path: Path, content: bytes) -> RankIndex:
    """Check every field of an index, and that each of its files and keys is there once.  Raises `CheckpointError`."""
    fields = JsonObject.parse(path, content, CheckpointError, ADVICE)
    fields.only(("files", "runs"))
    files = tuple(_file_from_json(item, _TENSOR_FILE) for item in fields.objects("files"))
    sizes = {file.name: file.size_bytes for file in files}
    if len(sizes) < len(files) or not all(name.startswith(f"{path.stem}-") for name in sizes):
        raise fields.fail("files", f"files of this rank ({path.stem}-….safetensors), each once")
    runs: list[StoredRange] = []
    taken: set[tuple[str, str]] = set()
    # Checked against the sizes of the files before anything is allocated: a forged length must not ask for memory.
    for item in fields.objects("runs"):
        run = _run_from_json(item)
        if run.file not in sizes:
            raise item.fail("file", "one of the index's files")
        if run.length * run.dtype.itemsize > sizes[run.file]:
            raise item.fail("length", f"what fits into {run.file}, of {sizes[run.file]:,} bytes")
        if (run.file, run.key) in taken:
            raise item.fail("key", "a key of its own: another run is stored under it")
        taken.add((run.file, run.key))
        runs.append(run)
    return RankIndex(files=files, runs=tuple(runs))


def index_name(rank: int) -> str:
    """Name of a rank's index."""
    return f"rank-{rank:05d}.json"


def _file_to_json(file: StoredFile) -> dict[str, Json]:
    return {"name": file.name, "size_bytes": file.size_bytes, "digest": file.digest}


def _file_from_json(fields: JsonObject, pattern: str) -> StoredFile:
    fields.only(("name", "size_bytes", "digest"))
    name = fields.text("name")
    if not re.fullmatch(pattern, name, re.ASCII):  # also keeps every read inside the folder
        raise CheckpointError(
            f"{fields.path} names the file {name!r:.80}, which no checkpoint has: not written by Weft."
        )
    digest = fields.text("digest", "[0-9a-f]{32}", "32 hexadecimal digits")
    return StoredFile(name=name, size_bytes=fields.count("size_bytes"), digest=digest)


def _run_from_json(fields: JsonObject) -> StoredRange:
    fields.only(_RUN_FIELDS)
    name, dtype, key = fields.text("name"), fields.text("dtype"), fields.text("key")
    if dtype not in DTYPES:
        raise fields.fail("dtype", f"one of {', '.join(DTYPES)}")
    if not key.startswith(name) or not re.fullmatch(r"(#[1-9]\d*)?", key.removeprefix(name), re.ASCII):
        raise fields.fail("key", f"the name of its tensor ({name:.80}), perhaps with a number (#2)")
    sizes = fields.counts("shape", longest=_MOST_DIMENSIONS)
    # The second product leaves zeros out: an empty tensor may still be of more parts than can be counted.
    if math.prod(sizes) > LARGEST_COUNT or math.prod(size or 1 for size in sizes) > LARGEST_COUNT:
        raise fields.fail("shape", f"the shape of a tensor of at most {LARGEST_COUNT:,} elements")
    shape = torch.Size(sizes)
    run = StoredRange(
        name=name,
        shape=shape,
        dtype=DTYPES[dtype],
        split=_split_from_json(fields, shape),
        start=fields.count("start"),
        length=fields.count("length"),
        file=fields.text("file"),
        key=key,
    )
    if run.start + run.length > math.prod(run.local_shape):
        raise fields.fail("length", f"what a part of the shape {list(shape)} has behind element {run.start:,}")
    return run


def _split_from_json(fields: JsonObject, shape: torch.Size) -> NestedSplit:
    if fields.values.get("split") is None:
        return NestedSplit()
    numbers = fields.counts("split", longest=4 * _MOST_CUTS)
    if numbers and len(numbers) % 4 == 0:
        split = NestedSplit.of_numbers(numbers)
        if split.parts <= MOST_RANKS and _fits(split, shape):
            return split
    raise fields.fail("split", f"[dim, parts, index, blocks] of the shape {list(shape)}, for each cut after the other")


def _fits(split: NestedSplit, shape: torch.Size) -> bool:
    # Cuts are nested, so each is checked against the shape that the one before it leaves.
    for cut in split.cuts:
        few = 0 < cut.parts <= MOST_RANKS and 0 < cut.blocks <= MOST_RANKS
        if not few or cut.dim >= len(shape) or cut.index >= cut.parts or shape[cut.dim] % (cut.parts * cut.blocks):
            return False
        shape = cut.local_shape(shape)
    return True


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
