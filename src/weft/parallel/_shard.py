"""What an optimizer updates and what a checkpoint stores, whatever the plan: flat runs of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm import GroupView
from weft.parallel._layout import ParameterLayout, TensorSplit
from weft.parallel._rows import SparseRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of one parameter inside a flat shard."""

    layout: ParameterLayout
    local_shape: torch.Size
    """Shape of the parameter on this rank after the tensor split (before any data-parallel cut)."""
    offset: int
    """First element in the shard."""
    start: int
    """First element in the flattened local parameter."""
    length: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.local_shape.numel()


@dataclass(slots=True, kw_only=True)
class Shard:
    """A flat tensor that this rank updates: fp32 masters under bf16 and fp16, else the parameters themselves."""

    master: Tensor
    """1-D, contiguous."""
    gradient: Tensor | None = None
    """1-D, as long as `master`, set by the gradient store once a step's gradients are reduced."""
    segments: list[Segment] = field(default_factory=list[Segment])
    """Ascending by offset; they may leave gaps (padding)."""
    group: int = 0
    """Index of the optimizer's parameter group."""
    counts: bool = True
    """Whether norms and checkpoints count this rank's copy among its data replicas."""
    data_cut: bool = False
    """Whether other data ranks hold other runs of the same parameters (so that sums over a parameter need them)."""
    cut_group: GroupView | None = None
    """The ranks that hold those other runs (`mesh["data"]` under ZeRO-1/2, `mesh["shard"]` under ZeRO-3); given
    whenever `data_cut`, also on a shard that came out empty, so that every rank of the group takes part in sums."""
    sparse: bool = False
    """Whether this is one whole table whose gradient comes as `rows`, and `gradient` stays None."""
    rows: SparseRows | None = None
    """Of a sparse shard: what the step's rows sum to, set by the gradient store."""

    def gradient_values(self) -> Tensor | None:
        """The elements of the reduced gradient that are not zero by construction, flat: what norms look at."""
        if self.sparse:
            return None if self.rows is None else self.rows.values.reshape(-1)
        return self.gradient

    def dense_gradient(self) -> Tensor:
        """The reduced gradient, as long as `master`."""
        if self.rows is not None:
            return self.rows.spread(self.segments[0].local_shape).view(-1)
        assert self.gradient is not None, "the gradient store has not finished this step"
        return self.gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of a named, layout-free tensor that lives on this rank: the unit of saving and loading."""

    name: str
    """`model/<parameter>`, `optimizer/<state>/<parameter>`, `average/<parameter>`, `buffer/<buffer>`, and
    `compression/<kind>/<parameter>` and `local/…`, which belong to a plan: a checkpoint may lack them, or hold them in
    vain."""
    shape: torch.Size
    """Shape of the whole tensor."""
    tensor: Tensor
    """1-D live storage; loading copies into it."""
    split: TensorSplit | None = None
    start: int = 0
    """First element in the flattened local tensor (after `split`)."""
    counts: bool = True
    """Whether this rank writes it (every element of a tensor is written once)."""
    addend: tuple[int, int] | None = None
    """(index, number): one of `number` tensors of this name, on as many ranks, of which only the sum says something
    about the training.  Each is stored by itself; where another number of them is loaded, each gets an equal part of
    the sum."""

    @property
    def stored_name(self) -> str:
        """Name in a checkpoint."""
        return self.name if self.addend is None else f"{self.name}@{self.addend[0]}-of-{self.addend[1]}"


def shard_pieces(prefix: str, shards: Sequence[Shard], states: Sequence[Tensor]) -> Iterator[Piece]:
    """Yield the pieces `<prefix>/<parameter>` of states (or averages) that lie element by element as the masters do."""
    for shard, state in zip(shards, states, strict=True):
        for segment in shard.segments:
            yield Piece(
                name=f"{prefix}/{segment.layout.name}",
                shape=segment.layout.shape,
                tensor=state[segment.offset : segment.offset + segment.length],
                split=segment.layout.split,
                start=segment.start,
                counts=shard.counts and segment.layout.counts,
            )


@torch.no_grad()
def exchange_masters(shards: Sequence[Shard], others: Sequence[Tensor]) -> None:
    """Let masters and others change places, one shard at a time: there is no third copy."""
    for shard, other in zip(shards, others, strict=True):
        held = shard.master.clone()
        shard.master.copy_(other)
        other.copy_(held)
