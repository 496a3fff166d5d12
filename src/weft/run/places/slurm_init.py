"""The files that start Slurm on machines that ssh reaches: its settings, scripts and a pool.

What lines mean: slurm.conf(5), topology.conf(5) and gres.conf(5) of 22.05, munged(8) of 0.5.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from weft.config.pool import Pool
from weft.errors import ClusterError, LaunchError
from weft.run.places.engines import EngineHost, comment, pool_text, script_head

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
_PARTITION = "all"
_LONGEST_SWITCH_WAIT_SECONDS = 30 * 86_400
_KEY = "/var/lib/weft-slurm/munge/munge.key"
_MARGIN_SECONDS = 30
"""Time that Slurm takes to end a job besides its grace."""
_HOST_SCRIPT = Path(__file__).with_name("slurm_host.sh")
_SETTINGS = ("slurm.conf", "topology.conf", "gres.conf")
SLURM_FILES = (*_SETTINGS, "host.sh", "start.sh", "stop.sh", "pool.toml")

_CONFIGURATION = """\
# Slurm on {count} hosts, written by weft pools init from {pool}.toml.  The same file is on all hosts.
ClusterName=weft
# The controller, which keeps the queue.
SlurmctldHost={controller}
# The daemons begin jobs under their users' accounts, so they run as root.  An account that has the same number on all
# hosts may be named for the controller in place of root.
SlurmUser=root
# Who says what is signed by a munged of this Slurm's own, whose key all hosts have.
AuthType=auth/munge
AuthInfo=socket=/run/weft-slurm/munge/socket
# Processes are found by their parents: that needs no settings of the system.  proctrack/cgroup is stricter.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# Cores and accelerators are given out one by one; Weft asks for whole hosts.
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# A host that was lost is used again when it is back.
ReturnToService=2
# Time to save between the word to stop and the end, as the pool has it.
KillWait={grace}
StateSaveLocation=/var/lib/weft-slurm/state
SlurmdSpoolDir=/var/lib/weft-slurm/slurmd
SlurmctldPidFile=/run/weft-slurm/slurmctld.pid
SlurmdPidFile=/run/weft-slurm/slurmd.pid
SlurmctldLogFile=/var/lib/weft-slurm/slurmctld.log
SlurmdLogFile=/var/lib/weft-slurm/slurmd.log
"""
_HOSTS = """\
# The hosts, with the cores and the memory (MiB) that each has told, but for a hundredth: a new kernel may leave a
# little less, and Slurm would use the host no longer.
"""
_TREE = f"""\
# Which switches join the hosts: topology.conf.  A job may wait for few switches as long as it says.
TopologyPlugin=topology/tree
SchedulerParameters=max_switch_wait={_LONGEST_SWITCH_WAIT_SECONDS}
"""


def slurm_files(pool: Pool, hosts: Sequence[EngineHost]) -> dict[str, str]:
    """Return the files by their names.

    Raises:
        ClusterError: names of hosts or switches are not different, or none that Slurm takes.
        LaunchError: a host lacks Slurm, munge, or a way to become root.
    """
    _check(hosts)
    files = {"slurm.conf": _configuration(pool, hosts)}
    if hosts[0].host.topology:
        files["topology.conf"] = topology_text(hosts)
    if any(each.facts.num_accelerators for each in hosts):
        files["gres.conf"] = _accelerators(hosts)
    files["host.sh"] = _HOST_SCRIPT.read_text()
    files["start.sh"] = _start(pool, hosts, [name for name in _SETTINGS if name in files])
    files["stop.sh"] = _stop(pool, hosts)
    settings = {"partition": _PARTITION, "topology": "tree" if hosts[0].host.topology else "none"}
    header = [f"Slurm on {len(hosts)} hosts, which start.sh starts: --on slurm:FILE, given on one of them."]
    files["pool.toml"] = pool_text(pool, "slurm", settings, header)
    return files


def _check(hosts: Sequence[EngineHost]) -> None:
    for index, each in enumerate(hosts):
        wanted = ["munged", "slurmd", *(["slurmctld", "sbatch"] if index == 0 else [])]
        wanted += [] if each.facts.is_root else ["sudo"]
        if missing := [name for name in wanted if name not in each.facts.programs]:
            raise LaunchError(
                f"{each.shown} lacks {', '.join(missing)}. Install Slurm and munge there, one version on all hosts"
                " (Debian: apt-get install slurmd slurmctld slurm-client munge), then give the command again."
            )
        if not _HOST_NAME.fullmatch(node_name(each)):
            raise ClusterError(
                f"{each.host.address} calls itself {each.facts.host!r}, which Slurm cannot take for a name. Give it one"
                " of letters, digits and - (hostnamectl set-hostname)."
            )
    names = Counter(node_name(each) for each in hosts)
    if twice := [each.shown for each in hosts if names[node_name(each)] > 1]:
        raise ClusterError(
            f"{' and '.join(twice)} have one name, and Slurm tells hosts apart by their names. Give each its own"
            " (hostnamectl set-hostname)."
        )


def node_name(each: EngineHost) -> str:
    """Return what Slurm calls a host: its own name, up to the first dot, by which its daemon finds itself."""
    return each.facts.host.partition(".")[0]


def _configuration(pool: Pool, hosts: Sequence[EngineHost]) -> str:
    first, name = hosts[0], comment(pool.name)
    controller = f"{node_name(first)}({first.facts.address})"
    text = _CONFIGURATION.format(count=len(hosts), pool=name, controller=controller, grace=pool.grace_seconds)
    if first.host.topology:
        text += _TREE
    if any(each.facts.num_accelerators for each in hosts):
        text += "GresTypes=gpu\n"
    text += _HOSTS
    for each in hosts:
        memory = each.facts.memory_bytes * 99 // 100 >> 20
        gpus = f" Gres=gpu:{each.facts.num_accelerators}" if each.facts.num_accelerators else ""
        text += f"NodeName={node_name(each)} NodeAddr={each.facts.address} CPUs={each.facts.num_cores}"
        text += f" RealMemory={memory}{gpus}\n"
    return f"{text}PartitionName={_PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


def topology_text(hosts: Sequence[EngineHost]) -> str:
    """Return the tree of switches, the innermost first.  Several outermost ones are joined by one more, `top`: Slurm
    would give no job hosts that nothing joins.

    Raises:
        ClusterError: two switches would have one name.
    """
    paths = {each.host.topology[:depth]: None for each in hosts for depth in range(1, len(each.host.topology) + 1)}
    several = len({path[0] for path in paths}) > 1
    paths = {**({(): None} if several else {}), **paths}
    last = Counter(path[-1] for path in paths if path)
    # Racks are often numbered anew under each spine; Slurm wants one name for one switch.
    names = {path: "top" if not path else path[-1] if last[path[-1]] == 1 else "-".join(path) for path in paths}
    if twice := sorted(name for name, count in Counter(names.values()).items() if count > 1):
        raise ClusterError(f"two switches would be called {twice[0]}, by the hosts' topology. Name one otherwise.")
    lines = ["# Where the hosts lie, as the pool has it: a tree of switches.  Written by weft pools init."]
    for path in sorted(paths, key=lambda each: (-len(each), names[each])):
        nodes = [node_name(each) for each in hosts if each.host.topology == path]
        under = [name for other, name in names.items() if len(other) == len(path) + 1 and other[: len(path)] == path]
        joined = f"Nodes={','.join(nodes)}" if nodes else f"Switches={','.join(under)}"
        lines.append(f"SwitchName={names[path]} {joined}")
    return "\n".join(lines) + "\n"


def _accelerators(hosts: Sequence[EngineHost]) -> str:
    lines = ["# Device files of the accelerators that each host has told.  Written by weft pools init."]
    for each in hosts:
        if count := each.facts.num_accelerators:
            files = "/dev/nvidia0" if count == 1 else f"/dev/nvidia[0-{count - 1}]"
            lines.append(f"NodeName={node_name(each)} Name=gpu File={files}")
    return "\n".join(lines) + "\n"


def _head(pool: Pool, hosts: Sequence[EngineHost], what: str) -> list[str]:
    """The first lines of both scripts, which define `root HOST WHAT`."""
    is_root = all(each.facts.is_root for each in hosts)
    why = "the pool's account is root's" if is_root else "by sudo, which must not ask for a password"
    return [
        *script_head(pool, what),
        'here=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd)',
        f"become='{'' if is_root else 'sudo -n '}'",
        "",
        f"# Has a host do something that host.sh can, as root: {why}.",
        'root() { on "$1" "${become}sh -s $2" <"$here/host.sh"; }',
        "",
    ]


def _for_each(hosts: Sequence[EngineHost], *body: str) -> list[str]:
    words = " ".join(shlex.quote(each.host.address) for each in hosts)
    return [f"for each in {words}; do", *(f"    {line}" for line in body), "done"]


def _start(pool: Pool, hosts: Sequence[EngineHost], names: Sequence[str]) -> str:
    first = shlex.quote(hosts[0].host.address)
    sends = [f'send "$each" {name} /etc/slurm/{name} 644' for name in names]
    lines = [
        *_head(pool, hosts, "Starts Slurm on each host; stop.sh ends it.  After a host's reboot give it again."),
        "# Copies a file of this folder to a host, as root.",
        """send() { on "$1" "${become}sh -c 'umask 077 && cat >$3 && chmod $4 $3'" <"$here/$2"; }""",
        "",
        "set -eu",
        "# All hosts have one key.  Who has it can run programs on all of them as any user: keep it to yourself.",
        "key=$here/munge.key",
        '[ -f "$key" ] || (umask 077 && dd if=/dev/urandom of="$key" bs=1024 count=1 2>/dev/null)',
        "",
        "# Folders, key, settings, and munged.  A host that has another Slurm ends this before any has the key.",
        *_for_each(hosts, 'echo "$each"', 'root "$each" prepare'),
        *_for_each(hosts, f'send "$each" munge.key {_KEY} 600', *sends, 'root "$each" munged'),
        "",
        "# The controller on the first host, and a daemon on each.  What runs already goes on.",
        f"root {first} slurmctld",
        *_for_each(hosts, 'root "$each" slurmd'),
        "",
        "# Shows the hosts as soon as all are idle, and after half a minute in any case.",
        "tries=0",
        f'until [ "$(on {first} sinfo -h -o %T:%D)" = idle:{len(hosts)} ] || [ "$tries" -ge 30 ]; do',
        "    sleep 1",
        "    tries=$((tries + 1))",
        "done",
        f"on {first} sinfo -N -l",
    ]
    return "\n".join(lines) + "\n"


def _stop(pool: Pool, hosts: Sequence[EngineHost]) -> str:
    lines = [
        *_head(pool, hosts, "Ends Slurm on each host.  Its files stay there, and start.sh goes on with its queue."),
        "# Jobs are told to save and leave, and waited for.  Then the daemons, those of the first host last.",
        "status=0",
        f"root {shlex.quote(hosts[0].host.address)} 'end-jobs {pool.grace_seconds + _MARGIN_SECONDS}' || status=1",
        *_for_each([*hosts[1:], hosts[0]], 'echo "$each"', 'root "$each" end || status=1'),
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"
