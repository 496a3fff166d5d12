"""`weft jobs`, `weft logs`, `weft stop` and `weft pools`: submitted runs, and where they can go."""

from __future__ import annotations

import json as to_text
import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from weft.cli._options import FLAG, Json
from weft.errors import LaunchError, WeftError

if TYPE_CHECKING:
    from weft.run.places.contract import PlaceState

_PAUSE_SECONDS = 0.2
_GRACE_LOOKS = 5
"""Looks at the place, a second apart, after which a run that has ended is followed no longer."""


def jobs(*, json: Json = False) -> None:
    """List the runs that you have submitted, the newest first.

    Each with its place, the place's name for it, how it stands there, its newest step and its machines.
    """
    from weft.run.places.submission import submitted_runs

    found = [_job(run) for run in submitted_runs()]
    if json:
        print(to_text.dumps(found, indent=2))
        return
    if not found:
        print("no run was submitted. weft train recipe.toml --on POOL --nodes N --run-folder RUN submits one.")
        return
    rows = [("run", "place", "job", "state", "step", "machines")]
    for job in found:
        phase = f"{job['phase']} ({job['why']})" if job["why"] else job["phase"]
        step = "" if job["step"] is None else str(job["step"])
        rows.append((_short(Path(job["run"])), job["pool"], job["job"], phase, step, ", ".join(job["machines"])))
    _print_table(rows)


def _job(run: Path) -> dict[str, Any]:
    """One submitted run, as `weft jobs --json` has it."""
    from weft.run.places.submission import JobOrder, Submission, newest_step

    found: dict[str, Any] = {"run": str(run), "pool": "", "job": "", "phase": "unknown", "why": "", "machines": []}
    try:
        order, newest = JobOrder.read(run), Submission.newest(run)
    except LaunchError as error:
        return {**found, "why": str(error), "step": newest_step(run)}
    number = "" if newest is None or newest.placed is None else newest.placed.number
    state = _state(run)
    return {
        **found,
        "pool": order.pool.name,
        "job": number,
        "phase": state.phase,
        "why": state.why,
        "machines": list(state.nodes),
        "step": newest_step(run),
    }


def logs(run: Path, /, *, follow: Annotated[bool, FLAG] = False, machine: int | None = None) -> None:
    """Print what the agents of a submitted run have said.

    Parameters
    ----------
    run
        Folder of the run.
    follow
        Go on as they say more, until the run has ended; Ctrl-C ends only this command.
    machine
        Number of one machine; by default all of them.
    """
    from weft.run.places.submission import FOLDER, JobOrder, agent_log

    run = run.absolute()
    JobOrder.read(run)
    opened: dict[Path, IO[str]] = {}
    ended = 0
    while True:
        paths = [agent_log(run, machine)] if machine is not None else sorted((run / FOLDER).glob("agent-*.log"))
        for path in paths:
            if path not in opened and path.is_file():
                opened[path] = path.open(encoding="utf-8", errors="replace")
        said = _print_new(opened)
        if not follow:
            if not opened:
                print(f"nothing was said yet ({_state(run).phase})", file=sys.stderr)
            break
        if not said and (ended or int(time.monotonic()) % 5 == 0):
            ended = ended + 1 if _state(run).phase == "ended" else 0
            if ended >= _GRACE_LOOKS:
                break
        time.sleep(_PAUSE_SECONDS)
    for file in opened.values():
        file.close()


def stop(run: Path, /) -> None:
    """Have a submitted run save and leave.

    The same command that submitted it lets it go on.

    Parameters
    ----------
    run
        Folder of the run.
    """
    from weft.run.places.proposal import stop as stop_run

    stop_run(run.absolute())
    print(f"told to   save and leave; weft logs {_short(run.absolute())} --follow shows it")


def pools() -> int:
    """List the pools that --on takes by name, and what is free.

    Their files lie in ~/.config/weft/pools, as NAME.toml.
    """
    from weft.config.pool import all_pools
    from weft.run.places import place_of

    rows, status = [("pool", "place", "machines", "free", "each", "")], 0
    for name, pool in all_pools().items():
        if isinstance(pool, WeftError):
            rows.append((name, "", "", "", "", str(pool)))
            status = 2
            continue
        try:
            for free in place_of(pool.place).free(pool):
                numbers = str(free.num_nodes), str(free.num_free)
                rows.append((name, pool.place, *numbers, free.devices, free.note))
        except LaunchError as error:
            rows.append((name, pool.place, "", "", "", str(error)))
            status = 2
    if len(rows) == 1:
        print("no pool has a name. Write ~/.config/weft/pools/NAME.toml, or give --on PLACE:FILE.toml.")
        return 0
    _print_table(rows)
    return status


def _state(run: Path) -> PlaceState:
    from weft.run.places.contract import PlaceState
    from weft.run.places.proposal import state_of

    try:
        return state_of(run)
    except WeftError as error:
        return PlaceState(phase="unknown", why=str(error))


def _print_new(opened: dict[Path, IO[str]]) -> bool:
    """Print the lines that have come; with several agents each has its machine's number in front."""
    said = False
    for path, file in opened.items():
        mark = f"{path.stem.removeprefix('agent-')}  " if len(opened) > 1 else ""
        for line in file.readlines():
            said = True
            print(f"{mark}{line}", end="" if line.endswith("\n") else "\n", flush=True)
    return said


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def _short(run: Path) -> str:
    relative = os.path.relpath(run)
    return relative if len(relative) < len(str(run)) else str(run)
