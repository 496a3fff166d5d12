"""Takes what the ranks of all hosts have recorded, about once a second, and writes the run's telemetry.

It reads the rings of this host itself, and the agents of others (`weft.watch.host_recorder`) report theirs.
It never asks a rank for anything, and nothing waits for it.  What it cannot read in time or cannot write is counted,
and stands in the telemetry as a gap.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from weft.config.plan import axis_coordinates, parse_plan
from weft.run.launch.memory_folder import RINGS, create_memory_folder, remove_memory_folder
from weft.watch.channel import CollectorServer
from weft.watch.host_reader import AGREED, Dropped, HostReader, RankRecording
from weft.watch.host_recorder import NOT_RECORDED, POLL_SECONDS, be_nice
from weft.watch.store import (
    Gap,
    GenerationFacts,
    StepDetail,
    StepRow,
    StepWindow,
)
from weft.watch.store_writer import TelemetryFile, TelemetryWriter
from weft.watch.verdicts import MOST_STEPS, RunVerdict, judge, judge_stall, newest_steps

_JUDGE_SECONDS = 2.0
_THIN_OUT_SECONDS = 20.0
_KEPT_WAITING = 4_096
"""Steps of a rank that wait for those of its peers, before they are written without them."""
_CLOSE_SECONDS = 5.0
_PREDICT_SECONDS = 5.0
"""Age of a generation at which its plan is predicted, for the page that shows both."""
_LATE_SECONDS = 5.0
"""Time that steps wait for ranks of which nothing is heard: those of other hosts."""
_CLOCK_SECONDS = 30.0
"""Interval at which what is known of the hosts' clocks is written anew."""
logger = logging.getLogger(__name__)

Predict = Callable[[str], Mapping[str, Any]]
"""Returns the prediction for a plan (TOML), as `GenerationFacts.predicted` has it."""


Judged = Callable[[Sequence[RunVerdict], GenerationFacts, StepWindow], object]
"""Hears what was found in the newest steps, every time that they are judged; it raises nothing."""


def no_prediction(plan: str) -> Mapping[str, Any]:
    """Predict nothing: see `Predict`."""
    return {}


def unheard(verdicts: Sequence[RunVerdict], facts: GenerationFacts, window: StepWindow) -> None:
    """Do nothing: see `Judged`."""


