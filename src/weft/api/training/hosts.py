"""A training on several hosts: the same command on each, which hosts may leave and join while it runs."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.api.planning.describe import describe_blueprint
from weft.api.training.supervised import HostsOfTraining
from weft.api.training.train import RunResult, check_training
from weft.config.cluster import Cluster, KnownMachine, cluster_of_hosts, known_machine
from weft.config.plan import Plan, load_plan
from weft.config.recipe import Recipe
from weft.errors import DataError, LaunchError, RecipeError, WeftError
from weft.events import RunFolder
from weft.files import write_whole
from weft.model.blueprint import Blueprint
from weft.planning.search import plan_for_devices
from weft.run.checkpoint import newest_saved_step
from weft.run.data import PreparedData, data_shape
from weft.run.data.preparation import ConsoleProgress, prepare_data, silent
from weft.run.engine.proof import ProveMode
from weft.run.hosts.crew import HostCrew, LeaderStoppedError, follow
from weft.run.hosts.meeting import FOLDER, Meeting, open_meeting
from weft.run.hosts.membership import JobVerdict, Membership
from weft.run.hosts.network import own_address
from weft.run.hosts.registry import RegistryLostError
from weft.run.hosts.roster import HostFacts
from weft.run.hosts.signed import SECRET, JobSecret
from weft.run.launch.launcher import ForkServer, open_fork_server
from weft.run.places.contract import GangBlock, read_nodes
from weft.run.places.placement import granted, placement_lines
from weft.run.supervise import SupervisorSignals
from weft.version import VERSION
from weft.watch.host_recorder import record_host

_KEPT = "hosts.json"
_SETTLE_SECONDS = 1.0
"""Time that further hosts get after the least number is there: one command starts them together."""
_FIRST_MEETING_SECONDS = 20.0
"""Time to reach the registry at the beginning, when its address may be wrong.  Later on it is known to be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsRequest:
    """Hosts of a job, as its user asks for them: the same on all."""

    least: int
    most: int
    rendezvous: str = FOLDER
    """`folder`: the host that gets the run's folder serves a store.  `etcd://host:port,…`: etcd, which outlives any."""
    network: str | None = None
    """Network on which hosts reach one another, as `10.0.0.0/24`; None: each has one address only."""
    wait_seconds: float = 300.0
    """Time to wait for hosts at the beginning."""
    replacement_seconds: float = 300.0
    """Time to wait for others where too few are left."""
    index: int = 0
    """This host's number by its place; hosts that lie in the same unit take their ranks in this order."""
    topology: tuple[str, ...] = ()
    """Where this host lies, from the outside in, as its place names it."""
    cluster: Cluster | None = None
    """What the hosts are and how they are joined, for the planner; None: all are like this one, on 10 Gbit/s."""
    blocks: tuple[GangBlock, ...] = ()
    """Hosts that should lie together, as the place was asked."""

    @classmethod
    def of_nodes(
        cls, nodes: int | str, *, rendezvous: str = FOLDER, network: str | None = None, wait_seconds: float = 300.0
    ) -> HostsRequest:
        """Read `4`, or `2..4` where hosts may be lost and join.

        Raises:
            LaunchError: it is neither.
        """
        least, most = read_nodes(nodes)
        return cls(
            least=least,
            most=most,
            rendezvous=rendezvous,
            network=network,
            wait_seconds=wait_seconds,
        )


