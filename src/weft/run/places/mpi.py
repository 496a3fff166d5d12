"""Machines on which the launcher of an MPI starts agents: one command for all of them.

The launcher only starts programs; Weft's ranks meet as everywhere, and no call of MPI is made.  It starts a job's
machines together and none later, so a job has a fixed number of them and no reserve.  When one is lost, the agents of
the others save and leave, and the keeper starts the same command again.

Options: mpiexec(1) of MPICH 4.0 (Hydra) and mpirun(1) of Open MPI 4.1.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import MutableMapping
from typing import final

from weft.config.pool import MpiSettings, Pool, PoolHost
from weft.errors import LaunchError
from weft.run.hosts.network import own_address
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
from weft.run.places.ssh import ALIVE, ask_hosts, free_hosts, ssh_options

_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPIR_", "MPI_LOCAL")
"""What a launcher says to the programs that it starts."""


@final
class MpiPlace(KeptPlace):
    """Hosts of a file, and an MPI's launcher."""

    name = "mpi"
    replaces_machines = False

    def request(self, gang: Gang, job: Job, pool: Pool) -> Request:
        """Return one command.  Agent 0 alone has the launcher's standard input: its end is the word to leave for all.

        Raises:
            LaunchError: there is no such launcher, it is that of another MPI, or a host of the job has no seat.
        """
        if gang.least != gang.most:
            raise LaunchError(
                f"--on {pool.name}: the launcher of an MPI starts all machines of a job together, and none later. Give"
                f" one number, as --nodes {gang.most}, or a pool whose place is ssh."
            )
        hosts, is_open_mpi = _hosts(pool, gang), _is_open_mpi(_settings(pool).launcher)
        words = _open_mpi(pool) if is_open_mpi else _hydra(pool, hosts)
        ends = [*([" : \\"] * (len(hosts) - 1)), ""]
        lines = [RequestLine(f"{shlex.join([*words, *_settings(pool).options])} \\", "starts agents by ssh")]
        for index, (host, end) in enumerate(zip(hosts, ends, strict=True)):
            options = ["--seat", f"{index}/{len(hosts)}", *(["--until-eof"] if index == 0 else [])]
            options += ["--topology", ",".join(host.topology)] if host.topology else []
            where = ["--host", host.address] if is_open_mpi else []
            program = shlex.join([*where, "-n", "1", *agent_command(pool, job.run, options)])
            lines.append(RequestLine(f"  {program}{end}", f"machine {index}, {host.address}"))
        return Request(lines=tuple(lines), command=())

    def check(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlaceVerdict:
        hosts = _hosts(pool, gang)
        if len(hosts) < gang.least:
            text = f"the pool lists {len(hosts)} hosts, and {gang.least} are wanted: list more, or lower --nodes"
            return PlaceVerdict(accepts=False, text=text)
        problems = [f"{each.host.address}: {each.problem}" for each in ask_hosts(pool, hosts, job) if each.problem]
        if problems:
            return PlaceVerdict(accepts=False, text="; ".join(problems))
        return PlaceVerdict(accepts=True, text=f"all {len(hosts)} hosts answer, it starts at once")

    def submit(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlacedJob:
        command = tuple(shlex.split(request.text.replace("\\\n", "")))
        machines = tuple(host.address for host in _hosts(pool, gang))
        agents = (KeptAgent(name=_settings(pool).launcher, command=command, machines=machines),)
        task = KeeperTask(
            agents=agents,
            num_wanted=1,
            grace_seconds=gang.grace_seconds,
            limit_seconds=gang.limit_seconds,
        )
        return start_keeper(job.run, task, self.name)

    def free(self, pool: Pool) -> list[FreeNodes]:
        return free_hosts(pool)


def leave_launcher(environment: MutableMapping[str, str]) -> None:
    """Take what a launcher has said out of an agent's environment: libraries in its ranks would take each of them for
    the one process that the launcher has started there."""
    for name in [name for name in environment if name.startswith(_VARIABLES)]:
        del environment[name]


def _hydra(pool: Pool, hosts: tuple[PoolHost, ...]) -> list[str]:
    # It tells the other machines where to report by its own name, which they need not know, or know as 127.0.1.1.
    words = ["env", f"HYDRA_LAUNCHER_EXTRA_ARGS={_ssh_words(pool)}", _settings(pool).launcher, "-launcher", "ssh"]
    words += ["-localhost", own_address(pool.network).address]
    # Machines have environments of their own, and one program each, in the order of the hosts.
    return [*words, "-genvnone", "-ppn", "1", "-hosts", ",".join(host.address for host in hosts)]


def _open_mpi(pool: Pool) -> list[str]:
    settings = {
        "plm_rsh_agent": "ssh",
        "plm_rsh_args": _ssh_words(pool),
        "plm_rsh_no_tree_spawn": "1",  # machines need no keys to one another
        "orte_abort_on_non_zero_status": "0",  # what the end of one agent means is for Weft to say
    }
    if pool.network is not None:
        settings["oob_tcp_if_include"] = pool.network
    words = [_settings(pool).launcher, "--bind-to", "none"]  # else an agent, and all of its ranks, have one core
    return [*words, *(word for name, value in settings.items() for word in ("--mca", name, value))]


def _ssh_words(pool: Pool) -> str:
    words = ssh_options(pool, ALIVE)
    if odd := [word for word in words if any(each.isspace() for each in word)]:
        raise LaunchError(f"--on {pool.name}: launchers of MPI split {odd[0]!r} at its space. Use paths without any.")
    return " ".join(words)


def _is_open_mpi(launcher: str) -> bool:
    """Ask a launcher whose it is.

    Raises:
        LaunchError: it is not there, or of another MPI.
    """
    try:
        done = subprocess.run(
            [launcher, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except OSError:
        raise LaunchError(
            f"--on mpi needs the command {launcher}, and this machine has none. Install MPICH or Open MPI, or name the"
            " command in the pool: mpi.launcher."
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{launcher} --version has not answered in {ANSWER_SECONDS:.0f} s.") from None
    said = done.stdout + done.stderr
    if "HYDRA" in said:
        return False
    if "OpenRTE" in said or "Open MPI" in said:
        return True
    first = said.strip().partition("\n")[0] or "nothing"
    raise LaunchError(
        f"{launcher} is neither that of MPICH nor that of Open MPI ({first}). Name one of them: mpi.launcher."
    )


def _hosts(pool: Pool, gang: Gang) -> tuple[PoolHost, ...]:
    return _settings(pool).hosts[: gang.most]


def _settings(pool: Pool) -> MpiSettings:
    assert pool.mpi is not None, "a pool of this place has its table"
    return pool.mpi
