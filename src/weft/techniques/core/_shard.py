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
    """Keeps masters and optimizer states elsewhere between the times when they are worked on.

    What is away has no elements, so that whoever forgets to fetch it gets an error about shapes and never old numbers.
    """

    def new_state(self, shard: Shard) -> Tensor:
        """Return a state of zeros, one element for each of the master's, that is away already."""
        ...

    def visit(self, shards: Sequence[Shard], *, states: bool, writes: bool) -> Iterator[Sequence[Shard]]:
        """Yield `shards` in groups that are there until the next is asked for, with their states if `states`.

        Changes are kept, and masters published as they leave, only if `writes`.
        """
        ...

    def at_rest(self, tensor: Tensor) -> Tensor:
        """Return the storage of a master or state while it is away, a tensor on the CPU: what is written there counts.

        Any other tensor is returned as it is.
        """
        ...

    def rest(self) -> None:
        """Let memory go that `at_rest` has taken."""
        ...


@dataclass(slots=True, kw_only=True)
class Shard:
    """A flat tensor that this rank updates: fp32 masters under bf16 and fp16, else the parameters themselves.

    Read and write masters and states within `resident_groups`: between two steps they may be away.
    """

    master: Tensor
    """1-D, contiguous."""
    weights: Tensor | None = None
    """What the master is cast to for computing, 1-D; None: the model computes with the master itself."""
    keeper: Keeper | None = None
    """Keeper of master and states between two steps; None: they are always there."""
    gradient: Tensor | None = None
    """1-D, as long as `master`, set by the gradient reducer once a step's gradients are reduced."""
    keeps_gradient: bool = False
    """Whether the gradient has the dtype of the master, and its place in memory for good."""
    segments: list[Segment] = field(default_factory=list[Segment])
    """Ascending by offset; they may leave gaps (padding)."""
    group: int = 0
    """Index of the optimizer's parameter group."""
    counts: bool = True
    """Whether norms and checkpoints count this rank's copy, of all that ranks hold."""
    cut_group: GroupView | None = None
    """The ranks over which ZeRO has cut the parameters, who hold the other runs of them, so that sums over a parameter
    need them; None where it has not.  A shard that came out empty has it too: every rank of the group takes part."""
    cut_matrices: Mapping[str, int] = field(default_factory=dict[str, int])
    """Matrix whose rows are cut over `cut_group` → its columns; the same on all its ranks, also on those without a
    row."""
    sparse: bool = False
    """Whether this is one whole table whose gradient comes as `rows`, and `gradient` stays None."""
    rows: SparseRows | None = None
    """Rows of a sparse shard: what the step's rows sum to, set by the gradient reducer."""
    rest: Callable[[], None] | None = None
    """Lets memory go that master and gradient can be read into again; None: they have it for good."""
    size: int = field(init=False)
    """Elements of the master, also while it is away."""

    def __post_init__(self) -> None:
        self.size = self.master.numel()

    def new_state(self) -> Tensor:
        """Return a state of zeros with one element for each of the master's."""
        return torch.zeros_like(self.master) if self.keeper is None else self.keeper.new_state(self)

    def at_rest(self, tensor: Tensor) -> Tensor:
        """Return where the master or a state lies between two steps, for saving and loading."""
        return tensor if self.keeper is None else self.keeper.at_rest(tensor)

    def let_go(self) -> None:
        """Let memory go in which `at_rest` has read what lies elsewhere."""
        if self.rest is not None:
            self.rest()
        if self.keeper is not None:
            self.keeper.rest()

    def write_weights(self) -> None:
        """Cast the master to the weights.  One that is away has done so when it left."""
        if self.weights is not None and self.master.numel() == self.size:
            self.weights.copy_(self.master)

    def take_over(self) -> None:
        """Take over what somebody has written into the weights since `write_weights`.  The others keep their digits."""
        if self.weights is not None and self.master.numel() == self.size:
            changed = self.weights != self.master.to(self.weights.dtype)
            self.master.copy_(torch.where(changed, self.weights.to(self.master.dtype), self.master))

    def gradient_values(self) -> Tensor | None:
        """The elements of the reduced gradient that are not zero by construction, flat: what norms look at."""
        if self.sparse:
            return None if self.rows is None else self.rows.values.reshape(-1)
        return self.gradient

    def dense_gradient(self) -> Tensor:
        """The reduced gradient, as long as `master`."""
        if self.rows is not None:
            return self.rows.spread(self.segments[0].local_shape).view(-1)
        assert self.gradient is not None, "the gradient reducer has not finished this step"
        return self.gradient


def first_element(shape: torch.Size, sharding: GroupView) -> int:
    """Return the first element of a rank's run of a tensor that `fully_shard` has cut: along dim 0, in equal chunks of
    rows but for the last."""
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
    """How the part is cut out of the whole tensor in which this run lies."""
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
    """Yield the indices of all shards in groups: a group's masters, and their states if `states`, are there until the
    next is asked for.  One group where nothing is kept elsewhere.

    `writes` must be true where masters or states change.  The groups are the same on ranks that hold the same runs.
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
    """Let masters and others change places, one shard at a time: there is no third copy."""
    for here in resident_groups(shards, states=False):
        for index in here:
            master = shards[index].master.clone()
            shards[index].master.copy_(others[index])
            others[index].copy_(master)
