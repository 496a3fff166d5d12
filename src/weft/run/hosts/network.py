"""The address of this host that the others reach, and the interface that has it."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass

from weft.errors import LaunchError

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_UP = 1
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class HostAddress:
    """One IPv4 address of this host."""

    address: str
    interface: str


def own_address(network: str | None) -> HostAddress:
    """Return this host's address in a network, given as `10.0.0.0/24`; by default the only one that leads outside.

    No name is looked up: a host's own name often means 127.0.0.1, or nothing on other hosts.

    Raises:
        LaunchError: none of this host's addresses fits, or several do.
    """
    found = own_addresses()
    listed = ", ".join(f"{each.address} ({each.interface})" for each in found) or "none"
    if network is None:
        outside = [each for each in found if not ipaddress.ip_address(each.address).is_loopback]
        if len(outside) == 1:
            return outside[0]
        which = "none that other hosts can reach" if not outside else "several that other hosts may reach"
        raise LaunchError(f"this host has {which}: {listed}. Say which by --network, such as --network 10.0.0.0/24.")
    try:
        wanted = ipaddress.ip_network(network, strict=False)
    except ValueError as error:
        raise LaunchError(f"--network {network!r} is no network: {error}. Write it as 10.0.0.0/24.") from None
    for each in found:
        if ipaddress.ip_address(each.address) in wanted:
            return each
    raise LaunchError(f"this host has no address in --network {network}. Its addresses: {listed}.")


def own_addresses() -> list[HostAddress]:
    """The IPv4 addresses of all interfaces that are up."""
    if sys.platform != "linux":
        raise LaunchError("several hosts are supported on Linux alone.")
    found: list[HostAddress] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack(f"{_NAME_BYTES}s", name.encode()[:15]))
            try:
                fcntl.ioctl(asking.fileno(), _SIOCGIFFLAGS, request)
                flags: int = struct.unpack_from("H", request, 16)[0]
                fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if flags & _UP:
                found.append(HostAddress(socket.inet_ntoa(bytes(request[20:24])), name))
    return found
