"""`weft train --on` and `weft launch --on`: hand a run to a place."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.errors import LaunchError

if TYPE_CHECKING:
    from weft.config.pool import Pool
    from weft.run.places.proposal import RunProposal
    from weft.run.places.submission import LaunchOrder, TrainOrder

REFUSED_STATUS = 2


def order_of(
    recipe: Path,
    plan: str,
    overrides: tuple[str, ...],
    processes_per_node: int | None,
    prove: Literal["auto", "always", "never"],
) -> TrainOrder:
    """Return what the agents are to do."""
    from weft.run.places.submission import TrainOrder

    return TrainOrder(
        recipe=recipe.absolute(),
        plan=plan if plan == "auto" else os.path.abspath(plan),
        overrides=overrides,
        processes_per_node=processes_per_node,
        prove=prove,
    )


def refuse_beside_on(*others: object) -> None:
    """Refuse options beside `--on` that say what the pool says, or the run's folder."""
    if any(other is not None for other in others):
        raise LaunchError(
            "--on does not go with --resume (the run goes on by itself), --processes (--processes-per-node says how"
            " many a machine has), --rendezvous or --network (which the pool says)."
        )


def submit_run(
    order: TrainOrder, on: str, nodes: str, run_folder: Path | None, *, dry_run: bool, time_limit: str | None
) -> int:
    """Print what is submitted, and submit it unless this is a dry run.  Status 2: the place would not take it."""
    pool, run = _pool_and_run(on, run_folder)
    from weft.cli._read import describe_recipe
    from weft.run.places.proposal import propose

    limit_seconds = _seconds(time_limit)
    proposal = propose(order, pool, nodes, run, Path.cwd(), describe=describe_recipe, limit_seconds=limit_seconds)
    return _submit(proposal, dry_run=dry_run)


def submit_script(
    order: LaunchOrder, on: str, nodes: str, run_folder: Path | None, *, dry_run: bool, time_limit: str | None
) -> int:
    """`submit_run`, of a script."""
    pool, run = _pool_and_run(on, run_folder)
    from weft.run.places.proposal import propose_launch

    proposal = propose_launch(order, pool, nodes, run, Path.cwd(), limit_seconds=_seconds(time_limit))
    return _submit(proposal, dry_run=dry_run)


def _pool_and_run(on: str, run_folder: Path | None) -> tuple[Pool, Path]:
    from weft.config.pool import find_pool

    pool = find_pool(on)
    if run_folder is None:
        raise LaunchError("--on needs --run-folder, a folder that all machines see: the run begins there, or goes on.")
    # The address of the folder itself: a link to it may mean another folder on another machine.
    return pool, run_folder.absolute()


def _submit(proposal: RunProposal, *, dry_run: bool) -> int:
    from weft.run.places.proposal import submit

    run = proposal.job.run
    print("\n".join(proposal.lines()))
    _print_request(proposal)
    if dry_run:
        verdict = proposal.check()
        print(f"verdict   {verdict.text}\nnothing was submitted (--dry-run)")
        return 0 if verdict.accepts else REFUSED_STATUS
    placed = submit(proposal)
    shown = shlex.quote(os.path.relpath(run))
    print(f"submitted {placed.place} job {placed.number}")
    print(f"next      weft logs {shown} --follow      weft watch {shown}      weft stop {shown}")
    return 0


def _print_request(proposal: RunProposal) -> None:
    request = proposal.request
    print(f"request   {shlex.join(request.command) + ', which reads' if request.command else 'these commands'}")
    print(request.text, end="")
    for line in request.lines:
        if line.why:
            print(f"why       {_shortened(line.text)}: {line.why}")


def _shortened(text: str, width: int = 48) -> str:
    return text if len(text) <= width else f"{text[: width // 2 - 1]} … {text[-width // 2 + 2 :]}"


def _seconds(given: str | None) -> int | None:
    """Read `12:00:00`, `1-00:00:00` (a day) or `30:00` (minutes)."""
    if given is None:
        return None
    days, dash, clock = given.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or not 2 <= len(parts) <= 3 or (dash and not days.isdecimal()):
        raise LaunchError(f"--time-limit {given} is no time. Write hours, minutes and seconds: 12:00:00.")
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    seconds += 86_400 * int(days or 0)
    if seconds < 1:
        raise LaunchError(f"--time-limit {given} leaves no time. Write hours, minutes and seconds: 12:00:00.")
    return seconds
