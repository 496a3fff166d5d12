"""What lies in a folder of checkpoints: listing, comparing, pinning and removing, on one process without the job."""

from __future__ import annotations

import secrets
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.config.document import Json
from weft.errors import CheckpointError
from weft.run.checkpoint._files import write_text
from weft.run.checkpoint._folder import PINNED, complete_checkpoints, find_checkpoint, remove_old
from weft.run.checkpoint._format import MANIFEST
from weft.run.checkpoint._read import StoredCheckpoint

if TYPE_CHECKING:
    from weft.run.checkpoint.store import CheckpointStore, SaveInStore


def is_url(place: str | Path) -> bool:
    """Whether a place is one of an object store, and not a folder."""
    return "://" in str(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One complete checkpoint of a run."""

    place: str
    """Path of its folder, or its URL."""
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


def list_checkpoints(run: str | Path) -> list[CheckpointEntry]:
    """Return the complete checkpoints of a run, the newest first.  Nothing is verified.

    Args:
        run: folder of the run, or the URL of its saves in an object store; this also goes for all that follows.

    Raises:
        CheckpointError: there is none.
    """
    if is_url(run):
        store, _ = _store_at(run)
        return [
            CheckpointEntry(
                place=f"{store.url}/{save.name}",
                step=save.manifest.step,
                num_bytes=save.num_bytes,
                num_ranks=save.manifest.world,
                plan=save.manifest.provenance.get("plan", ""),
                unix_time_seconds=save.unix_time_seconds,
                is_newest=number == 0,
                is_pinned=save.is_pinned,
            )
            for number, save in enumerate(_saves_of(store))
        ]
    return [
        CheckpointEntry(
            place=str(one.path),
            step=one.manifest.step,
            num_bytes=sum(file.stat().st_size for file in one.path.iterdir() if file.is_file()),
            num_ranks=one.manifest.world,
            plan=one.manifest.provenance.get("plan", ""),
            unix_time_seconds=one.path.stat().st_mtime,
            is_newest=number == 0,
            is_pinned=(one.path / PINNED).exists(),
        )
        for number, one in enumerate(complete_checkpoints(folder_of(Path(run))))
    ]


def folder_of(run: Path) -> Path:
    """Return the folder in which a run, or a folder of checkpoints, keeps them.  Raises `CheckpointError`."""
    return find_checkpoint(run).parent if not (run / MANIFEST).exists() else run.parent


@contextmanager
def opened(checkpoint: str | Path) -> Generator[tuple[str, StoredCheckpoint]]:
    """Give the place of a checkpoint, or of the newest of a run, and its manifest and indexes.  Nothing is verified.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if is_url(checkpoint):
        store, name = _store_at(checkpoint)
        name = name or _saves_of(store)[0].name
        with store.opened(name) as stored:
            yield f"{store.url}/{name}", stored
    else:
        path = find_checkpoint(Path(checkpoint))
        yield str(path), StoredCheckpoint(path)


def verify(checkpoint: str | Path) -> Iterator[tuple[str, str]]:
    """Verify a checkpoint, or all of a run, one after another; yield the place of each, and what is wrong with it, or
    an empty text.

    Raises:
        CheckpointError: there is none.
    """
    store, name = _store_at(checkpoint) if is_url(checkpoint) else (None, "")
    is_one = bool(name) if store is not None else (Path(checkpoint) / MANIFEST).exists()
    for place in [str(checkpoint)] if is_one else [entry.place for entry in list_checkpoints(checkpoint)]:
        problem = ""
        try:
            if store is not None:
                store.verify(place.rpartition("/")[2])
            else:
                StoredCheckpoint(Path(place)).verify()
        except CheckpointError as error:
            problem = str(error)
        yield place, problem


def pin(checkpoint: str | Path, *, is_pinned: bool = True) -> str:
    """Keep a checkpoint for good, or let it go with the old ones again; return its place.  Raises `CheckpointError`."""
    if is_url(checkpoint):
        store, name = _store_at(checkpoint)
        saves = _saves_of(store)
        name = name or saves[0].name
        if name not in [save.name for save in saves]:
            raise CheckpointError(f"{store.url} has no {name}. It has {', '.join(save.name for save in saves)}.")
        store.pin(name, is_pinned=is_pinned)
        return f"{store.url}/{name}"
    path = find_checkpoint(Path(checkpoint))
    try:
        if is_pinned and not (path / PINNED).exists():
            write_text(path / PINNED, "")
        elif not is_pinned:
            (path / PINNED).unlink(missing_ok=True)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be changed: {problem.strerror}.") from None
    return str(path)


def prune(run: str | Path, keep: int) -> list[str]:
    """Remove all checkpoints of a run but the newest `keep` and those that are pinned; return what was removed.

    The newest is verified first: nothing goes before what stays is known to be sound.

    Raises:
        CheckpointError: there is none, or the newest is damaged.
    """
    if keep < 1:
        raise CheckpointError(f"keep = {keep} would remove every checkpoint. Keep at least 1.")
    if is_url(run):
        store, _ = _store_at(run)
        store.verify(_saves_of(store)[0].name)
        return [f"{store.url}/{name}" for name in store.remove_old(keep)]
    folder = folder_of(Path(run))
    before = [one.path for one in complete_checkpoints(folder)]
    StoredCheckpoint(before[0]).verify()
    remove_old(folder, keep, f"{secrets.randbits(61):016x}")
    return [str(path) for path in before if not path.exists()]


def _store_at(url: str | Path) -> tuple[CheckpointStore, str]:
    """The store of a run's saves, and the name of one where the URL has it."""
    from weft.run.checkpoint.store import CheckpointStore  # what it stands on need not be installed

    run, _, name = str(url).rstrip("/").rpartition("/")
    return (CheckpointStore(run), name) if name.startswith("step-") else (CheckpointStore(str(url)), "")


def _saves_of(store: CheckpointStore) -> list[SaveInStore]:
    if not (saves := store.complete()):
        raise CheckpointError(
            f"{store.url} holds no complete checkpoint. Give the URL of a run, s3://bucket/prefix/<run>, or of one"
            " checkpoint (step-000120) below it."
        )
    return saves


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


def compare(first: str | Path, second: str | Path) -> CheckpointDifference:
    """Verify two checkpoints, of any plans, and compare every tensor.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    with ExitStack() as stack:
        one, other = (StoredCheckpoint(_brought(place, stack)) for place in (first, second))
        one.verify()
        other.verify()
        return _compared(one, other)


def _brought(place: str | Path, stack: ExitStack) -> Path:
    """The folder of a checkpoint; one of an object store is brought here first."""
    if not is_url(place):
        return find_checkpoint(Path(place))
    store, name = _store_at(place)
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-compared-")))
    try:
        return store.fetch(name or _saves_of(store)[0].name, scratch)
    except OSError as problem:
        raise CheckpointError(f"{place} cannot be brought to {scratch}: {problem.strerror}.") from None


def _compared(one: StoredCheckpoint, other: StoredCheckpoint) -> CheckpointDifference:
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
