"""The mesh of a plan as process groups: one group per axis, and the few products that techniques need.

Everything that needs a group takes a `Mesh`; nobody reads the default group or an environment variable.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.comm._device import forget_meshes
from weft.comm._watch import Sink, Watch
from weft.comm._watched_group import WATCHED_GLOO, WatchedGroup, register_watched_backend
from weft.errors import CollectiveError
from weft.plan import COLLECTIVE_TIMEOUT_SECONDS, Axis, MeshPlan, axis_coordinates

GroupName = Literal["pipeline", "replicate", "shard", "context", "tensor", "data", "world"]

_PRODUCTS: dict[GroupName, tuple[Axis, ...]] = {
    "pipeline": ("pipeline",),
    "replicate": ("replicate",),
    "shard": ("shard",),
    "context": ("context",),
    "tensor": ("tensor",),
    "data": ("replicate", "shard"),
    "world": ("pipeline", "replicate", "shard", "context", "tensor"),
}


@dataclass(frozen=True, slots=True)
class GroupView:
    """One process group as this rank sees it.  `group` is None when the group has one member: no collective is due."""

    ranks: tuple[int, ...]
    index: int
    """This rank's position in `ranks`."""
    group: dist.ProcessGroup | None
    timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS
    """How long its members wait for one another."""

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """This rank's place in the plan's mesh.  Build it on every rank with the same plan (it creates groups
    collectively).

    `alone` creates this rank's own groups only, for a dry run where nobody else is (see `fake_world`).
    `timeout_seconds` is how long its groups wait for a rank: the plan's `compute.collective_timeout_seconds`.
    """

    def __init__(
        self,
        plan: MeshPlan,
        device: torch.device,
        *,
        alone: bool = False,
        timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
    ) -> None:
        self.plan = plan
        self.device = device
        self.timeout_seconds = timeout_seconds
        self._alone = alone
        self._device_meshes: dict[tuple[Axis, ...], DeviceMesh] = {}
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coordinates = axis_coordinates(plan, self.rank)
        self._made: dict[tuple[tuple[int, ...], ...], GroupView] = {}
        """Groups of several axes, by all parts of the partition."""
        self._own: list[dist.ProcessGroup] = []
        """Groups that were made for this mesh."""
        self._watched: dict[WatchedGroup, str] = {}
        self._sink: Sink | None = None
        self._views = {name: self._create(name, axes) for name, axes in _PRODUCTS.items()}

    def __getitem__(self, name: GroupName) -> GroupView:
        return self._views[name]

    def size(self, name: GroupName) -> int:
        return self._views[name].size

    def index(self, name: GroupName) -> int:
        return self._views[name].index

    def watch(self, sink: Sink | None) -> None:
        """Hand every collective of this mesh's groups to `sink` when it is launched, from now on; None: to nobody.

        No collective.  A group that stands for two axes goes by the name of the one with fewer (`data` before `world`).
        Groups that NCCL carries are not watched, and those of one's own only once `watch_also` has named them.
        """
        self._sink = sink
        for group, name in self._watched.items():
            group.watch = None if sink is None else Watch(name, sink)

    def watch_also(self, group: dist.ProcessGroup, name: str) -> None:
        """Let a group of one's own be watched like the mesh's, by this name, which is its axis in what is seen.

        No collective.  Twice is as good as once; a group of the mesh keeps its name.

        Raises:
            CollectiveError: the group is none that can be watched.
        """
        if not isinstance(group, WatchedGroup):
            raise CollectiveError(
                f"the group {name!r} is carried by {dist.get_backend(group)}, where nothing can be seen. On CPUs make"
                f' it by new_group(ranks, backend="{self._backend() or "weft"}") after the mesh; NCCL is not watched.'
            )
        self._note(GroupView(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group), name)

    def _note(self, view: GroupView, name: str) -> GroupView:
        """Let a view's group be watched by this name, unless it has one already."""
        if isinstance(view.group, WatchedGroup) and view.group not in self._watched:
            self._watched[view.group] = name
            view.group.watch = None if self._sink is None else Watch(name, self._sink)
        return view

    def leave(self) -> None:
        """Leave all groups that were made for this mesh, so that the ranks can build another one.  Call on every rank
        alike, once nothing sends through them any more: the training is closed.

        The default group stays.  Sockets, threads and memory of a group end with the last object that holds it: drop
        the model and its optimizer, too.
        """
        if self._own:
            dist.barrier()  # nobody leaves while another still waits for its last message
        self.watch(None)
        self._watched.clear()
        self._made.clear()
        self._device_meshes.clear()
        self._views.clear()
        while self._own:
            dist.destroy_process_group(self._own.pop())
        forget_meshes()

    def device_mesh(self, *axes: Axis) -> DeviceMesh:
        """Return a DeviceMesh over `axes`, all larger than 1, with this rank's other coordinates fixed.

        Call it on every rank.  Axis names of the DeviceMesh are the plan's; the same axes give the same object.
        """
        if axes not in self._device_meshes:
            self._device_meshes[axes] = self._create_device_mesh(axes)
        return self._device_meshes[axes]

    def _create_device_mesh(self, axes: tuple[Axis, ...]) -> DeviceMesh:
        views = [self._views[axis] for axis in axes if axis != "expert"]
        shape = [view.size for view in views]
        ranks = torch.tensor(self._members(axes)).view(shape)
        groups = [view.group for view in views if view.group is not None]
        assert len(groups) == len(views), f"a DeviceMesh over {axes} would have an axis of size 1"
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(axes))
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(axes))

    def within_replica(self) -> Mesh:
        """Return this mesh as it looks to ranks that know of no other replica: the data ranks are those of the shard
        axis, and nobody replicates.  `world`, coordinates and groups stay what they are.  Not collective.
        """
        inside = copy.copy(self)
        alone = GroupView((self.rank,), 0, None)
        inside._views = {**self._views, "data": self._views["shard"], "replicate": alone}
        return inside

    def create_group(self, partition: Sequence[Sequence[int]], name: str) -> GroupView:
        """Create one group per part of `partition` (global ranks) and return this rank's.  Call on every rank alike.

        `name` says what for; by it its collectives are recorded.
        """
        mine: GroupView | None = None
        backend = self._backend()
        timeout = timedelta(seconds=self.timeout_seconds)  # torch's default is its own, not that of the default group
        for ranks in partition:
            if self._alone and self.rank not in ranks:
                continue
            group = (
                dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)
                if len(ranks) > 1
                else None
            )
            if self.rank in ranks:
                assert not isinstance(group, int), "torch gives a number only to ranks that are no members"
                mine = self._note(self._view(ranks, group), name)
                self._own += [] if group is None else [group]
        return mine if mine is not None else GroupView((self.rank,), 0, None)

    def _view(self, ranks: Sequence[int], group: dist.ProcessGroup | None) -> GroupView:
        return GroupView(tuple(ranks), tuple(ranks).index(self.rank), group, self.timeout_seconds)

    def _backend(self) -> str | None:
        """What carries new groups: the default group's backend, but Gloo in a form that can be watched."""
        if self.device.type != "cpu" or not dist.is_initialized():
            return None
        if "cpu:gloo" not in dist.get_backend_config().split(","):
            return None
        register_watched_backend()
        return WATCHED_GLOO

    def ranks_where(self, **fixed: int) -> tuple[int, ...]:
        """Global ranks whose coordinates agree with this rank's except for the axes given, which have these values."""
        wanted = {**self.coordinates, **fixed}
        return tuple(r for r in range(self.plan.world_size) if axis_coordinates(self.plan, r) == wanted)

    def _members(self, axes: Sequence[Axis]) -> tuple[int, ...]:
        """Global ranks of this rank's group over `axes`, row-major in the order of `axes`."""
        sizes = [range(int(getattr(self.plan, axis))) for axis in axes]
        members: list[int] = []
        for values in itertools.product(*sizes):
            members.extend(self.ranks_where(**dict(zip(axes, values, strict=True))))
        return tuple(members)

    def _create(self, name: GroupName, axes: tuple[Axis, ...]) -> GroupView:
        parts: dict[tuple[tuple[Axis, int], ...], list[int]] = {}
        for rank in range(self.plan.world_size):
            place = axis_coordinates(self.plan, rank)
            key: tuple[tuple[Axis, int], ...] = tuple((axis, at) for axis, at in place.items() if axis not in axes)
            parts.setdefault(key, []).append(rank)
        partition = tuple(tuple(parts[key]) for key in sorted(parts))
        if len(axes) == 1:
            return self.create_group(partition, name)
        if partition not in self._made:
            is_everyone = len(partition) == 1 and self.plan.world_size > 1 and self._backend() is None
            self._made[partition] = (
                self._note(self._view(partition[0], dist.group.WORLD), name)
                if is_everyone
                else self.create_group(partition, name)
            )
        return self._made[partition]
