"""Settings of the pipeline: its schedule, its chunks and its cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from weft.config.document import Rules
from weft.config.settings import setting
from weft.errors import PlanError
from weft.techniques.pipeline.schedules import SPLIT_BACKWARD, PricedSchedule, Schedule, chunk_limits

_RULES = Rules(PlanError)
_NAMES: Mapping[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "interleaved_zero_bubble": "interleaved zero-bubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
}
TORCH_SCHEDULES: Mapping[PricedSchedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
}
"""Names of what torch's own runtime plays alike: classes of `torch.distributed.pipelining`, after `Schedule`."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The section `pipeline_parallel`."""

    schedule: Schedule = setting("1f1b", space="schedules", asked=("schedule",), axis="pipeline", explained=True)
    """The order of forwards and backwards."""
    chunks_per_rank: int = setting(
        1, layout="chunks", space="chunks", asked=("chunks_per_rank", "chunks"), explained=True
    )
    """Stages on each pipeline rank."""
    cuts: tuple[int, ...] | None = setting(None, follows="mesh.pipeline")
    """First block of each later stage (stages = pipeline × chunks_per_rank); None: cut by cost."""

    def check_settings(self) -> None:
        _RULES.at_least(self, 1, "chunks_per_rank")
        cuts = self.cuts or ()
        if any(later <= earlier for earlier, later in zip(cuts, cuts[1:], strict=False)) or min(cuts, default=1) < 1:
            raise _RULES.refuse(self, "cuts", "must rise, from 1 up: they are the first blocks of later stages.")

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed in a pass of their own, later than those of inputs."""
        return self.schedule in SPLIT_BACKWARD

    @property
    def torch_schedule(self) -> str | None:
        """Name that torch's own runtime gives it; None where it has none that is alike."""
        return TORCH_SCHEDULES.get(self.schedule)

    @property
    def schedule_setting(self) -> str:
        """The setting as an error names it."""
        return f'schedule = "{self.schedule}"'

    @property
    def schedule_name(self) -> str:
        """The schedule as papers write it."""
        return _NAMES[self.schedule]

    def shape(self, pipeline: int) -> tuple[Schedule, int, int]:
        """Return what orders of actions are made of (`schedule_orders`, `stage_ranks`), for so many ranks."""
        return self.schedule, pipeline, self.chunks_per_rank

    def num_stages(self, pipeline: int) -> int:
        """Return the stages of a pipeline of so many ranks."""
        return pipeline * self.chunks_per_rank

    def pattern_microbatches(self, pipeline: int) -> int:
        """Return how many microbatches show what a schedule does with any number of them."""
        return pipeline * (2 if self.chunks_per_rank > 1 else 1)

    def with_few_chunks(self) -> Self:
        """Return the same with two chunks per rank, where the schedule leaves their number open and has more."""
        least, most = self.chunk_limits
        return self if most is not None else replace(self, chunks_per_rank=max(least, min(self.chunks_per_rank, 2)))

    @property
    def chunk_limits(self) -> tuple[int, int | None]:
        """The least and the most stages per rank that the schedule has; None: any number."""
        return chunk_limits(self.schedule)
