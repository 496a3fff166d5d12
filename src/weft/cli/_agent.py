"""`weft agent`: what a place starts on each machine of a job.  Nobody gives this command by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from weft.cli._options import FLAG
from weft.errors import LaunchError

if TYPE_CHECKING:
    from weft.run.places.contract import PlaceSeat


def agent(
    run: Path,
    /,
    *,
    seat: str | None = None,
    topology: str | None = None,
    until_eof: Annotated[bool, FLAG] = False,
    check: Annotated[bool, FLAG] = False,
    settle: Annotated[bool, FLAG] = False,
    ray: Annotated[bool, FLAG] = False,
    attempt: int = 0,
    network: str | None = None,
) -> int:
    """Take this machine's part in a submitted run; places start this, once on each machine.

    Status 0: the job is done; 2: something must be mended first; 75: stopped or too few machines, and it can go on.

    Parameters
    ----------
    run
        Folder of the run.
    seat
        Number of this machine and how many there are, such as 0/4; by default as the place's environment says.
    topology
        Where the machine lies, from the outside in, with commas between.
    until_eof
        Save and leave when the standard input ends.
    check
        Say what this machine is, as JSON, and start nothing.
    settle
        Say by the status how an attempt of the job ended whose agents have all ended; 75: start it again.
    ray
        Drive the job under Ray: have an agent run on each machine, until the job has ended.
    attempt
        How often the job was started before.
    network
        With --check: network on which the machines reach one another.
    """
    if settle:
        from weft.run.places.settle import settle as settle_attempt

        return settle_attempt(run.absolute())
    if ray:
        from weft.run.places.ray_driver import drive

        return drive(run.absolute())
    if check:
        from weft.run.places.look import look

        print(look(run.absolute(), network))
        return 0
    from weft.api.training.agent import run_agent

    return run_agent(run.absolute(), _seat(seat, topology, attempt), until_eof=until_eof)


def _seat(given: str | None, topology: str | None, attempt: int) -> PlaceSeat | None:
    from weft.run.places.contract import PlaceSeat

    if given is None:
        return None
    index, slash, count = given.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise LaunchError(f"--seat {given} is no place among machines. Write its number and how many: 0/4.")
    where = tuple(topology.split(",")) if topology else ()
    return PlaceSeat(index=int(index), count=int(count), attempt=attempt, topology=where)
