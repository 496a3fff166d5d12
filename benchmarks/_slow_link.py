"""Two network namespaces of this machine with a link of a given rate between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager

from benchmarks._contender import Host


class NoNamespacesError(RuntimeError):
    """This machine does not let this user make network namespaces or limit their rate."""


@contextmanager
def slow_link(rate: str, *, back: str | None = None) -> Generator[tuple[Host, Host]]:
    """Yield two hosts whose link carries `rate` (as `tc` writes it: `100mbit`) from the first to the second, and
    `back`, by default as much, the other way.  Needs root.

    A token bucket with little burst: a message of a few hundred kB already sees the rate.  No latency is added.

    Raises:
        NoNamespacesError: it cannot be made here.
    """
    tag = f"weft{os.getpid() % 100_000}"
    names = [f"{tag}{side}" for side in "ab"]
    addresses = ("10.231.77.1", "10.231.77.2")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address, limit in zip(names, addresses, (rate, back or rate), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", name, "up")
            bucket = ("tbf", "rate", limit, "burst", "64kb", "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", name, "root", *bucket)
        first, second = (
            Host(prefix=("ip", "netns", "exec", name), address=address, interface=name)
            for name, address in zip(names, addresses, strict=True)
        )
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoNamespacesError(f"there is no {error.filename}") from None
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(words)}: {done.stderr.strip()}")
