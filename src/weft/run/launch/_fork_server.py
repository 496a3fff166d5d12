"""The fork server, as its owner sees it: started once, it runs one job after another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from weft.errors import LaunchError
from weft.run.launch._rank_info import RankInfo

_CLOSED_ERRORS = (BrokenPipeError, ConnectionResetError)
"""Errors of a socket whose other end has died."""
_TRAINING = (
    *("weft.run.worker", "torch._dynamo"),
    *("weft.comm.shared_memory.engine", "weft.events.sinks.terminal", "tokenizers"),
)
"""Modules that the ranks of every training need.  Importing them takes nearly as long as torch.  torch itself imports
the second one with the first operator that it decomposes: 0.5 s in every rank (Xeon 2.5 GHz, 2026-11-28)."""
_SCRIPT = Path(__file__).with_name("_fork_server_main.py")


class ServerProcess(Protocol):
    """The process of a fork server, as its owner sees it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class ForkServer:
    """A process that imports torch while its owner does something else, and forks the ranks of jobs from itself.

    torch is imported once for all ranks of all jobs, so that a second job begins within a tenth of a second.  Modules
    that a job imports before its ranks are forked stay imported.  Ranks get the environment and the standard streams
    that this process has when the fork server is started.

    Use it as a context manager.  It ends with the block, and when this process has ended in whatever way, at the latest
    as soon as it has imported what it was importing.  One job at a time: it is not for several threads.

    Example::

        with ForkServer() as fork_server:
            for rate in (1e-3, 3e-3):
                weft.train(replace(recipe, optimizer=OptimizerRecipe(learning_rate=rate)), fork_server=fork_server)
    """

    def __init__(
        self,
        *,
        threads_per_rank: int | None = None,
        import_path: Sequence[str] | None = None,
        preload: Sequence[str] = (),
        interface: str | None = None,
    ) -> None:
        """Start the process, and do not wait for it.

        Args:
            threads_per_rank: OpenMP threads of every rank, where the environment does not say; by default each job's.
            import_path: where the process finds Weft and torch; by default where this one does.
            preload: modules that jobs will need beside torch.
            interface: network interface by which ranks reach those of other hosts; by default they have none, and
                torch's sockets listen on loopback.
        """
        environment = dict(os.environ)
        # Where the user says nothing each rank takes its job's number; until then one: what is imported may start more.
        environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank or 1))
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            # One host: no connections outside.
            environment.setdefault(name, interface or ("lo" if sys.platform == "linux" else "lo0"))
        path = [os.path.abspath(entry) for entry in (sys.path if import_path is None else import_path)]
        imports = json.dumps({"import_path": path, "preload": list(preload)}).encode()
        self._jobs = 0
        self._received = b""
        self._process: ServerProcess
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                    start_new_session=True,  # a terminal's Ctrl-C reaches the ranks once, through this process
                )
        except OSError as problem:
            self._control.close()
            raise LaunchError(
                f"no process can be started for the ranks: {problem}. Free memory, or raise the limit on processes"
                " (ulimit -u)."
            ) from problem
        with suppress(*_CLOSED_ERRORS):  # `end` reports it for the first job
            self._control.sendall(len(imports).to_bytes(4, "little") + imports)

    @classmethod
    def of_process(cls, process: ServerProcess, control: socket.socket) -> Self:
        """A fork server that runs already, and obeys this socket: `weft chaos` forks one for each run."""
        server = cls.__new__(cls)
        server._jobs, server._received = 0, b""
        server._process, server._control = process, control
        return server

    def begin(self, folder: Path, commands: int, events: int) -> None:
        """Let the job in `folder` begin.  It obeys one pipe and reports on another; both may be closed here then.

        Raises:
            LaunchError: the fork server is closed.
        """
        if self._control.fileno() < 0:
            raise LaunchError(
                "this fork server is closed, so no ranks can be forked from it. Use it inside its `with` block, or"
                " start another one."
            )
        self._jobs += 1
        with suppress(*_CLOSED_ERRORS):  # `end` reports it
            socket.send_fds(self._control, [os.fsencode(folder)], [commands, events])

    def end(self, while_waiting: Callable[[], object] = lambda: None) -> int:
        """Wait until the last process of the job has ended, and return the status of the one that started the ranks.
        `while_waiting` is called every second."""
        self._control.settimeout(1.0)
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if not newline:
                try:
                    word = self._control.recv(256)
                except TimeoutError:
                    while_waiting()
                    continue
                except ConnectionResetError:
                    word = b""
                if not word:
                    return self._process.wait()
                self._received += word
                continue
            self._received = rest
            number, status = map(int, line.split())
            if number == self._jobs:  # earlier numbers are of jobs whose launcher did not wait for their end
                return status

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, so that a job can begin."""
        return self._control.fileno() >= 0 and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def num_jobs(self) -> int:
        """Jobs that have begun."""
        return self._jobs

    def close(self) -> None:
        """End the process.  A job that still runs ends with it."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def open_fork_server(
    existing: ForkServer | None = None, *, preload: Sequence[str] = (), interface: str | None = None
) -> Generator[ForkServer | None]:
    """The given fork server, or one that lasts as long as the block; none on a rank, which starts no others.

    `preload`: what a new one imports beside what every training needs.  `interface`: as of `ForkServer`.
    """
    if existing is not None or RankInfo.from_environment() is not None:
        yield existing
        return
    with ForkServer(preload=(*_TRAINING, *preload), interface=interface) as fork_server:
        yield fork_server
