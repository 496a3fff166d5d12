"""This rank's rows of global batches: of a loop's own loader, which goes on looking like itself, and of its tensors."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast, final

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from weft.api.batches.batch_shape import samples_in, taken_apart
from weft.api.batches.batch_shares import bounds_of
from weft.api.batches.generators import (
    own_states,
    process_states,
    states_of,
    take_own_states,
    take_process_states,
    take_states,
)
from weft.api.batches.keyed_reads import KeyedReader, SampleRequest
from weft.api.batches.loop_draws import PlacedDraws
from weft.api.batches.stream import digest_of, refuse_shared_out
from weft.api.ranks.agreement import check_same_batches, check_same_facts, gather_texts
from weft.api.ranks.calls import RankCalls
from weft.errors import CheckpointError, DataError

_KNOWN = 256
"""Tensors of the last batches that are known again."""
_COMPARED = 3
"""Batches of a loader that only iterates, and calls of `session.share`, whose tensors ranks compare at once: one that
differs does so from the start.  Later calls are looked at in the agreement of the step."""


@dataclass(frozen=True, slots=True)
class HandedBatch:
    """A global batch of `size` samples, of which this rank was handed those from `start` to `stop`."""

    size: int
    first: int
    """Place of its first sample among those of all passes."""
    start: int
    stop: int
    has_fillers: bool
    """Whether some rank has none, and was handed one that does not count."""
    source: int = 0
    """Number of the loader that it comes from; below 0: the loop has made it, with so many samples."""

    @property
    def share(self) -> float:
        """Weight of the mean over this rank's samples in the mean over all, 0 to 1."""
        return (self.stop - self.start) / self.size


@dataclass(slots=True)
class LoaderSharing:
    """How a loop's data are shared out over the data ranks, and what was handed out last."""

    ranks: int
    index: int
    device: torch.device
    world: dist.ProcessGroup | None
    calls: RankCalls
    seed: int
    last: HandedBatch | None = None
    """None: no loader was prepared, or none was gone through yet."""
    draws: PlacedDraws | None = None
    """Places the loop's own draws, on several data ranks; None on one."""
    _given: dict[int, tuple[weakref.ref[Tensor], HandedBatch]] = field(default_factory=dict[int, Any])
    """Tensor by its id → the batch that it came with, of the last ones."""
    shared: str = ""
    """Digest of all that the loop has shared out itself; equal on all ranks."""
    _handed: dict[int, HandedBatch] = field(default_factory=dict[int, HandedBatch])
    """Batches that were handed out since the last backward, by source, of passes that go on."""
    _trained: dict[int, HandedBatch] = field(default_factory=dict[int, HandedBatch])
    """Batches that forwards which train were given since the last backward, by source."""

    def hand_out(self, batch: HandedBatch, *, is_made: bool = False) -> None:
        """Note the batch that the loop is handed, or its rows of one that it has made itself."""
        self.last = self._handed[batch.source] = batch
        if self.draws is not None:
            self.draws.begin(batch.size, batch.start, batch.stop, is_made=is_made)

    def know(self, value: Any, batch: HandedBatch) -> None:
        """Remember what a batch has handed out: a loop may take several before it trains on the first."""
        for leaf in tree_leaves(dict(value) if isinstance(value, Mapping) else value):
            if isinstance(leaf, Tensor):
                self._given.pop(id(leaf), None)
                self._given[id(leaf)] = (weakref.ref(leaf), batch)
        # Dictionaries keep the order of insertion: the oldest go first.
        while len(self._given) > _KNOWN:
            self._given.pop(next(iter(self._given)))

    def turn_to(self, leaves: Iterable[Any], *, trains: bool) -> None:
        """A forward, which trains or not, is given these: the batch that they came with is the present one."""
        # The weak reference guards against an id that another tensor has now.
        batch = next((known[1] for leaf in leaves if (known := self._given.get(id(leaf))) and known[0]() is leaf), None)
        if batch is not None:
            self.last = batch
        if trains:  # of what the loop has made of its batches it could be any
            self._trained |= self._handed if batch is None else {batch.source: batch}

    def check_shares(self) -> None:
        """Refuse a loss of batches of several sources of which this rank has other shares: it can have one weight.

        Raises:
            DataError: names the batches.
        """
        trained, self._trained = list(self._trained.values()), {}
        self._handed.clear()
        if self.ranks > 1 and len({parameter.share for parameter in trained}) > 1:
            sizes = " and ".join(f"{parameter.stop - parameter.start} of {parameter.size}" for parameter in trained)
            raise DataError(
                f"this loss comes of batches of which the rank has {sizes} samples: no one weight makes a mean over all"
                f" of its terms. Use batch sizes that {self.ranks} ranks divide (drop_last=True), or call"
                " session.backward() for each term right after its own forward."
            )

    def has_ended(self, source: int) -> None:
        """Note the end of a pass through this loader."""
        self._handed.pop(source, None)

    def take_back(self) -> None:
        """Note that the loop asks for the next batch, or for none: loaders draw now."""
        if self.draws is not None:
            self.draws.end()

    def aside(self) -> AbstractContextManager[None]:
        """Draws within this block do not count as the loop's."""
        return nullcontext() if self.draws is None else self.draws.aside()

    def at(self, index: int) -> LoaderSharing:
        """How they are shared out to another data rank."""
        return replace(self, index=index)

    def share_of(self, size: int, first: int, source: int = 0) -> HandedBatch:
        """This rank's share of a batch."""
        # As even as whole samples allow; the first ranks have one more.
        bounds = bounds_of(size, [1] * self.ranks)
        start, stop = bounds[self.index], bounds[self.index + 1]
        return HandedBatch(size, first, start, stop, has_fillers=size < self.ranks, source=source)


