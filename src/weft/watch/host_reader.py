"""What the ranks of one host have done since they were looked at last, read from their rings without their help."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from weft.process import is_stopped
from weft.watch.accounting import RankRecords, account
from weft.watch.other_work import OtherWork
from weft.watch.rings import NewRecords, RingReader, ask_for_stacks, read_stack, steps_of
from weft.watch.store import COLLECTIVE, SPAN, Matrix, StepDetail

AGREED = ("loss", "gradient_norm", "learning_rate", "loss_scale", "num_counted", "skipped")
"""Numbers of a step that all ranks agree on; the first rank of a host reports them."""
_CAME_ROUND = "the ring came round before it was read"


class HostClock(NamedTuple):
    """What is known of a host's monotonic clock: nanoseconds from it to the time since 1970 as the collector's host has
    it, and how far that may be wrong."""

    unix_ns: int
    error_ns: int


class Dropped(NamedTuple):
    """What was not recorded."""

    spans: int
    collectives: int
    steps: int
    reason: str


@dataclass(slots=True, kw_only=True)
class RankRecording:
    """What one rank has done since its last report, and where it is."""

    rank: int
    live: dict[str, Any]
    """Where it is, as `TelemetryWriter.live` takes it."""
    facts: dict[str, Any]
    """What it says of itself (`weft.run.engine.RankFacts`); empty: nothing yet."""
    steps: NDArray[np.int64]
    """Steps that it has finished."""
    starts: NDArray[np.float64]
    """Their begins, seconds since 1970."""
    columns: tuple[str, ...]
    """Columns of `weft.watch.accounting` but `start`."""
    values: Matrix
    """Shape (steps, columns)."""
    agreed: NDArray[np.float64]
    """Columns of `AGREED`, shape (steps, 6); (0, 6) where another rank of the host reports them."""
    detail: StepDetail | None = None
    """Spans and collectives of the newest step."""
    traffic: dict[str, dict[str, list[int]]] = field(default_factory=dict[str, dict[str, list[int]]])
    """Axis → operation → [count, bytes] of the newest step."""
    dropped: Sequence[Dropped] = ()


@dataclass(slots=True)
class _Rank:
    """One rank of the host."""

    ring: RingReader
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    launched: dict[str, int] = field(default_factory=dict[str, int])
    """Collectives launched so far, by axis."""
    counted: int = 0
    """Number of the newest collective that is counted."""
    delay_share: float | None = None
    """Share of time of late in which its main thread was ready to run and had no processor; None: not known."""
    delay: tuple[int, float] | None = None
    """Nanoseconds that it has waited for a processor since its start, and when that was read."""


@final
class HostReader:
    """Reads the rings of this host's ranks of one generation.  One thread at a time."""

    def __init__(self, folder: Path) -> None:
        """`folder` has the rings of the generation, and may fill with them later."""
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}
        self._others = OtherWork()

    @property
    def num_ranks(self) -> int:
        """Ranks whose rings have been found."""
        return len(self._ranks)

    def ask_for_stacks(self) -> None:
        """Let ranks write their stacks, for `reports` to read."""
        ask_for_stacks(self._folder, [state.ring.pid for state in self._ranks.values()])

    def reports(self, clock: HostClock | None = None, *, with_stacks: bool = False) -> list[RankRecording]:
        """Return what each rank has done since the last call, and where it is.  `clock` is this host's, where another
        one collects.  Raises nothing for the sake of a ring."""
        for path in self._folder.glob("rank-*.ring"):
            rank = int(path.stem.partition("-")[2])
            if rank not in self._ranks:
                with suppress(OSError, ValueError):  # just being made
                    self._ranks[rank] = _Rank(RingReader(path))
                    _delay_share(self._ranks[rank])
        first = min(self._ranks, default=0)
        self._others.look([state.ring.pid for state in self._ranks.values()])
        return [
            self._report(rank, state, clock, agrees=rank == first, with_stack=with_stacks)
            for rank, state in self._ranks.items()
        ]

    def _report(
        self, rank: int, state: _Rank, clock: HostClock | None, *, agrees: bool, with_stack: bool
    ) -> RankRecording:
        if not state.facts:
            state.facts = _document(self._folder / f"rank-{rank}.json")
        new = state.ring.read() if state.ring.has_new_steps else None
        _count_launched(state)
        live = _live(state)
        if with_stack:
            live["stack"] = read_stack(self._folder, rank)
        if clock is not None:
            live["clock"] = {
                "error_seconds": clock.error_ns / 1e9,
                "offset_seconds": (state.ring.clock_ns - clock.unix_ns) / 1e9,
            }
        report = RankRecording(
            rank=rank,
            live=live,
            facts=state.facts,
            steps=np.zeros(0, dtype=np.int64),
            starts=np.zeros(0),
            columns=(),
            values=np.zeros((0, 0), dtype=np.float32),
            agreed=np.zeros((0, len(AGREED))),
        )
        if new is not None and len(new.steps):
            self._add_steps(report, state, new, state.ring.clock_ns if clock is None else clock.unix_ns, agrees=agrees)
        return report

    def _add_steps(self, report: RankRecording, state: _Rank, new: NewRecords, unix_ns: int, *, agrees: bool) -> None:
        names = state.ring.names
        axes = sorted({names[index] for index in np.unique(new.collectives["axis"]).tolist()})
        records = RankRecords(steps_of(new.steps), new.spans, new.collectives, names)
        columns = account(records, axes, has_pipeline="pipeline" in axes, delay_share=_delay_share(state))
        columns["others"] = self._others.cores * columns["wall"]
        report.steps = new.steps["step"].astype(np.int64)
        report.starts = (new.steps["start_ns"] + unix_ns) / 1e9
        report.columns = tuple(columns)
        report.values = np.stack(list(columns.values()), axis=1).astype(np.float32)
        if agrees:
            report.agreed = np.stack([new.steps[name].astype(np.float64) for name in AGREED], axis=1)
        launched = _last_step(report, new, names)
        report.traffic = _traffic(launched, names)
        if new.lost_steps or new.lost_spans or new.lost_collectives:
            report.dropped = (Dropped(new.lost_spans, new.lost_collectives, new.lost_steps, _CAME_ROUND),)


def _last_step(report: RankRecording, new: NewRecords, names: list[str]) -> NDArray[Any]:
    """Add the spans of the newest step, and return its collectives."""
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
    report.detail = StepDetail(report.rank, tuple(names), spans, collectives)
    return launched


def _live(state: _Rank) -> dict[str, Any]:
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
        "completed": dict(state.launched),
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
