"""`weft agent RUN`: what a place starts, once on each machine of a job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import LaunchError, WeftError
from weft.events import RunFolder
from weft.run.places import place_of
from weft.run.places.contract import AGENT_DONE, AGENT_LATER, AGENT_MEND, ANSWER_SECONDS, PlaceSeat
from weft.run.places.mpi import leave_launcher
from weft.run.places.proposal import order_parts, pool_cluster
from weft.run.places.submission import AgentNote, JobOrder, LaunchOrder, agent_log

if TYPE_CHECKING:
    from weft.api.training.host_agent import HostsRequest

_RETURN_SECONDS = 30.0
"""Time for a machine whose network was away to come back, where no other can come."""
_REST_SECONDS = 10.0
"""Time for the agents of a run that is over to say so."""
_PAUSE_SECONDS = 0.2
_OUTPUTS = (1, 2)
"""Descriptors of the standard output and of that for errors."""


def run_agent(run: Path, given: PlaceSeat | None, *, until_eof: bool) -> int:
    """Take this machine's part in a submitted run until that ends, and return the status that its place understands.

    Args:
        run: folder of the run.
        given: the machine's seat, where the place says it in the command; else it is read from the environment.
        until_eof: whether the end of the standard input is the word to save and leave.

    Raises:
        WeftError: this machine, or the job, ended with an error.  It has been noted in the run's folder.
    """
    order = JobOrder.read(run)
    seat = given or place_of(order.pool.place).seat(os.environ)
    if seat is None:
        raise LaunchError(
            f"nothing says which machine of the job this is. weft agent is what {order.pool.place} starts; to submit"
            f" the run, give weft train … --on {order.pool.name} --run-folder {run}."
        )
    if order.pool.place == "mpi":
        leave_launcher(os.environ)
    note = AgentNote(
        index=seat.index,
        host=socket.gethostname(),
        pid=os.getpid(),
        attempt=seat.attempt,
        began=time.time(),
        topology=seat.topology,
        node=seat.node,
    )
    if until_eof:
        threading.Thread(target=_leave_at_end_of_input, name="weft-agent-input", daemon=True).start()
    note.write(run)
    try:
        with _printing_to(agent_log(run, seat.index)):
            try:
                status = _work(run, order, seat)
            except WeftError as error:
                print(error, file=sys.stderr, flush=True)
                raise
    except WeftError as error:
        replace(note, status=error.status, text=str(error)).write(run)
        _end_rest(run, seat)
        raise
    text = "done" if status == AGENT_DONE else "stopped, and saved"
    replace(note, status=status, text=text).write(run)
    _end_rest(run, seat)
    return status


def _end_rest(run: Path, seat: PlaceSeat) -> None:
    """Have the place end agents that say nothing of their end, where nobody leads the run any more."""
    deadline = time.monotonic() + _REST_SECONDS
    while seat.end_command:
        silent = [note for note in AgentNote.all_of(run) if note.attempt == seat.attempt and note.status is None]
        owner = RunFolder(run).owner
        if not silent or (owner is not None and not owner.ended):
            return
        if time.monotonic() > deadline:
            subprocess.run(seat.end_command, timeout=ANSWER_SECONDS, check=False)
            return
        time.sleep(_PAUSE_SECONDS)


def _work(run: Path, order: JobOrder, seat: PlaceSeat) -> int:
    # Where a host is lost, torch's sockets would print a page of C++ calls; Weft says in a line what it means.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from weft.api.training.host_agent import HostsRequest  # it imports torch, which reads that

    os.chdir(order.folder)
    hosts = replace(
        HostsRequest.of_nodes(order.gang.nodes, rendezvous=order.pool.rendezvous, network=order.pool.network),
        index=seat.index,
        topology=seat.topology,
        cluster=pool_cluster(order),
        blocks=order.gang.blocks,
    )
    if not place_of(order.pool.place).replaces_machines:
        # Its place starts the whole job again; until then the machines that are left do nothing.
        hosts = replace(hosts, replacement_seconds=_RETURN_SECONDS)
    return _train(run, order, hosts) if order.launch is None else _launch(run, order.launch, hosts)


def _train(run: Path, order: JobOrder, hosts: HostsRequest) -> int:
    from weft.api.training.hosts import train_on_hosts

    assert order.train is not None
    if str(order.folder) not in sys.path:
        sys.path.insert(0, str(order.folder))  # a recipe's factory lies there, as a rule
    recipe, plan = order_parts(order)
    result = train_on_hosts(
        recipe,
        plan or "auto",
        hosts,
        folder=run,
        processes_per_node=order.train.processes_per_node,
        prove=order.train.prove,
    )
    return AGENT_LATER if result is not None and result.stopped_early else AGENT_DONE


def _launch(run: Path, order: LaunchOrder, hosts: HostsRequest) -> int:
    from weft.api.training.launch_hosts import launch_on_hosts
    from weft.run.checkpoint import newest_saved_step

    try:
        end = launch_on_hosts(order, hosts, folder=run)
    except WeftError as error:
        # A place may start again what has failed, but not a script for which nothing is saved.
        known = error.status in (AGENT_MEND, AGENT_LATER)
        error.status = error.status if known else 1 if newest_saved_step(RunFolder(run).checkpoints) else AGENT_MEND
        raise
    return AGENT_DONE if end is None or not end.status else AGENT_LATER


def _leave_at_end_of_input() -> None:
    """Have this process save and leave when whoever started it is gone, or closes its input."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _printing_to(path: Path) -> Generator[None]:
    """Let this process and its ranks print into a file of the run's folder: what a place keeps of a job's output may go
    with the machine, and a connection that stalls must not hold up a rank that prints."""
    print(f"weft agent on {socket.gethostname()} prints into {path}", flush=True)
    before = [os.dup(number) for number in _OUTPUTS]
    with path.open("ab") as file:
        for number in _OUTPUTS:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in zip(_OUTPUTS, before, strict=True):
            os.dup2(kept, number)
            os.close(kept)