@dataclass(slots=True)
class _Rank:
    """One rank of the generation that is recorded."""

    live: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where it was when it was heard of last."""
    unix_time: float = 0.0
    heard_at: float = 0.0
    """Both when that was: since 1970, and on this host's monotonic clock."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    clock: dict[str, float] | None = None
    """How its host's clock differs from this host's: `offset_seconds`, `error_seconds`; None for this host."""
    values: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Columns of steps that are not written yet."""
    agreed: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    detail: StepDetail | None = None
    traffic: dict[str, dict[str, list[int]]] = field(default_factory=dict[str, dict[str, list[int]]])


@final
class Collector:
    """Writes the telemetry of one run from the rings of this host, and from what other hosts report.  Call `poll` about
    once a second from one thread."""

    def __init__(
        self,
        run: Callable[[], Path | None],
        rings: Path,
        predict: Predict = no_prediction,
        *,
        removes_after: int = 0,
        server: CollectorServer | None = None,
        judged: Judged = unheard,
    ) -> None:
        """`run` returns the run's folder once it is known.  `rings` has a folder for each generation, named by its
        number (`generation_folder`); with `removes_after`, it is removed once so many ranks have been found in it.
        `server` takes the reports of other hosts, who see the run's folder, too.  `judged` hears what is found."""
        self._run, self._rings, self._predict, self._removes_after = run, rings, predict, removes_after
        self._server, self._judged = server, judged
        self._file = TelemetryFile(is_shared=server is not None)
        self._number = 0
        self._reader: HostReader | None = None
        self._ranks: dict[int, _Rank] = {}
        self._facts: GenerationFacts | None = None
        self._written_facts: GenerationFacts | None = None
        self._facts_of: tuple[int, int] = (0, 0)
        self._predicted: Mapping[str, Any] | None = None
        self._recent: deque[tuple[int, float, dict[int, dict[str, float]]]] = deque(maxlen=MOST_STEPS)
        self._said: tuple[Any, ...] = ()
        self._advanced = (0, time.monotonic())
        """Finished steps of the rank that is behind, and when it finished the last of them."""
        self._first_step_at: float | None = None
        """When the first step of this generation came."""
        self._newest = 0
        """Newest step of this generation that is written."""
        self._judged_at = self._thinned_at = 0.0
        self._is_stalled = False

    def poll(self) -> None:
        """Take what has come.  Raises nothing for the sake of a ring, another host or a disk."""
        if self._run() is None:
            return
        for number in self._generations():
            if number > self._number:
                self._take()  # what the generation before left
                self._flush(is_over=True)
                self._begin(number)
        self._take()
        self._flush(is_over=False)
        if self._facts is not None and self._reader is not None and self._reader.num_ranks == self._removes_after:
            # Rings that are mapped live on without their names, and end with the last process that has them: so
            # nothing stays behind where this process is killed, too.
            remove_memory_folder(self._rings)

    def close(self) -> None:
        """Take what is left: all ranks have ended."""
        self.poll()
        self._flush(is_over=True)
        self._file.close()

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _generations(self) -> list[int]:
        with suppress(OSError):
            return sorted(int(path.name) for path in self._rings.iterdir() if path.name.isdigit())
        return []

    @property
    def _generation(self) -> int:
        """Number of the generation in the telemetry: it counts on where a run was started again."""
        return self._file.earlier + self._number

    def _begin(self, number: int) -> None:
        self._number, self._reader = number, HostReader(generation_folder(self._rings, number))
        self._facts, self._facts_of, self._predicted = None, (0, 0), None
        self._ranks.clear()
        self._recent.clear()
        self._advanced, self._first_step_at, self._newest = (0, time.monotonic()), None, 0

    def _take(self) -> None:
        """Take what the ranks of all hosts have done."""
        reports = [] if self._reader is None else self._reader.reports(with_stacks=self._is_stalled)
        if self._server is not None:
            reports += [report for number, report in self._server.take() if number == self._number]
        for report in reports:
            state = self._ranks.setdefault(report.rank, _Rank())
            state.clock = report.live.pop("clock", None)
            state.live, state.unix_time, state.heard_at = report.live, time.time(), time.monotonic()
            state.facts = report.facts or state.facts
            if len(report.steps):
                self._take_steps(state, report)
            for lost in report.dropped:
                self._gap(report.rank, int(report.steps[0]) - 1 if len(report.steps) else self._newest, lost)

    def _take_steps(self, state: _Rank, report: RankRecording) -> None:
        self._first_step_at = self._first_step_at or time.monotonic()
        late = int((report.steps <= self._newest).sum())
        if late:
            lost = Dropped(0, 0, late, "the steps were written before this rank was heard of")
            self._gap(report.rank, int(report.steps[0]) - 1, lost)
        for index in range(late, len(report.steps)):
            step = int(report.steps[index])
            state.values[step] = dict(zip(report.columns, report.values[index].tolist(), strict=True))
            state.values[step]["start"] = float(report.starts[index])
            if len(report.agreed):
                state.agreed[step] = dict(zip(AGREED, report.agreed[index].tolist(), strict=True))
        state.detail, state.traffic = report.detail, report.traffic

    def _gap(self, rank: int, step: int, lost: Dropped) -> None:
        # The generation is known once the file is open: there may be earlier ones in it.
        self._write(lambda writer: writer.gap(Gap(self._generation, rank, step, time.time(), *lost)))

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _flush(self, *, is_over: bool) -> None:
        """Write the steps that all ranks have finished, and where ranks are now."""
        if not self._ranks or (not self._file.is_open and self._first_step_at is None):
            return
        ready = self._ready(is_over=is_over)
        if not self._write(lambda writer: self._write_steps(writer, ready, is_over=is_over)):
            self._file.unwritten += len(ready)
        self._newest = max(self._newest, *ready) if ready else self._newest
        for state in self._ranks.values():
            for step in ready:
                state.values.pop(step, None)
                state.agreed.pop(step, None)

    def _ready(self, *, is_over: bool) -> list[int]:
        """Return the steps that are written now: those that every rank of which anything is heard has finished."""
        whole = [set(state.values) for state in self._ranks.values()]
        if is_over or max(map(len, whole)) > _KEPT_WAITING:
            return sorted(set.union(*whole))
        if not self._are_all_there:
            return []
        now = time.monotonic()
        heard = [state for state in self._ranks.values() if now - state.heard_at < _LATE_SECONDS]
        return sorted(set.intersection(*(set(state.values) for state in heard))) if heard else []

    @property
    def _are_all_there(self) -> bool:
        """Whether all ranks have been heard of, or those that have not are not waited for any more."""
        return self._is_late or len(self._ranks) >= int((self._head or {}).get("world_size", 0))

    @property
    def _head(self) -> dict[str, Any] | None:
        """What a rank says of the generation; None: nothing yet."""
        return next((state.facts["generation"] for state in self._ranks.values() if "generation" in state.facts), None)

    def _write(self, write: Callable[[TelemetryWriter], object]) -> bool:
        """Write, or count what is lost: a full disk costs telemetry and nothing else."""
        folder = self._run()
        assert folder is not None, "asked before anything was taken"
        newest = self._recent[-1][0] if self._recent else 0
        if self._file.write(folder, self._number, newest, write):
            return True
        self._written_facts, self._said = None, ()  # what was taken back with the rest
        return False

    def _write_steps(self, writer: TelemetryWriter, ready: list[int], *, is_over: bool) -> None:
        self._read_facts(is_over=is_over)
        self._predict_plan()
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
            for rank, state in self._ranks.items():
                writer.live(self._generation, rank, state.unix_time, state.live)
        if now - self._judged_at >= _JUDGE_SECONDS or is_over:
            self._judged_at = now
            self._judge(writer)
        if now - self._thinned_at >= _THIN_OUT_SECONDS and ready:
            self._thinned_at = now
            writer.thin_out(self._generation, ready[-1])

    def _write_step(self, writer: TelemetryWriter, step: int) -> None:
        there = {rank: state.values[step] for rank, state in self._ranks.items() if step in state.values}
        agreed = next((state.agreed[step] for state in self._ranks.values() if step in state.agreed), {})
        begin = min(values["start"] for values in there.values())
        row = StepRow(
            generation=self._generation,
            step=step,
            unix_time=begin,
            seconds=max(values["wall"] for values in there.values()),
            loss=_number(agreed, "loss"),
            gradient_norm=_number(agreed, "gradient_norm"),
            learning_rate=_number(agreed, "learning_rate"),
            loss_scale=_number(agreed, "loss_scale"),
            count=_number(agreed, "num_counted"),
            skipped=int(agreed.get("skipped", 0)),
        )
        writer.step(row)
        columns = tuple(dict.fromkeys(name for values in there.values() for name in values))
        first = min(self._ranks)
        matrix = np.full((max(self._ranks) - first + 1, len(columns)), np.nan, dtype=np.float32)
        for rank, values in there.items():
            values["start"] -= begin
            matrix[rank - first] = [values.get(name, 0.0) for name in columns]
        writer.part(self._generation, step, first, columns, matrix)
        self._recent.append((step, begin, there))

    def _read_facts(self, *, is_over: bool) -> None:
        """Take what ranks say of themselves: once all have, again where one has come later, and now and then for the
        clocks of hosts."""
        head = self._head
        known = {rank: state for rank, state in self._ranks.items() if "rank" in state.facts}
        clocks = any(state.clock is not None for state in known.values())
        mark = (len(known), 1 + int(time.monotonic() // _CLOCK_SECONDS) if clocks else 0)
        if head is None or mark == self._facts_of:
            return
        is_waiting = self._facts is None and not is_over and not self._is_late
        if is_waiting and len(known) < max(len(self._ranks), int(head["world_size"])):
            return
        self._facts_of = mark
        mesh, sizes = parse_plan(head["plan"]).mesh, head["axes"]
        ranks: list[dict[str, Any]] = [
            {"coordinates": {axis: index for axis, index in axis_coordinates(mesh, rank).items() if axis in sizes}}
            for rank in range(int(head["world_size"]))  # of those that nothing is heard of this is all that is known
        ]
        for rank, state in known.items():
            clock = {} if state.clock is None else {"clock": state.clock}
            ranks[rank] = {**state.facts["rank"], "pid": state.live["pid"], **clock}
        unix_time = time.time() if self._facts is None else self._facts.unix_time
        said: dict[str, Any] = {**head, "number": self._generation, "ranks": ranks, "unix_time": unix_time}
        self._facts = GenerationFacts(**said, predicted=self._predicted or {})

    @property
    def _is_late(self) -> bool:
        """Whether ranks of which nothing is heard are not waited for any more."""
        return self._first_step_at is not None and time.monotonic() - self._first_step_at > _LATE_SECONDS

    def _predict_plan(self) -> None:
        """Predict the plan of a generation that has run for a while: that takes a second of a processor."""
        facts = self._facts
        if facts is None or self._predicted is not None or time.time() - facts.unix_time < _PREDICT_SECONDS:
            return
        self._predicted = {}
        # A prediction is a figure beside the run: whatever goes wrong with it must not end the record.
        with suppress(Exception):
            self._predicted = self._predict(facts.plan)
            self._facts = replace(facts, predicted=self._predicted)

    def _judge(self, writer: TelemetryWriter) -> None:
        facts = self._facts or GenerationFacts(number=self._generation, unix_time=0.0, world_size=len(self._ranks))
        found = [verdict for verdict in self._verdicts(facts) if verdict.kind != "unknown"]
        self._judged(found, facts, self._window())
        said = tuple((verdict.kind, verdict.ranks, verdict.phase, verdict.axis) for verdict in found)
        if said != self._said:
            self._said = said
            step = self._recent[-1][0] if self._recent else 0
            for verdict in found[:3]:
                writer.verdict(self._generation, step, time.time(), verdict.document())

    def _verdicts(self, facts: GenerationFacts) -> list[RunVerdict]:
        now, last = time.monotonic(), min((state.live["step"] for state in self._ranks.values()), default=0)
        if last > self._advanced[0]:
            self._advanced = (last, now)
        usual = [max(values["wall"] for values in there.values()) for _, _, there in self._recent]
        states = {rank: state.live for rank, state in self._ranks.items()}
        stall = judge_stall(states, facts, stalled_seconds=now - self._advanced[1], step_seconds=usual)
        if stall is not None and not self._is_stalled and self._reader is not None:
            self._reader.ask_for_stacks()
        self._is_stalled = stall is not None
        if self._server is not None:
            self._server.wants_stacks = self._is_stalled
        return [stall] if stall is not None else judge(newest_steps(self._window()), facts)

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


def _number(agreed: Mapping[str, float], name: str) -> float | None:
    value = agreed.get(name, math.nan)
    return value if math.isfinite(value) else None


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
        listen: tuple[str, bytes] | None = None,
        judged: Judged = unheard,
    ) -> None:
        """`run`, `predict`, `removes_after` and `judged`: see `Collector`.  `rings` is a folder that ranks know; by
        default one is made.  `listen`: an address of this host on which other hosts report, and the key that they must
        know."""
        self._rings = create_memory_folder(RINGS) if rings is None else rings
        self._server = _server(listen)
        self._collector = None
        if self._rings is not None:
            self._collector = Collector(
                run, self._rings, predict, removes_after=removes_after, server=self._server, judged=judged
            )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="weft-collector", daemon=True)

    def address_of(self, number: int) -> str:
        """Where other hosts report of a generation that has begun (`weft.watch.host_recorder`); empty: nowhere."""
        return "" if self._server is None else f"{self._server.address}/{number}"

    def begin(self, number: int) -> Path | None:
        """Return a new folder for the rings of a generation; None, with a warning, where the host has no memory."""
        try:
            if self._rings is None:
                raise OSError("it does not exist or cannot be written")
            folder = generation_folder(self._rings, number)
            folder.mkdir(mode=0o700)
        except OSError as problem:
            logger.warning(NOT_RECORDED, problem.strerror or problem)
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
        if self._server is not None:
            self._server.close()
        if self._rings is not None:
            remove_memory_folder(self._rings)

    def _collect(self) -> None:
        collector = self._collector
        assert collector is not None
        be_nice()
        took = 0.0
        # Where ranks leave it little of a processor a turn takes long: its time counts, and a pause is left.
        while not self._is_over.wait(max(POLL_SECONDS - took, POLL_SECONDS / 4)):
            began = time.monotonic()
            collector.poll()
            took = time.monotonic() - began
        collector.close()


def _server(listen: tuple[str, bytes] | None) -> CollectorServer | None:
    if listen is None:
        return None
    try:
        return CollectorServer(*listen)
    except (OSError, RuntimeError) as problem:
        logger.warning("Only ranks of this host are recorded: %s cannot be listened on (%s).", listen[0], problem)
        return None
