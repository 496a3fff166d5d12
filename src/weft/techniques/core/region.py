"""The sequence region: the part of a model that works on shards of the sequence under sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import NO_SEQUENCE, FoundCut


@dataclass(frozen=True, slots=True)
class SequenceRegion:
    """Blocks, and the modules right after them that the table marks `sequence` (the final norm)."""

    blocks: tuple[str, ...]
    tail: tuple[str, ...]

    @property
    def last(self) -> str:
        """The module after which the sequence is whole again."""
        return self.tail[-1] if self.tail else self.blocks[-1]

    def contains(self, name: str) -> bool:
        return any(name == member or name.startswith(member + ".") for member in (*self.blocks, *self.tail))


def sequence_region(blueprint: Blueprint) -> SequenceRegion:
    """Return the region of a model.

    Raises:
        PlanError: the model has no cut table by hand, which names the blocks and what stands around them.
    """
    if isinstance(blueprint.cut, FoundCut):
        raise PlanError(
            f"plan.tensor_parallel.sequence = true cannot be had for {type(blueprint.module).__name__}: {NO_SEQUENCE}."
            " Use sequence = false."
        )
    if blueprint.cut is None:
        raise PlanError(
            "plan.tensor_parallel.sequence = true, but nothing says where the blocks of"
            f" {type(blueprint.module).__name__} begin and end (it has no cut table). Use sequence = false."
        )
    tail = takewhile(lambda name: blueprint.kind_of(name) == "sequence", blueprint.cut.tail)
    return SequenceRegion(tuple(blueprint.cut.blocks), tuple(tail))
