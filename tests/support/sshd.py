"""Real ssh servers on fake machines, each with a key of its own; the tests' user may log in with theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machines import Machine

_CONFIGURATION = """
Port 22
ListenAddress {address}
HostKey {folder}/host-{name}
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PermitUserEnvironment yes
LogLevel ERROR
"""
SSHD = "/usr/sbin/sshd"


def is_there() -> bool:
    """Whether OpenSSH's server is installed."""
    return Path(SSHD).exists() and shutil.which("ssh") is not None and os.geteuid() == 0


@dataclass(frozen=True)
class SshKeys:
    """What a client needs."""

    identity: Path
    known_hosts: Path


def serve_ssh(hosts: Sequence[Machine], folder: Path, environment: Mapping[str, str] | None = None) -> SshKeys:
    """Start a server on each machine, which gives commands a further environment; it ends with the machine."""
    folder.mkdir(exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    _make_key(folder / "user")
    known: list[str] = []
    for host in hosts:
        _make_key(folder / f"host-{host.name}")
        known.append(f"{host.address} {(folder / f'host-{host.name}.pub').read_text()}")
        configuration = folder / f"sshd-{host.name}"
        text = _CONFIGURATION.format(address=host.address, folder=folder, name=host.name)
        words = [f"{name}={value}" for name, value in (environment or {}).items()]
        configuration.write_text(text + (f"SetEnv {' '.join(words)}\n" if words else ""))
        start_ssh(host, folder)
    (folder / "known_hosts").write_text("".join(known))
    keys = SshKeys(folder / "user", folder / "known_hosts")
    for host in hosts:
        _wait_for(host, keys)
    return keys


def start_ssh(host: Machine, folder: Path) -> None:
    """Start the server of one of the machines, as its boot would."""
    with (folder / f"sshd-{host.name}.log").open("a") as output:
        host.start([SSHD, "-D", "-e", "-f", str(folder / f"sshd-{host.name}")], output=output)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _wait_for(host: Machine, keys: SshKeys) -> None:
    """Wait until a server answers; asked from the machine itself, since only machines reach one another."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={keys.known_hosts}", "-i", str(keys.identity)]
    deadline = time.monotonic() + 30
    while host.start([*command, host.address, "true"]).wait(60):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no ssh server on {host.name}")
        time.sleep(0.1)
