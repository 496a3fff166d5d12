"""The faults of a chaos campaign, and how a seed draws one: which, where, in which step, on which rank, which plan.

A case is a pure function of the seed, its number, the kinds that were asked for, and the plans; so it can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
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
_STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")
_BEFORE_STEPS = ("init", "rendezvous")
_SLOW_STEPS = 4
"""Steps from the first possible one in which a rank may become slow: twenty must be compared behind it."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault, and what is expected of a run that meets it."""

    name: str
    deed: str
    where: str
    """Phases at which it can come, with blanks between."""
    rows: tuple[int, ...]
    """Rows of the table in docs/concepts/faults.md."""
    failure: str = ""
    """Kind of failure, as policies are called, by which it is to be reported; empty: by none."""
    _: KW_ONLY
    is_of_rank: bool = True
    """Whether a failure is one rank's, which is to be named."""
    ends: EndOfRun = "goes on"
    ends_early: tuple[str, ...] = ()
    """Phases in which the run stops although it would go on in others: no step was made that a restart could keep."""
    words: str = ""
    """Pattern of a text that the report has, for a run that stops or goes on without a restart."""
    hangs: bool = False
    """Whether it is found by a limit of time."""
    times: int = 1
    damage: str = ""
    outside: Outside = ""
    in_script: bool = True
    """Whether it is drawn for a script with a session, too."""
    needs_replicas: bool = False
    """Whether it is drawn only under plans whose ranks hold the same weights."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases at which it can come."""
        return tuple(self.where.split())

    @property
    def names_rank(self) -> bool:
        """Whether the report names the rank."""
        return bool(self.failure) and self.is_of_rank


_EVERYWHERE = " ".join((*_BEFORE_STEPS, LOAD, *_STEP_PHASES, SAVE, "shutdown"))
_SIGNALLED = "init forward collective save shutdown"
_INJECTED = "a fault that weft chaos has injected"
_BATCH = "The batch of step {step} is samples {first:,} to {last:,} of the order"
_MEMORY = "can't allocate memory"

KINDS: tuple[FaultKind, ...] = (
    FaultKind("killed", "kill", _EVERYWHERE, (1, 16), "killed"),
    FaultKind("segfault", "segfault", "forward backward", (1,), "killed"),
    FaultKind("exited", "exit", "forward optimizer", (1,), "error"),
    FaultKind("error", "raise", _EVERYWHERE, (1,), "error", words=_INJECTED, ends_early=_BEFORE_STEPS),
    FaultKind("hang", "wait", _EVERYWHERE, (5,), "hang", hangs=True),
    FaultKind("spinning", "compute", "forward", (6,), "hang", hangs=True),
    FaultKind("interpreter", "interpreter", "forward optimizer", (5,), "hang", hangs=True),
    FaultKind("stopped", "stop", _SIGNALLED, (5,), "hang", hangs=True),
    FaultKind(
        "slow", "slow", "forward", (7,), words="rank {rank} of .* straggler", in_script=False, needs_replicas=True
    ),
    FaultKind(
        "device-memory", "device memory", "forward backward", (15,), "device_memory", ends="stops", words="CUDA out of"
    ),
    FaultKind("host-memory", "host memory", "forward optimizer", (14,), "host_memory", ends="stops", words=_MEMORY),
    FaultKind("nan", "nan", "backward", (10,)),
    FaultKind(
        "replica",
        "flip weights",
        "forward",
        (12,),
        "replicas",
        is_of_rank=False,  # of two nobody knows which is wrong
        in_script=False,
        needs_replicas=True,
    ),
    FaultKind("supervisor", "kill supervisor", _SIGNALLED, (2, 31), ends="killed"),
    FaultKind("fork-server", "kill fork server", "forward save", (2,), "killed", is_of_rank=False),
    FaultKind("parent", "kill parent", "forward save", (2,), "killed", is_of_rank=False),
    FaultKind("terminated", "terminate", _SIGNALLED, (26,), ends="ends"),
    FaultKind("terminated-rank", "terminate rank", "forward collective save", (26,), ends="ends"),
    FaultKind("short-grace", "terminate", "forward save", (27,), ends="killed", outside="kill supervisor"),
    FaultKind("interrupted", "interrupt", "forward save", (26,), ends="ends"),
    FaultKind("disk-full", "fill the disk", SAVE, (19,), words="No space left on device", in_script=False),
    FaultKind("torn-save", "kill", SAVE, (16,), "killed"),
    FaultKind("torn-copy", "kill", COPY, (16,), ends="killed", in_script=False),
    *(
        kind
        for name, how, row in (("truncated", "truncate", 17), ("missing", "remove", 17), ("flipped", "flip", 18))
        for kind in (
            # A session takes a snapshot when one is worth it: there may be none to damage.
            FaultKind(name, "kill", "memory", (row,), "killed", damage=f"{how} memory", in_script=False),
            FaultKind(name, "kill supervisor", "disk", (row,), ends="killed", damage=f"{how} disk"),
        )
    ),
    FaultKind(
        "newer", "kill supervisor", "disk", (32,), ends="killed", damage="newer disk", words="has format version"
    ),
    FaultKind("double-start", "hold", "forward", (31,), outside="second start"),
    FaultKind("poisoned", "kill", "forward backward", (34,), "killed", ends="stops", words=_BATCH, times=99),
    FaultKind("recovery", "kill", "init rendezvous load forward save", (35,), "killed"),
    FaultKind("replan", "hold", "forward", (28,), outside="replan"),
    FaultKind("replan-killed", "hold", "init rendezvous load save", (28, 35), outside="replan"),
)


