"""The faults of a chaos campaign, and how a seed draws one: which, where, in which step, on which rank, which plan.

A case is a pure function of the seed, its number, the kinds that were asked for, and the plans; so it can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.errors import RecipeError, did_you_mean
from weft.run.worker.faults import COPY, LOAD, SAVE, InjectedFault

EndOfRun = Literal["goes on", "stops", "ends", "killed"]
"""How the run is to answer: `goes on`: the ranks start again by themselves; `stops`: with an error that names the
fault; `ends`: as a signal has asked, saved; `killed`: nobody is left to say anything, and a resume goes on."""
Outside = Literal["", "kill supervisor", "second start", "replan"]
"""What the campaign does when the fault has come: kill the supervisor a moment later, start the run a second time, or
ask for another plan."""

SAVE_EVERY, NUM_STEPS = 4, 24
_FIRST_STEP, _SAVED_STEP, _BOTH_SAVED_STEP = 2, 6, 10
"""Steps from which on a fault may come: the first is done; something is saved; two saves are on the disk."""
_STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")
_BEFORE_STEPS = ("init", "rendezvous")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault, and what is expected of a run that meets it."""

    name: str
    deed: str
    phases: tuple[str, ...]
    ends: EndOfRun = "goes on"
    failure: tuple[str, ...] = ()
    """Kinds of failure, as policies are called, by one of which it is to be reported."""
    words: str = ""
    """Text that the report has, for a run that stops or goes on without a restart."""
    names_rank: bool = True
    """Whether the report names the rank."""
    hangs: bool = False
    """Whether it is found by a limit of time."""
    times: int = 1
    damage: str = ""
    outside: Outside = ""
    ends_early: tuple[str, ...] = ()
    """Phases in which the run stops although it would go on in others: no step was made that a restart could keep."""
    rows: tuple[int, ...] = ()
    """Rows of the table in docs/concepts/faults.md."""


_KILLED = ("killed",)
_EVERYWHERE = (*_BEFORE_STEPS, LOAD, *_STEP_PHASES, SAVE, "shutdown")

