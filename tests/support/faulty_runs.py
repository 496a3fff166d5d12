"""Folders of runs whose records are made up, with a recipe and a plan, and with faults of a given size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from recorded_runs import _COLUMNS, MadeUpRun

from weft.config.cluster import Cluster, Devices, Node, table_links
from weft.watch.doctor import RunCase, examine_run
from weft.watch.run_record import RunRecord
from weft.watch.store import TelemetryReader
from weft.watch.verdicts import RunVerdict

RECIPE = """
[model]
reference = "decoder"
num_layers = 4
hidden_size = {hidden}
num_heads = 4
vocabulary_size = 512
sequence_length = {tokens}
num_experts = {experts}
top_k = {choices}

[data]
train = [{{ source = "stdlib" }}]

[batch]
global_batch_size = {batch}

[optimizer]
name = "adamw"
learning_rate = {rate}

[run]
steps = 1000

[permit]
precision = [{precisions}]
"""

PLAN = """
[mesh]
pipeline = {pipeline}
replicate = {data}

{cuts}
[microbatch]
size = {size}
per_step = {per_step}

[compute]
threads_per_rank = {threads}
"""


def cpu_cluster(cores: int = 8, *, bf16: float = 0.24, peak: float = 1e11) -> Cluster:
    """A machine of cores whose bf16 is so many times as fast as fp32."""
    devices = Devices(kind="cpu", count=cores, memory_bytes=4 << 30, peak_flops={"fp32": peak, "bf16": bf16 * peak})
    node = Node(cores=cores, memory_bytes=cores * (4 << 30), devices=devices)
    return Cluster(nodes=(node,), links=table_links("cpu", 1, cores))


@dataclass(kw_only=True)
class FaultyRun(MadeUpRun):
    """A run with a recipe and a plan, and what is wrong with it."""

    hidden: int = 512
    tokens: int = 256
    batch: int = 32
    size: int = 8
    rate: float = 3e-4
    threads: int = 1
    experts: int = 0
    choices: int = 2
    precisions: str = '"fp32"'
    cluster: Cluster = field(default_factory=cpu_cluster)
    link: float = 0.0
    """Seconds more that every rank needs for the reduction of gradients."""
    lost: float = 0.0
    """Seconds of each step in which `without_core` have no processor."""
    without_core: tuple[int, ...] = ()
    others: float = 0.0
    """Seconds of each step that other programs compute on this machine's cores."""
    leak: float = 0.0
    """Bytes by which the memory of rank `leaks` grows per step."""
    leaks: int = 0
    cuts: str = ""
    """Lines of the plan that say how stages are cut."""
    share: float = 0.4
    """Share of the peak that a step of 80 ms reaches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        per_step = max(1, self.batch // (self.data * self.size))
        (self.folder / "recipe.toml").write_text(RECIPE.format(**values))
        (self.folder / "plan.toml").write_text(PLAN.format(**values, per_step=per_step))

    def begin(self, number: int) -> None:
        """A generation begins, whose share of the peak is that of a run that is well."""
        super().begin(number)
        (facts,) = [facts for facts in TelemetryReader(self.folder).generations() if facts.number == number]
        peak = 6e10 * self.num_ranks
        self.writer.generation(replace(facts, peak_flops=peak, alone_flops=peak, model_flops=self.share * peak * 0.08))

    def _matrix(self) -> NDArray[np.float32]:
        values = super()._matrix()
        at = {name: index for index, name in enumerate(_COLUMNS)}
        for name in ("wall", "communication", "phase:reduce_wait", "waits:reduce_wait", "exposed:data", "total:data"):
            values[:, at[name]] += self.link
        for rank in self.without_core:
            values[rank, at["descheduled"]] = self.lost * (1 + 0.05 * self._draw.standard_normal())
        values[:, at["others"]] = self.others
        values[self.leaks, at["memory"]] += self.leak * self.step
        return values

    def case(self) -> RunCase:
        """The run as the doctor sees it."""
        return RunCase(record=RunRecord(self.folder), cluster=self.cluster)

    def findings(self) -> list[RunVerdict]:
        """What the doctor finds."""
        return examine_run(self.case())


def healthy(folder: Path, seed: int) -> FaultyRun:
    """A run of 60 steps without any fault, with saves and reports."""
    draw = np.random.default_rng(seed)
    run = FaultyRun(folder=folder, seed=seed, data=int(draw.choice([2, 4, 8])), pipeline=int(draw.choice([1, 2])))
    run.add(60)
    for step in range(10, 60, 10):
        run.event("checkpoint", step=step, path=f"{folder}/checkpoints/{step}", seconds=0.004, copy_seconds=0.1,
                  problem="")  # fmt: skip
    run.end()
    return run
