"""What each rank computes on: the section `compute` of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from weft.config.document import Rules, format_value
from weft.config.recipe import Precision
from weft.config.settings import setting
from weft.errors import PlanError

_RULES = Rules(PlanError)
THREADS = "compute.threads_per_rank"
"""The dotted key of a rank's threads, for those who say why it has so many."""
COLLECTIVE_TIMEOUT_SECONDS = 600.0
"""How long ranks wait for one another where nothing else is said."""
_LONGEST_SECONDS = 2_592_000.0
"""30 days: clocks of backends count in nanoseconds, and overflow some time after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan:
    """In what precision and on what each rank computes."""

    precision: Precision = setting("fp32", space="precisions", asked=("precision",), explained=True)
    """Precision of forward and backward; masters stay fp32 with bf16 and fp16."""
    compile: bool = False
    """Compile each block with torch.compile."""
    threads_per_rank: int = setting(1, free=True)
    """Threads of CPU computation."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", free=True)
    """`auto`: an accelerator where there is one."""
    backend: Literal["auto", "gloo", "weft"] = setting("auto", free=True)
    """What carries tensors of the CPU between ranks.  weft: memory that one host's ranks share, Gloo between hosts;
    auto: weft where ranks compute on the CPU.  Algorithms that data_parallel.algorithm names send messages over Gloo
    under each of them."""
    collective_timeout_seconds: float = setting(COLLECTIVE_TIMEOUT_SECONDS, free=True)
    """How long a rank waits in a collective, or for a message, until those that have not come are given up: longer than
    ranks may be apart, as when one compiles or reads data, and at most 30 days."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "threads_per_rank")
        _RULES.above_zero(self, "collective_timeout_seconds")
        _RULES.between(self, 0.1, _LONGEST_SECONDS, "collective_timeout_seconds", below=False)
        if self.backend == "weft" and self.device == "cuda":
            raise _RULES.refuse(self, "backend", 'carries tensors of the CPU only, and device = "cuda". Use "auto".')

    @property
    def num_threads(self) -> int:
        """Threads of a rank's computation on the CPU."""
        return self.threads_per_rank

    def with_threads(self, threads: int) -> ComputePlan:
        """Return the same with so many threads on each rank."""
        return replace(self, threads_per_rank=threads)

    @property
    def timeout_seconds(self) -> float:
        """How long a rank waits for others in a collective."""
        return self.collective_timeout_seconds

    def waiting(self, seconds: float) -> ComputePlan:
        """Return the same with ranks that wait so long for one another."""
        return replace(self, collective_timeout_seconds=seconds)

    def unsupported_in_script(self) -> Iterator[str]:
        """Yield why no script of plain torch computes so, with the change to make."""
        if self.precision == "fp16":
            yield 'plan.compute.precision = "fp16": the script scales no losses. Use "bf16" or "fp32".'
        if self.backend == "weft":
            yield 'plan.compute.backend = "weft": the script imports torch alone, which has Gloo on CPUs. Use "auto".'
        if self.collective_timeout_seconds != COLLECTIVE_TIMEOUT_SECONDS:
            named = f"plan.compute.collective_timeout_seconds = {format_value(self.collective_timeout_seconds)}"
            yield f"{named}: the script waits for other ranks as long as torch does by itself. Leave it out."