def train_on_hosts(
    recipe: Recipe,
    plan: Plan | Literal["auto"],
    hosts: HostsRequest,
    *,
    folder: Path,
    processes_per_node: int | None = None,
    reasons: Mapping[str, str] | None = None,
    prove: ProveMode = "auto",
    quiet: bool = False,
) -> RunResult | None:
    """Train a recipe on several hosts.  Call it on each of them alike, and on further ones later.

    One host leads: it plans, owns the run's folder and supervises.  The others start the ranks that it says.  When a
    host is lost, is told to stop, or joins, all go on under a plan for those that are there; the mathematics stays.
    When the leader is lost, another leads.  A folder with saves is gone on with; otherwise the run begins.

    Args:
        plan: of the whole job, or `auto`.
        folder: of the run; all hosts must see it, and the user alone may enter it.
        processes_per_node: ranks of a host; by default its accelerators, or its cores.
        reasons: why settings of the plan have their values, to be printed.

    Returns:
        On the host that led at the end what came of it; None on the others.

    Raises:
        WeftError: what was wrong.  Status 75: the job was stopped or lost hosts, has saved, and can be started again.
    """
    if recipe.run.checkpoints is not None:
        raise RecipeError(
            "run.checkpoints names an object store, and runs on several hosts save in the run's folder, which all of"
            " them see. Leave it out."
        )
    policies = recipe.run.on_failure
    if shrinking := [each.name for each in fields(policies) if getattr(policies, each.name) == "shrink"]:
        raise RecipeError(
            f'run.on_failure.{shrinking[0]} = "shrink" leaves out a device, and on several hosts only a whole host is'
            ' left out. Use "restart".'
        )
    address = own_address(hosts.network)
    with open_fork_server(interface=address.interface) as fork_server:
        machine = known_machine()
        agent = _HostAgent(
            recipe=recipe,
            plan=plan,
            request=hosts,
            run=RunFolder(folder.absolute()),
            facts=HostFacts(
                host=socket.gethostname(),
                address=address.address,
                num_devices=_num_devices(machine.cluster, plan, processes_per_node),
                accelerator=machine.cluster.kinds[0] if machine.cluster.has_accelerators else "",
                version=VERSION,
                recipe=recipe.digest,
                index=hosts.index,
                topology=hosts.topology,
            ),
            machine=machine,
            reasons=reasons or {},
            prove=prove,
            quiet=quiet,
            fork_server=fork_server,
        )
        return agent.run_to_end()


def _num_devices(cluster: Cluster, plan: Plan | Literal["auto"], processes_per_node: int | None) -> int:
    if processes_per_node is not None:
        if processes_per_node < 1:
            raise LaunchError(f"--processes-per-node {processes_per_node}: a host has at least 1.")
        return processes_per_node
    on_processors = isinstance(plan, Plan) and plan.compute.device == "cpu"
    return (cluster.num_accelerators if not on_processors else None) or os.cpu_count() or 1


