"""The driver of a job under Ray: asks for a bundle on each machine, keeps an agent in each, and starts the job again
while the run advances.

Where a node is lost Ray looks for another for its bundle, and the driver starts an agent there.  Whether the job goes
on with fewer machines is decided by the agents.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from weft.run.places.contract import AGENT_DONE, AGENT_LATER, AGENT_MEND, Job, PlaceState, agent_command
from weft.run.places.ray import settings_of, tell
from weft.run.places.ray_cluster import RayAgent, RayCluster, RayGroup
from weft.run.places.ray_nodes import RayNode, bundle_of, choose_nodes, labelled_blocks, selectors, where
from weft.run.places.settle import settle, why_ended
from weft.run.places.submission import FOLDER, JobOrder, is_to_stop, job_name

_LOG = "ray.log"
_BEAT_SECONDS = 0.2
_LOOK_SECONDS = 15.0
"""Time for which bundles are asked for before the nodes are looked at again."""
_AGAIN_SECONDS = 5.0
"""Pause before a bundle that was lost is tried again."""
_LOST_SECONDS = 40.0
"""Time in which Ray notices that a node is lost: agents beside it may have ended before."""


@dataclass(slots=True)
class _Seat:
    """One machine of the job."""

    index: int
    group: RayGroup
    position: int
    """Position of its bundle in the group."""
    agent: RayAgent | None = None
    node: RayNode | None = None
    """None: its bundle has no node yet."""
    status: int | None = None
    """Status of its agent; None: that has not ended."""
    again_at: float = 0.0

    @property
    def runs(self) -> bool:
        return self.node is not None and self.status is None


@dataclass(slots=True)
class RayDriver:
    """Drives the job of one run."""

    run: Path
    order: JobOrder
    cluster: RayCluster
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set: all agents are to save and leave."""
    told: PlaceState | None = None
    began: float = field(default_factory=time.monotonic)

    def drive(self) -> int:
        """Start attempts of the job until it has ended; return the status of the whole."""
        status, attempt = AGENT_LATER, 0
        while status == AGENT_LATER and not self._is_to_end():
            if (asked := self._ask()) is None:
                break
            group, count = asked
            seats = [_Seat(index=index, group=group, position=index) for index in range(count)]
            self._attempt(seats, attempt)
            status = settle(self.run)
            self._say(f"attempt {attempt} has ended: {why_ended(self.run)}")
            attempt += 1
        if status == AGENT_LATER and not self._is_to_end():
            status, text = (
                1,
                f"{self.order.gang.nodes} machines were not free for as long as wait_seconds in [ray] says",
            )
        else:
            text = self._outcome(status)
        self._tell(PlaceState(phase="ended", why=text))
        return AGENT_DONE if is_to_stop(self.run) else status

    def _ask(self) -> tuple[RayGroup, int] | None:
        """Wait for the machines that begin together, and return how many they are.  None: the job is to end, or has
        waited too long."""
        gang, settings = self.order.gang, settings_of(self.order.pool)
        bundle, since = bundle_of(gang), time.monotonic()
        while not self._is_to_end() and (waited := time.monotonic() - since) < settings.wait_seconds:
            nodes = self.cluster.nodes()
            free = sum(node.holds(bundle) for node in nodes)
            self._tell(PlaceState(phase="pending", why=f"{gang.nodes} machines are wanted, and {free} are free"))
            if (chosen := self._choose(nodes, bundle, waited)) is None:
                self.stopping.wait(1)
                continue
            count, labels = chosen
            group = self.cluster.ask(bundle, count, labels, job_name(self.run))
            if self._has_come(group):
                return group, count
            group.give_back()  # and ask for those that are free now
        return None

    def _choose(
        self, nodes: Sequence[RayNode], bundle: Mapping[str, float], waited: float
    ) -> tuple[int, list[dict[str, str]]] | None:
        """Choose how many machines to ask for and the labels of each; None: blocks do not lie together yet."""
        gang, settings = self.order.gang, settings_of(self.order.pool)
        blocks = labelled_blocks(gang, settings.labels)
        musts = [block for block in blocks if block.must]
        able = [node.empty for node in nodes if node.could_hold(bundle)]
        hopeless = choose_nodes(able, bundle, gang.least, blocks, settings.labels) is None
        asked = musts if hopeless or waited >= settings.wish_wait_seconds else blocks
        for count in range(gang.most, gang.least - 1, -1):
            if (found := choose_nodes(nodes, bundle, count, asked, settings.labels)) is not None:
                return count, selectors(found, asked, settings.labels) if asked else []
        # Asked for all the same where any nodes do: a Ray that gets more machines sees what is wanted.
        return None if asked else (gang.least, [])

    def _has_come(self, group: RayGroup) -> bool:
        deadline = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < deadline and not self._is_to_end():
            if group.wait(_BEAT_SECONDS):
                return True
        return False

    # ── one attempt ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _attempt(self, seats: list[_Seat], attempt: int) -> None:
        """Keep agents until none runs any more."""
        done_at = math.inf
        try:
            while not self._is_to_end() and not self._is_over(seats) and time.monotonic() < done_at + _LOST_SECONDS:
                for seat in seats:
                    self._look(seat, attempt)
                self._grow(seats)
                self._tell_running(seats)
                if done_at == math.inf and any(seat.status == AGENT_DONE for seat in seats):
                    done_at = time.monotonic()
                self.stopping.wait(_BEAT_SECONDS)
            self._tell_running(seats, phase="stopping")
            self._let_leave(seats)
        finally:
            for group in {id(seat.group): seat.group for seat in seats}.values():
                group.give_back()

    def _look(self, seat: _Seat, attempt: int) -> None:
        """Have a seat's agent started where its bundle has a node, and see whether it has ended, or is lost."""
        if seat.status is not None or time.monotonic() < seat.again_at:
            return
        if seat.agent is None:
            seat.agent = self.cluster.begin(seat.group, seat.position)
        answer = seat.agent.answer()
        if answer == "lost":
            host = "no node" if seat.node is None else seat.node.address
            self._say(f"machine {seat.index} ({host}) is lost")
            seat.agent, seat.node, seat.again_at = None, None, time.monotonic() + _AGAIN_SECONDS
        elif isinstance(answer, str):
            nodes = [node for node in self.cluster.nodes() if node.number == answer]
            seat.node = nodes[0] if nodes else None
            seat.agent.run(self._command(seat, attempt))
        elif answer is not None:
            self._say(f"agent {seat.index} has ended: {answer}")
            seat.status = answer

    def _command(self, seat: _Seat, attempt: int) -> tuple[str, ...]:
        pool = self.order.pool
        options = ["--seat", f"{seat.index}/{self.order.gang.most}", "--attempt", str(attempt), "--until-eof"]
        path = () if seat.node is None else where(seat.node, settings_of(pool).labels)
        options += ["--topology", ",".join(path)] if path else []
        return agent_command(pool, self.run, options)

    def _grow(self, seats: list[_Seat]) -> None:
        """Ask for one further machine, where all that were asked for run and the job may have more."""
        if len(seats) < self.order.gang.most and all(seat.runs for seat in seats):
            beside = [seat.node.number for seat in seats if seat.node is not None]
            group = self.cluster.ask_for_another(bundle_of(self.order.gang), beside, job_name(self.run))
            seats.append(_Seat(index=len(seats), group=group, position=0))

    def _is_over(self, seats: Sequence[_Seat]) -> bool:
        """Whether agents have ended and none runs.  Where all were lost, Ray looks for other nodes."""
        return any(seat.status is not None for seat in seats) and not any(seat.runs for seat in seats)

    def _let_leave(self, seats: Sequence[_Seat]) -> None:
        """Let agents save and leave, then end what is left."""
        for seat in seats:
            if seat.agent is not None and seat.runs:
                seat.agent.tell_to_leave()
        deadline = time.monotonic() + self.order.gang.grace_seconds
        while any(seat.runs for seat in seats) and time.monotonic() < deadline:
            for seat in seats:
                answer = seat.agent.answer() if seat.agent is not None and seat.runs else None
                if answer is not None:
                    seat.status = answer if isinstance(answer, int) else 1
            time.sleep(_BEAT_SECONDS)
        for seat in seats:
            if seat.agent is not None:
                seat.agent.end()

    # ── what is told ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_to_end(self) -> bool:
        limit = self.order.gang.limit_seconds
        return self.stopping.is_set() or (limit is not None and time.monotonic() - self.began > limit)

    def _outcome(self, status: int) -> str:
        why = why_ended(self.run)
        return why if status in (1, AGENT_MEND) or why == "done" else "stopped, and can go on"

    def _tell_running(self, seats: Sequence[_Seat], phase: Literal["running", "stopping"] = "running") -> None:
        nodes = tuple(seat.node.address for seat in seats if seat.node is not None and seat.runs)
        self._tell(PlaceState(phase=phase, nodes=nodes))

    def _tell(self, state: PlaceState) -> None:
        if state != self.told:
            tell(Job(name=job_name(self.run), run=self.run), state)
            self.told = state

    def _say(self, text: str) -> None:
        """Print, and keep it with the run: what Ray keeps of a job goes with its head."""
        line = f"{time.strftime('%F %T')}  {text}"
        print(line, flush=True)
        with (self.run / FOLDER / _LOG).open("a") as file:
            file.write(f"{line}\n")


def drive(run: Path) -> int:
    """Drive the job of a run under Ray until its end, and return its status.

    Raises:
        LaunchError: the run was not submitted, or this is no driver of Ray's.
    """
    order = JobOrder.read(run)
    driver = RayDriver(run, order, RayCluster.connect())

    def stop(_number: int, _frame: FrameType | None) -> None:
        driver.stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        return driver.drive()
    finally:
        driver.cluster.leave()
