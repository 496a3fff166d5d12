"""The mesh of a plan as process groups: over any set of its axes.

Everything that needs a group takes a `Mesh`; nobody reads the default group or an environment variable. Which group a
tensor needs follows from its placements (`weft.techniques.core.ParameterLayout`); only techniques speak of axes by
name.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.device import forget_meshes
from weft.comm.trace_event import TraceCallback
from weft.comm.watch import Watch
from weft.comm.watched_group import WATCHED_GLOO, WatchedGroup, register_watched_backend
from weft.config.plan import (
    AXES,
    BATCH_AXES,
    COLLECTIVE_TIMEOUT_SECONDS,
    EXPERT_LENDERS,
    Axis,
    MeshPlan,
    axis_coordinates,
    groups_over,
)
from weft.errors import CollectiveError

GroupName = Literal[
    "pipeline", "replicate", "shard", "context", "tensor", "expert",
    "data", "expert_data", "expert_shard", "context_data", "context_shard", "world",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Over:
    """Which ranks form a group: those that differ in `axes` alone, and not in what they have of `holding`."""

    axes: frozenset[Axis]
    holding: frozenset[Axis] = frozenset()


def _over(*axes: Axis, holding: Collection[Axis] = ()) -> _Over:
    return _Over(frozenset(axes), frozenset(holding))


_NAMED: dict[GroupName, _Over] = {
    "pipeline": _over("pipeline"),
    "replicate": _over("replicate"),
    "shard": _over(*EXPERT_LENDERS),
    "context": _over("context"),
    "tensor": _over("tensor"),
    "data": _over(*BATCH_AXES),
    "world": _over(*AXES),
    "expert": _over("expert"),
    "expert_data": _over(*BATCH_AXES, holding=("expert",)),
    "expert_shard": _over(*EXPERT_LENDERS, holding=("expert",)),
    "context_data": _over(*BATCH_AXES, holding=("context",)),
    "context_shard": _over(*EXPERT_LENDERS, holding=("context",)),
}
"""Groups that exist from the start, in the order of their creation.

These are the axes that cut weights and activations, the groups over which gradients may be summed (`…data`), and those
over which ZeRO-3 may shard weights (`…shard`, with context ranks, which hold the same weights)."""
_OWN: frozenset[str] = frozenset(("pipeline", "replicate", "shard", "context", "tensor", "expert"))
"""Groups with a communicator of their own even if another group has the same ranks.

