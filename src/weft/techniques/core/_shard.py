"""What an optimizer updates and what a checkpoint stores, whatever the plan: flat runs of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.techniques.core._layout import NestedSplit, ParameterLayout
from weft.techniques.core._rows import SparseRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of one parameter inside a flat shard."""

    layout: ParameterLayout
    local_shape: torch.Size
    """Shape of this rank's part of the parameter, before ZeRO cuts it."""
    offset: int
    """First element in the shard."""
    start: int
    """First element in the flattened local parameter."""
    length: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.local_shape.numel()


class Keeper(Protocol):
    """Keeps masters and optimizer states outside of the device between the times when they are worked on.

    An offloaded tensor has no elements, so whoever forgets to fetch it gets an error about shapes, never old numbers.
    """

    def new_state(self, shard: Shard) -> Tensor:
        """Return a state of zeros as long as the master, already offloaded."""
        ...

    def visit(self, shards: Sequence[Shard], *, states: bool, writes: bool) -> Iterator[Sequence[Shard]]:
        """Yield `shards` in groups that are resident until the next is asked for, with their states if `states`.

        Only with `writes` are changes kept, and weights written from the masters as these leave.
        """
        ...

    def at_rest(self, tensor: Tensor) -> Tensor:
        """Return the storage of an offloaded master or state, a tensor on the CPU: what is written there counts.

        Any other tensor is returned as it is.
        """
        ...

    def rest(self) -> None:
        """Free the memory that `at_rest` has taken."""
        ...


@dataclass(slots=True, kw_only=True)
class Shard:
    """A flat tensor that this rank updates: fp32 masters under bf16 and fp16, else the parameters themselves.

    Read and write masters and states within `resident_groups`: between two steps they may be offloaded.
    """

    master: Tensor
    """The numbers that the optimizer updates, (size,), contiguous."""
    weights: Tensor | None = None
    """The master in the compute dtype, (size,); None: the model computes with the master itself."""
    keeper: Keeper | None = None
    """Keeper of master and states between two steps; None: they are always on the device."""
    gradient: Tensor | None = None
    """The reduced gradient, (size,), set by the gradient reducer at the end of a step's reductions."""
    keeps_gradient: bool = False
    """Whether the gradient has the dtype of the master, and one place in memory for good."""
    segments: list[Segment] = field(default_factory=list[Segment])
    """The parameters' runs, ascending by offset; they may leave gaps (padding)."""
    group: int = 0
    """Index of the optimizer's parameter group."""
    counts: bool = True
    """Whether norms and checkpoints count this rank's copy; of all copies, one rank's counts."""
    cut_group: GroupView | None = None
    """The ranks over which ZeRO has cut the parameters, which hold their other runs; None: ZeRO has not cut them.

    Sums over a parameter are collective over this group.  An empty shard has it too: every rank takes part."""
    cut_matrices: Mapping[str, int] = field(default_factory=dict[str, int])
    """Name → columns of the matrices whose rows are cut over `cut_group`; the same on all its ranks."""
    sparse: bool = False
    """Whether this is one unsplit table whose gradient comes as `rows`, and `gradient` stays None."""
    rows: SparseRows | None = None
    """The summed rows of a sparse shard's gradient, set by the gradient reducer."""
    rest: Callable[[], None] | None = None
    """Frees memory into which master and gradient can be read again; None: they keep their memory."""
    size: int = field(init=False)
    """Elements of the master, also while it is offloaded."""

    def __post_init__(self) -> None:
        self.size = self.master.numel()

    def new_state(self) -> Tensor:
        """Return a state of zeros with one element for each of the master's."""
        return torch.zeros_like(self.master) if self.keeper is None else self.keeper.new_state(self)

    def at_rest(self, tensor: Tensor) -> Tensor:
        """Return where the master or a state lies between two steps, for saving and loading."""
        return tensor if self.keeper is None else self.keeper.at_rest(tensor)

    def let_go(self) -> None:
        """Free the memory into which `at_rest` has read offloaded tensors."""
        if self.rest is not None:
            self.rest()
        if self.keeper is not None:
            self.keeper.rest()

    def write_weights(self) -> None:
        """Cast the master to the weights.  An offloaded master was cast as it left."""
        if self.weights is not None and self.master.numel() == self.size:
            self.weights.copy_(self.master)

    def take_over(self) -> None:
        """Copy weights that were changed since `write_weights` to the master.  The others keep their digits."""
        if self.weights is not None and self.master.numel() == self.size:
            # Weights are rounded masters: copying unchanged ones back would throw the masters' low digits away.
            changed = self.weights != self.master.to(self.weights.dtype)
            self.master.copy_(torch.where(changed, self.weights.to(self.master.dtype), self.master))

    def gradient_values(self) -> Tensor | None:
        """Return the reduced gradient, flat, without rows that are zero by construction; norms read this."""
        if self.sparse:
            return None if self.rows is None else self.rows.values.reshape(-1)
        return self.gradient

    def dense_gradient(self) -> Tensor:
        """Return the reduced gradient, (size,)."""
        if self.rows is not None:
            return self.rows.spread(self.segments[0].local_shape).view(-1)
        assert self.gradient is not None, "the gradient reducer has not finished this step"
        return self.gradient


