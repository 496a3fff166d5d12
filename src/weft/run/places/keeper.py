"""A process that keeps a job's agents where the place has no service that does: this machine, ssh, and MPI.

It runs on the host where the job was submitted, apart from that command.  Each agent is a child of it, or of an `ssh`
that is: an agent leaves when its standard input ends, so that none outlives its keeper.  Whether the job goes on with
fewer machines is decided by the agents; the keeper brings up those of the reserve.  A launcher that starts several
agents is one child: what its end means is read from what they have noted, since its status says little.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from weft.config.document import plain, typed
from weft.config.pool import Pool
from weft.errors import LaunchError
from weft.files import write_whole
from weft.process import machine_name, start_of
from weft.run.places.contract import AGENT_DONE, AGENT_LATER, AGENT_MEND, Job, PlacedJob, PlaceSeat, PlaceState
from weft.run.places.launched import LaunchedAgents
from weft.run.places.submission import FOLDER

_TASK, _STATE, _LOG = "keeper.json", "keeper-state.json", "keeper.log"
_LOST = 255
"""Status of ssh where it could not connect, or has lost its connection."""
_AGAIN_SECONDS = 5.0
"""Pause before a machine that was lost is tried again."""
_PATIENCE_SECONDS = 600.0
"""Time without any agent, or all of a launcher's, after which machines that are lost are waited for no longer."""
_BEAT_SECONDS = 0.2
_STARTED_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAgent:
    """One command that starts an agent on a machine."""

    name: str
    """Name of the machine, or the launcher, for people."""
    command: tuple[str, ...]
    machines: tuple[str, ...] = ()
    """Machines of the agents, where the command is a launcher that starts several; empty: it starts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperTask:
    """What a keeper does."""

    agents: tuple[KeptAgent, ...]
    """All that may be started, the preferred ones in front."""
    num_wanted: int
    """Number of agents that should run at the same time."""
    grace_seconds: int
    """Time between the word to stop and the end."""
    limit_seconds: int | None = None
    """Longest time of the job, after which its agents save and leave; None: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeeperState:
    """What a keeper tells."""

    pid: int
    started: str
    """Tells the process from a later one of the same number."""
    phase: str = "running"
    running: tuple[str, ...] = ()
    """Machines whose agents run."""
    text: str = ""
    """How the job ended."""


def start_keeper(run: Path, task: KeeperTask, place: str) -> PlacedJob:
    """Start a keeper of a run on this host, and return once it runs.

    Raises:
        LaunchError: it does not start.
    """
    folder = run / FOLDER
    write_whole(folder / _TASK, json.dumps(plain(task), indent=1))
    (folder / _STATE).unlink(missing_ok=True)
    with (folder / _LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.run.places.keeper", str(run)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the submitting command's end, or its Ctrl-C, is not the job's
        )
    deadline = time.monotonic() + _STARTED_SECONDS
    while _state_of(run) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise LaunchError(f"the process that keeps the job has not started; {folder / _LOG} says why.", status=1)
        time.sleep(0.02)
    return PlacedJob(place=place, number=str(process.pid), host=machine_name())


def keeper_state(run: Path, placed: PlacedJob) -> PlaceState:
    """Return how a kept job stands.  Only the host that keeps it can tell whether its keeper lives."""
    told = _state_of(run)
    if told is None:
        return PlaceState(phase="unknown", why=f"{run / FOLDER / _STATE} is not there")
    if told.phase == "ended":
        return PlaceState(phase="ended", why=told.text)
    if placed.host != machine_name():
        return PlaceState(phase="unknown", why=f"its keeper is on host {placed.host.partition('/')[0]}: ask there")
    if start_of(told.pid) != told.started:
        return PlaceState(phase="ended", why="its keeper was killed, and all agents with it")
    return PlaceState(phase="stopping" if told.phase == "stopping" else "running", nodes=told.running)


def stop_keeper(run: Path, placed: PlacedJob) -> None:
    """Tell a keeper to have its agents save and leave.

    Raises:
        LaunchError: it is on another host.
    """
    told = _state_of(run)
    if placed.host != machine_name():
        raise LaunchError(
            f"the job is kept by a process on host {placed.host.partition('/')[0]}. Give weft stop there."
        )
    if told is not None and told.phase != "ended" and start_of(told.pid) == told.started:
        os.kill(told.pid, signal.SIGTERM)


class KeptPlace:
    """A place without a service of its own, whose jobs are kept by a process on the host that submitted them."""

    def state(self, placed: PlacedJob, job: Job, pool: Pool) -> PlaceState:
        """See `JobPlace`."""
        return keeper_state(job.run, placed)

    def stop(self, placed: PlacedJob, job: Job, pool: Pool) -> None:
        """See `JobPlace`."""
        stop_keeper(job.run, placed)

    def seat(self, environment: Mapping[str, str]) -> PlaceSeat | None:
        """See `JobPlace`."""
        return None  # the command itself says


