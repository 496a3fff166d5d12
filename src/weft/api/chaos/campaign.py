"""A chaos campaign: one run of a recipe after another, each with a fault of its own, each judged."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.api.chaos._runs import RunRequest, Supervisors
from weft.api.chaos.cases import NUM_STEPS, SAVE_EVERY, ChaosCase, FaultKind, RunShape, draw_case
from weft.api.chaos.judge import (
    POLICIES,
    TIMEOUT_SECONDS,
    CaseRecord,
    FaultVerdict,
    WholeRun,
    events_of,
    judge,
    losses_of,
    phase_of,
)
from weft.config.document import plain
from weft.config.plan import Plan, dump_plan
from weft.config.recipe import Recipe, dump_recipe
from weft.errors import LaunchError, WeftError
from weft.events import RunFolder
from weft.run.supervise.replan import ask_for_plan
from weft.run.worker.faults import strikes_in

_RUN_SECONDS = 60.0
"""Time limit of one run: longer, and it hangs."""
_RESUMES = 3
_POLL_SECONDS = 0.02
_LEAST_BEHIND_SAVES = 5
"""Steps of a script behind its second save."""
_ANSWER_SECONDS = 5.0
_PHASES = (
    "init", "rendezvous", "load", "data", "forward", "backward", "collective", "optimizer", "save", "shutdown",
)  # fmt: skip


def campaign_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a campaign's runs: few steps, many saves, a ledger, and the default policies with short limits."""
    run = replace(
        recipe.run,
        steps=NUM_STEPS,
        save_every=SAVE_EVERY,
        evaluate_every=None,
        evaluate_batches=None,
        log_every=1,
        ledger=True,
        on_failure=POLICIES,
    )
    optimizer = recipe.optimizer
    decay = min(optimizer.decay_steps, NUM_STEPS) if optimizer.decay_steps is not None else None
    optimizer = replace(optimizer, warmup_steps=min(optimizer.warmup_steps, NUM_STEPS // 2), decay_steps=decay)
    return replace(recipe, run=run, optimizer=optimizer)


def campaign_plan(plan: Plan) -> Plan:
    """A plan as a campaign runs it: with a short limit on how long collectives wait."""
    return replace(plan, compute=replace(plan.compute, collective_timeout_seconds=TIMEOUT_SECONDS))


@dataclass(slots=True)
class CampaignResult:
    """The cases of a campaign so far."""

    seed: int
    plans: Sequence[str]
    cases: list[tuple[ChaosCase, FaultVerdict, float]] = field(
        default_factory=list[tuple[ChaosCase, FaultVerdict, float]]
    )
    """Case, verdict, and seconds that it took."""
    left_out: list[str] = field(default_factory=list[str])
    """Faults that this machine does not allow, each with the reason."""

    @property
    def num_failed(self) -> int:
        return sum(bool(verdict.problems) for _, verdict, _ in self.cases)

    def to_json(self) -> dict[str, Any]:
        """The campaign as JSON, for a file."""
        detected = sorted(
            verdict.detected_seconds for _, verdict, _ in self.cases if verdict.detected_seconds is not None
        )
        return {
            "seed": self.seed,
            "plans": list(self.plans),
            "num_faults": len(self.cases),
            "num_failed": self.num_failed,
            "num_false_alarms": sum(len(verdict.false_alarms) for _, verdict, _ in self.cases),
            "detected_seconds_median": detected[len(detected) // 2] if detected else None,
            "detected_seconds_max": detected[-1] if detected else None,
            "left_out": self.left_out,
            "faults": [
                {
                    "index": case.index,
                    "fault": case.kind.name,
                    "phase": case.phase,
                    "plan": self.plans[case.plan],
                    "rank": case.rank,
                    "step": case.step,
                    "problems": list(verdict.problems),
                    "detected_seconds": verdict.detected_seconds,
                    "false_alarms": list(verdict.false_alarms),
                    "seconds": round(seconds, 3),
                }
                for case, verdict, seconds in self.cases
            ],
        }

    def table(self) -> list[str]:
        """Faults by phase: how many came, and how many of these went wrong."""
        names = list(dict.fromkeys(case.kind.name for case, _, _ in self.cases))
        width = max([len(name) for name in names], default=0)
        phases = [phase for phase in _PHASES if any(phase_of(case) == phase for case, _, _ in self.cases)]
        lines = ["  ".join([" " * width, *phases])]
        for name in sorted(names):
            cells: list[str] = []
            for phase in phases:
                own = [
                    bool(v.problems) for case, v, _ in self.cases if case.kind.name == name and phase_of(case) == phase
                ]
                text = "" if not own else f"{len(own)}" if not any(own) else f"{len(own)} ({sum(own)} wrong)"
                cells.append(text.rjust(len(phase)))
            lines.append("  ".join([name.ljust(width), *cells]).rstrip())
        return lines


class Campaign:
    """Runs cases.  Use it as a context manager, and call `run` for each."""

    def __init__(
        self,
        subject: Recipe | Path,
        plans: Sequence[tuple[str, Plan]],
        kinds: Sequence[FaultKind],
        seed: int,
        *,
        log: Callable[[str], object],
        replay_words: str,
    ) -> None:
        """Say what runs.

        Args:
            subject: a recipe, or a script with a session.
            plans: name and plan; for a recipe each complete for this machine.
            log: takes a line.
            replay_words: the options by which a case is drawn, for the command that replays it.
        """
        self._script = subject if isinstance(subject, Path) else None
        self._recipe = None if isinstance(subject, Path) else campaign_recipe(subject)
        self._plans = [(name, campaign_plan(plan)) for name, plan in plans]
        self._log = log
        self._replay_words = replay_words
        self._folder = Path(tempfile.mkdtemp(prefix="weft-chaos-"))
        self._temporary = self._folder / "tmp"
        self._small_disk: Path | None = None
        self._references: dict[int, WholeRun] = {}
        self._seed = seed
        self._kinds = tuple(kinds)
        self._shape: RunShape | None = None
        self._supervisors: Supervisors | None = None
        self.result = CampaignResult(seed=seed, plans=[name for name, _ in plans])

    def __enter__(self) -> Self:
        self._temporary.mkdir()
        if self._recipe is not None:
            (self._folder / "recipe.toml").write_text(dump_recipe(self._recipe, everything=True))
        for number, (_, plan) in enumerate(self._plans):
            self._plan_path(number).write_text(dump_plan(plan))
        self._supervisors = Supervisors(self._temporary)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._supervisors is not None:
            self._supervisors.close()
        if self._small_disk is not None:
            subprocess.run(["umount", str(self._small_disk)], check=False, capture_output=True)
        if self.result.num_failed:
            self._log(f"kept      the runs of what went wrong: {self._folder}")
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reference(self, number: int) -> WholeRun:
        """The run under a plan without any fault, which is done once.

        Raises:
            LaunchError: it does not end well.
        """
        if number not in self._references:
            name, plan = self._plans[number]
            folder = self._folder / f"reference-{number}"
            folder.mkdir()
            output, run = folder / "output.txt", folder / "run"
            began = time.monotonic()
            status = self._ran(self._request(number, run, output, resume=False))
            seconds = time.monotonic() - began
            if status != 0:
                raise LaunchError(
                    f"a run under {name} without any fault ended with status {status}:\n{_tail(output, 15)}"
                )
            if left := self._sure.left_behind(run):
                raise LaunchError(f"a run under {name} without any fault left {left[0]} behind.")
            losses, has_ledger = losses_of(run), (run / "ledger").is_dir()
            self._references[number] = WholeRun(losses, seconds, plan.compute.precision, has_ledger)
            self._log(f"whole     {name}: {len(losses)} steps without a fault in {seconds:.1f} s")
            if self._script is not None and not has_ledger:
                self._log("left out  the ledger of samples: write weft.session(ledger=True) to have it judged, too")
        return self._references[number]

    def _run_shape(self) -> RunShape:
        """What cases are drawn for.  That of a script is learnt from its first run.

        Raises:
            LaunchError: the script has too few steps or saves.
        """
        if self._shape is None:
            sizes = [plan.mesh.world_size for _, plan in self._plans]
            same = [number for number, (_, plan) in enumerate(self._plans) if _holds_replicas(plan)]
            self._shape = RunShape(sizes, same)
            if self._script is not None:
                steps = len(self._reference(0).losses)
                saves = [event["step"] for event in events_of(self._folder / "reference-0" / "run", "checkpoint")]
                if len(saves) < 2 or saves[1] + _LEAST_BEHIND_SAVES > steps:
                    raise LaunchError(
                        f"{self._script} takes {steps} steps and saves behind {saves or 'none'}. weft chaos needs a"
                        f" session that saves twice, and {_LEAST_BEHIND_SAVES} steps behind that."
                    )
                self._shape = replace(self._shape, is_script=True, num_steps=steps, saves=saves)
        return self._shape

    def _mount_small_disk(self) -> None:
        """Mount a disk that a run can fill, where this user may."""
        self._reference(0)
        disk = self._folder / "small"
        disk.mkdir()
        files = (self._folder / "reference-0").rglob("*")
        size = sum(path.stat().st_size for path in files if path.is_file())
        command = ["mount", "-t", "tmpfs", "-o", f"size={max(8 << 20, 4 * size)}", "tmpfs", str(disk)]
        try:
            said = subprocess.run(command, check=False, capture_output=True, text=True)
            problem = said.stderr.strip() if said.returncode else ""
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            why = f"disk-full: a small disk cannot be mounted here ({problem.splitlines()[-1]})"
            self.result.left_out.append(why)
            self._log(f"left out  {why}")
            return
        self._small_disk = disk

    def run(self, index: int) -> FaultVerdict | None:
        """Run case `index`, judge it, and say so in a line.  None where this machine does not allow its fault.

        Raises:
            LaunchError: a run without any fault does not end well.
        """
        # Drawn from all that were asked for: a case is the same on a machine that allows fewer.
        case = draw_case(self._seed, index, self._kinds, self._run_shape())
        if case.kind.deed == "fill the disk" and self._small_disk is None:
            if not self.result.left_out:
                self._mount_small_disk()
            if self._small_disk is None:
                return None
        whole = self._reference(case.plan)
        began = time.monotonic()
        with self._case_folder(case) as (folder, run):
            record = self._record(case, folder, run)
            verdict = judge(record, self._recipe, whole)
            if verdict.problems:
                (folder / "problems.txt").write_text("\n".join(verdict.problems))
        seconds = time.monotonic() - began
        self.result.cases.append((case, verdict, seconds))
        name = self._plans[case.plan][0]
        mark = "ok" if not verdict.problems else "WRONG"
        found = f", reported after {verdict.detected_seconds:.1f} s" if verdict.detected_seconds is not None else ""
        self._log(f"{index:>4}  {mark:<5}  {name:<14}  {case}{found}  ({seconds:.1f} s)")
        for problem in (*verdict.problems, *(f"for no reason: {alarm}" for alarm in verdict.false_alarms)):
            self._log(f"          {problem}")
        if verdict.problems:
            self._log(f"          replay: {self._replay_words} --replay {self._seed}:{index}")
        return verdict

    # ── one case ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _case_folder(self, case: ChaosCase) -> Any:
        """The folder of a case and that of its run; both are removed where nothing went wrong."""
        folder = self._folder / f"case-{case.index}"
        folder.mkdir()
        run = folder / "run"
        if case.kind.deed == "fill the disk":
            assert self._small_disk is not None
            run = self._small_disk / "run"
        yield folder, run
        if (folder / "problems.txt").exists():
            if run.parent != folder and run.exists():
                shutil.copytree(run, folder / "run")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        if run.parent != folder:
            shutil.rmtree(run, ignore_errors=True)
            (run.parent / "ballast").unlink(missing_ok=True)

    def _record(self, case: ChaosCase, folder: Path, run: Path) -> CaseRecord:
        output = folder / "output.txt"
        faults = {"faults": [plain(fault) for fault in case.faults], "folder": str(folder)}
        pid = self._sure.start(replace(self._request(case.plan, run, output, resume=False), faults=faults))
        status, outside = self._attend(case, pid, folder, run)
        ended = time.time()
        statuses: list[int | None] = [status]
        while statuses[-1] != 0 and len(statuses) <= _RESUMES:
            resumes = any((run / "checkpoints").glob("step-*/manifest.json"))
            if not resumes:
                shutil.rmtree(run, ignore_errors=True)
            # Under the plan that it had last, which another may have taken the place of.
            request = self._request(case.plan, run, output, resume=resumes)
            statuses.append(self._ran(replace(request, plan=_kept(folder, run)) if resumes else request))
        return CaseRecord(
            case=case,
            run=run,
            output=_all_text(output, run),
            statuses=tuple(statuses),
            strikes=tuple(strikes_in(folder)),
            ended_unix_time_seconds=ended,
            left_behind=tuple(self._sure.left_behind(run)),
            outside=outside,
        )

    def _attend(self, case: ChaosCase, pid: int, folder: Path, run: Path) -> tuple[int | None, str]:
        """Wait for the end of a run, and do what the campaign does when the fault has come."""
        until, outside = time.monotonic() + _RUN_SECONDS, ""
        is_done = not case.kind.outside
        while (status := self._sure.status(pid, _POLL_SECONDS)) is None and time.monotonic() < until:
            if not is_done and strikes_in(folder):
                is_done = True
                outside = self._act(case, pid, folder, run)
        if status is None:
            self._sure.kill_all()
        return status, outside

    def _act(self, case: ChaosCase, pid: int, folder: Path, run: Path) -> str:
        said = ""
        if case.kind.outside == "kill supervisor":
            time.sleep(case.kill_after_seconds)
            if self._sure.status(pid) is None:
                _kill(pid)
        elif case.kind.outside == "second start":
            output = folder / "second.txt"
            resumes = any((run / "checkpoints").glob("step-*/manifest.json"))
            status = self._ran(self._request(case.plan, run, output, resume=resumes))
            said = f"status {status}: {_tail(output, 12)}"
        else:
            try:
                plan = self._plans[case.other_plan][1]
                said = ask_for_plan(RunFolder(run), plan, timeout_seconds=_ANSWER_SECONDS)
            except WeftError as problem:
                said = str(problem)
        (folder / "go-on").touch()
        return said

    def _request(self, plan: int, run: Path, output: Path, *, resume: bool) -> RunRequest:
        return RunRequest(
            subject=self._script or self._folder / "recipe.toml",
            plan=self._plan_path(plan),
            folder=run,
            resume=resume,
            output=output,
        )

    def _ran(self, request: RunRequest) -> int | None:
        """Run to the end; None where that does not come in time."""
        status = self._sure.status(self._sure.start(request), _RUN_SECONDS)
        if status is None:
            self._sure.kill_all()
        return status

    def _plan_path(self, number: int) -> Path:
        return self._folder / f"plan-{number}.toml"

    @property
    def _sure(self) -> Supervisors:
        assert self._supervisors is not None, "the campaign has not been entered"
        return self._supervisors


def _holds_replicas(plan: Plan) -> bool:
    """Whether the ranks of a plan have the same weights, and the same work."""
    return plan.mesh.replicate == plan.mesh.world_size > 1 and plan.data_parallel.zero == 0


def replay_words(subject: Path, plans: Sequence[str], faults: str) -> str:
    """The command, without the case, that draws the same cases again."""
    words = ["weft", "chaos", str(subject), *(word for plan in plans for word in ("--plan", plan)), "--faults", faults]
    return shlex.join(words)


def write_result(result: CampaignResult, path: Path, about: dict[str, Any]) -> None:
    """Write a campaign into a file, with facts about where and when it ran."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, **result.to_json()}, indent=1) + "\n")


def _kept(folder: Path, run: Path) -> Path:
    """The run's own plan, copied out of its folder."""
    kept = folder / "plan.toml"
    shutil.copyfile(run / "plan.toml", kept)
    return kept


def _kill(pid: int) -> None:
    import os
    import signal

    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tail(path: Path, count: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.is_file() else ""


def _all_text(output: Path, run: Path) -> str:
    """What a run printed, and what its ranks logged."""
    texts = [output, *sorted(run.glob("*.log"))]
    return "\n".join(path.read_text(errors="replace") for path in texts if path.is_file())
