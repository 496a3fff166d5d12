"""The main program of the process that forks the supervisors of a chaos campaign.

It imports torch once, and computes nothing.  A supervisor that is forked from it does what `weft train` does, with a
fork server that is a fork, too: so a run begins within a tenth of a second, and any of its processes can be killed.

    weft chaos ── this process ── supervisor ── fork server ── parent of the ranks ── ranks

It adopts whatever a supervisor leaves behind, which the campaign asks for.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.run.launch.launcher import ForkServer

_POLL_SECONDS = 0.01


class ForkedProcess:
    """The part of `subprocess.Popen` that a fork server needs, for a child that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._status if self._status is not None else self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for its end, and return its status."""
        status = self._status if self._status is not None else self._wait(0)
        assert status is not None
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
        return self._status


def serve(control: socket.socket) -> int:
    """Fork supervisors as asked for, and say which have ended.  In a child: be it, and return its status."""
    from weft.process import adopt_orphans

    for name in ("torch._dynamo", "weft.run.supervised_script", "weft.run.worker.faults", "weft.api.training.train"):
        importlib.import_module(name)
    adopt_orphans()
    gc.collect()
    gc.freeze()
    own = os.getpid()
    supervisors: set[int] = set()
    control.settimeout(_POLL_SECONDS)
    rest = b""
    _answer(control, {"ready": own})
    while True:
        with contextlib.suppress(TimeoutError):
            word = control.recv(1 << 16)
            if not word:
                os._exit(0)  # the campaign is gone, and supervisors die with this process
            *lines, rest = (rest + word).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    control.close()
                    return _supervise(request, own)
                supervisors.add(pid)
                _answer(control, {"started": pid})
        _reap(control, supervisors)


def _answer(control: socket.socket, answer: dict[str, Any]) -> None:
    control.settimeout(None)
    control.sendall(json.dumps(answer).encode() + b"\n")
    control.settimeout(_POLL_SECONDS)


def _reap(control: socket.socket, supervisors: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in supervisors:  # others were left by one, and adopted
                supervisors.discard(pid)
                _answer(control, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _supervise(request: dict[str, Any], parent: int) -> int:
    """Be the supervisor of one run, and return its exit status as `weft train` or `weft launch` does.  In a rank:
    return its own."""
    from weft.process import die_with

    die_with(parent)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        from weft.run.launch._fork_server_main import serve as serve_jobs

        ours.close()
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return serve_jobs(theirs, [])  # comes back in the parent of ranks and in every rank
    theirs.close()
    status = _run(request, ours, pid)
    sys.stdout.flush()
    gc.freeze()
    return status


def _run(request: dict[str, Any], control: socket.socket, fork_server: int) -> int:
    from weft.errors import WeftError
    from weft.run.launch.launcher import ForkServer
    from weft.run.worker.faults import COPY, FaultInjector

    folder, faults = Path(request["folder"]), request["faults"]
    if faults is not None and any(fault["phase"] == COPY for fault in faults["faults"]):
        FaultInjector.of_json(faults, -1, folder, None)
    time.sleep(request["delay_seconds"])
    try:
        with ForkServer.of_process(ForkedProcess(fork_server), control) as server:
            return (_launch if request["subject"].endswith(".py") else _train)(request, server)
    except WeftError as error:
        print(error, file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _train(request: dict[str, Any], server: ForkServer) -> int:
    from weft.api.training.train import check_training
    from weft.config.plan import load_plan
    from weft.config.recipe import load_recipe

    recipe, plan = load_recipe(Path(request["subject"])), load_plan(Path(request["plan"]))
    job = check_training(recipe, plan, None, {}, "", False, False, "never", False, server)
    folder = Path(request["folder"])
    new, resume = (None, folder) if request["resume"] else (folder, None)
    result = replace(job, faults=request["faults"]).run_as_parent("chaos", new, resume)
    if result.stopped_early:
        return 128 + signal.SIGINT if result.stop_signal in (0, signal.SIGINT) else os.EX_TEMPFAIL
    return 0


def _launch(request: dict[str, Any], server: ForkServer) -> int:
    from weft.api.chaos.judge import POLICIES
    from weft.config.plan import load_plan
    from weft.run.launched_script import LaunchedScript
    from weft.run.supervised_script import SessionTerms, SupervisedScript

    plan, folder = load_plan(Path(request["plan"])), Path(request["folder"])
    return SupervisedScript(
        launched=LaunchedScript(script=request["subject"], arguments=(), num_processes=plan.mesh.world_size),
        policies=POLICIES,
        restarts_any=False,
        resumes=folder if request["resume"] else None,
        terms=SessionTerms(folder=folder, plan=plan, faults=request["faults"]),
        fork_server=server,
    ).run()


if __name__ == "__main__":
    CONTROL = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the campaign's
    sys.path[:] = json.loads(sys.argv[2])
    sys.exit(serve(CONTROL))
