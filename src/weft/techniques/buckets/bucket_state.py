"""Gradient buckets: which parameters lie together in one flat storage, and which rank keeps which run of it.

Torch's DDP copies gradients into buckets and ZeRO libraries copy them again into partitions.  Here the flat storage is
the only one: parameters and gradients are views of it, a reduction runs on it in place, and a shard is a slice of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from weft.comm.flat import Collectives
from weft.comm.mesh import GroupView, Mesh
from weft.comm.reduce import Wait, nothing_to_wait_for
from weft.errors import PlanError
from weft.techniques.buckets.formation import BucketEntry, Cuts, FlatLayout, form_buckets
from weft.techniques.core._layout import ParameterLayout
from weft.techniques.core._shard import Segment, Shard

if TYPE_CHECKING:
    from weft.techniques.compression.codecs import CompressedReduction


@dataclass(slots=True, kw_only=True)
class BucketMember:
    """One trainable parameter on its way into a bucket, with the groups that follow from its layout on a mesh.

    Create them in the same order on all ranks of a stage.
    """

    mesh: InitVar[Mesh]
    parameter: nn.Parameter
    layout: ParameterLayout
    part: int
    """Index of the model part whose backward completes the gradient."""
    group: int
    """Index of the optimizer's parameter group."""
    tie: GroupView | None = None
    """Ranks of other pipeline stages that hold the same parameter; None: the parameter is not tied."""
    reducing: GroupView = field(init=False)
    """The data ranks that sum the gradient."""
    completing: tuple[GroupView, ...] = field(init=False)
    """Groups over which the sum is summed once more, one after another: their ranks have partial gradients."""
    counts: bool = field(init=False)
    """Whether norms and checkpoints count this rank's part among the copies outside of `reducing`."""

    shape: torch.Size = field(init=False)
    """Shape in the storage.  A complex parameter has its real and imaginary parts along a last dimension of 2."""

    def __post_init__(self, mesh: Mesh) -> None:
        self.shape = self.parameter.shape
        if self.parameter.is_complex():
            # Collectives and optimizers know real numbers only; a complex gradient is two real ones.
            self.shape = torch.Size((*self.shape, 2))
            self.layout = replace(self.layout, shape=torch.Size((*self.layout.shape, 2)))
        self.reducing, self.completing = self.layout.reducing(mesh), self.layout.completing(mesh)
        self.counts = self.layout.is_first_copy(mesh)

    def stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor like the parameter in the form of the storage (`shape`)."""
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    def seen(self, stored: Tensor) -> Tensor:
        """Return a view of a storage (of `shape`) in the form of the parameter."""
        return torch.view_as_complex(stored) if self.parameter.is_complex() else stored


@dataclass(frozen=True, slots=True)
class BucketKey:
    """The properties in which all members of a bucket agree, because reduction and update treat a bucket as one."""

    part: int
    group: int
    dtype: torch.dtype
    counts: bool
    reducing: GroupView
    completing: tuple[GroupView, ...]
    tie: str
    """Name of a tied parameter, else empty.  It has a bucket of its own, so that all its holders cut it alike."""
    compressed: bool = False
    """Whether the reduction is compressed.  It never is where ranks outside of `reducing` hold copies."""


@dataclass(slots=True, kw_only=True)
class Bucket(FlatLayout):
    """Members at fixed offsets in one flat storage; `regions[r]` is what rank r of the reducing group keeps."""

    key: BucketKey
    members: list[BucketMember]

    def view(self, flat: Tensor, position: int) -> Tensor:
        """Return one member's view, of its `shape`, of a flat storage (`num_elements`,)."""
        member, offset = self.members[position], self.offsets[position]
        return flat[offset : offset + member.shape.numel()].view(member.shape)

    def views(self, flat: Tensor) -> Iterable[tuple[BucketMember, Tensor]]:
        """Yield each member with its view of a flat storage of this bucket."""
        for position, member in enumerate(self.members):
            yield member, self.view(flat, position)

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the members' runs inside [start, stop) of the flat storage; offsets count from `start`."""
        segments: list[Segment] = []
        for member, offset in zip(self.members, self.offsets, strict=True):
            first, last = max(start, offset), min(stop, offset + member.shape.numel())
            if first < last:
                segments.append(
                    Segment(
                        layout=member.layout,
                        local_shape=member.shape,
                        offset=first - start,
                        start=first - offset,
                        length=last - first,
                    )
                )
        return segments

    def cut_matrices(self) -> dict[str, int]:
        """Return name → columns of the matrices whose rows lie in several regions.

        Optimizers that look at rows and columns (Adafactor) must sum over the ranks of these regions.
        """
        columns: dict[str, int] = {}
        for member, offset in zip(self.members, self.offsets, strict=True):
            end = offset + member.shape.numel()
            if len(member.shape) == 2 and any(offset < stop < end for _, stop in self.regions):
                columns[member.layout.name] = member.shape[1]
        return columns


def compose_buckets(
    members: Sequence[BucketMember],
    *,
    sharded: bool,
    cuts: Cuts,
    limits: tuple[int, int],
    compressed: Callable[[BucketMember], bool] | None = None,
) -> list[Bucket]:
    """Lay `members` into buckets in the order in which backward is expected to complete them (last registered first).

    `limits` are the bytes at which the first bucket and the others are full (`form_buckets`).  With `sharded`, every
    bucket is cut into one region per rank that reduces it: anywhere, or at parameter borders for optimizers that look
    at whole tensors.  `compressed` says which members share a compressed bucket; by default none does.
    """
    entries = [
        BucketEntry(
            _key(member, compressed is not None and compressed(member)),
            member.shape.numel(),
            member.parameter.numel() * member.parameter.element_size(),
        )
        for member in members
    ]
    return [
        Bucket(
            key=formed.key,
            members=[members[place] for place in formed.places],
            offsets=formed.offsets,
            num_elements=formed.num_elements,
            regions=formed.regions,
        )
        for formed in form_buckets(
            entries, ranks=lambda key: key.reducing.size if sharded else 1, cuts=cuts, limits=limits
        )
    ]


