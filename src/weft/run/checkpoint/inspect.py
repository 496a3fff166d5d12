"""What lies in a folder of checkpoints: listing, comparing, pinning and removing, on one process without the job."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.config.document import Json
from weft.errors import CheckpointError
from weft.run.checkpoint._files import write_text
from weft.run.checkpoint._folder import PINNED, complete_checkpoints, find_checkpoint, remove_old
from weft.run.checkpoint._read import StoredCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One complete checkpoint of a run."""

    path: Path
    step: int
    """Finished optimizer steps."""
    num_bytes: int
    num_ranks: int
    """Ranks that saved it."""
    plan: str
    """Digest of the plan that saved it; empty where that is not known."""
    unix_time_seconds: float
    is_newest: bool
    is_pinned: bool


def list_checkpoints(run: Path) -> list[CheckpointEntry]:
    """Return the complete checkpoints of a run, the newest first.  Nothing is verified.

    Raises:
        CheckpointError: there is none.
    """
    folder = folder_of(run)
    return [
        CheckpointEntry(
            path=one.path,
            step=one.manifest.step,
            num_bytes=sum(file.stat().st_size for file in one.path.iterdir() if file.is_file()),
            num_ranks=one.manifest.world,
            plan=one.manifest.provenance.get("plan", ""),
            unix_time_seconds=one.path.stat().st_mtime,
            is_newest=number == 0,
            is_pinned=(one.path / PINNED).exists(),
        )
        for number, one in enumerate(complete_checkpoints(folder))
    ]


def folder_of(run: Path) -> Path:
    """Return the folder in which a run, or a folder of checkpoints, keeps them.  Raises `CheckpointError`."""
    return find_checkpoint(run).parent if not (run / "manifest.json").exists() else run.parent


def pin(checkpoint: Path, *, is_pinned: bool = True) -> Path:
    """Keep a checkpoint for good, or let it go with the old ones again; return it.  Raises `CheckpointError`."""
    path = find_checkpoint(checkpoint)
    try:
        if is_pinned and not (path / PINNED).exists():
            write_text(path / PINNED, "")
        elif not is_pinned:
            (path / PINNED).unlink(missing_ok=True)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be changed: {problem.strerror}.") from None
    return path


def prune(run: Path, keep: int) -> list[Path]:
    """Remove all checkpoints of a run but the newest `keep` and those that are pinned; return what was removed.

    The newest is verified first: nothing goes before what stays is known to be sound.

    Raises:
        CheckpointError: there is none, or the newest is damaged.
    """
    if keep < 1:
        raise CheckpointError(f"keep = {keep} would remove every checkpoint. Keep at least 1.")
    folder = folder_of(run)
    before = [one.path for one in complete_checkpoints(folder)]
    StoredCheckpoint(before[0]).verify()
    remove_old(folder, keep, f"{secrets.randbits(61):016x}")
    return [path for path in before if not path.exists()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that two checkpoints do not hold alike."""

    name: str
    only_in: str = ""
    """`first` or `second`, where the other has no such tensor."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Shapes in both, where they differ."""
    largest: float = 0.0
    """Largest absolute difference of an element."""
    relative: float = 0.0
    """Norm of the difference over the norm of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """Two checkpoints compared."""

    num_equal: int
    """Tensors that are equal bit for bit."""
    tensors: tuple[TensorDifference, ...]
    state: tuple[str, ...]
    """Keys of the state beside the tensors that differ."""


def compare(first: Path, second: Path) -> CheckpointDifference:
    """Verify two checkpoints, of any plans, and compare every tensor.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    one, other = StoredCheckpoint(find_checkpoint(first)), StoredCheckpoint(find_checkpoint(second))
    one.verify()
    other.verify()
    differences = [(name, _difference(one, other, name)) for name in sorted(one.runs.keys() | other.runs.keys())]
    return CheckpointDifference(
        num_equal=sum(difference is None for _, difference in differences),
        tensors=tuple(difference for _, difference in differences if difference is not None),
        state=tuple(_state_differences(one.manifest.state, other.manifest.state)),
    )


def _difference(one: StoredCheckpoint, other: StoredCheckpoint, name: str) -> TensorDifference | None:
    if name not in one.runs or name not in other.runs:
        return TensorDifference(name=name, only_in="first" if name in one.runs else "second")
    left, right = one.whole(name), other.whole(name)
    if left.shape != right.shape:
        return TensorDifference(name=name, shapes=(tuple(left.shape), tuple(right.shape)))
    if left.dtype == right.dtype and torch.equal(left, right):
        return None
    difference = left.double() - right.double()
    norm = float(left.double().norm())
    return TensorDifference(
        name=name,
        largest=float(difference.abs().max()) if difference.numel() else 0.0,
        relative=float(difference.norm()) / norm if norm else float("inf"),
    )


def _state_differences(one: object, other: object, where: str = "") -> Iterator[str]:
    """Yield the dotted keys below which two states differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        left: dict[str, Json] = one
        right: dict[str, Json] = other
        for key in sorted(left.keys() | right.keys()):
            yield from _state_differences(left.get(key), right.get(key), f"{where}.{key}" if where else key)
    elif one != other:
        yield where


def sizes_by_kind(stored: StoredCheckpoint) -> dict[str, tuple[int, int]]:
    """Return tensors and bytes by kind: `model`, `optimizer/exp_avg`, `buffer`, `average`, …"""
    sizes: dict[str, list[int]] = defaultdict(list)
    for name, runs in stored.runs.items():
        kind = name.rpartition("/")[0]  # names of parameters and buffers have no slash
        sizes[kind].append(runs[0].shape.numel() * runs[0].dtype.itemsize)
    return {kind: (len(numbers), sum(numbers)) for kind, numbers in sorted(sizes.items())}