@final
class LoopLoader:
    """What `session.prepare` returns for a loader: the same to look at, with the same length, data set and samplers.

    `batch_size` stays that of the global batch, which the ranks share out; the first ones have the larger shares of one
    that does not divide.  A pass draws its order as plain PyTorch does on one process, from rank 0's generators.
    """

    def __init__(self, loader: Iterable[Any], sharing: LoaderSharing, number: int) -> None:
        """`number`: of the session's loaders, from 1."""
        refuse_shared_out(loader)
        self._loader, self._sharing, self._number = loader, sharing, number
        self._ahead: deque[HandedBatch] = deque()
        """Batches that the sampler has given out and the loop has not been handed yet: workers read ahead."""
        self._position = self._given = 0
        """Samples of all passes before the present one, and of that."""
        self._taken = self._skipped = 0
        self._passes = self._present = 0
        self._begun = ""
        """States of the generators when the present pass began."""
        self._resumes = ""
        """States of the generators for the beginning of the next pass, and those of the process behind the batches that
        it leaves out."""
        self._keeps = False
        self._kept: dict[str, Any] | None = None
        self.is_at_end = False
        """Whether the batch that was handed out last ends its pass."""
        self._inner = _inner_of(loader, _SharedBatchSampler(self), sharing.seed + number - 1, alone=sharing.ranks == 1)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._loader)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a loader is what it was made as")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(cast(Any, self._loader))

    def __iter__(self) -> Iterator[Any]:
        self._begin_pass()
        present, batches = self._present, self._global_batches() if self._inner is None else self._read()
        try:
            ahead = next(batches, None)
            while ahead is not None:  # one is read ahead, so that a loop can know which is the last
                batch, handed = ahead
                ahead = next(batches, None)
                self.is_at_end = ahead is None
                if not handed.size:
                    raise DataError(f"batch {self._taken} of the loader has no samples, so no step can be made of it.")
                self._taken += 1
                # Positions count the samples of all passes: they key draws, so two passes draw differently.
                self._given = max(self._given, handed.first + handed.size - self._position)
                moved = _moved(batch, self._sharing.device)
                self._sharing.hand_out(handed)
                self._sharing.know(moved, handed)
                yield moved
                self._sharing.take_back()
            self._passes += 1
        finally:  # of a pass that the loop leaves early, too: the next one begins anew
            self._sharing.take_back()
            self._sharing.has_ended(self._number)
            if self._present == present:
                self._taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the loop in its passes, for a save; equal on all ranks."""
        return {
            "passes": self._passes,
            "batches": self._taken,
            "position": self._position + (0 if self._taken else self._given),
            "began": self._begun if self._taken else "",
            "own": own_states(self._loader),
        }

    def skip(self, batches: int) -> None:
        """Leave out so many batches of the next pass, from its first on, and none of later passes."""
        self._skipped = batches

    def resume(self, state: Mapping[str, Any]) -> None:
        """`load_state_dict`, where the generators of the process were put where they stood at the save: they stand
        there again behind the batches that the next pass leaves out."""
        self.load_state_dict(state)
        self._keeps = bool(self._skipped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that were handed out: the next pass is the rest of the one that was saved.

        Raises:
            CheckpointError: the state is no loader's.
        """
        try:
            passes, taken, position = (int(state[name]) for name in ("passes", "batches", "position"))
            began = str(state["began"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"this is no state of a loader ({type(error).__name__}: {error}). Give what its state_dict() returned."
            ) from None
        self._passes, self._position, self._given, self._skipped = passes, position, 0, taken
        self._resumes, self._keeps = began if taken else "", False
        if not taken and "own" in state:
            try:
                take_own_states(self._loader, state["own"])
            except ValueError:
                raise CheckpointError(
                    "this state is that of a loader with other generators. Give the loader the same sampler and"
                    " generator as where it was saved."
                ) from None

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_pass(self) -> None:
        """Let all ranks draw the same order, which is rank 0's."""
        sharing, text = self._sharing, self._resumes
        self._kept = process_states(sharing.device) if self._keeps and self._skipped else None
        with sharing.calls.call(f"a pass through loader {self._number}", meets=True):
            # One broadcast per pass: the samplers of all ranks start from rank 0's generators and draw the same order
            # by themselves.
            if not text and sharing.world is not None:
                own = states_of(self._loader, sharing.device) if dist.get_rank() == 0 else ""
                text = gather_texts(own, sharing.device, sharing.world)[0]
        if text:
            take_states(self._loader, sharing.device, text)
        self._begun, self._resumes, self._keeps = text or states_of(self._loader, sharing.device), "", False
        self._present += 1
        self._ahead.clear()
        self._position, self._given, self._taken = self._position + self._given, 0, self._skipped

    def _read(self) -> Iterator[tuple[Any, HandedBatch]]:
        """Read a map-style data set: this rank's samples alone."""
        assert self._inner is not None, "asked of loaders that read by index"
        for batch in self._inner:
            yield batch, self._ahead.popleft()

    def asked(self) -> Iterator[SampleRequest]:
        """Yield this rank's samples of the batches of a pass, as the user's own sampler makes them up."""
        sampler = cast(Any, self._loader).batch_sampler
        skipped, self._skipped = self._skipped, 0
        first = self._position
        for number, drawn in enumerate(sampler):  # one is drawn ahead, where the save was made, too
            indices = list(drawn)
            if number >= skipped:
                self._put_back()
                handed = self._sharing.share_of(len(indices), first, self._number)
                self._ahead.append(handed)
                yield SampleRequest(indices, first, handed.start, handed.stop)
            first += len(indices)
        self._put_back()

    def _put_back(self) -> None:
        """The loop goes on from here: its generators stood elsewhere than behind the sampler's draws alone."""
        if self._kept is not None:
            take_process_states(self._sharing.device, self._kept)
            self._kept = None

    def _global_batches(self) -> Iterator[tuple[Any, HandedBatch]]:
        """Iterate over any other loader: every rank reads whole batches and takes its rows."""
        sharing = self._sharing
        skipped, self._skipped = self._skipped, 0
        first = self._position
        for number, batch in enumerate(self._loader):
            size = samples_in(batch)
            if number == skipped:
                self._put_back()
            if number < skipped:
                pass
            elif sharing.world is None:
                yield batch, sharing.share_of(size, first, self._number)
            else:
                fields, shape = taken_apart(batch)
                if number < skipped + _COMPARED:
                    with sharing.calls.call(f"a batch of loader {self._number}", meets=True):
                        check_same_batches(digest_of(fields), sharing.device, sharing.world)
                handed = sharing.share_of(next(iter(fields.values())).shape[0], first, self._number)
                # A rank without samples computes on the first one, which counts 0: collectives need every rank.
                rows = slice(handed.start, handed.stop) if handed.start < handed.stop else slice(0, 1)
                yield shape.restored({name: value[rows] for name, value in fields.items()}), handed
            first += size
        self._put_back()


@final
class _SharedBatchSampler:
    """A batch sampler that yields this rank's samples of the user's batches."""

    def __init__(self, loader: LoopLoader) -> None:
        self._of = loader

    def __iter__(self) -> Iterator[SampleRequest]:
        return self._of.asked()

    def __len__(self) -> int:
        return len(self._of)


def _inner_of(loader: Iterable[Any], shares: _SharedBatchSampler, seed: int, *, alone: bool) -> DataLoader[Any] | None:
    """A loader of the same settings that reads what this rank is to have; None: it cannot be read by index."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    loader_of_user = cast(DataLoader[Any], loader)
    if loader_of_user.batch_sampler is None:
        return None
    reader = KeyedReader(loader_of_user.dataset, loader_of_user.collate_fn, seed, alone=alone)
    ahead: dict[str, Any] = {"prefetch_factor": loader_of_user.prefetch_factor} if loader_of_user.num_workers else {}
    return DataLoader(
        cast(Any, reader),
        batch_sampler=cast(Any, shares),
        collate_fn=cast(Any, reader),
        num_workers=loader_of_user.num_workers,
        pin_memory=loader_of_user.pin_memory,
        timeout=loader_of_user.timeout,
        worker_init_fn=loader_of_user.worker_init_fn,
        multiprocessing_context=loader_of_user.multiprocessing_context if loader_of_user.num_workers else None,
        generator=loader_of_user.generator,
        persistent_workers=loader_of_user.persistent_workers,
        **ahead,
    )


def _moved(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    moved = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
    return moved.to(device) if moved is batch and callable(getattr(batch, "to", None)) else moved


@final
class SharedRows:
    """This rank's rows of batches that the loop makes itself, equally on every rank: the work of `session.share`."""

    def __init__(self, sharing: LoaderSharing) -> None:
        self._sharing = sharing
        self._calls = self._samples = 0

    def rows(self, values: Sequence[Any], dim: int) -> list[Any]:
        """Return this rank's rows of all tensors in `values`, on the device.

        Raises:
            DataError: there is none, they have not equally many rows, or other ranks gave others.
        """
        sharing, leaves = self._sharing, [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        size = _size_of(leaves, dim)
        handed = sharing.share_of(size, self._samples, source=-size)
        if sharing.world is not None:
            self._compare(leaves)
        self._calls += 1
        self._samples += handed.size
        sharing.hand_out(handed, is_made=True)
        rows = [tree_map_only(Tensor, lambda each: self._part(each, handed, dim), value) for value in values]
        sharing.know(rows, handed)
        return rows

    def _part(self, tensor: Tensor, handed: HandedBatch, dim: int) -> Tensor:
        rows = handed.stop - handed.start
        part = tensor.narrow(dim, handed.start, rows) if rows else tensor.narrow(dim, 0, 1)  # a filler, counted 0
        return part.to(self._sharing.device, non_blocking=True)

    def _compare(self, leaves: Sequence[Tensor]) -> None:
        """Note what was given, which must be equal on all ranks."""
        sharing, early = self._sharing, self._calls < _COMPARED
        digest = xxhash.xxh64(sharing.shared.encode())
        digest.update(torch.get_rng_state().numpy().tobytes())  # by which most loops make their batches
        for leaf in leaves:
            digest.update(f"{leaf.dtype} {[*leaf.shape]}".encode())
            if early or leaf.device.type == "cpu":  # to read it from another device would wait for that
                digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        sharing.shared = digest.hexdigest()
        if early:
            with sharing.calls.call("session.share()", meets=True):
                check_same_facts({"data: what session.share was given": sharing.shared}, sharing.device)


def _size_of(leaves: Sequence[Tensor], dim: int) -> int:
    if not leaves:
        raise DataError("session.share() was given no tensor. Give it the tensors of a whole batch.")
    short = next((leaf for leaf in leaves if not -leaf.ndim <= dim < leaf.ndim), None)
    if short is not None:
        raise DataError(
            f"session.share(dim={dim}) was given a tensor of shape {tuple(short.shape)}, which has no such dim. Share"
            " tensors whose samples lie along it, and leave others out."
        )
    sizes = sorted({leaf.shape[dim] for leaf in leaves})
    if len(sizes) > 1 or not sizes[0]:
        raise DataError(
            f"session.share(dim={dim}) was given tensors of {' and '.join(map(str, sizes))} samples. Give it the"
            " tensors of one batch, before they are flattened; dim= says where samples lie."
        )
    return sizes[0]
