"""A rank's shards of ZeRO-3, and their gradients, as pages of a file that are read where they are needed.

Weights and gradients are ordinary tensors on the CPU, so that whoever reads or writes them need not know where they
lie.  What they do not need goes: a unit's pages are let go once its weights are gathered, while those of the next are
read ahead; gradients land in the file, and the optimizer lets go of what it has updated.

Source: Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning" (arXiv
2104.07857), which does it with copies.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from weft.formatting import format_bytes
from weft.techniques.core import ModelPart, Shard
from weft.techniques.offload.place import new_file, return_what_is_freed
from weft.techniques.offload.storage import ALIGNMENT, FileStorage
from weft.techniques.runtime import Build, TechniqueRuntime

Span = tuple[int, int]
"""First byte and length, in whole pages."""


class _Place(NamedTuple):
    """The places of a shard and of its gradient in the file."""

    weights: Span
    gradients: Span | None
    gradient: Tensor | None
    """The gradient's tensor in the file; None: the parameter is frozen."""


@final
class MappedFile:
    """Tensors in a file without a name, whose pages can be read ahead and dropped."""

    def __init__(self, storage: FileStorage, num_bytes: int) -> None:
        storage.grow(num_bytes)
        self._storage = storage
        self._map = mmap.mmap(storage.descriptor, num_bytes)
        self._end = 0

    def take(self, like: Tensor) -> tuple[Tensor, Span]:
        """Return a contiguous tensor of the shape and dtype of another, zero at first, and where it lies."""
        span = self._end, -(-like.numel() * like.element_size() // ALIGNMENT) * ALIGNMENT
        self._end += span[1]
        whole = torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=span[0])
        return whole.view(like.shape), span

    def expect(self, span: Span) -> None:
        """Start to read pages."""
        os.posix_fadvise(self._storage.descriptor, *span, os.POSIX_FADV_WILLNEED)

    def let_go(self, span: Span) -> None:
        """Drop pages from memory: their content stays in the file, and the next access reads it again."""
        self._map.madvise(mmap.MADV_DONTNEED, *span)
        os.posix_fadvise(self._storage.descriptor, *span, os.POSIX_FADV_DONTNEED)

    def write_out(self) -> None:
        """Wait until the disk has everything, and drop all pages."""
        os.fdatasync(self._storage.descriptor)
        os.posix_fadvise(self._storage.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._storage.close()  # whoever still has a tensor of it keeps the pages


@dataclass(frozen=True, slots=True)
class _Landing:
    """Moves a new gradient into the file.  Weak: the garbage collector does not see autograd's hooks."""

    parameters: weakref.ref[OffloadedParameters]

    def __call__(self, parameter: Tensor) -> None:
        if (parameters := self.parameters()) is not None:
            parameters.land(parameter)


@final
class OffloadedParameters(TechniqueRuntime):
    """Shards of weights and their gradients, on a disk.  Shards that are shorter than those of other ranks stay."""

    span: ClassVar[str] = "offload"

    def __init__(self, build: Build) -> None:
        self._build = build
        self._parts: list[ModelPart] = []
        self._file: MappedFile | None = None
        self._places: dict[int, _Place] = {}
        """Address of a shard's first element → its place."""
        self._writer: ThreadPoolExecutor | None = None
        self._written: Future[None] | None = None
        self._kept_bytes = 0
        self._offloaded: set[int] = set()
        """Identities of storages that a dry run takes for the file's."""

    def wrap(self, part: ModelPart) -> None:
        self._parts.append(part)

    def offload_policy(self) -> OffloadPolicy | None:
        is_beside = self._build.mesh.device.type != "cpu" and not is_fake()
        return CPUOffloadPolicy(pin_memory=False) if is_beside else None  # pages of a file cannot be pinned

    # ── where shards and gradients lie ────────────────────────────────────────────────────────────────────────────────

    def on_sharded(self, part: ModelPart) -> Callable[[], None] | None:
        moving = {
            id(parameter): parameter
            for parameter in part.module.parameters()
            if isinstance(parameter, DTensor) and _is_even(parameter)
        }
        tensors = [
            parameter for parameter in moving.values() for _ in range(1 + parameter.requires_grad)
        ]  # with its gradient
        sizes = [parameter.to_local().numel() * parameter.element_size() for parameter in tensors]
        self._kept_bytes += sum(sizes)
        if not is_fake():
            pages = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
            return_what_is_freed()
            self._file = MappedFile(new_file(self._build, 0), pages)
            self._writer = ThreadPoolExecutor(1, "weft-offload-write")

        def moved(tensor: Tensor) -> Tensor:
            # A tied weight is met twice.
            return self._moved(tensor) if moving.pop(id(tensor), None) is not None else tensor

        part.module._apply(moved)  # pyright: ignore[reportPrivateUsage]  torch's way to give shards other storage
        return self._rest

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return the same shard, in the file."""
        assert isinstance(tensor, DTensor)
        local = tensor.to_local().detach()
        if self._file is None:
            return torch.empty_like(tensor, device=self._build.mesh.device) if tensor.is_meta else tensor
        there, span = self._file.take(local)
        gradient, below = self._file.take(local) if tensor.requires_grad else (None, None)
        if not local.is_meta:
            there.copy_(local)
            self._file.let_go(span)
        self._places[there.data_ptr()] = _Place(span, below, gradient)
        return on_host(there, tensor)

    def _rest(self) -> None:
        """Drop all pages."""
        for place in self._places.values():
            self._let_go(place)

    def _let_go(self, place: _Place) -> None:
        if self._file is not None:
            for span in (place.weights, place.gradients):
                if span is not None:
                    self._file.let_go(span)

    # ── what comes and goes ───────────────────────────────────────────────────────────────────────────────────────────

    def attach_shards(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            place = self._places.get(shard.master.data_ptr()) if self._file is not None else None
            if place is not None:
                shard.rest = partial(self._let_go, place)
        for part in self._parts:
            for parameter in part.module.parameters():
                if isinstance(parameter, DTensor) and parameter.requires_grad and _is_even(parameter):
                    parameter.register_post_accumulate_grad_hook(_Landing(weakref.ref(self)))
                    if self._file is None:
                        self._offloaded.add(identity_of(parameter))
            self._follow([unit for unit in part.module.modules() if isinstance(unit, FSDPModule)])

    def land(self, parameter: Tensor) -> None:
        """Let the gradient of a shard lie in the file, where later microbatches add to it."""
        gradient = parameter.grad
        assert isinstance(parameter, DTensor)
        assert isinstance(gradient, DTensor)
        local = _local(gradient)
        if self._file is None:
            self._offloaded.add(identity_of(gradient))
            return
        place = self._places[parameter.to_local().data_ptr()]
        assert place.gradient is not None
        assert place.gradients is not None
        if local.data_ptr() != place.gradient.data_ptr():
            place.gradient.copy_(local)
            gradient._local_tensor = place.gradient  # pyright: ignore[reportPrivateUsage]  as `fully_shard` itself does
        self._file.let_go(place.gradients)

    def _follow(self, units: Sequence[nn.Module]) -> None:
        """Hook what gathers: once a unit is gathered its shards may go, and the next one's are read ahead.  Of units
        that contain others, what is theirs alone."""
        if self._file is None:
            return
        spans = [self._spans_of(unit) for unit in units]
        blocks = [index for index, unit in enumerate(units) if not any(_units_within(unit))]
        for turn, index in enumerate(blocks):
            after = spans[blocks[turn + 1]] if turn + 1 < len(blocks) else []
            before = spans[blocks[turn - 2]] if turn >= 2 else []
            here = spans[index] if after else []  # the last is wanted again at once
            units[index].register_forward_pre_hook(partial(self._gathered, here, after))
            back = spans[index] + (spans[blocks[turn - 1]] if turn else [])  # `fully_shard` gathers one ahead
            units[index].register_forward_hook(partial(self._watch, back, before))
        for index in set(range(len(units))) - set(blocks):
            units[index].register_forward_pre_hook(partial(self._gathered, spans[index], []))

    def _spans_of(self, unit: nn.Module) -> list[Span]:
        """Return the file spans of the shards that are gathered with a unit."""
        others = {id(parameter) for inner in _units_within(unit) for parameter in inner.parameters()}
        own = [weight for weight in unit.parameters() if isinstance(weight, DTensor) and id(weight) not in others]
        places = [self._places.get(weight.to_local().data_ptr()) for weight in own]
        return [place.weights for place in places if place is not None]

    def _gathered(self, read: Sequence[Span], coming: Sequence[Span], *args: Any) -> None:
        if self._file is not None:
            for span in read:
                self._file.let_go(span)
            for span in coming:
                self._file.expect(span)

    def _watch(self, read: Sequence[Span], coming: Sequence[Span], unit: nn.Module, args: Any, output: Any) -> None:
        """Do the same in backward, whose gathers are hooked to the unit's outputs."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._gathered, read, coming))
                return

    def end_step(self, step: int, counts: Sequence[float] | None) -> bool:
        """Start to write the step's changes to the disk, behind the next forward."""
        self._wait_write()
        if self._writer is not None and self._file is not None:
            self._written = self._writer.submit(self._file.write_out)
        return False

    def _wait_write(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def offloaded_storages(self) -> Collection[int]:
        return self._offloaded

    def notes(self) -> list[str]:
        return [f"{format_bytes(self._kept_bytes)} of weights and gradients are on the disk, and gathered from there"]

    def close(self) -> None:
        self._wait_write()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _units_within(unit: nn.Module) -> Iterator[nn.Module]:
    return (module for module in unit.modules() if module is not unit and isinstance(module, FSDPModule))


def _is_even(parameter: DTensor) -> bool:
    """Return whether all ranks' shards are equally long, so that `fully_shard` gathers the file's memory directly."""
    chunks = 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        chunks *= size if placement.is_shard(0) else 1
    return parameter.shape[0] % chunks == 0 and parameter.to_local().numel() > 0


def on_host(local: Tensor, like: DTensor) -> DTensor:
    """Return a shard with other memory.  `DTensor.from_local` would take it to the mesh's device."""
    return DTensor(local, like._spec, requires_grad=False)  # pyright: ignore[reportPrivateUsage]


def identity_of(tensor: DTensor) -> int:
    """Return a number that is the same for all tensors of one storage, fake ones included."""
    return _local(tensor).untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _local(tensor: DTensor) -> Tensor:
    return tensor._local_tensor  # pyright: ignore[reportPrivateUsage]  itself, and no view of it


def is_fake() -> bool:
    """Whether tensors are fake: a dry run."""
    return isinstance(torch.empty(0), FakeTensor)