def first_element(shape: torch.Size, sharding: GroupView) -> int:
    """Return the first element of a rank's shard under `fully_shard`: equal chunks of rows, except for the last."""
    rows = -(-shape[0] // sharding.size) if shape else 1
    return min(sharding.index * rows * torch.Size(shape[1:]).numel(), shape.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShard:
    """A run of a named, layout-free tensor that lives on this rank: the unit of saving and loading."""

    name: str
    """`model/<parameter>`, `optimizer/<state>/<parameter>`, `average/<parameter>`, `buffer/<buffer>`, and
    `compression/<kind>/<parameter>` and `local/…`, which belong to a plan: a checkpoint may lack them, or hold them in
    vain."""
    shape: torch.Size
    """Shape of the whole tensor."""
    tensor: Tensor
    """1-D live storage; loading copies into it."""
    split: NestedSplit = NestedSplit()
    """The cuts that lead from the full tensor to the part in which this run lies."""
    start: int = 0
    """First element in the flattened local tensor (after `split`)."""
    counts: bool = True
    """Whether this rank writes it (every element of a tensor is written once)."""
    let_go: Callable[[], None] | None = None
    """Called by a reader who has read it: what lies elsewhere needs no memory then."""
    addend: tuple[int, int] | None = None
    """(index, number): one of `number` tensors of this name, on as many ranks, of which only the sum says something
    about the training.  Each is stored by itself; where another number of them is loaded, each gets an equal part of
    the sum."""

    @property
    def stored_name(self) -> str:
        """Name in a checkpoint."""
        return self.name if self.addend is None else f"{self.name}@{self.addend[0]}-of-{self.addend[1]}"


def checkpoint_shards_of(prefix: str, shards: Sequence[Shard], states: Sequence[Tensor]) -> Iterator[CheckpointShard]:
    """Yield the checkpoint shards `<prefix>/<parameter>` of states (or averages) that are laid out element by element
    as the masters are."""
    for shard, values in zip(shards, states, strict=True):
        state = shard.at_rest(values)
        for segment in shard.segments:
            yield CheckpointShard(
                name=f"{prefix}/{segment.layout.name}",
                shape=segment.layout.shape,
                tensor=state[segment.offset : segment.offset + segment.length],
                split=segment.layout.split,
                start=segment.start,
                counts=shard.counts,
                let_go=None if shard.keeper is None else shard.let_go,
            )


def resident_groups(shards: Sequence[Shard], *, states: bool = True, writes: bool = True) -> Iterator[Sequence[int]]:
    """Yield the indices of all shards in groups that are resident until the next group is asked for.

    A group's masters, and their states if `states`, are on the device then.  There is one group where nothing is
    offloaded.  `writes` must be true where masters or states change.  Ranks with the same runs get the same groups.
    """
    kept = {id(shard): index for index, shard in enumerate(shards) if shard.keeper is not None}
    keeper = next((shard.keeper for shard in shards if shard.keeper is not None), None)
    resident = [index for index, shard in enumerate(shards) if shard.keeper is None]
    if resident or keeper is None:
        yield resident
    if keeper is not None:
        for group in keeper.visit([shards[index] for index in kept.values()], states=states, writes=writes):
            yield [kept[id(shard)] for shard in group]


@torch.no_grad()
def exchange_masters(shards: Sequence[Shard], others: Sequence[Tensor]) -> None:
    """Exchange masters and others in place, one shard at a time, so that one shard alone exists three times."""
    for here in resident_groups(shards, states=False):
        for index in here:
            master = shards[index].master.clone()
            shards[index].master.copy_(others[index])
            others[index].copy_(master)
