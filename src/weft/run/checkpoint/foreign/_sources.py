"""What lies in a stranger's file or folder: names and tensors, each read when it is asked for."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.config.document import is_plain_name
from weft.errors import CheckpointError
from weft.run.checkpoint.foreign._dcp_metadata import DescribedObject, NamedClass, read_metadata
from weft.run.checkpoint.foreign._torch_files import load_torch


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]


Tree = dict[str, Any]
"""Nested mappings of names; a leaf is a `LazyTensor`, or anything else that is no tensor."""


def read_source(source: Path) -> Tree:
    """Return what a file or folder holds, without reading tensors where that is possible.

    Raises:
        CheckpointError: it is of no kind that is known, or damaged.
    """
    if source.is_file():
        if source.suffix == ".safetensors":
            return dict(_safetensors(source))
        return _tree_of(load_torch(source, str(source)), str(source))
    if (source / ".metadata").is_file():
        return _distributed(source)
    for pattern in ("*.safetensors", "pytorch_model*.bin", "*.pt", "*.pth", "*.bin"):
        if files := sorted(path for path in source.glob(pattern) if path.is_file()):
            break
    else:
        raise CheckpointError(
            f"{source} holds no weights of a known kind: .safetensors, pytorch_model*.bin, one .pt or .pth file, or a"
            " distributed checkpoint of torch (.metadata and .distcp)."
        )
    if len(files) > 1 and pattern in ("*.pt", "*.pth", "*.bin"):
        names = ", ".join(path.name for path in files[:4])
        raise CheckpointError(f"{source} holds {len(files)} files ({names}). Name the one to import.")
    tree: Tree = {}
    for path in files:
        part = (
            dict(_safetensors(path)) if path.suffix == ".safetensors" else _tree_of(load_torch(path, str(path)), path)
        )
        if twice := sorted(part.keys() & tree.keys()):
            raise CheckpointError(f"{path} holds {twice[0]}, which an earlier file of the folder holds, too.")
        tree.update(part)
    return tree


def _tree_of(value: Any, where: str | Path) -> Tree:
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"{where} holds a {type(value).__name__}, and no names with tensors. Save a state_dict()."
        )
    return {str(name): _leaf_or_tree(item) for name, item in value.items()}


def _leaf_or_tree(value: Any) -> Any:
    if isinstance(value, Tensor):
        return LazyTensor(tuple(value.shape), value.dtype, lambda: value.detach())
    if isinstance(value, Mapping):
        return {str(name): _leaf_or_tree(item) for name, item in value.items()}
    return value


def _safetensors(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    opened: Callable[..., Any] = safe_open  # it has no types
    try:
        with opened(path, framework="pt") as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                one = part[:0] if part.get_shape() else file.get_tensor(name)
                yield name, LazyTensor(tuple(part.get_shape()), one.dtype, partial(_one_of, path, name))
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path} cannot be read as safetensors ({problem}): it is damaged.") from None


def _one_of(path: Path, name: str) -> Tensor:
    opened: Callable[..., Any] = safe_open
    with opened(path, framework="pt") as file:
        return file.get_tensor(name)


# ── distributed checkpoints of torch ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tensor, which `torch.save` has written into a file."""

    offsets: tuple[int, ...]
    path: Path
    start: int
    length: int


def _distributed(folder: Path) -> Tree:
    where = str(folder / ".metadata")
    metadata = read_metadata((folder / ".metadata").read_bytes(), where)
    chunks: dict[str, list[_Chunk]] = {}
    for index, info in _mapping(metadata.get("storage_data"), where).items():
        if not isinstance(index, DescribedObject) or not isinstance(info, DescribedObject):
            raise _wrong(where)
        chunks.setdefault(str(index.get("fqn")), []).append(_chunk(folder, where, index, info))
    paths = _mapping(metadata.get("planner_data") or {}, where)
    tree: Tree = {}
    for name, entry in _mapping(metadata.get("state_dict_metadata"), where).items():
        leaf: Any = None  # not a tensor: a pickle, which is not read
        if isinstance(entry, DescribedObject) and entry.kind.endswith(".TensorStorageMetadata"):
            leaf = _tensor_of(folder, where, str(name), entry, chunks.get(str(name), []))
        path = paths.get(name)
        parts = [str(part) for part in path] if isinstance(path, tuple) and path else [str(name)]
        place = tree
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise _wrong(where)
        place[parts[-1]] = leaf
    return tree


def _tensor_of(folder: Path, where: str, name: str, entry: DescribedObject, chunks: list[_Chunk]) -> LazyTensor:
    properties, shape = entry.get("properties"), _sizes(entry.get("size"), where)
    kind = properties.state.get("") if isinstance(properties, DescribedObject) else None
    kind = (
        kind[0]
        if isinstance(kind, tuple) and kind
        else properties.get("dtype")
        if isinstance(properties, DescribedObject)
        else None
    )
    dtype = getattr(torch, kind.name.removeprefix("torch."), None) if isinstance(kind, NamedClass) else None
    if not isinstance(dtype, torch.dtype) or not chunks:
        raise _wrong(where)
    # Before anything is allocated: what a file says of sizes must fit into the bytes that are there.
    if math.prod(shape) * dtype.itemsize > sum(chunk.length for chunk in chunks):
        raise CheckpointError(f"{where}: {name:.80} of shape {list(shape)} is larger than its files. It is damaged.")
    return LazyTensor(shape, dtype, lambda: _joined(where, name, shape, dtype, chunks))


def _joined(where: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[_Chunk]) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    filled = 0
    for chunk in chunks:
        with chunk.path.open("rb") as file:
            file.seek(chunk.start)
            part = load_torch(io.BytesIO(file.read(chunk.length)), f"{chunk.path} ({name:.80})")
        if not isinstance(part, Tensor) or part.dtype != dtype or part.dim() != len(shape):
            raise CheckpointError(f"{chunk.path} holds something else than {name:.80}. It is damaged.")
        offsets = chunk.offsets or (0,) * len(shape)
        if any(start + size > most for start, size, most in zip(offsets, part.shape, shape, strict=True)):
            raise CheckpointError(f"{chunk.path} holds a part of {name:.80} that lies outside of it. It is damaged.")
        whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
        filled += part.numel()
    if filled != whole.numel():
        raise CheckpointError(f"{where}: the parts of {name:.80} have {filled:,} elements of {whole.numel():,}.")
    return whole


def _chunk(folder: Path, where: str, index: DescribedObject, info: DescribedObject) -> _Chunk:
    file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(file, str) or not is_plain_name(file) or not file.endswith(".distcp"):
        raise CheckpointError(f"{where} names the file {file!r:.80}, which is none of its folder. Nothing was read.")
    if info.get("transform_descriptors"):
        raise CheckpointError(f"{where}: its files are compressed, which is not read. Save it without an extension.")
    path = folder / file
    size = path.stat().st_size if path.is_file() and not path.is_symlink() else -1
    if not isinstance(start, int) or not isinstance(length, int) or min(start, length) < 0 or start + length > size:
        raise CheckpointError(f"{path} is missing, no plain file, or shorter than {where} says. It is damaged.")
    offset = index.get("offset")
    return _Chunk(_sizes(offset, where) if offset is not None else (), path, start, length)


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(size) is not int or not 0 <= size < 1 << 62 for size in value):
        raise _wrong(where)
    return value


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(where)
    return value


def _wrong(where: str) -> CheckpointError:
    return CheckpointError(f"{where} does not describe tensors as torch's distributed checkpoints do. It is damaged.")
