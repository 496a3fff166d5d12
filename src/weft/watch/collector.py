"""Reads the rings of this host's ranks about once a second and writes the run's telemetry, beside the training.

It never asks a rank for anything, and nothing waits for it.  What it cannot read in time or cannot write is counted,
and stands in the telemetry as a gap.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from weft.config.plan import axis_coordinates, parse_plan
from weft.process import is_stopped
from weft.run.launch.memory_folder import RINGS, create_memory_folder, remove_memory_folder
from weft.watch.accounting import RankRecords, account
from weft.watch.rings import NewRecords, RingReader, ask_for_stacks, read_stack, steps_of
from weft.watch.store import COLLECTIVE, SPAN, Gap, GenerationFacts, StepDetail, StepRow, StepWindow, TelemetryWriter
from weft.watch.verdicts import RunVerdict, judge, judge_stall

POLL_SECONDS = 1.0
_JUDGED_STEPS = 60
_JUDGE_SECONDS = 2.0
_THIN_OUT_SECONDS = 20.0
_KEPT_WAITING = 4_096
"""Steps of a rank that wait for those of its peers, before they are written without them."""
_CLOSE_SECONDS = 5.0
_PREDICT_SECONDS = 5.0
"""Age of a generation at which its plan is predicted, for the page that shows both."""
_NICENESS = 10

_NOT_RECORDED = "The run is not recorded: no folder could be made in /dev/shm (%s). Give the host, or container, one."
logger = logging.getLogger(__name__)

Predict = Callable[[str], Mapping[str, Any]]
"""Returns the prediction for a plan (TOML), as `GenerationFacts.predicted` has it."""


def no_prediction(plan: str) -> Mapping[str, Any]:
    """Predict nothing: see `Predict`."""
    return {}


@dataclass(slots=True)
class _Rank:
    """One rank of the generation that is recorded."""

    ring: RingReader
    values: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Columns of steps that are not written yet."""
    agreed: dict[int, StepRow] = field(default_factory=dict[int, StepRow])
    launched: dict[str, int] = field(default_factory=dict[str, int])
    """Collectives launched so far, by axis."""
    counted: int = 0
    """Number of the newest collective that is counted."""
    delay_share: float | None = None
    """Share of time of late in which its main thread was ready to run and had no processor; None: not known."""
    delay: tuple[int, float] | None = None
    """Nanoseconds that it has waited for a processor since its start, and when that was read."""
    detail: StepDetail | None = None
    traffic: dict[str, dict[str, list[int]]] = field(default_factory=dict[str, dict[str, list[int]]])


