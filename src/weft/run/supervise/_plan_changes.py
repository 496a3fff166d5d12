"""The plan of a run from one generation to the next: asked for by `weft replan`, and gone back from where it fails."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from weft.config.plan import Plan, dump_plan
from weft.errors import PlanError
from weft.events import RunFolder
from weft.files import write_whole
from weft.run.launch import HAND_OVER
from weft.run.launch.job_end import JobEnd
from weft.run.supervise._failure import made_steps
from weft.run.supervise._supervisor import PlanChange
from weft.run.supervise.replan import PlanRequest, ReplanRequests
from weft.techniques.check import mesh_sizes

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class FoundPlan(Generic[D]):
    """A plan that was found for a request which names none."""

    plan: Plan
    data: D
    text: str
    """Lines for whoever has asked: what was measured and predicted."""
    why: str
    """End of the sentence that names both plans."""


class PlanChanges(Generic[D]):
    """The plan of one run's generations, each with `data`: what else of a generation depends on its plan."""

    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        data: D,
        *,
        check: Callable[[Plan], tuple[Plan, D]],
        find: Callable[[PlanRequest], FoundPlan[D]] | None = None,
        report: Callable[[JobEnd], object],
        since: float | None = None,
    ) -> None:
        """Look for requests in the run's folder, from the Unix time `since` on; None: from now on.

        Args:
            check: returns a plan complete, with its data, or raises `WeftError` where this run cannot go on under it.
            find: finds a plan for a request that names none, or raises `WeftError`; None: only given plans are taken.
            report: shows the first cause of a failure after which the run goes back to the plan before.
        """
        self.plan, self.data = plan, data
        self._run = run
        self._check = check
        self._find = find
        self._report = report
        self._requests = ReplanRequests(run, self._accept, since)
        self._asked: tuple[Plan, D] | None = None
        """Plan under which the next generation shall go on."""
        self._why = ""
        self._before: tuple[Plan, D] | None = None
        """Plan before the last change of it, until a step has been done under the new one."""
        self._is_handing_over = False

    def begin(self) -> None:
        """A generation begins, which nobody has asked to stop yet."""
        self._is_handing_over = False

    def signal_to_send(self, noted: signal.Signals | None, *, others_are_wanted: bool = False) -> signal.Signals | None:
        """Return the signal that the ranks shall get: `noted`, one that came while no launcher passed it on, or to stop
        for others, where these are wanted or another plan has been asked for.  Each generation gets one at most."""
        if self._asked is None and noted is None:
            self._requests.take()
        if self._is_handing_over or not (self._asked is not None or noted is not None or others_are_wanted):
            return None
        self._is_handing_over = True
        return noted or HAND_OVER

    def change_after(self, end: JobEnd, *, handed_over: bool) -> PlanChange | None:
        """Whether the next generation goes on under another plan: the one that was asked for, where the ranks have
        `handed_over`, or the one before, where no step could be done under the new one."""
        failed = end.cause is not None
        if failed and self._before is not None and not made_steps(end):
            self._report(end)
            why = f"since no step could be done under {mesh_sizes(self.plan)}"
            before, self._before = self._before, None
            return self.change_to(before, why)
        self._before = None
        if failed or self._asked is None or not handed_over:
            return None
        self._before, asked, self._asked = (self.plan, self.data), self._asked, None
        return self.change_to(asked, self._why)

    def change_to(self, plan_and_data: tuple[Plan, D], why: str) -> PlanChange:
        """Let the next generation go on under another plan, with its data.  `why` ends the sentence that names both."""
        plan, data = plan_and_data
        before, after = mesh_sizes(self.plan), mesh_sizes(plan)
        text = f"{before} → {after}, {why}" if before != after else f"{after}, {why}"
        self.plan, self.data = plan, data
        write_whole(self._run.plan, dump_plan(plan), durable=True)
        return PlanChange(text=text)

    def _accept(self, request: PlanRequest) -> str:
        """Take a request, and return what to say of it."""
        if request.plan is not None:
            self._asked, self._why = self._check(request.plan), "as was asked for"
            return ""
        if self._find is None:
            raise PlanError("this run takes a plan that is given. Use weft replan RUN --plan PLAN.")
        found = self._find(request)
        self._asked, self._why = (found.plan, found.data), found.why
        return found.text