KINDS: tuple[FaultKind, ...] = (
    FaultKind(name="killed", deed="kill", phases=_EVERYWHERE, failure=_KILLED, rows=(1, 16)),
    FaultKind(name="segfault", deed="segfault", phases=("forward", "backward"), failure=_KILLED, rows=(1,)),
    FaultKind(name="exited", deed="exit", phases=("forward", "optimizer"), failure=("error",), rows=(1,)),
    FaultKind(
        name="error",
        deed="raise",
        phases=_EVERYWHERE,
        failure=("error",),
        words="a fault that weft chaos has injected",
        ends_early=_BEFORE_STEPS,
        rows=(1,),
    ),
    FaultKind(name="hang", deed="wait", phases=_EVERYWHERE, failure=("hang",), hangs=True, rows=(5,)),
    FaultKind(name="spinning", deed="compute", phases=("forward",), failure=("hang",), hangs=True, rows=(6,)),
    FaultKind(
        name="interpreter",
        deed="interpreter",
        phases=("forward", "optimizer"),
        failure=("hang",),
        hangs=True,
        rows=(5,),
    ),
    FaultKind(
        name="stopped",
        deed="stop",
        phases=("init", "forward", "collective", SAVE, "shutdown"),
        failure=("hang",),
        hangs=True,
        rows=(5,),
    ),
    FaultKind(
        name="device-memory",
        deed="device memory",
        phases=("forward", "backward"),
        ends="stops",
        words="CUDA out of memory",
        failure=("device_memory",),
        rows=(15,),
    ),
    FaultKind(
        name="host-memory",
        deed="host memory",
        phases=("forward", "optimizer"),
        ends="stops",
        words="can't allocate memory",
        failure=("host_memory",),
        rows=(14,),
    ),
    FaultKind(name="nan", deed="nan", phases=("backward",), names_rank=False, rows=(10,)),
    FaultKind(
        name="supervisor",
        deed="kill supervisor",
        phases=("init", "forward", "collective", SAVE, "shutdown"),
        ends="killed",
        names_rank=False,
        rows=(2, 31),
    ),
    FaultKind(
        name="fork-server",
        deed="kill fork server",
        phases=("forward", SAVE),
        failure=_KILLED,
        names_rank=False,
        rows=(2,),
    ),
    FaultKind(
        name="parent", deed="kill parent", phases=("forward", SAVE), failure=_KILLED, names_rank=False, rows=(2,)
    ),
    FaultKind(
        name="terminated",
        deed="terminate",
        phases=("init", "forward", "collective", SAVE, "shutdown"),
        ends="ends",
        names_rank=False,
        rows=(26,),
    ),
    FaultKind(
        name="terminated-rank",
        deed="terminate rank",
        phases=("forward", "collective", SAVE),
        ends="ends",
        names_rank=False,
        rows=(26,),
    ),
    FaultKind(
        name="short-grace",
        deed="terminate",
        phases=("forward", SAVE),
        ends="killed",
        names_rank=False,
        outside="kill supervisor",
        rows=(27,),
    ),
    FaultKind(
        name="interrupted", deed="interrupt", phases=("forward", SAVE), ends="ends", names_rank=False, rows=(26,)
    ),
    FaultKind(
        name="disk-full",
        deed="fill the disk",
        phases=(SAVE,),
        names_rank=False,
        words="No space left on device",
        rows=(19,),
    ),
    FaultKind(name="torn-save", deed="kill", phases=(SAVE,), failure=_KILLED, rows=(16,)),
    FaultKind(name="torn-copy", deed="kill", phases=(COPY,), ends="killed", names_rank=False, rows=(16,)),
    *(
        FaultKind(
            name=name,
            deed="kill" if tier == "memory" else "kill supervisor",
            phases=(tier,),
            ends="goes on" if tier == "memory" else "killed",
            failure=_KILLED if tier == "memory" else (),
            names_rank=tier == "memory",
            damage=f"{how} {tier}",
            rows=rows,
        )
        for name, how, rows in (
            ("truncated", "truncate", (17,)),
            ("missing", "remove", (17,)),
            ("flipped", "flip", (18,)),
        )
        for tier in ("memory", "disk")
    ),
    FaultKind(
        name="double-start", deed="hold", phases=("forward",), names_rank=False, outside="second start", rows=(31,)
    ),
    FaultKind(
        name="poisoned",
        deed="kill",
        phases=("forward", "backward"),
        ends="stops",
        words="The batch of step {step} is samples {first:,} to {last:,} of the order",
        times=99,
        rows=(34,),
    ),
    FaultKind(
        name="recovery",
        deed="kill",
        phases=("init", "rendezvous", LOAD, "forward", SAVE),
        failure=_KILLED,
        rows=(35,),
    ),
    FaultKind(name="replan", deed="hold", phases=("forward",), names_rank=False, outside="replan", rows=(28,)),
    FaultKind(
        name="replan-killed",
        deed="hold",
        phases=("init", "rendezvous", LOAD, SAVE),
        names_rank=False,
        outside="replan",
        rows=(28, 35),
    ),
)


