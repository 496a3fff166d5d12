"""Microbatches: how the global batch falls into the shares of data ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from weft.config.document import Rules
from weft.config.settings import setting
from weft.errors import PlanError

_RULES = Rules(PlanError)


class ReplicaAveraging:
    """How often replicas meet: in every step, where no technique says otherwise.

    Everything that asks this of a plan or a layout asks it by these names, so that it need not know the technique.
    """

    @property
    def round_length(self) -> int:
        """Steps that each replica takes by itself before replicas average their weights; 0: none."""
        return 0

    @property
    def replicas_step_alone(self) -> bool:
        """Whether gradients meet inside a replica only."""
        return self.round_length > 0

    def ends_round(self, step: int, num_steps: int | None) -> bool:
        """Whether a round ends with a step, from 0, of a training of `num_steps`: its last one ends there, too.  None:
        nobody knows them yet."""
        return self.replicas_step_alone and ((step + 1) % self.round_length == 0 or step + 1 == num_steps)

    def average_seconds(self, master_bytes: int, seconds_per_byte: float, memory_bytes_per_second: float) -> float:
        """Return seconds per element and step of averaging the replicas at the end of a round: nothing hides it.

        Args:
            master_bytes: of one element.
            seconds_per_byte: of an all-reduce over the replicas.
            memory_bytes_per_second: of a rank's device.
        """
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPlan:
    """How the global batch falls into microbatches."""

    size: int = setting(
        1,
        layout="microbatch_size",
        space="microbatch_sizes",
        asked=("size", "microbatch", "micro", "microbatch_size"),
        explained=True,
    )
    """Samples per microbatch and data rank."""
    per_step: int | tuple[int, ...] = setting(1, follows="microbatch.size")
    """Microbatches per step on each data rank; a list gives data ranks unequal shares."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "size")
        if isinstance(self.per_step, int):
            _RULES.at_least(self, 1, "per_step")
        elif not self.per_step or min(self.per_step) < 1:
            raise _RULES.refuse(self, "per_step", "must give each data rank at least 1 microbatch.")

    @property
    def is_split(self) -> bool:
        """Whether a data rank takes its samples in more than one microbatch, or ranks take unequal numbers."""
        return self.per_step != 1

    @property
    def has_unequal_shares(self) -> bool:
        """Whether some data ranks have more microbatches than others."""
        return isinstance(self.per_step, tuple) and len(set(self.per_step)) > 1

    @classmethod
    def of(cls, size: int, shares: tuple[int, ...]) -> Self:
        """Return microbatches of `size` samples, so many on each data rank."""
        return cls(size=size, per_step=as_per_step(shares))

    @classmethod
    def of_share(cls, samples: int, at_least: int) -> Self:
        """Return microbatches of a rank's samples: the fewest that are at least so many, or one sample each."""
        parts = min(at_least, samples)
        number = next(number for number in range(parts, samples + 1) if samples % number == 0)
        return cls(size=samples // number, per_step=number)

    def smaller(self) -> Self | None:
        """Return the same samples in smaller microbatches, by the smallest divisor of the size; None: of one sample."""
        divisor = next((by for by in range(2, self.size + 1) if self.size % by == 0), None)
        if divisor is None:
            return None
        counts = self.per_step
        more = counts * divisor if isinstance(counts, int) else tuple(share * divisor for share in counts)
        return replace(self, size=self.size // divisor, per_step=more)

    def joined(self) -> Self:
        """Return the same samples in one microbatch per data rank; itself where ranks have unequal shares."""
        if self.has_unequal_shares:
            return self
        count = self.shares(1)[0]
        return replace(self, size=self.size * count, per_step=1)

    def shares(self, data_ranks: int) -> tuple[int, ...]:
        """Microbatches of each data rank."""
        return (self.per_step,) * data_ranks if isinstance(self.per_step, int) else self.per_step


def even_shares(microbatches: int, data_ranks: int) -> tuple[int, ...]:
    """Return microbatches per data rank, as equal as can be, the larger shares first: 32 over 3 is 11, 11, 10."""
    fewest, more = divmod(microbatches, data_ranks)
    return tuple(fewest + (rank < more) for rank in range(data_ranks))


def as_per_step(shares: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return shares as `per_step` spells them: one number when they are equal."""
    return shares[0] if len(set(shares)) == 1 else shares


def split_batch(global_batch_size: int, data_ranks: int, largest: int) -> MicrobatchPlan | None:
    """Return the microbatches that keep the global batch exactly; None when there are more data ranks than samples.

    The busiest rank gets as few samples as can be; among such splits the microbatch is the largest up to `largest`.
    """
    if data_ranks > global_batch_size:
        return None
    best: tuple[int, int] | None = None
    for size in range(1, min(largest, global_batch_size // data_ranks) + 1):
        if global_batch_size % size == 0:
            busiest = even_shares(global_batch_size // size, data_ranks)[0] * size
            best = min(best, (busiest, -size)) if best is not None else (busiest, -size)
    if best is None:
        return None
    size = -best[1]
    return MicrobatchPlan(size=size, per_step=as_per_step(even_shares(global_batch_size // size, data_ranks)))