def _state_of(run: Path) -> _KeeperState | None:
    try:
        return typed(_KeeperState, json.loads((run / FOLDER / _STATE).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(slots=True)
class _Child:
    agent: KeptAgent
    process: subprocess.Popen[bytes] | None = None
    status: int | None = None
    """Status of its newest process; None: it runs, or was never started."""
    again_at: float = 0.0
    """When it may be started again."""
    agents: LaunchedAgents | None = None
    """What a launcher's agents say; None: the command starts one agent, and its status says all."""

    def start(self) -> None:
        self.status = None
        if self.agents is not None:
            self.agents.begin()
        # In a group of its own, so that what it has started itself ends with it.
        self.process = subprocess.Popen(self.agent.command, stdin=subprocess.PIPE, process_group=0)

    def look(self) -> bool:
        """Whether it has just ended."""
        if self.process is None:
            return False
        if self.agents is not None and self.agents.is_stuck:
            print(f"{time.strftime('%F %T')}  {self.agent.name} does not end by itself, and is ended", flush=True)
            self.kill()
        if (status := self.process.poll()) is None:
            return False
        self._ended(status, was_told=False)
        return True

    def leave(self, seconds: float) -> None:
        """Give it time to end; then end it."""
        assert self.process is not None
        try:
            status = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            status = self.process.wait()
        self._ended(status, was_told=True)

    def kill(self) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _ended(self, status: int, *, was_told: bool) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process, self.again_at = None, time.monotonic() + _AGAIN_SECONDS
        self.status = status if self.agents is None else self.agents.status(status, were_told=was_told)


@dataclass(slots=True)
class _Keeper:
    run: Path
    task: KeeperTask
    children: list[_Child]
    stopping: threading.Event = field(default_factory=threading.Event)
    told: _KeeperState | None = None
    """What was told last."""
    ran_at: float = field(default_factory=time.monotonic)
    """When an agent ran last; of a launcher, when all of them did."""

    def keep(self) -> int:
        """Keep agents until the job has ended; return its status."""
        told = _KeeperState(pid=os.getpid(), started=start_of(os.getpid()) or "")
        for child in self.children[: self.task.num_wanted]:
            child.start()
        limit = self.task.limit_seconds
        deadline = math.inf if limit is None else time.monotonic() + limit
        while not self.stopping.is_set() and not self._is_over():
            if time.monotonic() > deadline:
                self.stopping.set()
            self._tell(told)
            for child in self.children:
                if child.look():
                    print(f"{time.strftime('%F %T')}  agent on {child.agent.name} ended: {child.status}", flush=True)
            self._bring_up()
            self.stopping.wait(_BEAT_SECONDS)
        self._tell(replace(told, phase="stopping"))
        self._end_all()
        status, text = self._outcome()
        self._tell(replace(told, phase="ended", text=text))
        return status

    def _is_over(self) -> bool:
        """Whether an agent has told how the job ended, or none is left."""
        statuses = {child.status for child in self.children}
        finished = statuses & {AGENT_DONE, AGENT_MEND, AGENT_LATER}
        running = [child for child in self.children if child.process is not None]
        if any(child.agents is None or child.agents.have_all_begun for child in running):
            self.ran_at = time.monotonic()
        if running:
            return False
        # Where one is done the others are about to be; one that must be mended, or has waited for others in vain, may
        # be alone with that.
        is_hopeless = time.monotonic() - self.ran_at > _PATIENCE_SECONDS
        return bool(finished) or is_hopeless or not any(self._is_lost(child) for child in self.children)

    def _is_lost(self, child: _Child) -> bool:
        return child.status == _LOST

    def _bring_up(self) -> None:
        """Replace machines that were lost: by those of the reserve, or, where there are none, by themselves."""
        running = [child for child in self.children if child.process is not None]
        lost = sum(self._is_lost(child) for child in self.children)
        if not lost or any(child.status in (AGENT_DONE, AGENT_MEND, AGENT_LATER) for child in self.children):
            return
        fresh = [child for child in self.children if child.process is None and child.status is None]
        ready = [each for each in self.children if self._is_lost(each) and time.monotonic() > each.again_at]
        for child in [*fresh, *ready][: self.task.num_wanted - len(running)]:
            print(f"{time.strftime('%F %T')}  starting an agent on {child.agent.name}", flush=True)
            child.start()

    def _end_all(self) -> None:
        """Let agents save and leave, which the end of their standard input tells them; kill what is left."""
        running = [child for child in self.children if child.process is not None]
        for child in running:
            assert child.process is not None
            assert child.process.stdin is not None
            child.process.stdin.close()
        deadline = time.monotonic() + self.task.grace_seconds
        for child in running:
            child.leave(deadline - time.monotonic())

    def _outcome(self) -> tuple[int, str]:
        """The status of the whole job and a sentence."""
        statuses = [child.status for child in self.children if child.status is not None]
        if AGENT_DONE in statuses:
            return AGENT_DONE, "done"
        if AGENT_MEND in statuses:
            return AGENT_MEND, "failed: something must be mended first"
        if AGENT_LATER in statuses or self.stopping.is_set():
            return AGENT_LATER, "stopped, and can go on"
        return 1, f"failed: agents ended with {', '.join(map(str, sorted(set(statuses))))}"

    def _tell(self, state: _KeeperState) -> None:
        running = [child.agent for child in self.children if child.process is not None]
        names = tuple(name for agent in running for name in agent.machines or (agent.name,))
        state = replace(state, running=names)
        if state != self.told:
            write_whole(self.run / FOLDER / _STATE, json.dumps(plain(state)))
            self.told = state


def main(run: Path) -> int:
    """Keep the agents of a run until its end."""
    task = typed(KeeperTask, json.loads((run / FOLDER / _TASK).read_text()))
    children = [
        _Child(agent, agents=LaunchedAgents(run, len(agent.machines), _LOST) if agent.machines else None)
        for agent in task.agents
    ]
    keeper = _Keeper(run, task, children)

    def stop(_number: int, _frame: FrameType | None) -> None:
        keeper.stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    return keeper.keep()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
