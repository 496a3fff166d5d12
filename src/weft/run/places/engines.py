"""`weft pools init`: the files that start Ray or Slurm on machines that ssh reaches and that have no queue.

Weft has no scheduler of its own.  It asks each host what it is, and writes what the engine cannot know: addresses,
where the machines lie, and the pool by which `--on` takes them.  Nothing is started, and nothing is changed on a host.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.config.document import dump, format_value
from weft.config.pool import Pool, PoolHost, SshSettings
from weft.errors import ClusterError, LaunchError
from weft.files import write_whole
from weft.run.places.look import MachineFacts
from weft.run.places.ssh import ask_hosts, ssh_options

EngineName = Literal["ray", "slurm"]
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
"""What Ray's labels and Slurm's switches may be called; a dot would part them in SLURM_TOPOLOGY_ADDR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHost:
    """One machine on which an engine is to run: what the pool says of it, and what it says of itself."""

    host: PoolHost
    facts: MachineFacts

    @property
    def shown(self) -> str:
        """Its address, and its own name."""
        return f"{self.host.address} ({self.facts.host})"


def ask_for_engine(pool: Pool) -> list[EngineHost]:
    """Ask each host of a pool what it is, all at the same time.

    Raises:
        ClusterError: the pool's place is not ssh, or says unevenly where its hosts lie.
        LaunchError: a host does not answer, or is wrong.
    """
    hosts = _settings(pool).hosts
    check_topology(hosts)
    answers = ask_hosts(pool, hosts, None)
    if problems := [f"{each.host.address}: {each.problem}" for each in answers if each.facts is None]:
        raise LaunchError(
            f"{len(problems)} of {len(hosts)} hosts did not say what they are. {'; '.join(problems)}. Nothing was"
            " written: mend them, or take them out of the pool."
        )
    return [EngineHost(host=each.host, facts=each.facts) for each in answers if each.facts is not None]


def check_topology(hosts: Sequence[PoolHost]) -> None:
    """Refuse names that an engine would not take, and hosts of which some say less than others where they lie.

    Raises:
        ClusterError: it names the host, and the change to make.
    """
    first = hosts[0]
    for host in hosts:
        for name in host.topology:
            if not _NAME.fullmatch(name):
                raise ClusterError(
                    f"topology of {host.address}: {name!r} can be neither a label of Ray nor a switch of Slurm. Use"
                    " letters, digits, - and _, with a letter or digit at both ends, 63 at most."
                )
        if len(host.topology) != len(first.topology):
            raise ClusterError(
                f"topology of {host.address} has {len(host.topology)} names, and that of {first.address}"
                f" {len(first.topology)}. Give each host as many, from the outside in, or none at all."
            )


def refuse_files_that_are_there(names: Iterable[str], folder: Path) -> None:
    """Refuse a folder that has a file of one of these names.

    Raises:
        LaunchError: it names the files that are there.
    """
    if there := [str(folder / name) for name in names if os.path.lexists(folder / name)]:
        verb = "is" if len(there) == 1 else "are"
        raise LaunchError(
            f"{', '.join(there)} {verb} there already, and nothing was written. Give another --folder, or move them"
            " away (after their stop.sh, where the engine runs)."
        )


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write all files, or none; scripts may be executed by their owner.

    Raises:
        LaunchError: a file is there already, or the folder cannot be written.
    """
    refuse_files_that_are_there(files, folder)
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(folder / name, text)
            written.append(folder / name)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise LaunchError(
            f"{folder} cannot be written: {error.strerror}. Give a --folder that you may write."
        ) from None


def pool_text(pool: Pool, engine: EngineName, settings: Mapping[str, Any], header: Sequence[str]) -> str:
    """Return the pool by which `--on` takes the engine: what the hosts' pool says, with the engine's own table."""
    # The engine's table is required by no place, so `dump` would leave one out whose settings are the defaults.
    carried = dump(replace(pool, place=engine, ssh=None), header=header, descriptions=False)
    table = [f"{name} = {format_value(value)}" for name, value in settings.items()]
    return "\n".join([carried, f"[{engine}]", *table]) + "\n"


def script_head(pool: Pool, what: str) -> list[str]:
    """Return the first lines of a script, which define `on HOST COMMAND`."""
    settings = _settings(pool)
    fixed = replace(settings, identity=_fixed(settings.identity), known_hosts=_fixed(settings.known_hosts))
    options = shlex.join(ssh_options(replace(pool, ssh=fixed)))
    return [
        "#!/bin/sh",
        f"# {what}",
        f"# Written by weft pools init from {comment(pool.name)}.toml.",
        "",
        "# Runs a command on a host.  Nobody is asked for a password, and no host is talked to whose key is not known.",
        "on() {",
        "    host=$1",
        "    shift",
        f'    ssh {options} -- "$host" "$@"',
        "}",
        "",
    ]


def comment(text: str) -> str:
    """Return a text of the user's as it may stand in a comment line."""
    return re.sub(r"[^\w./@:+-]", "?", text)


def _fixed(file: str | None) -> str | None:
    """A file of ssh's, so that a script finds it wherever it is started; ssh itself reads ~ and %."""
    return file if file is None or file.startswith(("~", "%")) else os.path.abspath(file)


def _settings(pool: Pool) -> SshSettings:
    if pool.place != "ssh" or pool.ssh is None:
        raise ClusterError(
            f'weft pools init reads a pool of machines that ssh reaches: {pool.name}.toml has place = "{pool.place}".'
            ' Write place = "ssh", and the machines in [ssh]: hosts = [{ address = "10.0.0.1" }].'
        )
    return pool.ssh
