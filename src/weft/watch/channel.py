"""The way of telemetry from the other hosts of a job to the collector on the one that leads.

A host connects, and both show by a code (HMAC-SHA256) under every frame that they know a key of the job.  A frame is a
length, the code, and so many bytes; its size is limited, and one that is not as it should be ends the connection.  An
empty frame asks for the time: by the answers that came back fastest a host knows how its clock differs from the
collector's.  Nothing here is waited for by a training.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, final

import numpy as np

from weft.watch.host_reader import AGREED, Dropped, HostClock, RankRecording
from weft.watch.store import COLLECTIVE, SPAN, StepDetail

logger = logging.getLogger(__name__)

MOST_BYTES = 4 << 20
"""Size of the largest frame: a ring's 8,192 spans and as many collectives are 0.7 MB."""
_MOST_WAITING_BYTES = 64 << 20
"""Reports that wait for the collector; of more the oldest are left out."""
_MOST_CONNECTIONS = 1_024
_NONCE_BYTES, _CODE_BYTES = 32, 32
_MEET_SECONDS = 3.0
"""Time in which who connects must have shown the key."""
_SILENT_SECONDS = 10.0
_LENGTH = struct.Struct("!I")
_ANSWER = struct.Struct("!q?")
"""Nanoseconds since 1970, and whether ranks shall be asked for their stacks."""
_CLOCK_SAMPLES = 64


class ChannelError(Exception):
    """The other side is not as it should be, or gone."""


@final
class _Frames:
    """Frames over one connection, of which both sides know a key."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_collector: bool, deadline: float) -> None:
        """Exchange the nonces, which make the key of this connection."""
        self._connection = connection
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.settimeout(_MEET_SECONDS)
        connection.sendall(nonce)
        theirs = self._receive(_NONCE_BYTES, deadline)
        both = nonce + theirs if is_collector else theirs + nonce
        self._key = hmac.new(key, both, hashlib.sha256).digest()
        self._own, self._other = (b"collector", b"host") if is_collector else (b"host", b"collector")
        self._sent = self._received = 0

    def send(self, content: bytes, seconds: float) -> None:
        """Send a frame.  Raises `OSError` where it is not taken in time."""
        code = self._code(self._own, self._sent, content)
        self._sent += 1
        self._connection.settimeout(seconds)
        self._connection.sendall(_LENGTH.pack(len(content)) + code + content)

    def receive(self, most: int, deadline: float) -> bytes:
        """Return the content of the next frame.

        Raises:
            OSError, ChannelError: it does not come in time, is too long, or the other side does not know the key.
        """
        head = self._receive(_LENGTH.size + _CODE_BYTES, deadline)
        (size,) = _LENGTH.unpack_from(head)
        if size > most:
            raise ChannelError(f"a frame of {size:,} bytes is longer than {most:,}")
        content = self._receive(size, deadline)
        if not hmac.compare_digest(head[_LENGTH.size :], self._code(self._other, self._received, content)):
            raise ChannelError("a frame does not carry the job's code")
        self._received += 1
        return content

    def _code(self, side: bytes, number: int, content: bytes) -> bytes:
        return hmac.new(self._key, side + number.to_bytes(8, "big") + content, hashlib.sha256).digest()

    def _receive(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelError("nothing comes any more")
            self._connection.settimeout(left)
            part = self._connection.recv(min(size, 1 << 16))
            if not part:
                raise ChannelError("the other side has closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


@final
class CollectorServer:
    """Takes what other hosts report, in threads of its own, until `close`."""

    def __init__(self, address: str, key: bytes, clock_ns: int | None = None) -> None:
        """Listen on one address of this host.  `clock_ns` leads from its monotonic clock to the time since 1970.

        Raises:
            OSError: it cannot be listened on.
        """
        self._key = key
        self._clock_ns = time.time_ns() - time.perf_counter_ns() if clock_ns is None else clock_ns
        self.wants_stacks = False
        """Whether the hosts shall ask their ranks for stacks."""
        self._waiting: deque[tuple[int, RankRecording, int]] = deque()
        self._lost: dict[tuple[int, int], int] = {}
        """Steps that were left out, by (generation, rank)."""
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server((address, 0), backlog=128)
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="weft-collector-hosts", daemon=True).start()

    def take(self) -> list[tuple[int, RankRecording]]:
        """Return (generation, report) of all that has come since the last call."""
        with self._lock:
            waiting, lost = list(self._waiting), self._lost
            self._waiting.clear()
            self._waiting_bytes, self._lost = 0, {}
        for number, report, _ in waiting:
            if steps := lost.pop((number, report.rank), 0):
                report.dropped = (
                    *report.dropped,
                    Dropped(0, 0, steps, "the collector did not keep up with other hosts"),
                )
        return [(number, report) for number, report, _ in waiting]

    def close(self) -> None:
        """Close all connections.  A thread that is in the middle of a frame ends by that."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                is_full = len(self._connections) >= _MOST_CONNECTIONS
                if not is_full:
                    self._connections.add(connection)
            if is_full:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="weft-collector-host", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            deadline, most = time.monotonic() + _MEET_SECONDS, 0  # the first frame is a question for the time
            frames = _Frames(connection, self._key, is_collector=True, deadline=deadline)
            while True:
                content = frames.receive(most, deadline)
                if not content:
                    now = time.perf_counter_ns() + self._clock_ns
                    frames.send(_ANSWER.pack(now, self.wants_stacks), _MEET_SECONDS)
                else:
                    self._add(*decode(content), len(content))
                deadline, most = time.monotonic() + _SILENT_SECONDS, MOST_BYTES
        except (OSError, ChannelError) as problem:
            logger.debug("a host of the telemetry is gone: %s", problem)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _add(self, number: int, report: RankRecording, size: int) -> None:
        with self._lock:
            self._waiting.append((number, report, size))
            self._waiting_bytes += size
            while self._waiting_bytes > _MOST_WAITING_BYTES:
                old, left_out, left_size = self._waiting.popleft()
                self._waiting_bytes -= left_size
                place = (old, left_out.rank)
                self._lost[place] = self._lost.get(place, 0) + len(left_out.steps)


