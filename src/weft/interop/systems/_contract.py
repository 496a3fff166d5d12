"""The contract with other training systems: a job that they are given, and an emission that starts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.config.recipe import OptimizerRecipe
from weft.model.profile import ModelSizes
from weft.techniques.cost_terms import Layout

DEFAULT_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemJob:
    """A model under a layout, as another system is to train it."""

    sizes: ModelSizes
    layout: Layout
    cuts: tuple[int, ...] = ()
    """First block of each later stage; empty without a pipeline."""
    shares: tuple[int, ...] = ()
    """Microbatches of each data rank where they differ; empty: all have `layout.microbatches`."""
    global_batch_size: int
    sequence_length: int
    devices_per_node: int
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    steps: int = DEFAULT_STEPS

    @property
    def nodes(self) -> int:
        """Nodes in use; all but a single one are full."""
        return -(-self.layout.world_size // self.devices_per_node)

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return min(self.layout.world_size, self.devices_per_node)

    @property
    def adamw(self) -> dict[str, Any]:
        """Arguments of torch's AdamW."""
        optimizer = self.optimizer
        return {
            "lr": optimizer.learning_rate,
            "betas": optimizer.betas,
            "eps": optimizer.epsilon or 1e-8,
            "weight_decay": optimizer.weight_decay,
        }

    @property
    def stages(self) -> tuple[range, ...]:
        """Blocks of each stage, in the order of the model."""
        starts, ends = (0, *self.cuts), (*self.cuts, self.sizes.num_layers)
        return tuple(range(start, end) for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Command and files that start another system with the same model and the same layout."""

    system: str
    version: str
    command: tuple[str, ...]
    """Words of the command, to be given on every node.  `$HEAD_NODE` and `$NODE_RANK` stand for what only the place
    knows."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name → text of what must lie in the folder of the command."""
    notes: tuple[str, ...] = ()
    """Lines on what the system does differently, and on placeholders that the user must replace."""
