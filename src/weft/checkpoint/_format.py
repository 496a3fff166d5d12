"""What lies in a checkpoint folder, and how its JSON is read back without being trusted.

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
from typing import Any, TypeVar, cast

import torch
import xxhash

from weft.errors import CheckpointError
from weft.parallel import TensorSplit

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

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

_TENSOR_FILE = re.compile(r"rank-\d{5}-\d{4,}\.safetensors", re.ASCII)
_INDEX_FILE = re.compile(r"rank-\d{5}\.json", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    name: str
    size_bytes: int
    digest: str
    """xxh3-128 of its content, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stored run of a tensor: elements [start, start + length) of the flattened part that `split` cuts out."""

    name: str
    shape: torch.Size
    """Whole shape."""
    dtype: torch.dtype
    split: TensorSplit | None
    start: int
    length: int
    file: str
    key: str
    """Name inside the safetensors file."""

    @property
    def local_shape(self) -> torch.Size:
        return self.shape if self.split is None else self.split.local_shape(self.shape)

    def to_json(self) -> dict[str, Json]:
        split = self.split
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": DTYPE_NAMES[self.dtype],
            "split": None if split is None else [split.dim, split.parts, split.index, split.blocks],
            "start": self.start,
            "length": self.length,
            "file": self.file,
            "key": self.key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """What one rank wrote."""

    files: tuple[StoredFile, ...]
    runs: tuple[Run, ...]

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
    best: bool
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
            "best": self.best,
            "world": self.world,
            "provenance": dict(self.provenance),
            "state": dict(self.state),
            "indexes": [_file_to_json(file) for file in self.indexes],
        }
        body = json.loads(_canonical(body))  # as it will be read: tuples are lists, keys are strings
        return json.dumps({"digest": digest_of(_canonical(body).encode()), "manifest": body}, indent=1, allow_nan=False)


def digest_of(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of one checkpoint folder.

    Raises:
        CheckpointError: it is missing, damaged, or of a format that this Weft does not read.
    """
    path = folder / MANIFEST
    outer = _Fields.parse(path, _read(path))
    body = outer.object("manifest")
    if outer.take("digest", str) != digest_of(_canonical(body).encode()):
        raise CheckpointError(f"{path} does not match its own digest: it is damaged. Load an earlier checkpoint.")
    fields = _Fields(path, body)
    if fields.take("format", str) != FORMAT:
        raise CheckpointError(f'{path} is not a checkpoint of Weft: its format is "{fields.take("format", str)}".')
    if (version := fields.take("version", int)) != VERSION:
        raise CheckpointError(f"{path} has format version {version}; this Weft reads {VERSION}. Use a newer Weft.")
    return Manifest(
        step=fields.count("step"),
        sequence=fields.count("sequence"),
        token=fields.take("token", str),
        best=fields.take("best", bool),
        world=fields.count("world"),
        provenance={str(key): str(value) for key, value in fields.object("provenance").items()},
        state=fields.object("state"),
        indexes=tuple(_file_from_json(path, item, _INDEX_FILE) for item in fields.list("indexes")),
    )


def read_index(folder: Path, stored: StoredFile) -> RankIndex:
    """Read one rank's index and check it against the manifest's digest.

    Raises:
        CheckpointError: it is missing, damaged, or names files or runs that cannot be.
    """
    path = folder / stored.name
    content = _read(path)
    if len(content) != stored.size_bytes or digest_of(content) != stored.digest:
        raise CheckpointError(f"{path} does not match its digest in {MANIFEST}: it is damaged.")
    return parse_index(path, content)


def parse_index(path: Path, content: bytes) -> RankIndex:
    fields = _Fields.parse(path, content)
    files = tuple(_file_from_json(path, item, _TENSOR_FILE) for item in fields.list("files"))
    known = {file.name for file in files}
    runs = tuple(_run_from_json(path, item) for item in fields.list("runs"))
    for run in runs:
        if run.file not in known:
            raise CheckpointError(f"{path} puts {run.name} into {run.file!r}, which is none of its files.")
    return RankIndex(files=files, runs=runs)


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object whose members are taken by name and type; anything unexpected is an error that names the file."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def parse(cls, path: Path, content: bytes) -> _Fields:
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not readable as JSON ({error}): it is damaged.") from None
        return cls.of(path, values)

    @classmethod
    def of(cls, path: Path, value: Any) -> _Fields:
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} should hold an object, but holds a {type(value).__name__}: it is damaged.")
        return cls(path, cast(dict[str, Any], value))

    def take(self, name: str, kind: type[T]) -> T:
        value = self.values.get(name)
        if type(value) is not kind:
            raise CheckpointError(f'{self.path}: "{name}" should be a {kind.__name__}, but is {value!r:.80}: damaged.')
        return value

    def object(self, name: str) -> dict[str, Any]:
        return cast(dict[str, Any], self.take(name, dict))

    def list(self, name: str) -> list[Any]:
        return cast(list[Any], self.take(name, list))

    def count(self, name: str) -> int:
        return self.check_count(name, self.take(name, int))

    def check_count(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 2**62:
            raise CheckpointError(f'{self.path}: "{name}" holds {value!r:.80}, which is not a count: it is damaged.')
        return value


def _file_to_json(file: StoredFile) -> dict[str, Json]:
    return {"name": file.name, "size_bytes": file.size_bytes, "digest": file.digest}


def _file_from_json(path: Path, value: Any, pattern: re.Pattern[str]) -> StoredFile:
    fields = _Fields.of(path, value)
    name = fields.take("name", str)
    if not pattern.fullmatch(name):  # also keeps every read inside the folder
        raise CheckpointError(f"{path} names the file {name!r:.80}, which no checkpoint has: not written by Weft.")
    return StoredFile(name=name, size_bytes=fields.count("size_bytes"), digest=fields.take("digest", str))


def _run_from_json(path: Path, value: Any) -> Run:
    fields = _Fields.of(path, value)
    name, dtype = fields.take("name", str), fields.take("dtype", str)
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has the dtype {dtype!r:.40}, which no checkpoint has.")
    shape = torch.Size([fields.check_count("shape", size) for size in fields.list("shape")])
    run = Run(
        name=name,
        shape=shape,
        dtype=DTYPES[dtype],
        split=_split_from_json(fields, shape),
        start=fields.count("start"),
        length=fields.count("length"),
        file=fields.take("file", str),
        key=fields.take("key", str),
    )
    if run.start + run.length > math.prod(run.local_shape):
        raise CheckpointError(f"{path}: a run of {name} ends beyond the tensor of shape {list(shape)}: it is damaged.")
    return run


def _split_from_json(fields: _Fields, shape: torch.Size) -> TensorSplit | None:
    if fields.values.get("split") is None:
        return None
    numbers = [fields.check_count("split", number) for number in fields.list("split")]
    if len(numbers) == 4:
        dim, parts, index, blocks = numbers
        fits = dim < len(shape) and index < parts and blocks > 0 and shape[dim] % max(parts * blocks, 1) == 0
        if fits:
            return TensorSplit(dim=dim, parts=parts, index=index, blocks=blocks)
    raise CheckpointError(f"{fields.path}: split {numbers} does not fit the shape {list(shape)}: it is damaged.")


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read(path: Path) -> bytes:
    try:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link; a checkpoint has only plain files.")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
