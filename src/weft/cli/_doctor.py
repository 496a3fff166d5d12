"""`weft doctor`."""

from __future__ import annotations

import json as to_text
import textwrap
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from weft.cli._options import FLAG, Json, write_output
from weft.errors import PlanError
from weft.formatting import format_percent, format_seconds

if TYPE_CHECKING:
    from weft.config.cluster import Cluster
    from weft.watch.doctor import MachineCheck, RunCase
    from weft.watch.run_record import RunRecord
    from weft.watch.verdicts import RunVerdict

WRONG_STATUS = 1


def doctor(
    run: Path | None = None,
    /,
    *,
    cluster: str | None = None,
    fix: Annotated[bool, FLAG] = False,
    json: Json = False,
) -> int:
    """Look at a run, or at this machine, and say what is wrong and what to change.

    Of a run, live or finished: slow ranks, links, disks and input, stages that are cut unequally, microbatches, memory
    and precision that are used badly, experts, failures, and a loss that does not fall. Without a run: cores, memory,
    shared memory, devices, versions, sockets, open files, clocks and disks. Status 0: nothing was found; 1: something.

    Parameters
    ----------
    run
        Folder of a run; by default this machine is looked at.
    cluster
        TOML file, or a spec such as 4x8xh100. Of a run: where it ran; by default this machine. Without a run: it is
        compared with this machine, and its peaks and links with the table of devices.
    fix
        Let the planner, corrected by what the run measured, look for a better plan, and write it to better-plan.toml in
        the run's folder.
    """
    if run is None and fix:
        raise PlanError("--fix writes a better plan for a run. Give its folder: weft doctor RUN --fix.")
    from weft.config.cluster import resolve_cluster

    described = None if cluster is None else resolve_cluster(cluster)
    return _of_machine(described, json=json) if run is None else _of_run(run, described, fix=fix, json=json)


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_machine(cluster: Cluster | None, *, json: bool) -> int:
    from weft.config.cluster import Cluster
    from weft.watch.doctor import check_cluster, check_machine

    checks = check_machine(Path("runs"))
    if cluster is not None:
        checks += check_cluster(cluster, Cluster.detect())
    if json:
        _print_json([check.document() for check in checks])
    else:
        _print_checks(checks)
    return WRONG_STATUS if any(check.state == "change" for check in checks) else 0


def _print_checks(checks: list[MachineCheck]) -> None:
    width = max(len(check.what) for check in checks)
    for check in checks:
        print(f"{check.state:<6}  {check.what:<{width}}  {check.value}")
        if check.change:
            _print_wrapped(check.change, 8 + width + 2, "→ ")
    num = sum(check.state == "change" for check in checks)
    print("\nNothing is to change." if not num else f"\n{num} to change.")


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_run(run: Path, cluster: Cluster | None, *, fix: bool, json: bool) -> int:
    from weft.watch.doctor import RunCase, examine_run
    from weft.watch.run_record import RunRecord

    with closing(RunRecord(run)) as record:
        case = RunCase(record=record, cluster=cluster or _machine_of(record))
        found = examine_run(case)
        is_well = not any(finding.is_of_run for finding in found)
        if json:
            _print_json([finding.document() for finding in found])
        else:
            print(_heading(case))
            for number, finding in enumerate(found, 1):
                _print_finding(number, finding)
            print(f"\nNothing is known to be wrong{' with the run' if found else ''}." if is_well else "")
        if fix:
            _write_better_plan(case, run, is_quiet=json)
    return 0 if is_well else WRONG_STATUS


def _machine_of(record: RunRecord) -> Cluster | None:
    """Return this machine where the run is, or was, on it alone."""
    from weft.config.cluster import known_machine
    from weft.watch.doctor import hosts_of

    if (record.owner is not None and not record.owner.shares_kernel) or len(hosts_of(record.facts)) > 1:
        return None
    machine = known_machine().cluster
    devices = {str(about.get("device", "cpu")).partition(":")[0] for about in record.facts.ranks}
    return None if devices - {"cpu"} and not machine.has_accelerators else machine


def _heading(case: RunCase) -> str:
    record = case.record
    if not record.steps:
        return f"{record.name}: no step is recorded"
    ranks = f" on {record.num_ranks} rank{'s' if record.num_ranks != 1 else ''}" if record.num_ranks else ""
    judged = f"; times are judged by the newest {len(case.recorded.steps)}" if case.is_timed else ""
    plain = "" if record.is_recorded else "; ranks recorded nothing, so that little can be said of its speed"
    share = "" if case.peak_share is None else f", {format_percent(100 * case.peak_share)} of the measured peak"
    return (
        f"{record.name}: {record.steps[-1].step:,} steps, {format_seconds(record.usual_seconds)} each{ranks}{share}"
        f"{judged}{plain}"
    )


def _print_finding(number: int, finding: RunVerdict) -> None:
    cost = f" ({format_percent(100 * finding.share)} of a step, {finding.confidence} confidence)"
    print()
    print(textwrap.fill(f"{number}. {finding.title}{cost if finding.share else ''}", 120, subsequent_indent="   "))
    for line in finding.evidence:
        _print_wrapped(line, 3, "· ")
    _print_wrapped(finding.next, 3, "→ ")
    if finding.promise:
        _print_wrapped(finding.promise, 3, "= ")


def _write_better_plan(case: RunCase, run: Path, *, is_quiet: bool) -> None:
    """Write the plan that the planner finds, or say that it finds none.  Raises PlanError where too little is known."""
    from weft.config.plan import dump_plan

    better = case.better()
    path = run / "better-plan.toml"
    write_output(path, dump_plan(better.plan, header=["found by weft doctor", *better.lines()]), PlanError)
    if not is_quiet:
        print("\n".join(better.lines()))
        print(f"written to {path}; a living run takes it by: weft replan {run} --plan {path}")


# ── printing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _print_wrapped(text: str, indent: int, mark: str) -> None:
    first, more = " " * indent + mark, " " * (indent + len(mark))
    print(textwrap.fill(text, 120, initial_indent=first, subsequent_indent=more))


def _print_json(documents: list[dict[str, Any]]) -> None:
    print(to_text.dumps(documents, indent=2, ensure_ascii=False))
