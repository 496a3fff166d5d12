"""A script on several hosts: the same command on each, which hosts may leave and join while its session trains."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from weft.api.training.host_agent import HostAgent, HostsRequest
from weft.api.training.hosts import num_devices
from weft.config.cluster import known_machine
from weft.config.recipe import OnFailure
from weft.errors import LaunchError
from weft.events import RunFolder
from weft.run.checkpoint import newest_saved_step
from weft.run.hosts.crew import HostCrew, HostRanks
from weft.run.hosts.meeting import Meeting
from weft.run.hosts.network import own_address
from weft.run.hosts.roster import HostFacts
from weft.run.launch.job_end import JobEnd
from weft.run.launch.launcher import ForkServer, open_fork_server
from weft.run.launched_script import HostsOfScript, LaunchedScript, ScriptEnd, start_script
from weft.run.places.submission import LaunchOrder
from weft.run.script_policies import policies_of
from weft.run.supervise import SupervisorSignals
from weft.run.supervised_script import SupervisedScript
from weft.version import VERSION
from weft.watch.collector import Collecting


def launch_on_hosts(
    order: LaunchOrder,
    hosts: HostsRequest,
    *,
    folder: Path,
) -> ScriptEnd | None:
    """Run a script on ranks of several hosts.  Call it on each of them alike, and on further ones later.

    One host leads, and supervises as `weft launch` does on one.  When a host is lost, is told to stop, or joins, all
    ranks start again on those that are there, and the session goes on from its last save.  A script whose session has
    not saved is not started again by itself.

    Args:
        order: the script, and how it is to be started; how many processes it has follows from the hosts.
        folder: of the session's run, whatever the script says; all hosts must see it.

    Returns:
        On the host that led at the end how the script ended: well, or stopped; None on the others.

    Raises:
        WeftError: what was wrong.  Status 75: the job was stopped or lost hosts, has saved, and can be started again;
        a script that fails gives its own.
    """
    policies = policies_of(order.on_failure, order.max_restarts)
    launched = LaunchedScript(
        script=order.script,
        arguments=order.arguments,
        num_processes=1,  # as many as the hosts have, once they are there
        module=order.module,
        under=order.under,
        threads=order.threads,
        logs=order.logs,
    )
    address, run = own_address(hosts.network), RunFolder(folder.absolute())
    cluster = known_machine().cluster
    with open_fork_server(interface=address.interface) as fork_server:
        work = _ScriptOfHosts(
            launched=launched,
            run=run,
            wait_seconds=hosts.replacement_seconds,
            policies=policies,
            restarts_any=order.max_restarts is not None,
            fork_server=fork_server,
        )
        facts = HostFacts(
            host=socket.gethostname(),
            address=address.address,
            num_devices=num_devices(cluster, "auto", order.processes_per_node),
            accelerator=cluster.kinds[0] if cluster.has_accelerators else "",
            version=VERSION,
            script=_digest(launched),
            index=hosts.index,
            topology=hosts.topology,
        )
        agent = HostAgent(work=work, request=hosts, run=run, facts=facts, quiet=False, fork_server=fork_server)
        return agent.run_to_end()


@dataclass(slots=True, kw_only=True)
class _ScriptOfHosts:
    """A script as the work of several hosts."""

    launched: LaunchedScript
    run: RunFolder
    wait_seconds: float
    policies: OnFailure
    restarts_any: bool
    fork_server: ForkServer | None

    def prepare(self) -> None:
        """See `HostWork`."""

    def start(self, ranks: HostRanks) -> JobEnd:
        """See `HostWork`."""
        return start_script(self.launched, ranks)

    def lead(self, crew: HostCrew, meeting: Meeting, signals: SupervisorSignals, *, has_run: bool) -> ScriptEnd:
        """See `HostWork`."""
        resumes = newest_saved_step(self.run.checkpoints) > 0
        if has_run and not resumes and not self.restarts_any:
            raise LaunchError(
                "the host that led was lost before a weft.session had saved, and a script without a save is not started"
                " again by itself. Submit it again, or allow that: --max-restarts 3."
            )
        supervised = SupervisedScript(
            launched=replace(self.launched, num_processes=crew.num_devices),
            policies=self.policies,
            restarts_any=self.restarts_any,
            resumes=self.run.path if resumes else None,
            hosts=HostsOfScript(
                crew=crew, run=self.run, lock=meeting.lock, wait_seconds=self.wait_seconds, signals=signals
            ),
            fork_server=self.fork_server,
        )
        end = self._recorded(supervised, crew) if self.launched.uses_weft else supervised.run_to_end()
        if end.has_failed:
            raise LaunchError(end.text, status=end.status)
        return end

    def _recorded(self, supervised: SupervisedScript, crew: HostCrew) -> ScriptEnd:
        """Let ranks of all hosts record what they do, and collect it here."""
        with Collecting(lambda: supervised.run_folder, listen=crew.listen) as collecting:

            def begin(number: int) -> Path | None:
                crew.collector = collecting.address_of(number)
                return collecting.begin(number)

            supervised.rings = begin
            return supervised.run_to_end()

    def told(self, result: ScriptEnd) -> tuple[int, str]:
        """See `HostWork`."""
        if result.status == os.EX_TEMPFAIL:
            return result.status, result.text or "stopped   as the script says (status 75)"
        if result.status:
            return os.EX_TEMPFAIL, "stopped   before a weft.session had saved; the same command begins again"
        return 0, f"done      {self.run.path}"


def _digest(launched: LaunchedScript) -> str:
    """Digest of a script and its command line, by which hosts find out that they were started with different ones."""
    text = "" if launched.module else Path(launched.script).read_text(errors="replace")
    words = [launched.script, *launched.arguments, str(launched.module), str(launched.under), text]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