def _key(member: BucketMember, compressed: bool) -> BucketKey:
    return BucketKey(
        part=member.part,
        group=member.group,
        dtype=member.parameter.dtype,
        counts=member.counts,
        reducing=member.reducing,
        completing=member.completing,
        tie=member.layout.name if member.tie is not None else "",
        compressed=compressed,
    )


@dataclass(slots=True)
class BucketState:
    """A bucket with its storages, and how far its reduction and its gather are in the step."""

    bucket: Bucket
    collectives: Collectives
    """Collectives over the ranks that reduce the bucket."""
    weights: Tensor
    """All weights, (elements,), in the compute dtype; the parameters are views of it."""
    master: Tensor
    """This rank's region of the masters, (stop − start,); a view of `weights` where the dtypes are the same."""
    shard: Shard
    kept: Tensor | None
    """ZeRO-2: this rank's region of the summed gradients, (stop − start,); no other gradient outlives backward."""
    reduction: CompressedReduction | None
    """The compressed reduction; None: gradients travel in their own dtype."""
    gradients: Tensor | None = None
    """All gradients, (elements,); None under ZeRO-2 while no backward fills the bucket."""
    pending: set[int] = field(default_factory=set[int])
    """Positions of the members whose last gradient of this round is still to come."""
    used: set[int] = field(default_factory=set[int])
    """Positions of the members that have had a gradient in this step."""
    adopted: set[int] = field(default_factory=set[int])
    """Positions of the members whose `.grad` is a view of `gradients`."""
    lasting: Sequence[Tensor] = ()
    """ZeRO-0 and 1: the members' gradients, permanent views of `gradients`."""
    wait: Wait = nothing_to_wait_for
    """Waits for the reduction under way."""
    launched: bool = False
    """Whether this round's reduction has been started."""
    reduced: bool = False
    """Whether this round's reduction has been waited for."""
    gather: Wait | None = None
    """Waits for the gather of weights under way; None: there is none."""
    gathered: Sequence[Tensor] = ()
    """The members' weights as views of `weights`, while a gather runs and the parameters have no elements."""

    def state_bytes(self, *, only_kept: bool) -> dict[str, int]:
        """Return the bytes between two steps by kind; `only_kept` (ZeRO-2) counts this rank's gradients alone."""
        gradients = self.kept if only_kept else self.gradients
        return {
            "parameters": self.weights.nbytes,
            "gradients": 0 if gradients is None else gradients.nbytes,
            "masters": self.master.nbytes if self.master.dtype != self.weights.dtype else 0,
            "residuals": 0 if self.reduction is None else self.reduction.state_bytes(),
        }

    def advance(self) -> None:
        """Start the second exchange of a compressed bucket; the first had the time that the next bucket took to fill.

        Call it at the same place on every rank of the group.
        """
        if self.reduction is not None:
            self.reduction.advance()

    def keep_one_addend(self, region: tuple[int, int] | None) -> None:
        """Let reduced gradients count once in the next sum: each rank keeps its `region` and zeroes the rest.

        Without ZeRO (`region` is None) all ranks hold the same sum, so the first one keeps it.
        """
        if self.gradients is None or self.bucket.key.reducing.size == 1 or self.kept is not None:
            return
        if region is not None:
            self.gradients[: region[0]].zero_()
            self.gradients[region[1] :].zero_()
        elif self.bucket.key.reducing.index:
            self.gradients.zero_()

    def drop_parameters(self) -> None:
        """Leave the members' parameters without elements until the gather has ended."""
        self.gathered = [member.parameter.data for member in self.bucket.members]
        nothing = self.weights[:0]
        for member in self.bucket.members:
            member.parameter.data = nothing


class GradientListener(Protocol):
    """The reducer that owns the buckets, as its hooks know it."""

    def on_gradient(self, index: int, position: int, parameter: Tensor) -> None:
        """Autograd has added to the gradient of a bucket's member."""
        ...


@dataclass(frozen=True, slots=True)
class GradientHook:
    """Tells the reducer that a gradient is there.

    The reference is weak.  Autograd holds hooks where the garbage collector cannot see the cycle, so a strong one would
    keep the reducer, and through it the process groups, alive for ever.
    """

    store: weakref.ref[GradientListener]
    index: int
    position: int

    def __call__(self, parameter: Tensor) -> None:
        store = self.store()
        if store is not None:
            store.on_gradient(self.index, self.position, parameter)


def check_alone(bucket: Bucket, position: int) -> None:
    """Refuse a gradient that comes after its bucket was sent: the late part of it would be lost.

    Raises:
        PlanError: the bucket has gone to other ranks.
    """
    if bucket.key.reducing.group is not None:
        raise PlanError(
            f"{bucket.members[position].layout.name} gets its gradient in several parts in one backward, and the first"
            " was taken for all of it and sent to other ranks. torch.utils.checkpoint(use_reentrant=True) does so for"
            " a module that is called more than once: use use_reentrant=False."
        )
