"""Judges a run into which a fault came: found in time, named rightly, the same losses, a whole ledger, nothing left."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.api.chaos.cases import ChaosCase
from weft.config.recipe import OnFailure, Recipe
from weft.errors import WeftError
from weft.run.data.check_ledger import check_ledger
from weft.run.worker.faults import COPY, LOAD, Strike

HANG_SECONDS, TIMEOUT_SECONDS = 3.0, 6.0
"""Limits of the campaign's runs: a step without progress, and a collective that waits."""
POLICIES = OnFailure(hang_seconds=HANG_SECONDS, max_restarts=2)
"""Policies of the campaign's runs: the defaults, with short limits."""
_CRASH_BOUND_SECONDS = 1.0
_LOOKS_SECONDS = 6.0
"""Time that the launcher takes from the end of a limit to the report, on a busy machine."""
_DAMAGED = "damaged"
_NO_FAILURE = ("hold", "nan", "slow", "fill the disk")
"""Deeds after which no rank has to start again."""
_TOLERANCES = {"fp32": 2e-5, "fp64": 1e-10}
_OTHER_TOLERANCE = 2e-2
_STOPPED_STATUSES = (0, 75, 130)
"""Ends as a signal asks: it was done already, SIGTERM, Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """What a run left when a case was through."""

    case: ChaosCase
    run: Path
    output: str
    """What it printed."""
    statuses: tuple[int | None, ...]
    """Exit status of the run with the fault, and of each that went on; None: it was killed at the time limit."""
    strikes: tuple[Strike, ...]
    ended_unix_time_seconds: float
    """When the run with the fault had ended."""
    left_behind: tuple[str, ...]
    outside: str = ""
    """What the campaign's own deed came to."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultVerdict:
    """The judgement of a case."""

    problems: tuple[str, ...]
    """What was not as it should be; empty: all was."""
    detected_seconds: float | None
    """Time from the fault to the report of it; None where nothing was to be reported."""
    false_alarms: tuple[str, ...]
    """Causes of restarts that no fault explains."""


def losses_of(run: Path) -> dict[int, float]:
    """Step → loss of committed history: of two lines of one step the later counts."""
    return {line["step"]: line["loss"] for line in events_of(run, "step")}


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [event for event in (_event(line) for line in lines if line.endswith("\n")) if event["kind"] == kind]


