"""What a block sends and takes on one rank, and what a rank holds of a pipeline."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.config.cluster import Collective
from weft.model.profile import Operator, last_of_experts
from weft.techniques.cost_terms._compute import Device, OperatorWork, Share
from weft.techniques.cost_terms._placement import AxisGroup


class Seconds(Protocol):
    """Seconds of a collective: see `collective_seconds`."""

    def __call__(self, kind: Collective, size_bytes: float, group: AxisGroup, algorithm: str = "auto", /) -> float: ...


class PassCost(NamedTuple):
    """Seconds of one pass of one microbatch through a block on one rank, by cause."""

    ideal: float = 0.0
    shapes: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    statistics: float = 0.0
    """Exchange of batch norms' statistics between data ranks."""

    @property
    def compute(self) -> float:
        return self.ideal + self.shapes + self.memory

    @property
    def seconds(self) -> float:
        return sum(self)


Works = list[tuple[Operator, OperatorWork]]


class CostKey(NamedTuple):
    """All that the cost of a block depends on, beside the block."""

    samples: int
    sequence_parallel: bool
    tensor_scheme: str
    context_scheme: str
    context_ulysses: int
    expert_exchange: str
    expert_tensor: int
    precision: str
    gradient_bytes: int
    tensor: AxisGroup
    context: AxisGroup
    expert: AxisGroup
    statistics: AxisGroup | None
    """Data ranks that exchange the statistics of batch norms; None where the model has none."""


class Sender(NamedTuple):
    """One rank in one block: what decides what it sends."""

    works: Works
    share: Share
    key: CostKey
    seconds: Seconds
    device: Device

    @property
    def summed_experts(self) -> Operator | None:
        """The product of experts whose results the tensor ranks sum up, once those of a token are added."""
        is_cut = self.share.expert_tensor > 1
        return last_of_experts([operator for operator, _ in self.works]) if is_cut else None


class RankLoad(NamedTuple):
    """What one pipeline rank holds and how long its last backward and first forward take."""

    dense: float
    """Elements of weights that are no experts."""
    experts: float
    forward: float
    backward: float
    scatter: float = 0.0
    """Exposed seconds by which ZeRO-3's reduction of a step's gradients makes its last backward longer, where that is
    the only one that reduces."""
