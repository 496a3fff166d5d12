"""The memory that the ranks of a group share: made by one, found by the others, and gone with the last of them.

It is an anonymous file (`memfd`): it has no name that could be guessed or stay behind, is readable by its owner only,
and its memory is freed when the last process that has it mapped lets go of it or dies.  The others open it by the
descriptor of the process that made it; once all have it that descriptor is closed and nobody else can get at it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.comm._process import boot_id

NONCE_AT = 8
"""Offset behind the magic number; the first page is a header for the engine."""
NONCE_BYTES = 16
OTHER_HOSTS = "the group's ranks are on different hosts"
"""Reason for which a rank can never share memory with another."""


class Unreachable(Exception):
    """This rank cannot share memory with the one that made the segment; the text says why."""


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A mapping, and, with the rank that made it, the descriptor by which the others find it."""

    memory: mmap.mmap
    nonce: bytes
    descriptor: int = -1

    def describe(self) -> str:
        """What the others need to find it, as JSON."""
        return json.dumps(
            {
                "boot_id": boot_id(),
                "process": os.getpid(),
                "descriptor": self.descriptor,
                "num_bytes": len(self.memory),
                "nonce": self.nonce.hex(),
            }
        )

    def forget_descriptor(self) -> None:
        """Nobody else can map it from here on.  By the rank that made it, once all have mapped it or given up."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def create_segment(num_bytes: int) -> SharedSegment:
    """Make a segment of zeros; it takes memory only where it is written.

    Raises:
        Unreachable: this system has no such memory, or not so much address space.
    """
    if not hasattr(os, "memfd_create"):
        raise Unreachable("this system has no memfd_create")
    try:
        descriptor = os.memfd_create("weft", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, num_bytes)
        memory = _map(descriptor, num_bytes)
    except OSError as error:
        raise Unreachable(f"{num_bytes:,} bytes of shared memory cannot be made: {error}") from error
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[NONCE_AT : NONCE_AT + NONCE_BYTES] = nonce
    return SharedSegment(memory, nonce, descriptor)


def open_segment(description: str) -> SharedSegment:
    """Map the segment that another rank of this host has made, and prove that it is that one by its nonce.

    Raises:
        Unreachable: the rank is on another host, in another container, or another user's.
    """
    fields: Mapping[str, Any] = json.loads(description)
    if "reason" in fields:
        raise Unreachable(str(fields["reason"]))
    if not fields["boot_id"] or fields["boot_id"] != boot_id():
        raise Unreachable(OTHER_HOSTS)
    path = f"/proc/{int(fields['process'])}/fd/{int(fields['descriptor'])}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unreachable(f"the memory of rank 0's process cannot be opened ({error.strerror})") from error
    try:
        num_bytes = int(fields["num_bytes"])
        if os.fstat(descriptor).st_size != num_bytes:
            raise Unreachable("rank 0's process is in another container: its descriptor leads to another file here")
        memory = _map(descriptor, num_bytes)
    except OSError as error:
        raise Unreachable(f"the memory of rank 0's process cannot be mapped ({error.strerror})") from error
    finally:
        os.close(descriptor)
    nonce = bytes.fromhex(fields["nonce"])
    if memory[NONCE_AT : NONCE_AT + NONCE_BYTES] != nonce:
        raise Unreachable("rank 0's process is in another container: its descriptor leads to other memory here")
    return SharedSegment(memory, nonce)


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    # A forked helper (a data loader's) inherits the mapping.  Without it (MADV_DONTFORK) the helper's own memory could
    # come to lie there, and would be unmapped with the object that stands for this one.
    return mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