@final
class Collector:
    """Writes the telemetry of one run from the rings of this host.  Call `poll` about once a second from one thread."""

    def __init__(
        self, run: Callable[[], Path | None], rings: Path, predict: Predict = no_prediction, *, removes_after: int = 0
    ) -> None:
        """`run` returns the run's folder once it is known.  `rings` has a folder for each generation, named by its
        number (`generation_folder`); with `removes_after`, it is removed once so many ranks have been found in it."""
        self._run, self._rings, self._predict, self._removes_after = run, rings, predict, removes_after
        self._writer: TelemetryWriter | None = None
        self._number = 0
        self._earlier = 0
        """Generations of earlier starts of the run, which the telemetry has."""
        self._ranks: dict[int, _Rank] = {}
        self._facts: GenerationFacts | None = None
        self._written_facts: GenerationFacts | None = None
        self._is_predicted = False
        self._recent: deque[tuple[int, float, dict[int, dict[str, float]]]] = deque(maxlen=_JUDGED_STEPS)
        self._said: tuple[Any, ...] = ()
        self._advanced = (0, time.monotonic())
        """Finished steps of the rank that is behind, and when it finished the last of them."""
        self._judged_at = self._thinned_at = self._retry_at = 0.0
        self._unwritten, self._reason = 0, ""
        self._is_stalled = False

    def poll(self) -> None:
        """Take what has come.  Raises nothing for the sake of a ring or a disk."""
        if self._run() is None:
            return
        for number in self._generations():
            if number > self._number:
                self._take()  # what the generation before left
                self._flush(is_over=True)
                self._begin(number)
        self._find_ranks()
        self._take()
        self._flush(is_over=False)
        if self._facts is not None and len(self._ranks) == self._removes_after:
            # Rings that are mapped live on without their names, and end with the last process that has them: so
            # nothing stays behind where this process is killed, too.
            remove_memory_folder(self._rings)

    def close(self) -> None:
        """Take what is left: all ranks have ended."""
        self.poll()
        self._flush(is_over=True)
        if self._writer is not None:
            with suppress(sqlite3.Error):
                with self._writer:
                    self._writer.end_live()
                self._writer.close()
            self._writer = None

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _generations(self) -> list[int]:
        with suppress(OSError):
            return sorted(int(path.name) for path in self._rings.iterdir() if path.name.isdigit())
        return []

    @property
    def _generation(self) -> int:
        """Number of the generation in the telemetry: it counts on where a run was started again."""
        return self._earlier + self._number

    def _begin(self, number: int) -> None:
        self._number, self._facts, self._is_predicted = number, None, False
        self._ranks.clear()
        self._recent.clear()
        self._advanced = (0, time.monotonic())

    def _find_ranks(self) -> None:
        for path in self._folder.glob("rank-*.ring"):
            rank = int(path.stem.partition("-")[2])
            if rank not in self._ranks:
                with suppress(OSError, ValueError):  # just being made
                    self._ranks[rank] = _Rank(RingReader(path))
                    _delay_share(self._ranks[rank])

    @property
    def _folder(self) -> Path:
        return generation_folder(self._rings, self._number)

    def _take(self) -> None:
        for rank, state in self._ranks.items():
            if state.ring.has_new_steps:
                new = state.ring.read()
                if len(new.steps):
                    self._take_steps(rank, state, new)
            _count_launched(state)

    def _take_steps(self, rank: int, state: _Rank, new: NewRecords) -> None:
        names, steps = state.ring.names, steps_of(new.steps)
        axes = sorted({names[index] for index in np.unique(new.collectives["axis"]).tolist()})
        records = RankRecords(steps, new.spans, new.collectives, names)
        columns = account(records, axes, has_pipeline="pipeline" in axes, delay_share=_delay_share(state))
        unix = state.ring.clock_ns
        for index, row in enumerate(new.steps):
            step = int(row["step"])
            state.values[step] = {name: float(column[index]) for name, column in columns.items()}
            state.values[step]["start"] = (int(row["start_ns"]) + unix) / 1e9
            state.agreed[step] = StepRow(
                generation=self._generation,
                step=step,
                unix_time=state.values[step]["start"],
                seconds=state.values[step]["wall"],
                loss=_number(row["loss"]),
                gradient_norm=_number(row["gradient_norm"]),
                learning_rate=_number(row["learning_rate"]),
                loss_scale=_number(row["loss_scale"]),
                count=_number(row["num_counted"]),
                skipped=int(row["skipped"]),
            )
        self._keep_newest(rank, state, new, names)
        if new.lost_steps or new.lost_spans or new.lost_collectives:
            lost = (int(new.steps["step"][0]) - 1, time.time(), new.lost_spans, new.lost_collectives, new.lost_steps)
            why = "the ring came round before it was read"
            self._write(lambda writer: writer.gap(Gap(self._generation, rank, *lost, why)))

    def _keep_newest(self, rank: int, state: _Rank, new: NewRecords, names: list[str]) -> None:
        """Keep spans and traffic of the newest step for the next time that is written."""
        last = new.steps[-1]
        inside = (new.spans["start_ns"] >= last["start_ns"]) & (new.spans["start_ns"] <= last["end_ns"])
        spans = np.zeros(int(inside.sum()), dtype=SPAN)
        for name in SPAN.names or ():
            spans[name] = new.spans[name][inside]
        first = int(new.steps["num_collectives"][-2]) if len(new.steps) > 1 else None
        numbers = new.collectives["number"]
        began = new.collectives["launched_ns"] >= last["start_ns"] if first is None else numbers > first
        launched = new.collectives[began & (numbers <= last["num_collectives"])]
        collectives = launched[list(COLLECTIVE.names or ())].astype(COLLECTIVE)
        state.detail = StepDetail(rank, tuple(names), spans, collectives)
        state.traffic = _traffic(launched, names)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _flush(self, *, is_over: bool) -> None:
        """Write the steps that all ranks have finished, and where ranks are now."""
        if not self._ranks or (self._writer is None and not any(state.agreed for state in self._ranks.values())):
            return
        self._read_facts()
        self._predict_plan()
        whole = [set(state.values) for state in self._ranks.values()]
        ready = set.union(*whole) if is_over else set.intersection(*whole)
        if not is_over and max(map(len, whole)) > _KEPT_WAITING:
            ready = set.union(*whole)
        done = self._write(lambda writer: self._write_steps(writer, sorted(ready), is_over=is_over))
        if not done:
            self._unwritten += len(ready)
        for state in self._ranks.values():
            for step in ready:
                state.values.pop(step, None)
                state.agreed.pop(step, None)

    def _write(self, write: Callable[[TelemetryWriter], object]) -> bool:
        """Write, or count what is lost: a full disk costs telemetry and nothing else."""
        if time.monotonic() < self._retry_at:
            return False
        try:
            if self._writer is None:
                folder = self._run()
                assert folder is not None, "asked before anything was taken"
                self._writer = TelemetryWriter(folder)
                self._earlier = self._writer.newest_generation()
            with self._writer as writer:
                if self._unwritten:
                    newest = self._recent[-1][0] if self._recent else 0
                    writer.gap(Gap(self._generation, -1, newest, time.time(), 0, 0, self._unwritten, self._reason))
                write(writer)
            self._unwritten = 0
        except (sqlite3.Error, OSError) as problem:
            self._reason = f"the telemetry could not be written: {problem}"
            self._retry_at = time.monotonic() + POLL_SECONDS
            return False
        return True

    def _write_steps(self, writer: TelemetryWriter, ready: list[int], *, is_over: bool) -> None:
        if self._facts is not self._written_facts and self._facts is not None:
            writer.generation(self._facts)
            self._written_facts = self._facts
        for step in ready:
            self._write_step(writer, step)
        if ready:
            for rank, state in self._ranks.items():
                if state.detail is not None:
                    writer.detail(self._generation, ready[-1], state.detail)
                    writer.traffic(self._generation, ready[-1], rank, state.traffic)
                    state.detail = None
        now = time.monotonic()
        if not is_over:
            self._write_live(writer)
        if now - self._judged_at >= _JUDGE_SECONDS or is_over:
            self._judged_at = now
            self._judge(writer)
        if now - self._thinned_at >= _THIN_OUT_SECONDS and ready:
            self._thinned_at = now
            writer.thin_out(self._generation, ready[-1])

    def _write_step(self, writer: TelemetryWriter, step: int) -> None:
        there = {rank: state.values[step] for rank, state in self._ranks.items() if step in state.values}
        agreed = next(state.agreed[step] for state in self._ranks.values() if step in state.agreed)
        begin = min(values["start"] for values in there.values())
        seconds = max(values["wall"] for values in there.values())
        writer.step(replace(agreed, generation=self._generation, unix_time=begin, seconds=seconds))
        columns = tuple(dict.fromkeys(name for values in there.values() for name in values))
        first = min(self._ranks)
        matrix = np.full((max(self._ranks) - first + 1, len(columns)), np.nan, dtype=np.float32)
        for rank, values in there.items():
            shifted = {**values, "start": values["start"] - begin}
            matrix[rank - first] = [shifted.get(name, 0.0) for name in columns]
            values["start"] = shifted["start"]
        writer.part(self._generation, step, first, columns, matrix)
        self._recent.append((step, begin, there))

    def _read_facts(self) -> None:
        """Read what the ranks say of this generation, once all have."""
        if self._facts is not None:
            return
        documents = {rank: _document(self._folder / f"rank-{rank}.json") for rank in sorted(self._ranks)}
        head = next((about["generation"] for about in documents.values() if "generation" in about), None)
        if head is None or not all(documents.values()):
            return
        mesh = parse_plan(head["plan"]).mesh
        sizes = head["axes"]
        ranks: list[dict[str, Any]] = [
            {"coordinates": {axis: index for axis, index in axis_coordinates(mesh, rank).items() if axis in sizes}}
            for rank in range(int(head["world_size"]))  # of other hosts nothing else is known
        ]
        for rank, about in documents.items():
            ranks[rank] = {**about["rank"], "pid": self._ranks[rank].ring.pid}
        said: dict[str, Any] = {**head, "number": self._generation, "ranks": ranks, "unix_time": time.time()}
        self._facts = GenerationFacts(**said)

    def _predict_plan(self) -> None:
        """Predict the plan of a generation that has run for a while: that takes a second of a processor."""
        facts = self._facts
        if facts is None or self._is_predicted or time.time() - facts.unix_time < _PREDICT_SECONDS:
            return
        self._is_predicted = True
        # A prediction is a figure beside the run: whatever goes wrong with it must not end the record.
        with suppress(Exception):
            self._facts = replace(facts, predicted=self._predict(facts.plan))

    def _write_live(self, writer: TelemetryWriter) -> None:
        unix = time.time()
        for rank, state in self._ranks.items():
            stack = {"stack": read_stack(self._folder, rank)} if self._is_stalled else {}
            writer.live(self._generation, rank, unix, _live(state) | stack)

    def _judge(self, writer: TelemetryWriter) -> None:
        facts = self._facts or GenerationFacts(number=self._generation, unix_time=0.0, world_size=len(self._ranks))
        found = [verdict for verdict in self._verdicts(facts) if verdict.kind != "unknown"]
        said = tuple((verdict.kind, verdict.ranks, verdict.phase, verdict.axis) for verdict in found)
        if said != self._said:
            self._said = said
            step = self._recent[-1][0] if self._recent else 0
            for verdict in found[:3]:
                writer.verdict(self._generation, step, time.time(), verdict.document())

    def _verdicts(self, facts: GenerationFacts) -> list[RunVerdict]:
        now, last = time.monotonic(), min((state.ring.step for state in self._ranks.values()), default=0)
        if last > self._advanced[0]:
            self._advanced = (last, now)
        usual = [max(values["wall"] for values in there.values()) for _, _, there in self._recent]
        states = {rank: _live(state) for rank, state in self._ranks.items()}
        stall = judge_stall(states, facts, stalled_seconds=now - self._advanced[1], step_seconds=usual)
        if stall is not None and not self._is_stalled:
            ask_for_stacks(self._folder, [state.ring.pid for state in self._ranks.values()])
        self._is_stalled = stall is not None
        return [stall] if stall is not None else judge(self._window(), facts)

    def _window(self) -> StepWindow:
        columns = tuple(dict.fromkeys(n for _, _, there in self._recent for values in there.values() for n in values))
        values = np.full((len(self._recent), max(self._ranks, default=-1) + 1, len(columns)), np.nan, dtype=np.float32)
        for index, (_, _, there) in enumerate(self._recent):
            for rank, own in there.items():
                values[index, rank] = [own.get(name, 0.0) for name in columns]
        return StepWindow(
            generation=self._generation,
            steps=np.array([step for step, _, _ in self._recent], dtype=np.int64),
            num_steps=np.ones(len(self._recent), dtype=np.int64),
            unix_times=np.array([begin for _, begin, _ in self._recent]),
            columns=columns,
            values=values,
        )


