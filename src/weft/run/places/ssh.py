"""Machines that ssh reaches: one connection to each holds its agent."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from weft.config.document import typed
from weft.config.pool import Pool, PoolHost, SshSettings
from weft.errors import LaunchError
from weft.run.places.contract import (
    ANSWER_SECONDS,
    FreeNodes,
    Gang,
    Job,
    PlacedJob,
    PlaceVerdict,
    Request,
    RequestLine,
    agent_command,
)
from weft.run.places.keeper import KeeperTask, KeptAgent, KeptPlace, start_keeper
from weft.run.places.look import MachineFacts
from weft.version import VERSION

_OPTIONS = ("BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10", "LogLevel=ERROR")
"""Nobody is asked, and no unknown host is talked to."""
ALIVE = ("ServerAliveInterval=1", "ServerAliveCountMax=3")
"""A machine that is gone ends its connection after 4 s."""
_LAST_LINES = 4


@final
class SshPlace(KeptPlace):
    """Hosts of a file."""

    name = "ssh"
    replaces_machines = True

    def request(self, gang: Gang, job: Job, pool: Pool) -> Request:
        hosts = _settings(pool).hosts
        lines: list[RequestLine] = []
        for index, host in enumerate(hosts):
            options = ["--seat", f"{index}/{len(hosts)}", "--until-eof"]
            if host.topology:
                options += ["--topology", ",".join(host.topology)]
            words = ssh_command(pool, host, agent_command(pool, job.run, options), ALIVE)
            why = f"machine {index}" if index < gang.most else "in reserve, started where another is lost"
            lines.append(RequestLine(shlex.join(words), why))
        return Request(lines=tuple(lines), command=())

    def check(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlaceVerdict:
        hosts = _settings(pool).hosts
        if len(hosts) < gang.least:
            text = f"the pool lists {len(hosts)} hosts, and {gang.least} are wanted: list more, or lower --nodes"
            return PlaceVerdict(accepts=False, text=text)
        answers = ask_hosts(pool, hosts, job)
        good = [answer for answer in answers if not answer.problem]
        problems = [f"{answer.host.address}: {answer.problem}" for answer in answers if answer.problem]
        if len(good) < gang.least or any(answer.is_wrong for answer in answers):
            return PlaceVerdict(accepts=False, text="; ".join(problems))
        also = f"; not used: {'; '.join(problems)}" if problems else ""
        return PlaceVerdict(accepts=True, text=f"{len(good)} of {len(hosts)} hosts answer, it starts at once{also}")

    def submit(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlacedJob:
        hosts = _settings(pool).hosts
        agents = tuple(
            KeptAgent(name=host.address, command=tuple(shlex.split(line.text)))
            for host, line in zip(hosts, request.lines, strict=True)
        )
        task = KeeperTask(
            agents=agents,
            num_wanted=min(gang.most, len(hosts)),
            grace_seconds=gang.grace_seconds,
            limit_seconds=gang.limit_seconds,
        )
        return start_keeper(job.run, task, self.name)

    def free(self, pool: Pool) -> list[FreeNodes]:
        return free_hosts(pool)


def ssh_command(pool: Pool, host: PoolHost, words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return the command that runs another on a host.  Its words are quoted, since ssh gives them to a shell there."""
    return ["ssh", *ssh_options(pool, more), "--", host.address, shlex.join(words)]


def ssh_options(pool: Pool, more: Sequence[str] = ()) -> list[str]:
    """Return the options of `ssh` by which the hosts of a pool are reached."""
    settings, options = _settings(pool), [*_OPTIONS, *more]
    if settings.known_hosts is not None:
        options.append(f"UserKnownHostsFile={settings.known_hosts}")
    words = [word for option in options for word in ("-o", option)]
    words += ["-i", settings.identity, "-o", "IdentitiesOnly=yes"] if settings.identity is not None else []
    words += ["-p", str(settings.port)] if settings.port is not None else []
    words += ["-l", settings.user] if settings.user is not None else []
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """What a host has answered."""

    host: PoolHost
    facts: MachineFacts | None = None
    """None: it has a problem."""
    problem: str = ""
    """Why it cannot be used; empty: it can."""
    is_wrong: bool = False
    """Whether that is a mistake in the pool or an attack, and not a machine that is down."""


def ask_hosts(pool: Pool, hosts: Sequence[PoolHost], job: Job | None) -> list[HostAnswer]:
    """Ask hosts what they are, all at the same time.  Starts nothing that lasts.

    Args:
        job: whose folder they must see; None: none in particular.
    """
    with ThreadPoolExecutor(max_workers=16) as threads:
        return list(threads.map(_ask, [pool] * len(hosts), hosts, [job] * len(hosts)))


def free_hosts(pool: Pool) -> list[FreeNodes]:
    """Return how many of a pool's hosts answer, and what they have."""
    hosts = _settings(pool).hosts
    answers = ask_hosts(pool, hosts, None)
    problems = "; ".join(f"{answer.host.address}: {answer.problem}" for answer in answers if answer.problem)
    devices = {answer.facts.devices for answer in answers if answer.facts is not None}
    return [
        FreeNodes(
            num_nodes=len(hosts),
            num_free=sum(not answer.problem for answer in answers),
            devices=" or ".join(sorted(devices)) or "unknown",
            note=problems or "ssh knows nothing of other jobs there",
        )
    ]


def _ask(pool: Pool, host: PoolHost, job: Job | None) -> HostAnswer:
    """Ask a host what it is, by the agent's own look at it."""
    options = ["--check", *(["--network", pool.network] if pool.network is not None else [])]
    folder = job.run if job is not None else Path("/")
    command = ssh_command(pool, host, agent_command(pool, folder, options))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except FileNotFoundError:
        raise LaunchError(f"--on {pool.name} needs the command ssh, and this machine has none (OpenSSH).") from None
    except subprocess.TimeoutExpired:
        return HostAnswer(host=host, problem=f"no answer in {ANSWER_SECONDS:.0f} s")
    if done.returncode:
        return _refused(host, done.returncode, (done.stderr or done.stdout).strip())
    return read_answer(host, done.stdout.strip())


def read_answer(host: PoolHost, said: str) -> HostAnswer:
    """Return what a host has answered, of which the last line counts: shells may greet."""
    try:
        told: dict[str, Any] = json.loads(said.splitlines()[-1])
        if told["version"] != VERSION:
            problem = f"it has Weft {told['version']}, and this machine {VERSION}: give both the same"
            return HostAnswer(host=host, problem=problem, is_wrong=True)
        return HostAnswer(host=host, facts=typed(MachineFacts, told))
    except (ValueError, KeyError, TypeError, IndexError):
        problem = (
            f"what it said is no answer of Weft {VERSION}: {said[-80:]!r}. See what the pool's command starts there"
        )
        return HostAnswer(host=host, problem=problem, is_wrong=True)


def _refused(host: PoolHost, status: int, said: str) -> HostAnswer:
    if "IDENTIFICATION HAS CHANGED" in said or "Host key verification failed" in said:
        changed = "has another key than known_hosts says" if "CHANGED" in said else "is not in known_hosts"
        problem = f"it {changed}. If that is right, put its key there (ssh-keyscan {host.address}); nothing was sent"
        return HostAnswer(host=host, problem=problem, is_wrong=True)
    last = " ".join(said.splitlines()[-_LAST_LINES:]) or f"status {status}"
    return HostAnswer(host=host, problem=last, is_wrong=status != 255)


def _settings(pool: Pool) -> SshSettings:
    settings = pool.ssh or pool.mpi
    assert settings is not None, "a pool of these places has its table"
    return settings
