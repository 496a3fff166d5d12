"""The contract of a place: what runs agents on machines, and what Weft asks of it.

A place is this machine, a list of hosts that ssh or an MPI's launcher reaches, Slurm, Kubernetes or Ray.  It starts,
places and replaces machines.  On each it starts one agent, `weft agent RUN`; Weft decides which ranks the agent starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from weft.config.pool import Pool
from weft.errors import LaunchError
from weft.formatting import format_percent

AGENT_DONE = 0
"""Exit status of an agent whose job is done."""
AGENT_MEND = 2
"""Exit status of an agent whose user must mend something: starting it again cannot help."""
AGENT_LATER = 75
"""Exit status of an agent that was stopped, or has too few peers, and has saved: starting it again goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangBlock:
    """Machines that should lie together, since the inner axes of the plan talk among them."""

    tier: str
    """Link tier of the cluster inside which the block should lie, such as `leaf`."""
    level: int
    """How many tiers lie between that and a machine: 0 for the innermost of those that join machines."""
    tier_nodes: int
    """Machines that one unit of the tier has."""
    num_nodes: int
    """Machines of the block."""
    axes: tuple[str, ...]
    """Axes of the mesh whose ranks all lie inside one block, the outermost first."""
    must: bool
    """Whether the place must keep the block together; otherwise it tries."""
    whole_seconds: float
    """Predicted time of a step where every block lies inside its tier."""
    split_seconds: float
    """The same where each block is split in two."""
    scattered_seconds: float
    """The same where no two machines of a block lie together."""

    @property
    def why(self) -> str:
        """Why its machines should lie together, as the end of a sentence."""
        axes = " and ".join(self.axes) or "neighbours"
        loss = format_percent(100 * (self.scattered_seconds / self.whole_seconds - 1))
        return f"{axes} stay in one {self.tier}; scattered: +{loss} per step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The machines that one job needs, all at the same time."""

    least: int
    most: int
    """Fewest and most machines."""
    num_devices: int
    """Accelerators of a machine, or its processes where they compute on cores."""
    accelerator: str
    """Kind of the accelerators; empty: ranks compute on cores."""
    num_cores: int | None = None
    """Cores of a machine; None: as the place gives."""
    blocks: tuple[GangBlock, ...] = ()
    """Blocks by tier, the smallest first."""
    limit_seconds: int | None = None
    """Longest time of the job; None: the place's own limit."""
    grace_seconds: int = 120
    """Time between the word to stop and the end, in which ranks save."""

    @property
    def nodes(self) -> str:
        """The numbers of machines as `--nodes` has them: `4`, or `2..4`."""
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"

    @property
    def dearest_block(self) -> GangBlock | None:
        """The block for which a place is asked that takes one such wish: the one that costs most where it is split."""
        blocks = [block for block in self.blocks if block.num_nodes > 1]
        return max(blocks, key=lambda each: (each.must, each.split_seconds, each.num_nodes), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What runs on the machines of a gang."""

    name: str
    """Name by which the place shows it; letters, digits and hyphens."""
    run: Path
    """Folder of the run: an absolute path that all machines see."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line of a request."""

    text: str
    why: str = ""
    """Reason for it, as the end of a sentence; empty: it is what every request has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a place is asked, as text.  A dry run prints the very bytes that `submit` hands over."""

    lines: tuple[RequestLine, ...]
    command: tuple[str, ...]
    """The command that hands it over, which reads the text from its standard input; or a method and an address."""

    @property
    def text(self) -> str:
        """The bytes that are handed over."""
        return "".join(f"{line.text}\n" for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceVerdict:
    """What a place says of a request that it has not been given."""

    accepts: bool
    text: str
    """When and where it would start, or why it would not: one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob:
    """A job as its place names it."""

    place: str
    number: str
    """The place's own name for the job."""
    host: str = ""
    """Host whose process keeps the job, for places that have no service of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceState:
    """What a place says of a job that it was given."""

    phase: Literal["pending", "running", "stopping", "ended", "unknown"]
    """`unknown`: the place does not answer, or has forgotten the job."""
    why: str = ""
    """Why it waits, or how it ended."""
    nodes: tuple[str, ...] = ()
    """Machines that it has, by the place's names for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeNodes:
    """Machines of one kind in a pool."""

    num_nodes: int
    num_free: int
    devices: str
    """What each has, as `8 × h100` or `64 cores`."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSeat:
    """What an agent learns of itself from its place."""

    index: int
    """Number of this machine among those of the job, counted from 0."""
    count: int
    attempt: int = 0
    """How often the place has started the job again."""
    topology: tuple[str, ...] = ()
    """Where the machine lies, from the outside in, as `spine0`, `leaf2`; empty: the place does not say."""
    node: str = ""
    """The place's name for the machine."""
    end_command: tuple[str, ...] = ()
    """Command that ends all agents of this attempt, for a place that may wait for one that is no more."""


def read_nodes(nodes: int | str) -> tuple[int, int]:
    """Read `4`, or `2..4`: the fewest machines and the most.

    Raises:
        LaunchError: it is neither.
    """
    least, dots, most = str(nodes).partition("..")
    if not least.isdecimal() or (dots and not most.isdecimal()) or not 1 <= int(least) <= int(most or least):
        raise LaunchError(f"--nodes {nodes} is no number of hosts. Give one, as 4, or the least and the most: 2..4.")
    return int(least), int(most or least)


class JobPlace(Protocol):
    """One place.  Methods that ask the place end within `ANSWER_SECONDS`.

    Raises (all but `request` and `seat`):
        LaunchError: the place does not answer, or refuses; with the place's own words, and status 2.
    """

    name: str
    replaces_machines: bool
    """Whether it starts another machine, or the same one again, where one is lost while the job runs."""

    def request(self, gang: Gang, job: Job, pool: Pool) -> Request:
        """Return what the place is asked.  It looks at nothing else, but for what this machine is called and has."""
        ...

    def check(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlaceVerdict:
        """Ask the place what it would say.  Starts nothing."""
        ...

    def submit(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlacedJob:
        """Hand the request over."""
        ...

    def state(self, placed: PlacedJob, job: Job, pool: Pool) -> PlaceState:
        """Ask how the job stands."""
        ...

    def stop(self, placed: PlacedJob, job: Job, pool: Pool) -> None:
        """Have every agent told to save and leave."""
        ...

    def free(self, pool: Pool) -> list[FreeNodes]:
        """Ask what machines there are."""
        ...

    def seat(self, environment: Mapping[str, str]) -> PlaceSeat | None:
        """Read the agent's seat from the environment that the place gave it; None: the place did not start it."""
        ...


ANSWER_SECONDS = 20.0
"""Time after which a place that does not answer counts as down."""


def weft_command(pool: Pool) -> tuple[str, ...]:
    """Return the command that starts Weft on a pool's machines."""
    return pool.command or (sys.executable, "-m", "weft.cli")


def agent_command(pool: Pool, run: Path, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command of an agent."""
    return (*weft_command(pool), "agent", str(run), *options)