def chosen_kinds(names: str) -> tuple[FaultKind, ...]:
    """The kinds of a list of names with commas between them; `all`: every one.

    Raises:
        RecipeError: there is none of that name.
    """
    known = list(dict.fromkeys(kind.name for kind in KINDS))
    if names == "all":
        return KINDS
    for name in (asked := names.split(",")):
        if name not in known:
            hint = did_you_mean(name, known)
            raise RecipeError(f"--faults {name} is no fault.{hint} Known are all, {', '.join(known)}.")
    return tuple(kind for kind in KINDS if kind.name in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosCase:
    """One fault to inject, and everything that was drawn for it."""

    seed: int
    index: int
    kind: FaultKind
    phase: str
    plan: int
    """Number of the plan under which the run begins."""
    other_plan: int
    """Number of the plan that is asked for on the way."""
    rank: int
    step: int
    """Step in which it comes, counted from 1; 0 before the first."""
    faults: tuple[InjectedFault, ...] = field(default=())
    kill_after_seconds: float = 0.0

    @property
    def is_second(self) -> bool:
        """Whether the fault comes while the run recovers from a first one."""
        return len(self.faults) > 1

    def __str__(self) -> str:
        where = f"rank {self.rank}" if self.kind.names_rank else ""
        when = f"step {self.step}" if self.step else ""
        return " ".join(word for word in (self.kind.name, "at", self.phase, where, when) if word)


def draw_case(seed: int, index: int, kinds: Sequence[FaultKind], world_sizes: Sequence[int]) -> ChaosCase:
    """Draw case `index` of a campaign.  `world_sizes` are those of its plans.

    Every round goes through all pairs of kind and phase once, in an order of its own, so that few cases cover many.
    """
    cells = [(kind, phase) for kind in kinds for phase in kind.phases]
    rounds, place = divmod(index, len(cells))
    order = random.Random(f"{seed} order {rounds}").sample(range(len(cells)), len(cells))
    kind, phase = cells[order[place]]
    draw = random.Random(f"{seed} case {index}")
    plan = draw.randrange(len(world_sizes))
    others = [number for number in range(len(world_sizes)) if number != plan]
    other = draw.choice(others) if others else plan
    world = world_sizes[plan]
    rank = draw.randrange(world)
    first = _BOTH_SAVED_STEP if kind.damage else _SAVED_STEP if phase == LOAD else _FIRST_STEP
    last = NUM_STEPS - (5 if kind.deed == "fill the disk" else 2)
    step = draw.randrange(first, last + 1)
    faults = _faults(kind, phase, rank, step, world, min(world, world_sizes[other]), draw)
    return ChaosCase(
        seed=seed,
        index=index,
        kind=kind,
        phase=phase,
        plan=plan,
        other_plan=other,
        rank=faults[-1].rank,
        step=faults[-1].step,
        faults=faults,
        kill_after_seconds=draw.uniform(0.0, 0.3),
    )


def _faults(
    kind: FaultKind, phase: str, rank: int, step: int, world: int, both: int, draw: random.Random
) -> tuple[InjectedFault, ...]:
    """What is injected: mostly one fault, and two where the second comes while the run recovers."""
    operation = draw.randrange(1, 13)

    def fault(deed: str, phase: str, rank: int, step: int, **more: Any) -> InjectedFault:
        return InjectedFault(deed=deed, phase=phase, rank=rank, step=step, **more)

    if kind.outside == "replan" and kind.name != "replan":
        hold = fault("hold", "forward", rank, step)
        return hold, fault("kill", phase, draw.randrange(both), 0, after=0, operation=operation)
    if kind.name == "recovery" or phase == LOAD:
        first = fault("kill", draw.choice(_STEP_PHASES), draw.randrange(world), step)
        return first, fault(kind.deed, phase, rank, 0, after=0, operation=operation)
    if phase == COPY:
        return (fault(kind.deed, phase, -1, 0, operation=draw.randrange(1, 40)),)
    if kind.damage:
        return (fault(kind.deed, "forward", rank, step, damage=kind.damage, drawn=draw.randrange(1 << 30)),)
    if phase in _BEFORE_STEPS:
        return (fault(kind.deed, phase, rank, 0),)
    if phase == "shutdown":
        return (fault(kind.deed, phase, rank, NUM_STEPS),)
    if phase == SAVE and draw.random() < 0.3 and kind.deed != "fill the disk":
        step = NUM_STEPS + 1  # the last save, which goes to the disk at once
    if kind.deed == "fill the disk":
        operation = 1
    return (fault(kind.deed, phase, rank, step, operation=operation, times=kind.times),)
