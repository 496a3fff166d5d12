"""What every parameter and buffer of a rank is on each axis of the mesh, and which groups follow from that.

Parameters stay plain local tensors while they train: the user's forward then runs unchanged on local shapes, a fused
query-key-value can be cut block by block (which no DTensor placement says), and no dispatch stands in the hot path.
The layout is kept beside them, by name, and is what buckets, ZeRO, clipping, optimizers and checkpoints read: they ask
it for the group over which a gradient is summed, and never for an axis by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import AXES, BATCH_AXES, EXPERT_LENDERS, Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A cut over one axis: dimension `dim` is `blocks` equal blocks, each cut in `parts`; this rank has `index`."""

    dim: int
    parts: int
    index: int
    blocks: int = 1

    def local_shape(self, shape: torch.Size) -> torch.Size:
        sizes = list(shape)
        sizes[self.dim] //= self.parts
        return torch.Size(sizes)

    def slice(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, contiguous and with storage of its own."""
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(self.parts, self.dim)[self.index] for block in blocks], self.dim).contiguous()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from the parts of all ranks, in rank order."""
        per_rank = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([piece[block] for block in range(self.blocks) for piece in per_rank], self.dim).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSplit:
    """A cut over an axis whose ranks form a grid: in several dimensions, or along some lines of the grid alone."""

    cuts: tuple[Split, ...]
    """One after another, as in `NestedSplit`; at least one."""
    copies: GroupView
    """Ranks of the axis that hold the same part."""
    is_partial: bool
    """Whether each of these has a part of the gradient's sum; if not, backward has made the sum on all of them."""


Placement = Split | GridSplit | Literal["partial", "whole"]
"""What a gradient is on an axis after backward.

`Split`: each rank has its part of weight and gradient; in a 2-D mesh some ranks may have the same part.  `partial`:
ranks hold the same weight, and the gradient is the sum of theirs.  `whole`: ranks hold the same weight and gradient."""


@dataclass(frozen=True, slots=True)
class NestedSplit:
    """How a tensor is cut over several axes: first by the first of `cuts`, what comes of that by the second, and so on.
    Without any it is whole.

    Parts are numbered in that order, the last cut fastest.
    """

    cuts: tuple[Split, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cuts)

    @property
    def parts(self) -> int:
        """Number of parts of the full tensor."""
        number = 1
        for cut in self.cuts:
            number *= cut.parts
        return number

    @property
    def index(self) -> int:
        """Number of this rank's part."""
        index = 0
        for cut in self.cuts:
            index = index * cut.parts + cut.index
        return index

    @property
    def form(self) -> tuple[tuple[int, int, int], ...]:
        """(dim, parts, blocks) of every cut, which is the same on the ranks with the other parts."""
        return tuple((cut.dim, cut.parts, cut.blocks) for cut in self.cuts)

    @property
    def numbers(self) -> list[int]:
        """Dim, parts, index and blocks of one cut after another, as files store them."""
        return [number for cut in self.cuts for number in (cut.dim, cut.parts, cut.index, cut.blocks)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Self:
        """Return the split of which `numbers` returned these."""
        fours = (numbers[at : at + 4] for at in range(0, len(numbers), 4))
        return cls(
            tuple(Split(dim=dim, parts=parts, index=index, blocks=blocks) for dim, parts, index, blocks in fours)
        )

    def local_shape(self, shape: torch.Size) -> torch.Size:
        for cut in self.cuts:
            shape = cut.local_shape(shape)
        return shape

    def slice(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor; the tensor itself where it is not cut."""
        for cut in self.cuts:
            whole = cut.slice(whole)
        return whole

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor from all parts by their number."""
        for cut in reversed(self.cuts):
            parts = [cut.join(parts[at : at + cut.parts]) for at in range(0, len(parts), cut.parts)]
        return parts[0]

    def without(self, dim: int) -> Self:
        """How that is cut which has one number for all that stands along `dim`, and no such dimension."""
        return type(self)(
            tuple(
                Split(dim=cut.dim - (cut.dim > dim), parts=cut.parts, index=cut.index, blocks=cut.blocks)
                for cut in self.cuts
                if cut.dim != dim
            )
        )

    def is_first_along(self, dim: int) -> bool:
        """Whether this rank has the first part of the cuts along `dim`."""
        return all(cut.index == 0 for cut in self.cuts if cut.dim == dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """One parameter or buffer of this rank.

    What is not said of an axis is what a model has that knows nothing of it: on `BATCH_AXES` ranks see other samples or
    tokens, so gradients are partial; on `tensor` they compute the same.  Each pipeline stage holds its own parameters.
    """

    name: str
    """Name in the whole, unsplit model; of a tied parameter, its first name."""
    shape: torch.Size
    """Whole shape."""
    placements: Mapping[Axis, Placement] = field(default_factory=dict[Axis, Placement])
    """Placement of the parameter and its gradient by axis; splits in the order in which they cut."""
    tied: bool = False
    """Shared between pipeline stages on different ranks: gradients are summed over them, and only one counts in
    norms."""
    counts: bool = True
    """Whether, of the stages that hold a copy, this is the one that norms and checkpoints count."""
    is_buffer: bool = False
    inner: Split | None = None
    """ZeRO-3's cut of this rank's part along columns; None: a shard is a run of its elements."""

    def placement(self, axis: Axis) -> Placement:
        return self.placements.get(axis, "partial" if axis in BATCH_AXES else "whole")

    @property
    def split_axes(self) -> tuple[Axis, ...]:
        """The axes that cut the parameter, in their order."""
        return tuple(axis for axis, placement in self.placements.items() if not isinstance(placement, str))

    @property
    def split(self) -> NestedSplit:
        """The cuts that lead from the full tensor to this rank's part."""
        cuts = [cut for placement in self.placements.values() for cut in _cuts(placement)]
        return NestedSplit(tuple(cuts if self.inner is None else (*cuts, self.inner)))

    def axes_along(self, dim: int) -> frozenset[Axis]:
        """Return the axes that cut dimension `dim` (from 0)."""
        return frozenset(
            a for a, placement in self.placements.items() if any(cut.dim == dim for cut in _cuts(placement))
        )

    def reducing(self, mesh: Mesh) -> GroupView:
        """Return the ranks with the same part and other samples or tokens.

        The gradient is summed over them, and ZeRO-1 and 2 shard gradients and optimizer states over them.
        """
        return mesh.group_over(self._partial_of(BATCH_AXES), holding=self.split_axes)

    def sharding(self, mesh: Mesh) -> GroupView:
        """Return the ranks of `reducing` over which ZeRO-3 shards the weights."""
        return mesh.group_over(self._partial_of([*EXPERT_LENDERS]), holding=self.split_axes)

    def replicating(self, mesh: Mesh) -> GroupView:
        """Return the ranks of `reducing` that hold the same ZeRO-3 shard."""
        beside: list[Axis] = [axis for axis in BATCH_AXES if axis not in EXPERT_LENDERS]
        return mesh.group_over(self._partial_of(beside), holding=self.split_axes)

    def completing(self, mesh: Mesh) -> tuple[GroupView, ...]:
        """Return the groups over which the reduced gradient is still a partial sum.

        Their ranks see the same samples and tokens, and each computes with a part of them.
        """
        others: list[Axis] = [a for a in AXES if a not in BATCH_AXES and self.placement(a) == "partial"]
        views = [mesh.group_over((axis,)) for axis in others]
        views += [grid.copies for grid in self._grids if grid.is_partial]
        return tuple(view for view in views if view.group is not None)

    def is_copied(self, mesh: Mesh) -> bool:
        """Return whether ranks outside of `reducing` hold the same part.

        These are other stages (a tied weight), and ranks of an axis that neither cuts it nor sees other tokens.
        """
        return self.tied or any(view.size > 1 for view in self._copying(mesh))

    def is_first_copy(self, mesh: Mesh) -> bool:
        """Return whether norms and checkpoints count this rank's part among its copies outside of `reducing`."""
        return self.counts and all(view.index == 0 for view in self._copying(mesh))

    def _partial_of(self, axes: Sequence[Axis]) -> list[Axis]:
        # An axis that cuts the parameter is named too: of the ranks that `expert` borrows from it, some hold the same.
        return [axis for axis in axes if self.placement(axis) != "whole"]

    @property
    def _grids(self) -> list[GridSplit]:
        return [placement for placement in self.placements.values() if isinstance(placement, GridSplit)]

    def _copying(self, mesh: Mesh) -> list[GroupView]:
        """Return the groups whose ranks hold the same part, and do not reduce it with one another."""
        axes: list[Axis] = [axis for axis in BATCH_AXES if self.placement(axis) == "whole"]
        if "tensor" not in self.split_axes:
            axes.append("tensor")
        return [*(mesh.group_over((axis,)) for axis in axes), *(grid.copies for grid in self._grids)]


def _cuts(placement: Placement) -> tuple[Split, ...]:
    if isinstance(placement, GridSplit):
        return placement.cuts
    return (placement,) if isinstance(placement, Split) else ()


@dataclass(slots=True)
class ModelLayout:
    """Layouts by the name under which the tensor is found in the part."""

    entries: dict[str, ParameterLayout] = field(default_factory=dict[str, ParameterLayout])

    def __getitem__(self, name: str) -> ParameterLayout:
        return self.entries[name]
