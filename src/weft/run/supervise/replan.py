"""Another plan for a training that runs: how it is asked for, and how the run answers.

Both lie in the run's folder, which only its user can enter: `replan.toml` is the plan that is asked for, and
`replan-answer.json` says whether the run takes it.  Each appears whole or not at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weft.config.plan import Plan, dump_plan, load_plan
from weft.errors import LaunchError, PlanError, WeftError
from weft.events import RunFolder, read_owner
from weft.files import write_whole

_POLL_SECONDS = 0.05
ANSWER_SECONDS = 60.0
"""Time that a run gets to answer: it looks for requests twice a second, and runs a few samples through the model where
a plan needs that."""


def ask_for_plan(run: RunFolder, plan: Plan, *, timeout_seconds: float = ANSWER_SECONDS) -> str:
    """Ask the training that runs in a folder to go on under another plan, and return what it answers.

    Raises:
        LaunchError: no training runs there, or it does not answer.
        PlanError: the run does not take the plan, and goes on as it was.
    """
    owner = read_owner(run.path / "owner.json")
    if owner is None or owner.ended or owner.is_gone:
        raise LaunchError(
            f"no training runs in {run.path}. Go on with it under another plan by: weft train {run.recipe} --plan"
            f" PLAN --resume {run.path}"
        )
    request, answer = _request(run), _answer(run)
    answer.unlink(missing_ok=True)
    write_whole(request, dump_plan(plan))
    until = time.monotonic() + timeout_seconds
    while time.monotonic() < until:
        if answer.is_file():
            said = json.loads(answer.read_text())
            if not said["accepted"]:
                raise PlanError(f"{said['text']}\nThe run goes on under its plan.")
            return str(said["text"])
        time.sleep(_POLL_SECONDS)
    request.unlink(missing_ok=True)
    raise LaunchError(
        f"the training in {run.path} has not answered for {timeout_seconds:.0f} s. It may be starting or ending; only"
        " one that `weft train` started on this host takes another plan while it runs."
    )


class ReplanRequests:
    """The requests to one run, as its supervisor sees them."""

    def __init__(self, run: RunFolder, check: Callable[[Plan], Plan]) -> None:
        """`check` returns the plan complete, or raises `WeftError` where the run cannot go on under it."""
        self._run = run
        self._check = check
        for left in (_request(run), _answer(run)):  # by a run in this folder that was killed
            with suppress(OSError):
                left.unlink(missing_ok=True)

    def take(self) -> Plan | None:
        """Return the plan of a request that has come, checked and accepted; None where none has, or it was refused."""
        request = _request(self._run)
        if not request.is_file():
            return None
        try:
            plan = self._check(load_plan(request))
        except WeftError as problem:
            self._say(accepted=False, text=str(problem))
            return None
        finally:
            request.unlink(missing_ok=True)
        self._say(accepted=True, text="the ranks go on under it after the step that they are in")
        return plan

    def _say(self, *, accepted: bool, text: str) -> None:
        with suppress(OSError):
            write_whole(_answer(self._run), json.dumps({"accepted": accepted, "text": text}))


def _request(run: RunFolder) -> Path:
    return run.path / "replan.toml"


def _answer(run: RunFolder) -> Path:
    return run.path / "replan-answer.json"
