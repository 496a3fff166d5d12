"""Fake machines on this one: namespaces with a host name, network, shared memory, processes and boot id of their own.

Programs of all machines see the same files, as on a cluster with a shared folder.  They reach one another over a bridge
that leads nowhere else.  A machine can be crashed (its sockets close), lose its power (they do not), or be cut off.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_START = f"""
set -e
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
mount --bind "$2/$1.boot-id" {_BOOT_ID}
hostname "$1"
ip link set lo up
touch "$2/$1.ready"
exec sleep infinity
"""
"""What a machine's first process does.  Without name servers that answer, torch's look-ups would wait 10 s each."""
_counter = itertools.count()


def why_not() -> str:
    """Why this system has no fake machines; empty where it has."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "fake machines are namespaces with networks, which only root on Linux may make"
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    return f"fake machines need {' and '.join(missing)} (apt-get install iproute2 util-linux)" if missing else ""


@dataclass
class Machine:
    """One fake machine."""

    name: str
    address: str
    _link: str
    _bridge: str
    _folder: Path
    """Holds what it sees as its hosts file and its boot id."""
    _unshare: subprocess.Popen[bytes] = field(init=False)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def boot(self) -> None:
        """Start the machine, for the first time or after a crash."""
        (self._folder / f"{self.name}.boot-id").write_text(f"{uuid.uuid4()}\n")
        ready = self._folder / f"{self.name}.ready"
        ready.unlink(missing_ok=True)
        command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "sh", "-c", _START, "sh", self.name]
        self._unshare = subprocess.Popen([*command, str(self._folder)])
        _wait_for(ready)
        inside = str(self._init)
        self._unlink()  # that of a machine which has crashed goes a little later
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", inside)
        _ip("link", "set", self._link, "master", self._bridge, "up")
        for words in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run(["nsenter", "-t", inside, "-n", "ip", *words], check=True)

    @property
    def _init(self) -> int:
        return _only_child(self._unshare.pid)

    def start(
        self,
        command: Sequence[str],
        *,
        output: IO[str] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on the machine; its outputs go to a file, or together into a pipe."""
        enter = ["nsenter", "-t", str(self._init), "-n", "-u", "-i", "-m", "-p", f"--wd={folder or Path.cwd()}"]
        process = subprocess.Popen(
            [*enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._processes.append(process)
        return process

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Send a signal to a program that `start` has started."""
        os.kill(_only_child(process.pid), number)

    def crash(self) -> None:
        """End all of the machine's processes at once.  The kernel closes their sockets, so peers hear of it."""
        with suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._unshare.wait()

    def lose_power(self) -> None:
        """End the machine without a word to its peers."""
        self.cut_off()
        self.crash()

    def cut_off(self) -> None:
        """Take the machine's network away; its processes live."""
        _ip("link", "set", self._link, "down")

    def reconnect(self) -> None:
        """Give the machine its network back."""
        _ip("link", "set", self._link, "up")

    def close(self) -> None:
        """End the machine, and whatever was started on it."""
        self._unshare.kill()  # and with it the machine's first process, by which all others end
        self._unshare.wait()
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._unlink()

    def _unlink(self) -> None:
        subprocess.run(["ip", "link", "del", self._link], stderr=subprocess.DEVNULL)  # its end in there may be gone


@contextmanager
def machines(number: int, folder: Path, *, from_here: bool = False) -> Generator[list[Machine]]:
    """Start so many machines: `node0`, `node1`, …, with addresses 10.83.<n>.1, .2, …

    Args:
        folder: gets a few files of theirs.
        from_here: whether this machine, too, reaches them, and they it.
    """
    folder.mkdir(exist_ok=True)
    mark = f"{os.getpid() % 100_000}{next(_counter) % 10}"  # names of links have at most 15 characters
    subnet = f"10.83.{int(mark) % 250}"
    names = [f"node{index}" for index in range(number)]
    lines = ["127.0.0.1 localhost", *(f"{subnet}.{index + 1} {name}" for index, name in enumerate(names))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    with ExitStack() as stack:
        bridge = f"wb{mark}"
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        if from_here:
            _ip("addr", "add", f"{subnet}.250/24", "dev", bridge)
        started = [
            stack.enter_context(_machine(name, f"{subnet}.{index + 1}", f"wv{mark}{index}", bridge, folder))
            for index, name in enumerate(names)
        ]
        yield started


@contextmanager
def _machine(name: str, address: str, link: str, bridge: str, folder: Path) -> Generator[Machine]:
    machine = Machine(name, address, link, bridge, folder)
    try:
        machine.boot()
        yield machine
    finally:
        machine.close()


def _only_child(pid: int) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.01)
    raise TimeoutError(f"process {pid} has no child")


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} is not there after 10 s")
        time.sleep(0.01)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
