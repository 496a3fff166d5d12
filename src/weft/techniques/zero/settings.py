"""Settings of ZeRO: its stage, and how often gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from weft.config.settings import setting
from weft.errors import PlanError

Stage = Literal[0, 1, 2, 3]
ReduceEvery = Literal["auto", "step", "microbatch"]
ZERO_KEY = "data_parallel.zero"
"""The stage as a plan file spells it."""


def stage_of(number: int) -> Stage:
    """Return a stage.

    Raises:
        PlanError: the number is none.
    """
    match number:
        case 0 | 1 | 2 | 3:
            return number
        case _:
            raise PlanError(f"data_parallel.zero = {number} is no stage. Use 0, 1, 2 or 3.")


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """The part of `data_parallel` that is about what data ranks share out."""

    zero: Stage = setting(1, space="zeros", asked=("zero",), explained=True)
    """1 and 2 shard over replicate × shard; 3 shards the weights over shard only."""
    reduce_every: ReduceEvery = setting("auto", space="reductions", asked=("reduce_every",), explained=True)
    """How often ZeRO-2 and 3 reduce-scatter gradients.  `microbatch`: each rank keeps its share only, and every
    microbatch sends all gradients.  `step`: they travel once, and stay whole from the first backward to the last.
    `auto`: `microbatch` with ZeRO-2 and 3 without a pipeline, `step` otherwise; a search names what is faster and fits.
    Copies of hybrid sharding are summed once per step in either case."""

    @property
    def stage(self) -> int:
        """The number alone, as tables and other systems have it."""
        return self.zero

    @property
    def zero_setting(self) -> str:
        """The setting as an error names it."""
        return f"{ZERO_KEY} = {self.zero}"

    @property
    def stage_name(self) -> str:
        """`ZeRO-3`."""
        return f"ZeRO-{self.zero}"

    @property
    def shards_states(self) -> bool:
        """Whether data ranks share out optimizer states."""
        return self.zero >= 1

    @property
    def shards_gradients(self) -> bool:
        """Whether data ranks share out gradients, once they are reduced."""
        return self.zero >= 2

    @property
    def shards_weights(self) -> bool:
        """Whether the ranks of `mesh.shard` share out the weights, and gather them where they compute."""
        return self.zero == 3

    @property
    def shards_gradients_alone(self) -> bool:
        """Whether gradients are shared out bucket by bucket, and the weights stay whole."""
        return self.zero == 2

    @property
    def bucket_stage(self) -> Literal[0, 1, 2]:
        """The stage of parameters whose weights stay whole: ZeRO-3 over one shard is ZeRO-1 over the replicas."""
        return 1 if self.zero == 3 else self.zero

    def unsharded(self) -> Self:
        """Return the same with everything whole on every data rank."""
        return replace(self, zero=0)

    @property
    def gathers_after_step(self) -> bool:
        """Whether every data rank renews a part of the weights, which all then gather."""
        return self.zero in (1, 2)
