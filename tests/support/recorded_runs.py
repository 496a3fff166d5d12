"""Folders of runs whose telemetry is made up, with a fault whose rank and phase are known."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.watch.store import COLLECTIVE, SPAN, GenerationFacts, StepDetail, StepRow
from weft.watch.store_writer import TelemetryWriter

_NAMES = ("data_wait", "forward", "backward", "forward_backward", "reduce_wait", "optimizer")
_OPERATIONS = ("all_reduce", "receive", "send")
_COLUMNS = (
    "start", "wall", "compute", "communication", "bubble", "input", "checkpoint", "idle", "descheduled", "others",
    *(f"phase:{name}" for name in (*_NAMES, "other")), *(f"waits:{name}" for name in (*_NAMES, "other")),
    "exposed:data", "total:data", "exposed:pipeline", "total:pipeline", "exposed:world", "total:world",
    "bubble:fill", "bubble:drain", "bubble:imbalance", "memory",
)  # fmt: skip


@dataclass(kw_only=True)
class MadeUpRun:
    """A run of data × pipeline ranks with steps of 80 ms."""

    folder: Path
    name: str = "made-up"
    data: int = 4
    pipeline: int = 1
    seed: int = 0
    slow: Mapping[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])
    """Seconds more by (rank, phase)."""
    generation: int = 1
    began: float = 3_600.0
    """Seconds ago."""
    file: int = 1
    """Number of its file: hosts that come to lead write further ones."""
    plan: str = "[mesh]\n"
    away: float = 0.0
    """Share of time that other work takes from the ranks in every second step."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._draw = np.random.default_rng(self.seed)
        self.writer = TelemetryWriter(self.folder, self.file, is_shared=self.file > 1)
        self._time = time.time() - self.began
        self.step = 0
        self.begin(self.generation)
        (self.folder / "recipe.toml").write_text(f"# {self.name}\n[run]\nsteps = 1000\n")

    @property
    def num_ranks(self) -> int:
        return self.data * self.pipeline

    def begin(self, number: int) -> None:
        """A generation begins."""
        self.generation = number
        ranks = [
            {
                "host": f"host-{rank * 2 // self.num_ranks}", "pid": 1000 + rank, "device": "cpu",
                "coordinates": {"pipeline": rank // self.data, "data": rank % self.data},
                "memory": {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000},
            }
            for rank in range(self.num_ranks)
        ]  # fmt: skip
        axes = {name: size for name, size in (("pipeline", self.pipeline), ("data", self.data)) if size > 1}
        predicted: dict[str, Any] = {
            "seconds": {"ideal": 0.04, "matrix_shapes": 0.015, "data": 0.01, "optimizer": 0.008},
            "spread": 0.1,
            "memory": [{"weights": 4e6, "gradients": 4e6, "optimizer": 8e6, "activations": 6e6}] * self.pipeline,
            "traffic": {"data": {"all_reduce": [2, 8_000_000]}},
            "spans": self._predicted_spans(),
        }
        self.writer.generation(
            GenerationFacts(
                number=number, unix_time=self._time, world_size=self.num_ranks, plan=self.plan, plan_digest="abc123",
                axes=axes, ranks=ranks, predicted=predicted, model_flops=1e9, peak_flops=6e10, samples_per_step=32,
                tokens_per_sample=128, versions={"weft": "0.1", "torch": "2.13.0"},
            )
        )  # fmt: skip

    def _predicted_spans(self) -> list[list[Any]]:
        spans: list[list[Any]] = []
        for stage in range(self.pipeline):
            for microbatch in range(4):
                at = 0.004 * (stage + microbatch)
                spans.append([stage, "forward", 0, microbatch, at, at + 0.004])
                back = 0.04 + 0.008 * (self.pipeline - 1 - stage + microbatch)
                spans.append([stage, "backward", 0, microbatch, back, back + 0.008])
        return spans

    def add(self, num_steps: int, *, missing: frozenset[int] = frozenset()) -> None:
        """Add steps; ranks in `missing` record nothing in them."""
        with self.writer:
            for _ in range(num_steps):
                self._add(missing)
            self.live()

    def catch_up(self) -> None:
        """Let the next step begin now: a run whose newest step lies seconds back counts as one that stands still."""
        self._time = max(self._time, time.time())

    def _add(self, missing: frozenset[int]) -> None:
        self.step += 1
        matrix = self._matrix()
        for rank in missing:
            matrix[rank] = np.nan
        seconds = float(np.nanmax(matrix[:, 1]))
        loss = 6.0 * np.exp(-self.step / 400) + 1.5 + 0.02 * float(self._draw.standard_normal())
        self.writer.step(
            StepRow(
                generation=self.generation, step=self.step, unix_time=self._time, seconds=seconds, loss=loss,
                gradient_norm=1.0 + 0.1 * float(self._draw.standard_normal()), learning_rate=3e-4, loss_scale=1.0,
                count=4096.0,
            )
        )  # fmt: skip
        self.writer.part(self.generation, self.step, 0, _COLUMNS, matrix)
        sums = {"data": {"all_reduce": (2, 8_000_000)}, "world": {"all_reduce": (1, 96)}}
        for rank in range(self.num_ranks):
            self.writer.traffic(self.generation, self.step, rank, sums)
            if self.step % 10 == 0:
                self.writer.detail(self.generation, self.step, self._detail(rank))
        self._time += seconds

    def _matrix(self) -> NDArray[np.float32]:
        number = self.num_ranks
        base = {"data_wait": 0.001, "forward": 0.02, "backward": 0.04, "forward_backward": 0.001,
                "reduce_wait": 0.006, "optimizer": 0.008, "other": 0.002}  # fmt: skip
        noise = 1 + 0.02 * self._draw.standard_normal((number, len(base)))
        own = np.array(list(base.values())) * noise
        names = list(base)
        for (rank, phase), more in self.slow.items():
            own[rank, names.index(phase)] += more
        # All ranks meet in the reduction: who comes early waits there for the others.
        before = own[:, : names.index("reduce_wait")].sum(axis=1)
        waits = before.max() - before
        values = np.zeros((number, len(_COLUMNS)), dtype=np.float32)
        at = {name: index for index, name in enumerate(_COLUMNS)}
        for index, name in enumerate(names):
            values[:, at[f"phase:{name}"]] = own[:, index] + (waits if name == "reduce_wait" else 0)
        values[:, at["waits:reduce_wait"]] = waits + 0.9 * own[:, names.index("reduce_wait")]
        values[:, at["exposed:data"]] = values[:, at["waits:reduce_wait"]]
        values[:, at["total:data"]] = values[:, at["exposed:data"]] + 0.01
        wall = own.sum(axis=1) + waits
        values[:, at["wall"]], values[:, at["start"]] = wall, 1e-4 * np.arange(number)
        values[:, at["communication"]] = values[:, at["waits:reduce_wait"]]
        values[:, at["input"]], values[:, at["idle"]] = own[:, 0], own[:, names.index("other")]
        values[:, at["compute"]] = wall - values[:, at["communication"]] - own[:, 0] - own[:, names.index("other")]
        values[:, at["memory"]] = 22e6 + 1e5 * self._draw.standard_normal(number)
        if self.away and self.step % 2:
            taken = values[:, at["compute"]] * self.away / (1 - self.away)
            for column in ("wall", "compute", "descheduled", "phase:backward"):
                values[:, at[column]] += taken
        return values

    def _detail(self, rank: int) -> StepDetail:
        names = (*_NAMES, "data", "pipeline", "world", *_OPERATIONS)
        stage, start = (rank // self.data if self.pipeline > 1 else -1), int(1e9 * self.step)
        rows, at = [(0, stage, -1, start, 1_000_000, -1)], start + 1_000_000 + 4_000_000 * max(stage, 0)
        for microbatch in range(4):
            rows.append((1, stage, microbatch, at, 4_000_000, 3_900_000))
            at += 4_200_000
        for microbatch in range(4):
            rows.append((2, stage, microbatch, at, 8_000_000, 7_900_000))
            at += 8_200_000
        rows += [(4, stage, -1, at, 6_000_000, -1), (5, stage, -1, at + 6_000_000, 8_000_000, -1)]
        wait = at + 100_000
        collectives = [(6, 9, 8_000_000, wait - 3_000_000, wait + 5_000_000, wait, 5_000_000)]
        return StepDetail(rank, names, np.array(rows, SPAN), np.array(collectives, COLLECTIVE))

    def live(self, *, stopped: Mapping[int, str] | None = None) -> None:
        """Say where ranks are; `stopped` ones stand in a phase, the others wait for them."""
        for rank in range(self.num_ranks):
            state: dict[str, Any] = {"step": self.step, "phase": "forward", "pid": 1000 + rank, "open": None}
            state |= {"has_begun": True, "has_ended": False, "completed": {"data": 2 * self.step}}
            if stopped:
                waits = {"axis": "data", "operation": "all_reduce", "num_bytes": 8_000_000, "seconds": 12.0,
                         "number": 2 * self.step + 1}  # fmt: skip
                state |= {"phase": stopped[rank]} if rank in stopped else {"phase": "reduce_wait", "open": waits}
            self.writer.live(self.generation, rank, time.time(), state)

    def event(self, kind: str, **values: Any) -> None:
        """Add a line to `metrics.jsonl`."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, **values, "unix_time_seconds": self._time}) + "\n")

    def end(self) -> None:
        """The run ends."""
        self.writer.end_live()
        self.writer.close()
