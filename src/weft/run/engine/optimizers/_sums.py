"""Sums over whole parameters, of which each rank may hold a run, a part, or a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.collectives import all_reduce
from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import AXES, BATCH_AXES, Axis
from weft.techniques.core import Segment, Shard

_CHUNK = 1024


def squared_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares of a 1-D tensor as a 0-d fp64 tensor on its device.

    On CPUs one fp32 norm over 10 M elements is wrong by 6e-4 (and `torch.dot` by 2e-4), which would make norms depend
    on how parameters are cut.  Norms of chunks, summed in fp64, are right to 2e-9 and as fast (2026-11).
    """
    body = flat.numel() // _CHUNK * _CHUNK
    heads = torch.linalg.vector_norm(flat[:body].view(-1, _CHUNK), dim=1).to(torch.float64)
    tail = torch.linalg.vector_norm(flat[body:]).to(torch.float64)
    return torch.dot(heads, heads) + tail * tail


def cutting_groups(shards: Sequence[Shard]) -> list[GroupView]:
    """Return the groups over which ZeRO has cut parameters, in an order that all their ranks share.

    There may be several: parameters are cut over those who reduce their gradients, and what ZeRO-3 leaves out (ties) is
    cut as in ZeRO-1.
    """
    groups: dict[tuple[int, ...], GroupView] = {}
    for shard in shards:
        if shard.cut_group is not None and shard.cut_group.group is not None:
            groups.setdefault(shard.cut_group.ranks, shard.cut_group)
    return sorted(groups.values(), key=lambda view: (view.size, [rank - view.ranks[0] for rank in view.ranks]))


def is_cut_over(shard: Shard, view: GroupView) -> bool:
    """Whether the ranks of `view` hold the other runs of this shard's parameters."""
    return shard.cut_group is not None and shard.cut_group.ranks == view.ranks


class ParameterSums:
    """Turns sums over this rank's segments into sums over whole parameters, with a small all-reduce per cutting group.

    Constructing it is collective: ranks agree on which parameters are cut at all.  `names` are all parameters of this
    rank's parts, in an order that the ranks of a stage share.
    """

    def __init__(self, shards: Sequence[Shard], names: Sequence[str], mesh: Mesh) -> None:
        self._device = mesh.device
        self._stage = mesh.within_stage
        self._num_names = len(names)
        # Values travel as one vector with a slot for every parameter of the stage, so that ranks which hold different
        # segments can add them without telling one another what they hold.
        places = [(shard, segment) for shard in shards for segment in shard.segments]
        position = {name: index for index, name in enumerate(names)}
        owners = [position[segment.layout.name] for _, segment in places]
        self._owners = torch.tensor(owners, dtype=torch.int64, device=self._device)
        self._splits = self._agree_on_splits([segment for _, segment in places], mesh)
        covered = self._gather([segment.length for _, segment in places])
        self._cuts: list[tuple[GroupView, Tensor]] = []
        for view in cutting_groups(shards):
            mine = [is_cut_over(shard, view) for shard, _ in places]
            partial = self._gather([int(m and not s.is_whole) for m, (_, s) in zip(mine, places, strict=True)])
            # A parameter counts as cut if any rank of the stage holds a part of it: the ranks of a group must agree,
            # also those whose part is empty.
            self._everywhere(partial)
            total_lengths = all_reduce(
                self._gather([s.length * m for m, (_, s) in zip(mine, places, strict=True)]), view
            )
            covered = torch.where(partial > 0, total_lengths, covered)
            self._cuts.append((view, partial > 0))
        sizes = torch.ones(self._num_names, dtype=torch.int64, device=self._device)
        for index, (_, segment) in zip(owners, places, strict=True):
            sizes[index] = max(segment.local_shape.numel(), 1)
        # Both parts of a rank under a V-shaped pipeline may hold the same tied parameter: it counts once.
        self._copies = (covered // sizes).clamp(min=1)

    def _agree_on_splits(self, segments: Sequence[Segment], mesh: Mesh) -> list[tuple[GroupView, Tensor]]:
        """The axes that cut parameters, and which: also those of which this rank holds nothing."""
        whole: tuple[Axis, ...] = ("pipeline", *BATCH_AXES)  # ranks of the latter see other samples
        axes: list[Axis] = [axis for axis in AXES if axis not in whole and getattr(mesh.plan, axis) > 1]
        flags = [self._gather([int(axis in s.layout.split_axes) for s in segments]) for axis in axes]
        if not flags:
            return []
        cut = self._everywhere(torch.stack(flags)) > 0
        return [(mesh.group_over((axis,)), names) for axis, names in zip(axes, cut, strict=True) if names.any()]

    def _everywhere(self, counts: Tensor) -> Tensor:
        """Add up over all ranks of the stage, in place."""
        for view in self._stage:
            all_reduce(counts, view)
        return counts

    def _gather(self, values: Sequence[int]) -> Tensor:
        per_segment = torch.tensor(values, dtype=torch.int64, device=self._device)
        return torch.zeros(self._num_names, dtype=torch.int64, device=self._device).index_add_(
            0, self._owners, per_segment
        )

    def total(self, sums: Tensor) -> Tensor:
        """Return, for every segment of this rank, the sums over the whole parameter it belongs to.

        `sums` is fp64, (kinds, segments), in the order of shards and segments, over this rank's elements; so is the
        result. Call on every rank.
        """
        values = torch.zeros(sums.shape[0], self._num_names, dtype=sums.dtype, device=self._device)
        values.index_add_(1, self._owners, sums.to(self._device))
        # The sum over runs has a parameter as often as this rank's parts hold it (`_copies`).  It is divided before the
        # tensor ranks' parts are added, of which there are no copies.
        for view, partial in self._cuts:
            values = self._add_up(values, view, partial)
        values = values / self._copies
        for view, split in self._splits:
            values = self._add_up(values, view, split)
        return values[:, self._owners].to(sums.device)

    def _add_up(self, values: Tensor, view: GroupView, chosen: Tensor) -> Tensor:
        """Sum the chosen parameters' values over a group; the others have their whole value on each rank already."""
        if view.group is None or not self._num_names:
            return values
        return torch.where(chosen, all_reduce(values.clone(), view), values)
