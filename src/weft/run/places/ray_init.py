"""The files that start Ray on machines that ssh reaches: two scripts and a pool.  What options mean: `ray start --help`
(2.60)."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Sequence

from weft.config.pool import Pool
from weft.errors import LaunchError
from weft.run.places.engines import EngineHost, comment, pool_text, script_head

RAY_FILES = ("start.sh", "stop.sh", "pool.toml")
_PORT, _DASHBOARD_PORT = 6379, 8265


def ray_files(pool: Pool, hosts: Sequence[EngineHost]) -> dict[str, str]:
    """Return the files by their names.

    Raises:
        LaunchError: a host has no Ray.
    """
    if missing := [each.shown for each in hosts if not each.facts.ray]:
        raise LaunchError(
            f"no Ray in the Python that Weft has on {', '.join(missing)}. Install it there (pip install 'weft[ray]'),"
            " the same version on all hosts, then give the command again."
        )
    return {"start.sh": _start(pool, hosts), "stop.sh": _stop(pool, hosts), "pool.toml": _pool(pool, hosts)}


def level_names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return what the levels of a topology are called, from the outside in: `rack` where all names there are such as
    `rack0`, and otherwise `level0` for the outermost."""
    names: list[str] = []
    for level, inside in enumerate(zip(*paths, strict=True)):
        stems = {name.rstrip("0123456789").rstrip("-_") for name in inside}
        names.append(stems.pop() if len(stems) == 1 and "" not in stems else f"level{level}")
    return names if len(set(names)) == len(names) else [f"level{level}" for level in range(len(names))]


def _listens_on(pool: Pool, head: EngineHost) -> str:
    """The address at which the head's dashboard is to be reached: never a public one, and never all."""
    if pool.network is None or not ipaddress.ip_address(head.facts.address).is_private:
        return "127.0.0.1"
    return head.facts.address


def _start(pool: Pool, hosts: Sequence[EngineHost]) -> str:
    head, levels = hosts[0], level_names([each.host.topology for each in hosts])
    shown = _listens_on(pool, head)
    lines = script_head(pool, "Starts Ray on each host; stop.sh ends it.")
    lines += ["set -eu", ""]
    lines += [
        "# The head first: it keeps the cluster, and takes jobs at its dashboard.  The dashboard asks nobody who they",
        f"# are, and whoever reaches it can run programs on all hosts: it listens on {shown} alone.",
    ]
    if shown == "127.0.0.1":
        lines.append(
            "# The pool names no private network, so commands reach it on the head, or by ssh -L 8265:127.0.0.1:8265."
        )
    lines += [
        f"# Ray's other ports, {_PORT} and some that it draws, listen on all addresses of a host, and ask nobody",
        "# either: keep them from all but these hosts by a firewall.",
        "# Nothing is told to Ray's makers: --disable-usage-stats.",
    ]
    options = ["--head", f"--port={_PORT}", f"--dashboard-host={shown}", f"--dashboard-port={_DASHBOARD_PORT}"]
    lines += [*_line(head, [*options, "--disable-usage-stats"], levels), ""]
    if len(hosts) > 1:
        lines.append("# The other hosts join it.  Cores, memory and accelerators of a host are found by Ray itself.")
    if levels:
        lines.append(f"# Labels say where a host lies, as the pool has it, from the outside in: {', '.join(levels)}.")
    for each in hosts[1:]:
        lines += _line(each, [f"--address={head.facts.address}:{_PORT}"], levels)
    return "\n".join(lines) + "\n"


def _line(each: EngineHost, options: Sequence[str], levels: Sequence[str]) -> list[str]:
    labels = ",".join(f"{level}={name}" for level, name in zip(levels, each.host.topology, strict=True))
    words = [*each.facts.ray, "start", *options, f"--node-ip-address={each.facts.address}"]
    words += [f"--labels={labels}"] if labels else []
    return [f"echo {shlex.quote(comment(each.host.address))}", _on(each, words)]


def _stop(pool: Pool, hosts: Sequence[EngineHost]) -> str:
    lines = script_head(pool, "Ends Ray on each host.")
    lines += [
        "# Whatever runs under Ray ends with it, unsaved: give weft stop RUN first.  `ray stop` ends all processes of",
        "# Ray that your account has on a host, those of another cluster, too.  The head is the last one.",
        "status=0",
        *(f"{_on(each, [*each.facts.ray, 'stop'])} || status=1" for each in (*hosts[1:], hosts[0])),
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _on(each: EngineHost, words: Sequence[str]) -> str:
    # Quoted twice: ssh gives its words to a shell of the host.
    return f"on {shlex.quote(each.host.address)} {shlex.quote(shlex.join(words))}"


def _pool(pool: Pool, hosts: Sequence[EngineHost]) -> str:
    settings: dict[str, object] = {"address": f"http://{_listens_on(pool, hosts[0])}:{_DASHBOARD_PORT}"}
    if levels := level_names([each.host.topology for each in hosts]):
        settings["labels"] = levels
    return pool_text(pool, "ray", settings, [f"Ray on {len(hosts)} hosts, which start.sh starts: --on ray:FILE."])