def generation_folder(rings: Path, number: int) -> Path:
    """Return the folder with the rings of one generation."""
    return rings / str(number)


def _live(state: _Rank) -> dict[str, Any]:
    """Return where a rank is, as `TelemetryWriter.live` takes it."""
    ring, now = state.ring, time.perf_counter_ns()
    phase, since = ring.phase()
    is_open = ring.open_collective(now)
    return {
        "step": ring.step,
        "phase": phase,
        "seconds": max(now - since, 0) / 1e9 if since else 0.0,
        "pid": ring.pid,
        "has_begun": ring.has_begun,
        "has_ended": ring.has_ended,
        "is_stopped": is_stopped(ring.pid),
        "is_alive": Path(f"/proc/{ring.pid}").exists(),
        "open": None if is_open is None else is_open._asdict(),
        "completed": state.launched,
    }


def _delay_share(state: _Rank) -> float | None:
    """Return the share of time since the last call in which the rank's main thread waited for a processor."""
    pid, now = state.ring.pid, time.monotonic()
    try:  # Linux: time on a processor, time ready to run and without one, in nanoseconds
        delay = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return state.delay_share  # it has ended; or the system does not say
    if state.delay is not None and now > state.delay[1]:
        state.delay_share = min((delay - state.delay[0]) / 1e9 / (now - state.delay[1]), 1.0)
    state.delay = (delay, now)
    return state.delay_share