def _event(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError:
        return {"kind": _DAMAGED, "line": line.rstrip()}


@dataclass(frozen=True, slots=True)
class WholeRun:
    """The run without faults, under the plan with which a case begins."""

    losses: Mapping[int, float]
    """Step → loss."""
    seconds: float
    """How long it took: on a busy machine reports take longer, too."""
    precision: str
    has_ledger: bool = True


def judge(record: CaseRecord, recipe: Recipe | None, whole: WholeRun) -> FaultVerdict:
    """Judge a case by the run without faults.  `recipe`: None for a script."""
    problems: list[str] = []
    if len({strike.fault for strike in record.strikes}) < len(record.case.faults):
        problems.append("the fault did not come")
    if None in record.statuses:
        problems.append("the run did not end in time")
    elif record.statuses[-1] != 0:
        problems.append(f"the run could not be gone on with: it ended with status {record.statuses[-1]}")
    detected = None
    if record.strikes and record.statuses[0] is not None:
        problems += _end_problems(record)
        detected, reports = _report_problems(record, whole.seconds)
        problems += reports + _damage_problems(record)
    problems += _loss_problems(record, whole)
    problems += [f"a line of the metrics is damaged: {event['line']}" for event in events_of(record.run, _DAMAGED)]
    try:
        if recipe is not None:
            check_ledger(record.run, seed=recipe.run.seed, global_batch_size=recipe.batch.global_batch_size)
        elif whole.has_ledger:
            check_ledger(record.run)
    except WeftError as problem:
        problems.append(str(problem))
    problems += [f"left behind: {what}" for what in record.left_behind]
    restarts = [event for event in events_of(record.run, "generation") if event["failure"] != "replan"]
    explained = sum(record.case.faults[strike.fault].deed not in _NO_FAILURE for strike in record.strikes)
    alarms = tuple(f"{event['failure']}: {event['cause']}" for event in restarts[explained:])
    return FaultVerdict(problems=tuple(problems), detected_seconds=detected, false_alarms=alarms)


def expected_end(case: ChaosCase) -> str:
    """How the run is to answer."""
    return "stops" if case.phase in case.kind.ends_early and not case.is_second else case.kind.ends


def _end_problems(record: CaseRecord) -> list[str]:
    status, ends = record.statuses[0], expected_end(record.case)
    if ends == "goes on" and status != 0:
        return [f"the run ended with status {status} and should have gone on by itself"]
    if ends == "stops" and status in (0, -signal.SIGKILL):
        return [f"the run ended with status {status} and should have stopped with an error"]
    if ends == "ends" and status not in _STOPPED_STATUSES:
        return [f"the run ended with status {status}, which a signal does not ask for"]
    if ends == "killed" and status not in (-signal.SIGKILL, *_STOPPED_STATUSES):
        return [f"the run ended with status {status} and not by the kill"]
    return []


def _report_problems(record: CaseRecord, whole_seconds: float) -> tuple[float | None, list[str]]:
    """Whether the fault was reported in time, with the right rank and the right cause."""
    case, kind, strike = record.case, record.case.kind, record.strikes[-1]
    ends = expected_end(case)
    if case.kind.outside:
        return None, _outside_problems(record)
    problems = _words_problems(record, ends)
    if ends == "stops":
        if kind.names_rank and not re.search(rf"rank {case.rank} (of|\(pid)", record.output):
            problems.append(f"rank {case.rank} is not named")
        seconds = record.ended_unix_time_seconds - record.strikes[0].unix_time_seconds
        return (seconds if kind.times == 1 else None), problems
    if ends != "goes on" or not kind.failure:
        return None, problems
    reports = [
        event
        for event in events_of(record.run, "generation")
        if event["unix_time_seconds"] >= strike.unix_time_seconds and event["failure"] != "replan"
    ]
    if not reports:
        return None, [*problems, "no report says that the ranks started again"]
    report = reports[0]
    if report["failure"] != kind.failure:
        problems.append(f"reported as {report['failure']} ({report['cause']}), and was {kind.failure}")
    if kind.names_rank and report["rank"] != case.rank:
        problems.append(f"rank {report['rank']} is named ({report['cause']}), and it was rank {case.rank}")
    seconds = report["unix_time_seconds"] - strike.unix_time_seconds
    if seconds > (bound := _bound_seconds(case) + whole_seconds):
        problems.append(f"reported after {seconds:.1f} s; at most {bound:.0f} s are allowed")
    return seconds, problems


def _bound_seconds(case: ChaosCase) -> float:
    """Seconds in which the fault is to be reported, beside the time of the whole run without it."""
    if not case.kind.hangs:
        return _CRASH_BOUND_SECONDS
    is_step = case.step and case.phase not in ("save", LOAD, "shutdown", "data")
    return _LOOKS_SECONDS + (HANG_SECONDS if is_step else TIMEOUT_SECONDS)


def _words_problems(record: CaseRecord, ends: str) -> list[str]:
    case, kind = record.case, record.case.kind
    if kind.name == "nan":
        skipped = {line["step"] for line in events_of(record.run, "step") if line["skipped"]}
        return (
            [] if skipped == {record.strikes[0].step} else [f"steps {sorted(skipped)} were skipped, and not that one"]
        )
    batch = 0
    if "{first" in kind.words:
        batch = record_batch(record)
    first, last = (case.step - 1) * batch, case.step * batch - 1
    words = kind.words.format(rank=case.rank, step=case.step, first=first, last=last)
    if words and not re.search(words, record.output) and (ends == "stops" or not kind.failure):
        return [f"the report does not say: {words}"]
    return []


def record_batch(record: CaseRecord) -> int:
    """Samples of a global batch, from the ledger."""
    return int(json.loads((record.run / "ledger" / "order.json").read_text())["global_batch_size"])


def _outside_problems(record: CaseRecord) -> list[str]:
    kind = record.case.kind
    if kind.outside == "second start" and "in use by" not in record.outside and "not empty" not in record.outside:
        return [f"the second start was not refused: {record.outside}"]
    if kind.outside == "replan" and "the ranks go on" not in record.outside:
        return [f"another plan was not taken: {record.outside}"]
    if kind.name == "replan":
        changes = [event for event in events_of(record.run, "generation") if event["failure"] == "replan"]
        return [] if changes else ["the plan was not changed"]
    return []


def _damage_problems(record: CaseRecord) -> list[str]:
    """Damage of the save that would have been taken must be named."""
    strike = record.strikes[-1]
    if not strike.damaged:
        return ["there was no save to damage"] if record.case.kind.damage else []
    damaged = Path(strike.damaged)
    # A save without its manifest is none, as one that a kill cut off.
    is_none = damaged.name == "manifest.json" and not damaged.exists()
    is_newest = record.case.phase == "disk" or strike.saved_in_memory > strike.saved_on_disk
    # A copy of it may have reached the disk before.
    step = int(damaged.parent.name.removeprefix("step-"))
    is_copied = any(event["restored_step"] >= step for event in events_of(record.run, "generation"))
    if is_none or not is_newest or is_copied or damaged.parent.name in record.output:
        return []
    return [f"the damage of {damaged.parent.name}/{damaged.name} ({record.case.kind.name}) was not said"]


def _loss_problems(record: CaseRecord, whole: WholeRun) -> list[str]:
    losses = losses_of(record.run)
    missing = set(whole.losses) - set(losses)
    if record.case.kind.deed == "fill the disk" and record.strikes:
        # A full disk costs lines of metrics, and never a step.
        missing -= set(range(record.strikes[0].step, record.strikes[0].step + 4))
    if missing:
        return [f"steps {sorted(missing)} have no loss"]
    last = record.strikes[0].step if record.case.kind.name == "nan" and record.strikes else len(whole.losses)
    has_other_plan = any(event["failure"] == "replan" for event in events_of(record.run, "generation"))
    tolerance = _TOLERANCES.get(whole.precision, _OTHER_TOLERANCE) if has_other_plan else 0.0
    for step in range(1, last + 1):
        loss, expected = losses.get(step), whole.losses[step]
        if loss is not None and not (math.isfinite(loss) and abs(loss - expected) <= tolerance * abs(expected)):
            return [f"the loss of step {step} is {loss!r}, and without the fault it is {expected!r}"]
    return []


def phase_of(case: ChaosCase) -> str:
    """Column of a case in the table."""
    return "save" if case.phase == COPY else "load" if case.phase in ("memory", "disk") else case.phase
