"""Another plan for a training that runs: how it is asked for, and how the run answers.

Both lie in the run's folder, which only its user can enter: `replan.json` is what is asked for, and
`replan-answer.json` says whether the run takes it.  Each appears whole or not at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.config.plan import Plan, dump_plan, parse_plan
from weft.errors import LaunchError, PlanError, WeftError
from weft.events import FolderOwner, RunFolder, read_owner
from weft.files import write_whole

_POLL_SECONDS = 0.05
ANSWER_SECONDS = 60.0
"""Time that a run gets to answer: it looks for requests twice a second, and runs a few samples through the model where
a plan needs that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A request for another plan: this one, one for so many devices, or else a better one, from measurements."""

    plan: Plan | None = None
    num_devices: int | None = None

    def to_json(self) -> str:
        plan = None if self.plan is None else dump_plan(self.plan)
        return json.dumps({"plan": plan, "num_devices": self.num_devices})

    @classmethod
    def of_json(cls, text: str) -> PlanRequest:
        """Read what `to_json` has written.  Raises `PlanError` for anything else."""
        try:
            values = json.loads(text)
            plan, num_devices = values["plan"], values["num_devices"]
        except (ValueError, TypeError, KeyError):
            raise PlanError("the request for another plan is not readable. Ask by: weft replan RUN") from None
        if num_devices is not None and type(num_devices) is not int:
            raise PlanError(f"{num_devices!r} is no number of devices.")
        return cls(plan=None if plan is None else parse_plan(str(plan), name="plan"), num_devices=num_devices)


def ask_for_plan(run: RunFolder, request: Plan | PlanRequest, *, timeout_seconds: float = ANSWER_SECONDS) -> str:
    """Ask the training that runs in a folder to go on under another plan, and return what it answers.

    Raises:
        LaunchError: no training runs there, or it does not answer.
        PlanError: the run does not take the plan, and goes on as it was.
    """
    owners = (run.owner, read_owner(_supervisor(run)))
    if all(owner is None or owner.ended or owner.is_gone for owner in owners):
        go_on = f"weft train {run.recipe} --plan PLAN --resume {run.path}"
        if not run.recipe.is_file():
            go_on = f"weft launch -n N --resume {run.path} SCRIPT, with the plan in {run.plan}"
        raise LaunchError(f"no training runs in {run.path}. Go on with it under another plan by: {go_on}")
    asked = request if isinstance(request, PlanRequest) else PlanRequest(plan=request)
    path, answer = _request(run), _answer(run)
    answer.unlink(missing_ok=True)
    write_whole(path, asked.to_json())
    until = time.monotonic() + timeout_seconds
    while time.monotonic() < until:
        if answer.is_file():
            said = json.loads(answer.read_text())
            if not said["accepted"]:
                raise PlanError(f"{said['text']}\nThe run goes on under its plan.")
            return str(said["text"])
        time.sleep(_POLL_SECONDS)
    path.unlink(missing_ok=True)
    raise LaunchError(
        f"the training in {run.path} has not answered for {timeout_seconds:.0f} s. It may be starting or ending; only"
        " one that `weft train` started on this host takes another plan while it runs."
    )


class ReplanRequests:
    """The requests to one run, as its supervisor sees them."""

    def __init__(self, run: RunFolder, accept: Callable[[PlanRequest], str], since: float | None = None) -> None:
        """`accept` takes what was asked for, and returns what to say of it beside that it is accepted; it raises
        `WeftError` where the run cannot go on so.  Requests count from the Unix time `since` on; None: from now on."""
        self._run = run
        self._accept = accept
        for left in (_request(run), _answer(run)):  # by a run in this folder that was killed
            with suppress(OSError):
                if since is None or left.stat().st_mtime < since:
                    left.unlink(missing_ok=True)

    def take(self) -> None:
        """Answer a request, if one has come."""
        request = _request(self._run)
        if not request.is_file():
            return
        try:
            text = self._accept(PlanRequest.of_json(request.read_text()))
        except WeftError as problem:
            self._say(accepted=False, text=str(problem))
            return
        finally:
            request.unlink(missing_ok=True)
        goes_on = "accepted  the ranks go on under it after the step that they are in"
        self._say(accepted=True, text="\n".join([*([text] if text else []), goes_on]))

    def _say(self, *, accepted: bool, text: str) -> None:
        with suppress(OSError):
            write_whole(_answer(self._run), json.dumps({"accepted": accepted, "text": text}))


@contextmanager
def named_as_supervisor(run: RunFolder) -> Generator[None]:
    """Name this process as the one that takes requests within, where the folder's owner is a rank: between two
    generations it has none."""
    path = _supervisor(run)
    with suppress(OSError):
        write_whole(path, json.dumps(asdict(FolderOwner(token=1))))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _supervisor(run: RunFolder) -> Path:
    return run.path / "supervisor.json"


def _request(run: RunFolder) -> Path:
    return run.path / "replan.json"


def _answer(run: RunFolder) -> Path:
    return run.path / "replan-answer.json"