@dataclass(frozen=True, slots=True)
class RunShape:
    """What a case is drawn for: the runs of a recipe, or those of a script with a session."""

    world_sizes: Sequence[int]
    """Ranks of each plan."""
    replicated: Sequence[int] = ()
    """Numbers of the plans whose ranks hold the same weights."""
    is_script: bool = False
    num_steps: int = NUM_STEPS
    saves: Sequence[int] = tuple(range(SAVE_EVERY, NUM_STEPS + 1, SAVE_EVERY))
    """Steps behind which is saved."""

    def kinds_of(self, kinds: Sequence[FaultKind]) -> tuple[FaultKind, ...]:
        """Those of some kinds that make sense here, as they are to be answered here."""
        possible = [kind for kind in kinds if self.replicated or not kind.needs_replicas]
        if not self.is_script:
            return tuple(possible)
        return tuple(_of_script(kind) for kind in possible if kind.in_script)

    @property
    def first_step(self) -> int:
        """First step in which a fault may come: a script is not started again before it has saved."""
        return self.saves[0] + 2 if self.is_script else 2


def _of_script(kind: FaultKind) -> FaultKind:
    """A kind of fault as a script is to answer it.  Without a save it stops; Weft does not know its samples."""
    if kind.ends == "goes on" and kind.failure:
        return replace(kind, ends_early=_BEFORE_STEPS)
    if kind.ends == "ends":
        return replace(kind, where=kind.where.removeprefix("init "))
    return replace(kind, words="has saved no new step after step") if kind.name == "poisoned" else kind


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


def draw_case(seed: int, index: int, kinds: Sequence[FaultKind], shape: RunShape) -> ChaosCase:
    """Draw case `index` of a campaign.

    Every round goes through all pairs of kind and phase once, in an order of its own, so that few cases cover many.
    """
    cells = [(kind, phase) for kind in shape.kinds_of(kinds) for phase in kind.phases]
    rounds, place = divmod(index, len(cells))
    order = random.Random(f"{seed} order {rounds}").sample(range(len(cells)), len(cells))
    kind, phase = cells[order[place]]
    draw = random.Random(f"{seed} case {index}")
    plan = draw.choice(shape.replicated) if kind.needs_replicas else draw.randrange(len(shape.world_sizes))
    others = [number for number in range(len(shape.world_sizes)) if number != plan]
    other = draw.choice(others) if others else plan
    faults = _faults(kind, phase, shape, plan, other, draw)
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


def _step(kind: FaultKind, phase: str, shape: RunShape, draw: random.Random) -> int:
    """Draw the step in which a fault comes."""
    first = shape.saves[1] + 2 if kind.damage else shape.saves[0] + 2 if phase == LOAD else shape.first_step
    if kind.deed == "slow":
        return draw.randrange(first, first + _SLOW_STEPS)
    return draw.randrange(first, shape.num_steps - (4 if kind.deed == "fill the disk" else 1))


def _faults(
    kind: FaultKind, phase: str, shape: RunShape, plan: int, other: int, draw: random.Random
) -> tuple[InjectedFault, ...]:
    """What is injected: mostly one fault, and two where the second comes while the run recovers."""
    world = shape.world_sizes[plan]
    rank, step, operation = draw.randrange(world), _step(kind, phase, shape, draw), draw.randrange(1, 13)

    def fault(deed: str, phase: str, rank: int, step: int, **more: Any) -> InjectedFault:
        return InjectedFault(deed=deed, phase=phase, rank=rank, step=step, **more)

    if kind.name == "replan-killed":
        both = min(world, shape.world_sizes[other])
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
        return (fault(kind.deed, phase, rank, shape.num_steps),)
    if phase == SAVE and draw.random() < 0.3 and kind.deed != "fill the disk" and shape.num_steps in shape.saves:
        step = shape.num_steps + 1  # the last save, which goes to the disk at once
    if kind.deed == "fill the disk":
        operation = 1
    drawn = shape.num_steps if kind.deed == "slow" else 0
    return (fault(kind.deed, phase, rank, step, operation=operation, times=kind.times, drawn=drawn),)