@final
class CollectorLink:
    """A host's connection to the collector.  Every call raises `OSError` or `ChannelError` where that is gone."""

    def __init__(self, address: str, key: bytes, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=seconds)
        try:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._frames = _Frames(self._connection, key, is_collector=False, deadline=time.monotonic() + _MEET_SECONDS)
        except BaseException:
            self._connection.close()
            raise
        self._samples: deque[tuple[int, int]] = deque(maxlen=_CLOCK_SAMPLES)

    def ask(self, seconds: float) -> bool:
        """Ask for the time, which also shows that all that was sent before has come.  Return whether ranks shall be
        asked for their stacks."""
        asked = time.perf_counter_ns()
        self._frames.send(b"", seconds)
        answer = self._frames.receive(_ANSWER.size, time.monotonic() + seconds)
        back = time.perf_counter_ns()
        if len(answer) != _ANSWER.size:
            raise ChannelError("an answer is too short")
        unix_ns, wants_stacks = _ANSWER.unpack(answer)
        self._samples.append((back - asked, unix_ns - (asked + back) // 2))
        return wants_stacks

    @property
    def clock(self) -> HostClock:
        """This host's clock beside the collector's, by the answer that came back fastest."""
        round_trip, unix_ns = min(self._samples)
        return HostClock(unix_ns, (round_trip + 1) // 2)

    def send(self, content: bytes, seconds: float) -> None:
        """Send a report."""
        self._frames.send(content, seconds)

    def close(self) -> None:
        self._connection.close()


def encode(number: int, report: RankRecording) -> bytes:
    """Return a report of a generation as the content of a frame."""
    detail = report.detail
    spans, collectives = (b"", b"") if detail is None else (detail.spans, detail.collectives)
    head = {
        "number": number,
        "rank": report.rank,
        "live": report.live,
        "facts": report.facts,
        "columns": report.columns,
        "sizes": [len(report.steps), len(report.agreed), len(spans), len(collectives)],
        "names": None if detail is None else detail.names,
        "traffic": report.traffic,
        "dropped": report.dropped,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    arrays = (report.steps, report.starts, report.values, report.agreed, spans, collectives)
    return b"".join([_LENGTH.pack(len(text)), text, *map(bytes, arrays)])


def decode(content: bytes) -> tuple[int, RankRecording]:
    """Return the generation and the report of a frame.  Raises `ChannelError` where there is none."""
    try:
        return _decoded(content)
    except (ValueError, TypeError, KeyError, struct.error, RecursionError, OverflowError) as problem:
        raise ChannelError(f"a frame holds no report: {problem}") from None


def _decoded(content: bytes) -> tuple[int, RankRecording]:
    (size,) = _LENGTH.unpack_from(content)
    at = _LENGTH.size + size
    head: dict[str, Any] = json.loads(content[_LENGTH.size : at])
    steps, agreed, spans, collectives = (int(count) for count in head["sizes"])
    columns = tuple(str(name) for name in head["columns"])

    def take(kind: Any, *shape: int) -> Any:
        nonlocal at
        count = int(np.prod(shape))
        array = np.frombuffer(content, dtype=kind, count=count, offset=at) if count else np.zeros(0, dtype=kind)
        at += array.nbytes
        return array.reshape(shape)

    report = RankRecording(
        rank=int(head["rank"]),
        live=dict(head["live"]),
        facts=dict(head["facts"]),
        steps=take("<i8", steps),
        starts=take("<f8", steps),
        columns=columns,
        values=take("<f4", steps, len(columns)),
        agreed=take("<f8", agreed, len(AGREED)),
        traffic=dict(head["traffic"]),
        dropped=[Dropped(*row) for row in head["dropped"]],
    )
    if head["names"] is not None:
        report.detail = StepDetail(report.rank, tuple(head["names"]), take(SPAN, spans), take(COLLECTIVE, collectives))
    if at != len(content) or not 0 <= report.rank < 1 << 24 or agreed not in (0, steps):
        raise ValueError("its parts do not fit")
    return int(head["number"]), report