@dataclass(slots=True, kw_only=True)
class _HostAgent:
    """This host's part in one job: it follows, or leads, until the job is over."""

    recipe: Recipe
    plan: Plan | Literal["auto"]
    request: HostsRequest
    run: RunFolder
    facts: HostFacts
    machine: KnownMachine
    reasons: Mapping[str, str]
    prove: ProveMode
    quiet: bool
    fork_server: ForkServer | None

    def run_to_end(self) -> RunResult | None:
        secret = self._open_folder()
        # All that a host needs to start ranks is there before it joins: others wait for it from then on.
        blueprint = build_blueprint(self.recipe)
        prepared = self._prepare(blueprint)
        seconds, wait_seconds, has_met = _FIRST_MEETING_SECONDS, self.request.wait_seconds, False
        with SupervisorSignals() as signals:
            while True:
                with open_meeting(
                    self.request.rendezvous,
                    self.run.path,
                    secret,
                    self.facts,
                    seconds=seconds,
                    is_again=has_met,
                    is_stopping=signals.stopping.is_set,
                    log=self._say,
                ) as meeting:
                    has_met = True
                    followed = follow(
                        meeting.membership,
                        lambda arguments: _own_data(arguments, prepared),
                        fork_server=self.fork_server,
                        may_lead=meeting.may_lead,
                        record=record_host,
                    )
                    if followed.verdict is not None:
                        return self._conclude(followed.verdict)
                    if followed.why == "stopped":
                        raise _stopped(followed.signal or signals.number, has_saved=followed.has_saved)
                    if followed.why == "leads":
                        try:
                            return self._lead(meeting, signals, blueprint, wait_seconds)
                        except RegistryLostError as error:
                            self._say(f"note      {error}")
                if signals.stopping.is_set():
                    raise _stopped(signals.number, has_saved=False)
                seconds = wait_seconds = self.request.replacement_seconds
                self._say("note      this host looks for the others again")

    def _open_folder(self) -> JobSecret:
        """Make the run's folder, and return the job's secret, which lies in it.

        Raises:
            LaunchError: the folder is no run's, or cannot be made.
        """
        path = self.run.path
        is_run = (path / SECRET).exists() or newest_saved_step(self.run.checkpoints) > 0
        if path.is_dir() and any(path.iterdir()) and not is_run:
            raise LaunchError(f"{path} is there already, not empty, and no run's folder. Give a new folder.")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"the run folder {path} cannot be made: {error.strerror}.") from None
        return JobSecret.of_folder(path)

    def _prepare(self, blueprint: Blueprint) -> PreparedData:
        progress = silent if self.quiet else ConsoleProgress(sys.stderr)
        return prepare_data(self.recipe, data_shape(blueprint, self.recipe), progress=progress)

    def _conclude(self, verdict: JobVerdict) -> None:
        if verdict.status:
            raise LaunchError(verdict.text, status=verdict.status)
        self._say(verdict.text)

    def _lead(
        self, meeting: Meeting, signals: SupervisorSignals, blueprint: Blueprint, wait_seconds: float
    ) -> RunResult:
        """Lead the job to its end, and tell the others how it ended."""
        if line := meeting.lead():
            self._say(f"note      {line}")
        crew = HostCrew(
            meeting.membership,
            self.facts.address,
            least=self.request.least,
            most=self.request.most,
            blocks=[(block.num_nodes, block.level) for block in self.request.blocks],
        )
        try:
            self._gather(crew, meeting.membership, wait_seconds)
            if signals.stopping.is_set():  # the others, if they are not told so, too, go on
                raise LeaderStoppedError(str(_stopped(signals.number, has_saved=False)), status=os.EX_TEMPFAIL)
            result = self._train(meeting, crew, signals, blueprint)
        except (RegistryLostError, LeaderStoppedError):
            raise
        except WeftError as error:
            if not meeting.still_leads:  # others may go on: what went wrong here says nothing of them
                raise RegistryLostError(f"this host leads no longer: {error}") from error
            crew.conclude(error.status, f"host {self.facts.host}, which leads, says: {error}")
            raise
        status = os.EX_TEMPFAIL if result.stopped_early else 0
        done = f"stopped   at step {result.steps}, saved" if result.stopped_early else f"done      {self.run.path}"
        crew.conclude(status, f"{done} (host {self.facts.host} has led)")
        return result

    def _gather(self, crew: HostCrew, membership: Membership, seconds: float) -> None:
        """Wait so long until enough hosts are there, and choose them.

        Raises:
            LaunchError: too few have come in time.
        """
        wanted, least = self.request.most, self.request.least
        if len(crew.present()) < least:
            self._say(f"hosts     {_names(crew.present())}; at least {least} are wanted, so this one waits for more")
        enough = membership.wait(lambda _: len(crew.present()) >= least, seconds)
        if not enough and not membership.is_stopping:
            raise LaunchError(
                f"at least {least} hosts are wanted, and {_names(crew.present())} have come in"
                f" {seconds:.0f} s. Start Weft on the others by the same command, or permit fewer"
                " (--nodes).",
                status=os.EX_TEMPFAIL,
            )
        if len(crew.present()) < wanted:
            membership.wait(lambda _: len(crew.present()) >= wanted, _SETTLE_SECONDS)
        crew.choose()
        self._say(f"hosts     {_names(crew.hosts)}")
        for line in placement_lines(self.request.blocks, [facts.topology for facts in crew.hosts.values()]):
            self._say(line)

    def _train(self, meeting: Meeting, crew: HostCrew, signals: SupervisorSignals, blueprint: Blueprint) -> RunResult:
        resumes = newest_saved_step(self.run.checkpoints) > 0
        cluster = self._cluster(crew)
        kept = _KeptPlan.read(self.run.path) if resumes else None
        # A run goes on under the plan that it had, unless its user has given another one since.
        goes_on = kept is not None and kept.given == self._given
        plan, processes = self.plan, None
        if kept is not None and goes_on:
            plan = self._plan_of_run(crew, kept, cluster, blueprint)
            processes = plan.mesh.world_size  # it was spread over the hosts' devices when it was chosen
        elif isinstance(plan, Plan) and plan.mesh.world_size == 1:
            processes = crew.num_devices
        job = check_training(
            self.recipe,
            plan,
            processes,
            self.reasons,
            "",
            trials=False,
            try_memory=False,
            prove=self.prove,
            quiet=self.quiet,
            fork_server=self.fork_server,
            machine=replace(self.machine, cluster=cluster),
        )
        job.is_chosen = self.plan == "auto"
        if kept is None or not goes_on:
            kept = _KeptPlan(given=self._given, ranks_per_host=math.ceil(job.plan.mesh.world_size / len(crew.hosts)))
            kept.write(self.run.path)
        hosts = HostsOfTraining(
            crew=crew,
            cluster=lambda: self._cluster(crew),
            ranks_per_host=kept.ranks_per_host,
            wait_seconds=self.request.replacement_seconds,
            signals=signals,
        )
        return job.run_on_hosts(self.run, meeting.lock, hosts, resumes=resumes)

    def _cluster(self, crew: HostCrew) -> Cluster:
        """The hosts that take part, as the planner sees them."""
        hosts, described = crew.hosts.values(), self.request.cluster
        if described is not None:
            described = granted(described, [facts.topology for facts in hosts])
        num_devices = max(facts.num_devices for facts in hosts)
        return cluster_of_hosts(self.machine.cluster, described, len(hosts), num_devices)

    @property
    def _given(self) -> str:
        """Names the plan that the user has given."""
        return self.plan.digest if isinstance(self.plan, Plan) else self.plan

    def _plan_of_run(self, crew: HostCrew, kept: _KeptPlan, cluster: Cluster, blueprint: Blueprint) -> Plan:
        """The plan under which a run was going on, or the one for the hosts that are there now."""
        before = load_plan(self.run.plan)
        number = sum(min(kept.ranks_per_host, facts.num_devices) for facts in crew.hosts.values())
        if self.recipe.run.max_devices is not None:
            number = min(number, self.recipe.run.max_devices)
        if number == before.mesh.world_size:
            return before
        return plan_for_devices(
            before,
            number,
            recipe=self.recipe,
            facts=facts_of_blueprint(blueprint, self.recipe),
            profile=describe_blueprint(blueprint, self.recipe).profile,
            cluster=cluster,
            is_chosen=self.plan == "auto",
            fewest=self.recipe.run.min_devices,
        )

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptPlan:
    """What a run on several hosts keeps of its first plan, for the hosts that go on with it."""

    given: str
    """Digest of the plan that the user has given, or `auto`."""
    ranks_per_host: int

    @classmethod
    def read(cls, folder: Path) -> _KeptPlan | None:
        """Return what the run in a folder has kept; None: it had one host."""
        try:
            return cls(**json.loads((folder / _KEPT).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        write_whole(folder / _KEPT, json.dumps(asdict(self)), durable=True)


def _stopped(number: signal.Signals | None, *, has_saved: bool) -> LaunchError:
    """The error of a host that a signal has stopped."""
    number = number or signal.SIGTERM
    status = 128 + number if number == signal.SIGINT else os.EX_TEMPFAIL
    saved = ", and has saved with the others." if has_saved else " before a step of its own could be saved."
    return LaunchError(f"this host was stopped by {number.name}{saved}", status=status)


def _own_data(arguments: dict[str, Any], prepared: PreparedData) -> dict[str, Any]:
    """The leader's arguments of the ranks, with the data as they lie on this host.

    Raises:
        DataError: they are not the leader's data.
    """
    theirs = PreparedData.from_json(arguments["prepared"])
    if prepared.fingerprint != theirs.fingerprint:
        raise DataError(
            f"the data on host {socket.gethostname()} are not those of the host that leads: fingerprint"
            f" {prepared.fingerprint} and {theirs.fingerprint}. Let all hosts read the same files."
        )
    return {**arguments, "prepared": replace(prepared, branches=theirs.branches).to_json()}


def _names(hosts: Mapping[str, HostFacts]) -> str:
    names = [facts.host for facts in hosts.values()]
    return f"{len(names)} host{'s' if len(names) != 1 else ''}: {', '.join(names)}"
