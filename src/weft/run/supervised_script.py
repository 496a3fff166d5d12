"""A script whose ranks start again when one fails: `weft launch`, on this host or, led by it, on several.

Only a script whose session has saved is started again by itself: it goes on from there.  Any other may have had effects
that a second start repeats; its first failure ends the job, unless the user allows restarts.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.config.document import typed
from weft.config.plan import MeshPlan, ModelFacts, Plan, complete_plan, dump_plan, load_plan, over_ranks
from weft.config.recipe import OnFailure, Recipe
from weft.events import Event, FolderToken, GenerationEvent, RunFolder
from weft.run.launch import HAND_OVER, threads_of_user
from weft.run.launch._rank_info import run_folder_note
from weft.run.launch.generation import ScriptGeneration, SessionReport
from weft.run.launch.job_end import JobEnd
from weft.run.launch.launcher import ForkServer, HangLimits, run_script
from weft.run.launch.memory_folder import create_memory_folder, remove_memory_folder
from weft.run.launched_script import SCRIPT_FUNCTION, HostsOfScript, LaunchedScript, ScriptEnd, start_script
from weft.run.supervise import (
    PlanChange,
    PlanChanges,
    PolicyTexts,
    Supervisor,
    SupervisorSignals,
    log_between,
    report_end,
)
from weft.run.supervise.replan import named_as_supervisor
from weft.techniques.check import check_plan, check_runnable

_TEXTS = PolicyTexts(
    stop="--on-failure {kind}=stop; {kind}=restart would start the script again.",
    max_restarts="--max-restarts {number}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """What `weft chaos` sets for the session of a script, whatever that says."""

    folder: Path
    """Folder in which its run begins."""
    plan: Plan
    faults: dict[str, Any] | None = None
    """What is injected into its ranks; None: nothing."""


@dataclass(slots=True, kw_only=True)
class SupervisedScript:
    """A script that is to run until it is done."""

    launched: LaunchedScript
    policies: OnFailure
    restarts_any: bool
    """Whether a script is started again, too, for which no session has saved."""
    resumes: Path | None = None
    """Folder of an earlier run, from whose newest save the session goes on."""
    terms: SessionTerms | None = None
    """What is set for its session; None: it has its own way."""
    hosts: HostsOfScript | None = None
    """The hosts of the script, where it has several."""
    fork_server: ForkServer | None = None
    """Forks the ranks; by default one is started."""
    rings: Callable[[int], Path | None] = lambda number: None
    """Returns the folder in which the ranks of a generation record what they do; None: nothing is recorded."""
    _run: RunFolder | None = None
    """Folder of the session's run, once it has told."""
    _session: SessionReport = field(default_factory=SessionReport)
    _began: float = field(default_factory=time.time)
    """Unix time: who has asked for another plan before has asked an earlier job."""
    _folder: Path | None = None
    """Private folder of the generation that runs."""
    _plans: PlanChanges[None] | None = None
    _before: str = ""
    """TOML of the plan before, where the next generation goes on under another."""
    _memory: Path | None = None
    """Folder in the host's memory for snapshots."""
    _open: ExitStack = field(default_factory=ExitStack)
    """Closed with the last generation."""
    _is_named: bool = False
    """Whether this process is named in the run's folder as its supervisor."""
    _has_asked: bool = False
    """Whether the ranks of this generation were asked to hand over."""

    def run(self) -> int:
        """`run_to_end`, and say how the script ended; return the status for the caller's own exit."""
        end = self.run_to_end()
        if end.text:
            print(end.text, file=sys.stderr if end.has_failed else sys.stdout, flush=True)
        return end.status

    def run_to_end(self) -> ScriptEnd:
        """Run generations of ranks until the script is done, was stopped, or failed for good.

        Raises:
            LaunchError: there is no such script, or no ranks could be started.
            KeyboardInterrupt: a second Ctrl-C came between two generations.
        """
        if self.resumes is not None:
            self._run, self._session = RunFolder.open(self.resumes), SessionReport(num_models=1, has_saved=True)
        if self.hosts is None:  # what lies in a host's memory is lost with it
            self._memory = create_memory_folder()
        self._open.callback(self._leave_memory, is_wanted=True)
        with SupervisorSignals() if self.hosts is None else nullcontext(self.hosts.signals) as signals, self._open:
            supervisor = Supervisor(
                self.policies,
                saved_step=self._saved_step,
                samples_per_step=0,
                plan=self._plan,
                plan_change=self._plan_change,
                log=self._log,
                report=report_end,
                stopping=signals.stopping,
                may_restart=lambda end: self._goes_on or self.restarts_any,
                texts=_TEXTS,
                tries_early_errors=self.restarts_any,
            )

            def next_signal() -> signal.Signals | None:
                supervisor.sample()
                self._look()
                return self._signal_to_send(signals.number)

            def start(number: int, resumes: bool) -> JobEnd:
                if signals.number is not None and self.hosts is None:  # it came before any launcher could pass it on
                    return JobEnd(num_processes=0, outcomes={}, cause=None, signals=(signals.number,))
                rate = supervisor.failure_rate.mean_seconds
                return self._generation(number, resumes, next_signal, rate)

            end, reason = supervisor.run(start, resumes=self.resumes is not None)
            end = signals.added_to(end)
            self._leave_memory(is_wanted=end.cause is not None or end.has_failed_rank)
            return self._end(end, reason)

    def _signal_to_send(self, noted: signal.Signals | None) -> signal.Signals | None:
        """The signal that the ranks shall get: one that has come, or to hand over to more hosts or another plan."""
        if self._plans is None:
            return noted
        has_grown = self.hosts is not None and self.hosts.crew.has_grown()
        number = self._plans.signal_to_send(noted, others_are_wanted=has_grown)
        self._has_asked = self._has_asked or number == HAND_OVER
        return number

    def _generation(
        self,
        number: int,
        resumes: bool,
        next_signal: Callable[[], signal.Signals | None],
        failure_seconds: float,
    ) -> JobEnd:
        """Start the ranks of a generation, and return how they ended."""
        launched, goes_on, plan = self.launched, resumes and self._goes_on, self._plan()
        self._has_asked = False
        if self._plans is not None:
            self._plans.begin()
        generation = ScriptGeneration(
            number=number,
            run=str(self._known_run.path.resolve()) if goes_on else "",
            plan=dump_plan(plan) if self.terms is not None or (goes_on and plan != self._plan_of_script) else "",
            before=self._before,
            memory="" if self._memory is None else str(self._memory),
            failure_seconds=failure_seconds,
            folder=self._given_folder,
            faults=None if self.terms is None else self.terms.faults,
            owner=self._token(number),
        )
        self._before = ""
        hang_seconds, timeout_seconds = self.policies.hang_seconds, plan.compute.timeout_seconds
        stopped_seconds = min(timeout_seconds, hang_seconds or timeout_seconds)
        limits = HangLimits(hang_seconds, timeout_seconds)

        def prepare(folder: Path) -> None:
            self._folder = folder
            generation.write(folder)

        if self.hosts is not None:
            self.hosts.crew.start = lambda ranks: start_script(
                launched, ranks, prepare=prepare, conclude=self._look, starts_again=self._starts_again
            )
            return self.hosts.crew.run(
                SCRIPT_FUNCTION,
                asdict(generation),
                plan.mesh.world_size,
                threads_per_rank=launched.threads or 1,  # each host shares its own cores out, where none are given
                fork_server=self.fork_server,
                stopped_timeout_seconds=stopped_seconds,
                hang_limits=limits,
                memory=None,
                signal_to_send=next_signal,
                rings=self.rings(number),
            )
        return run_script(
            launched.script,
            launched.arguments,
            plan.mesh.world_size,
            module=launched.module,
            under=launched.under,
            threads_per_rank=launched.threads,
            logs=launched.logs,
            preload=launched.preload,
            num_restarts=number - 1,
            fork_server=self._fork_server(),
            stopped_timeout_seconds=stopped_seconds,
            hang_limits=limits,
            memory=self._memory,
            signal_to_send=next_signal,
            prepare=prepare,
            conclude=self._look,
            starts_again=self._starts_again,
            rings=self.rings(number),
        )

    @property
    def _given_folder(self) -> str:
        """Folder in which the session begins its run, whatever the script says; empty: as the script says."""
        if self.hosts is not None:
            return str(self.hosts.run.path)
        return "" if self.terms is None else str(self.terms.folder)

    def _token(self, number: int) -> dict[str, Any] | None:
        """What lets the ranks of a generation write in the run's folder, where the hosts' leader owns it."""
        if self.hosts is None:
            return None
        if number > 1:
            self.hosts.lock.renew()
        assert self.hosts.lock.token is not None, "who leads owns the folder"
        return self.hosts.lock.token.to_json()

    def _fork_server(self) -> ForkServer:
        """The fork server of all generations; one that was killed with its ranks is replaced."""
        if self.fork_server is None or not self.fork_server.is_alive:
            launched = self.launched
            threads = launched.threads or max(1, (os.cpu_count() or 1) // launched.num_processes)
            self.fork_server = self._open.enter_context(ForkServer(threads_per_rank=threads))
        return self.fork_server

    @property
    def run_folder(self) -> Path | None:
        """Folder of the session's run, once it has told."""
        return None if self._run is None else self._run.path

    # ── what the session has told ─────────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        """Read what the session of the generation that runs has told."""
        assert self._folder is not None
        session, note = SessionReport.read(self._folder), run_folder_note(self._folder)
        if session.num_models:
            self._session = session
        if self._run is None and note.is_file():
            self._run = RunFolder(Path(note.read_text()))
        if self._plans is None and self._run is not None and session.num_models == 1 and session.facts:
            # What a restart needs is imported now, beside the ranks, and not when one has failed.
            threading.Thread(target=import_module, args=("weft.run.checkpoint",), daemon=True).start()
            if not self._is_named:
                self._open.enter_context(named_as_supervisor(self._run))
                self._is_named = True
            self._plans = PlanChanges(
                self._run, load_plan(self._run.plan), None, check=self._checked, report=report_end, since=self._began
            )

    @property
    def _goes_on(self) -> bool:
        """Whether a session can go on from what it has saved."""
        return self._run is not None and self._session.num_models == 1 and self._session.has_saved

    @property
    def _known_run(self) -> RunFolder:
        assert self._run is not None, "asked of a session that has saved"
        return self._run

    @property
    def _plan_of_script(self) -> Plan:
        """Stands for the plan that the script itself names."""
        return self.terms.plan if self.terms is not None else Plan(mesh=MeshPlan(replicate=self.launched.num_processes))

    def _plan(self) -> Plan:
        """The plan of the generation that runs, or is about to."""
        if self._plans is not None:
            return self._plans.plan
        if self.resumes is not None and self._run is not None and self._run.plan.is_file():
            plan = load_plan(self._run.plan)
            return plan if plan.mesh.world_size == self.launched.num_processes else self._plan_of_script
        return self._plan_of_script

    def _saved_step(self) -> int:
        """Finished steps of the session's newest save."""
        if not self._goes_on:
            return 0
        from weft.run.checkpoint import newest_saved_step  # imports torch, which a script may do without

        folders = [self._known_run.checkpoints, *([self._memory] if self._memory is not None else [])]
        return max(newest_saved_step(folder) for folder in folders)

    def _leave_memory(self, *, is_wanted: bool) -> None:
        """Remove the folder in memory; where the script has not come to its end, its newest snapshot lasts."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if is_wanted and self._goes_on:
            from weft.run.checkpoint import KEEP
            from weft.run.checkpoint.tiers import DiskFolder, Drain

            owner = self._known_run.owner
            token = None if owner is None else FolderToken(self._known_run.path, owner)
            is_free = owner is None or owner.ended or owner.is_gone  # else another job has taken the folder over
            if is_free and not Drain(memory, DiskFolder(self._known_run.checkpoints, KEEP, token)).flush():
                print(f"The newest snapshot lies in {memory} alone. Make room.", file=sys.stderr, flush=True)
                return
        remove_memory_folder(memory)

    def _starts_again(self) -> bool:
        self._look()
        return self._goes_on or self.restarts_any

    # ── plans ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _checked(self, plan: Plan) -> tuple[Plan, None]:
        """Return a plan complete under which the session could go on, as far as can be told without building its model.

        Raises:
            WeftError: it does not fit the session's batch or model.
        """
        recipe, facts = typed(Recipe, self._session.recipe), typed(ModelFacts, self._session.facts)
        plan, _ = complete_plan(over_ranks(plan, None), recipe, {}, threads_of_user(), is_chosen=False)
        check_plan(plan, recipe, facts, None)
        check_runnable(plan)
        return plan, None

    def _plan_change(self, end: JobEnd) -> PlanChange | None:
        # Who is there comes first: the plan that was asked for, or that before, may not fit those that are left.
        if self.hosts is not None and (change := self._hosts_change(self.hosts, end)) is not None:
            return change
        if self._plans is None:
            return None
        before = dump_plan(self._plans.plan)
        change = self._plans.change_after(end, handed_over=end.has_left_to_go_on)
        if change is not None:
            self._before = before
        elif self.hosts is not None and self._has_asked and end.has_left_to_go_on:
            return PlanChange(text=f"{self.launched.num_processes} ranks, since the host that had come is gone again")
        return change

    def _hosts_change(self, hosts: HostsOfScript, end: JobEnd) -> PlanChange | None:
        """Whether the next generation has other hosts.  The session then splits as the script says, for their ranks.

        Raises:
            LaunchError: too few hosts are left.
        """
        has_left = bool(end.outcomes) and end.has_left_to_go_on
        if not has_left and (end.cause is None or not (self._goes_on or self.restarts_any)):
            return None
        if not (why := hosts.crew.change_after(end, hosts.wait_seconds)):
            return None
        before, after = self.launched.num_processes, hosts.crew.num_devices
        self._before = "" if self._plans is None else dump_plan(self._plans.plan)
        self._plans, self.launched = None, replace(self.launched, num_processes=after)
        return PlanChange(text=f"{before} → {after} ranks, {why}" if before != after else f"{after} ranks, {why}")

    def _log(self, event: Event) -> None:
        if isinstance(event, GenerationEvent) and not self._goes_on:
            event = replace(event, failed_step=0)  # which of its steps a script does again is its own affair
        log_between(self._run, event)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, end: JobEnd, reason: str) -> ScriptEnd:
        """Return how the script ended."""
        if end.signals and (end.has_failed_rank or end.cause is not None or not end.outcomes):
            if end.signals[0] == signal.SIGTERM and self._goes_on:
                return ScriptEnd(status=os.EX_TEMPFAIL, text=f"stopped   {self._how_to_go_on()}")
            return ScriptEnd(status=128 + end.signals[0])
        if end.cause is None:
            return ScriptEnd(status=os.EX_TEMPFAIL if end.outcomes and end.has_left_to_go_on else 0)
        texts = (end.report(self.launched.logs), reason, self._how_to_go_on())
        text = "\n".join(text for text in texts if text)
        return ScriptEnd(status=end.cause.status, text=text, has_failed=True)

    def _how_to_go_on(self) -> str:
        """A sentence on what is saved and how to go on from it; empty where no save has finished."""
        if self._run is None:
            return ""
        sentence = self._run.how_to_go_on()
        if not sentence or not self._goes_on:
            return sentence
        if self.hosts is not None:
            return f"{sentence.partition(' Go on with')[0]} The same command goes on with it."
        launched = self.launched
        words = [f"--resume={os.path.relpath(self._run.path)}", f"-n{launched.num_processes}"]
        words += ["--module"] if launched.module else []
        words += ["--accelerate"] if launched.under else []
        command = shlex.join(["weft", "launch", *words, launched.script, *launched.arguments])
        return f"{sentence.partition(' Go on with')[0]} Go on with: {command}"
