"""A training on several hosts: the same command on each, which hosts may leave and join while it runs."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.api.planning.describe import describe_blueprint
from weft.api.training.host_agent import HostAgent, HostsRequest
from weft.api.training.supervised import HostsOfTraining
from weft.api.training.train import RunResult, check_training
from weft.config.cluster import Cluster, KnownMachine, cluster_of_hosts, known_machine
from weft.config.plan import Plan, load_plan
from weft.config.recipe import Recipe
from weft.errors import DataError, LaunchError, RecipeError
from weft.events import RunFolder
from weft.files import write_whole
from weft.model.blueprint import Blueprint
from weft.planning.search import plan_for_devices
from weft.run.checkpoint import newest_saved_step
from weft.run.data import PreparedData, data_shape
from weft.run.data.preparation import ConsoleProgress, prepare_data, silent
from weft.run.engine.proof import ProveMode
from weft.run.hosts.crew import HostCrew, HostRanks, start_training
from weft.run.hosts.meeting import Meeting
from weft.run.hosts.network import own_address
from weft.run.hosts.roster import HostFacts
from weft.run.launch.job_end import JobEnd
from weft.run.launch.launcher import ForkServer, open_fork_server
from weft.run.places.placement import granted
from weft.run.supervise import SupervisorSignals
from weft.version import VERSION

_KEPT = "hosts.json"


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
        run = RunFolder(folder.absolute())
        work = _TrainingOfHosts(
            recipe=recipe,
            plan=plan,
            request=hosts,
            run=run,
            machine=machine,
            reasons=reasons or {},
            prove=prove,
            quiet=quiet,
            fork_server=fork_server,
        )
        agent = HostAgent(
            work=work,
            request=hosts,
            run=run,
            facts=HostFacts(
                host=socket.gethostname(),
                address=address.address,
                num_devices=num_devices(machine.cluster, plan, processes_per_node),
                accelerator=machine.cluster.kinds[0] if machine.cluster.has_accelerators else "",
                version=VERSION,
                recipe=recipe.digest,
                index=hosts.index,
                topology=hosts.topology,
            ),
            quiet=quiet,
            fork_server=fork_server,
        )
        return agent.run_to_end()


def num_devices(cluster: Cluster, plan: Plan | Literal["auto"], processes_per_node: int | None) -> int:
    """Return the ranks of a host: as many as was said, or its accelerators, or its cores.

    Raises:
        LaunchError: fewer than one was asked for.
    """
    if processes_per_node is not None:
        if processes_per_node < 1:
            raise LaunchError(f"--processes-per-node {processes_per_node}: a host has at least 1.")
        return processes_per_node
    on_processors = isinstance(plan, Plan) and plan.compute.device == "cpu"
    return (cluster.num_accelerators if not on_processors else None) or os.cpu_count() or 1


@dataclass(slots=True, kw_only=True)
class _TrainingOfHosts:
    """A training as the work of several hosts."""

    recipe: Recipe
    plan: Plan | Literal["auto"]
    request: HostsRequest
    run: RunFolder
    machine: KnownMachine
    reasons: Mapping[str, str]
    prove: ProveMode
    quiet: bool
    fork_server: ForkServer | None
    _blueprint: Blueprint | None = None
    _prepared: PreparedData | None = None

    def prepare(self) -> None:
        """See `HostWork`."""
        self._blueprint = build_blueprint(self.recipe)
        progress = silent if self.quiet else ConsoleProgress(sys.stderr)
        self._prepared = prepare_data(self.recipe, data_shape(self._blueprint, self.recipe), progress=progress)

    def start(self, ranks: HostRanks) -> JobEnd:
        """See `HostWork`."""
        assert self._prepared is not None
        return start_training(replace(ranks, arguments=_own_data(ranks.arguments, self._prepared)))

    def lead(self, crew: HostCrew, meeting: Meeting, signals: SupervisorSignals, *, has_run: bool) -> RunResult:
        """See `HostWork`."""
        resumes = newest_saved_step(self.run.checkpoints) > 0
        cluster = self._cluster(crew)
        kept = _KeptPlan.read(self.run.path) if resumes else None
        # A run goes on under the plan that it had, unless its user has given another one since.
        goes_on = kept is not None and kept.given == self._given
        plan, processes = self.plan, None
        if kept is not None and goes_on:
            plan = self._plan_of_run(crew, kept, cluster)
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

    def _plan_of_run(self, crew: HostCrew, kept: _KeptPlan, cluster: Cluster) -> Plan:
        """The plan under which a run was going on, or the one for the hosts that are there now."""
        before, blueprint = load_plan(self.run.plan), self._blueprint
        assert blueprint is not None
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

    def told(self, result: RunResult) -> tuple[int, str]:
        """See `HostWork`."""
        if result.stopped_early:
            return os.EX_TEMPFAIL, f"stopped   at step {result.steps}, saved"
        return 0, f"done      {self.run.path}"


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