Their collectives run beside those of the gradients, and one communicator would run them one after another."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """One process group as this rank sees it.  `group` is None when the group has one member: no collective is due."""

    ranks: tuple[int, ...]
    index: int
    """This rank's position in `ranks`."""
    group: dist.ProcessGroup | None
    timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS
    """Seconds that its members wait for one another."""

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
        self._device_meshes: dict[tuple[GroupName, ...], DeviceMesh] = {}
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coordinates = axis_coordinates(plan, self.rank)
        self._hidden: frozenset[Axis] = frozenset()
        """Axes that `within_replica` hides: this rank acts as if it were alone on them."""
        self._made: dict[tuple[tuple[int, ...], ...], GroupView] = {}
        """Groups by all parts of their partition, which axes with the same ranks share."""
        self._own: list[dist.ProcessGroup] = []
        """Groups that were made for this mesh."""
        self._watched: dict[WatchedGroup, str] = {}
        self._callback: TraceCallback | None = None
        self.lines: dict[str, GroupView] = {}
        """Groups inside the tensor axis by name, where its ranks form a grid."""
        self._loss_replicas: GroupView | None = None
        self._views: dict[_Over, GroupView] = {}
        # Created in one order on all ranks, as `new_group` is collective.  A group that holds something (experts,
        # context) is the same as one without, where that axis has one rank.
        for name, over in _NAMED.items():
            same = self._views.get(self._reduced(over)) if over.holding else None
            self._views[over] = same if same is not None else self._create(name, over)
            self._views.setdefault(self._reduced(over), self._views[over])

    def __getitem__(self, name: GroupName) -> GroupView:
        over = _NAMED[name]
        return self._views[over] if name == "world" else self.group_over(over.axes, holding=over.holding)

    def group_over(self, axes: Collection[Axis], *, holding: Collection[Axis] = ()) -> GroupView:
        """Return this rank's group over a set of axes: the ranks that differ from it in these alone.

        `holding` leaves out those that differ in what they have of these axes: over `BATCH_AXES`, holding `expert`,
        are the ranks that see other tokens and have the same experts.  Groups over one axis, and those over
        `BATCH_AXES` or `EXPERT_LENDERS` holding nothing, `expert` or `context`, exist from the start.  Any other is
        created when it is first asked for: then call it on every rank alike.
        """
        near = set(axes)
        if near.intersection(("expert", *EXPERT_LENDERS)):
            near.update(("expert", *EXPERT_LENDERS))  # they are made of the same ranks
        over = _Over(frozenset(axes) - self._hidden, frozenset(holding) & near)
        view = self._views.get(over) or self._views.get(self._reduced(over))
        if view is None:
            name = "+".join(axis for axis in AXES if axis in over.axes)
            view = self._views[over] = self._create(name, over)
        return view

    def _reduced(self, over: _Over) -> _Over:
        """Return the same group without axes that have one rank."""
        one = {axis for axis in AXES if getattr(self.plan, axis) == 1}
        return _Over(over.axes - one, over.holding - one)

    @property
    def within_stage(self) -> tuple[GroupView, ...]:
        """Groups over which, one after another, a sum takes in every rank of this rank's pipeline stage."""
        return tuple(view for view in (self["data"], self["tensor"]) if view.group is not None)

    @property
    def loss_replicas(self) -> GroupView:
        """Tensor ranks that see the same tokens, and so compute the same loss: all, unless they form a grid."""
        return self._loss_replicas or self["tensor"]

    def set_loss_replicas(self, view: GroupView | None) -> None:
        """Set the tensor ranks that see the same tokens; None: all of them.  Not collective."""
        self._loss_replicas = view

    @property
    def data_index(self) -> int:
        """Number of the share of a global batch that this rank takes, among `plan.data`; context ranks take parts of
        the same one."""
        index = 0
        for axis in self.plan.order:
            if axis in ("replicate", "shard"):
                index = index * int(getattr(self.plan, axis)) + self.coordinates[axis]
        return index

    def size(self, name: GroupName) -> int:
        return self[name].size

    def index(self, name: GroupName) -> int:
        return self[name].index

    def watch(self, callback: TraceCallback | None) -> None:
        """Hand every collective of this mesh's groups to `callback` when it is launched, from now on; None: to nobody.

        No collective.  A group that stands for two axes goes by the name of the one with fewer (`data` before `world`).
        Groups that NCCL carries are not watched, and those of one's own only once `watch_also` has named them.
        """
        self._callback = callback
        for group, name in self._watched.items():
            group.watch = None if callback is None else Watch(name, callback)

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
            view.group.watch = None if self._callback is None else Watch(name, self._callback)
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
        self.lines.clear()
        self._loss_replicas = None
        self._device_meshes.clear()
        self._views.clear()
        while self._own:
            dist.destroy_process_group(self._own.pop())
        forget_meshes()

    def device_mesh(self, *names: GroupName) -> DeviceMesh:
        """Return a DeviceMesh over groups that cross one another, each with more than one rank.

        Call it on every rank.  Its axes bear the groups' names; the same names give the same object.
        """
        if names not in self._device_meshes:
            self._device_meshes[names] = self._create_device_mesh(names)
        return self._device_meshes[names]

    def _create_device_mesh(self, names: tuple[GroupName, ...]) -> DeviceMesh:
        views = [self[name] for name in names]
        # Ranks count row-major through the axes, so that steps along different axes add up.
        ranks = torch.tensor(self.rank)
        for view in views:
            ranks = ranks[..., None] + torch.tensor(view.ranks) - self.rank
        groups = [view.group for view in views if view.group is not None]
        assert len(groups) == len(views), f"a DeviceMesh over {names} would have an axis of size 1"
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(names))
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(names))

    def within_replica(self) -> Mesh:
        """Return this mesh as it looks to ranks that know of no other replica: gradients are summed over the shard axis
        alone, and nobody replicates.  `world`, coordinates and groups stay what they are.  Not collective.
        """
        inside = copy.copy(self)
        inside._hidden = frozenset(("replicate",))
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
        """Return the backend of new groups: the default group's, but Gloo in a form that can be watched."""
        if self.device.type != "cpu" or not dist.is_initialized():
            return None
        if "cpu:gloo" not in dist.get_backend_config().split(","):
            return None
        register_watched_backend()
        return WATCHED_GLOO

    def _create(self, name: str, over: _Over) -> GroupView:
        """Create the groups of a kind on all ranks, and return this rank's."""
        partition = groups_over(self.plan, over.axes, over.holding)
        if name in _OWN:
            return self.create_group(partition, name)
        if partition not in self._made:
            is_everyone = len(partition) == 1 and self.plan.world_size > 1 and self._backend() is None
            self._made[partition] = (
                self._note(self._view(partition[0], dist.group.WORLD), name)
                if is_everyone
                else self.create_group(partition, name)
            )
        return self._made[partition]