def _document(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _traffic(launched: NDArray[Any], names: list[str]) -> dict[str, dict[str, list[int]]]:
    """Return axis → operation → [count, bytes] of the collectives of one step."""
    sums: dict[str, dict[str, list[int]]] = {}
    for row in launched:
        pair = sums.setdefault(names[row["axis"]], {}).setdefault(names[row["operation"]], [0, 0])
        pair[0] += 1
        pair[1] += int(row["num_bytes"])
    return sums


def _count_launched(state: _Rank) -> None:
    rows = state.ring.launched()
    new = rows[(rows["number"] > state.counted) & ((rows["done_ns"] > 0) | (rows["waited_ns"] == 0))]
    if len(new):
        names = state.ring.names
        for axis, count in zip(*np.unique(new["axis"], return_counts=True), strict=True):
            state.launched[names[axis]] = state.launched.get(names[axis], 0) + int(count)
        state.counted = int(new["number"][-1])


@final
class Collecting:
    """Lets a supervisor's ranks record what they do, and a thread of its process collect it: `with Collecting(run) as
    collecting: … rings=collecting.begin(number)`."""

    def __init__(
        self,
        run: Callable[[], Path | None],
        predict: Predict = no_prediction,
        *,
        rings: Path | None = None,
        removes_after: int = 0,
    ) -> None:
        """`run`, `predict` and `removes_after`: see `Collector`.  `rings` is a folder that ranks know; by default one
        is made."""
        self._rings = create_memory_folder(RINGS) if rings is None else rings
        if self._rings is None:
            self._collector = None
        else:
            self._collector = Collector(run, self._rings, predict, removes_after=removes_after)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="weft-collector", daemon=True)

    def begin(self, number: int) -> Path | None:
        """Return a new folder for the rings of a generation; None, with a warning, where the host has no memory."""
        try:
            if self._rings is None:
                raise OSError("it does not exist or cannot be written")
            folder = generation_folder(self._rings, number)
            folder.mkdir(mode=0o700)
        except OSError as problem:
            logger.warning(_NOT_RECORDED, problem.strerror or problem)
            return None
        return folder

    def __enter__(self) -> Self:
        if self._collector is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take what is left, and remove the rings.  A disk that does not answer is waited for a few seconds."""
        self._is_over.set()
        if self._collector is not None:
            self._thread.join(_CLOSE_SECONDS)
        if self._rings is not None:
            remove_memory_folder(self._rings)

    def _collect(self) -> None:
        collector = self._collector
        assert collector is not None
        # On Linux a thread has a niceness of its own: ranks go before it.
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self._is_over.wait(POLL_SECONDS):
            collector.poll()
        collector.close()
