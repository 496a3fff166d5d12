"""Ranks of other hosts are recorded: over connections that need the job's key, without a run that waits for them."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from weft.comm.telemetry import Recorder
from weft.comm.trace_event import TraceEvent
from weft.events.ring import RankRing, StepScalars, ring_path
from weft.watch.channel import ChannelError, CollectorLink, CollectorServer, decode, encode
from weft.watch.collector import Collector
from weft.watch.host_reader import HostReader
from weft.watch.host_recorder import record_host
from weft.watch.run_record import RunRecord
from weft.watch.store import TelemetryReader
from weft.watch.views import page_of

KEY = b"k" * 32
AHEAD_NS = 5_000_000_000
"""The collector's clock is so far ahead of the host's."""
SCALARS = StepScalars(2.5, 1.0, 1e-3, 1.0, 64.0, skipped=False)


@pytest.fixture
def server() -> Generator[CollectorServer]:
    made = CollectorServer("127.0.0.1", KEY, time.time_ns() - time.perf_counter_ns() + AHEAD_NS)
    yield made
    made.close()


def take_step(recorder: Recorder, step: int) -> None:
    recorder.begin_ring_step()
    with recorder.span("forward_backward"):
        seen = TraceEvent("data", "all_reduce", 4_000)
        recorder.collectives.add(seen)
        seen.exit_wait(seen.enter_wait())
    recorder.end_ring_step(step, 1 << 20, SCALARS)


def wait_for(look: Callable[[], object], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


def test_a_report_is_the_same_on_the_other_side(tmp_path: Path) -> None:
    recorder = Recorder(ring=RankRing.create(ring_path(tmp_path, 7), 7))
    for step in (1, 2, 3):
        take_step(recorder, step)
    (report,) = HostReader(tmp_path).reports()
    number, again = decode(encode(4, report))
    assert number == 4
    assert (again.rank, again.live, again.columns, again.traffic) == (7, report.live, report.columns, report.traffic)
    for name in ("steps", "starts", "values", "agreed"):
        np.testing.assert_array_equal(getattr(again, name), getattr(report, name))
    assert again.detail is not None
    assert report.detail is not None
    assert again.detail.names == report.detail.names
    np.testing.assert_array_equal(again.detail.spans, report.detail.spans)
    np.testing.assert_array_equal(again.detail.collectives, report.detail.collectives)


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(ring=RankRing.create(ring_path(tmp_path, 0), 0))
    take_step(recorder, 1)
    (report,) = HostReader(tmp_path).reports()
    content, draw = encode(1, report), random.Random(40)
    head = 4 + struct.unpack_from("!I", content)[0]
    for _ in range(300):
        cut = content[: draw.randrange(len(content))]
        with pytest.raises(ChannelError):
            decode(cut)
        altered = bytearray(content)
        altered[draw.randrange(head)] ^= 1 << draw.randrange(8)
        with suppress(ChannelError):  # or it is another report: the frame's code says whose
            decode(bytes(altered))
    for text in (b"", b"\0\0\0\2{}", b"\0\0\0\2[]", b"\xff\xff\xff\xff{}"):
        with pytest.raises(ChannelError):
            decode(text)


STRANGERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a wrong code": bytes(32) + struct.pack("!I", 0) + bytes(32),
    "a long frame": bytes(32) + struct.pack("!I", 1 << 31) + bytes(64),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_who_does_not_know_the_key_is_not_heard(server: CollectorServer, stranger: str) -> None:
    host, _, port = server.address.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(STRANGERS[stranger])
        with suppress(OSError):  # it may have hung up already
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1024):
                answer += part
    assert len(answer) <= 32, "a nonce, and no word more"
    with closing(CollectorLink(server.address, b"another key", 5)) as link, pytest.raises((ChannelError, OSError)):
        link.ask(5)
    assert server.take() == []


def test_clocks_are_compared_by_the_fastest_answer(server: CollectorServer) -> None:
    link = CollectorLink(server.address, KEY, 5)
    for _ in range(20):
        assert not link.ask(5)
    clock = link.clock
    true = time.time_ns() - time.perf_counter_ns() + AHEAD_NS
    assert 0 < clock.error_ns < 50_000_000
    assert abs(clock.unix_ns - true) <= clock.error_ns + 1_000_000  # the wall clock may be slewed meanwhile
    link.close()


def test_ranks_of_another_host_stand_beside_those_of_the_collector(server: CollectorServer, tmp_path: Path) -> None:
    rings, run = tmp_path / "rings", tmp_path / "run"
    (rings / "1").mkdir(parents=True)
    run.mkdir()
    collector = Collector(lambda: run, rings, server=server)
    own = Recorder(ring=RankRing.create(ring_path(rings / "1", 0), 0))
    head = {"world_size": 2, "plan": "[mesh]\nreplicate = 2\n", "axes": {"replicate": 2}}
    facts = {"rank": {"host": "a", "coordinates": {"replicate": 0}}, "generation": head}
    (rings / "1" / "rank-0.json").write_text(json.dumps(facts))
    with record_host(f"{server.address}/1", KEY) as other_rings:
        assert other_rings is not None
        other = Recorder(ring=RankRing.create(ring_path(other_rings, 1), 1))
        (other_rings / "rank-1.json").write_text('{"rank": {"host": "b", "coordinates": {"replicate": 1}}}')
        for step in range(1, 6):
            take_step(own, step)
            take_step(other, step)
        collector.poll()
        assert not TelemetryReader(run).newest_step()[1], "the other host's ranks are waited for"

        def step_is_there() -> bool:
            collector.poll()
            return TelemetryReader(run).newest_step() == (1, 5)

        wait_for(step_is_there)
        server.wants_stacks = True
        wait_for(lambda: (collector.poll(), "stack" in TelemetryReader(run).live()[1])[1])
    collector.close()
    reader = TelemetryReader(run)
    window = reader.window(1)
    assert not np.isnan(window.column("wall")).any()
    (facts,) = reader.generations()
    assert [about["host"] for about in facts.ranks] == ["a", "b"]
    assert "clock" not in facts.ranks[0]
    assert facts.clock_error_seconds is not None
    assert facts.ranks[1]["clock"]["offset_seconds"] == pytest.approx(-AHEAD_NS / 1e9, abs=0.1)
    # The first host's own ranks have the wall clock, which in this test is not the collector's.
    assert window.column("start")[:, 1] == pytest.approx(AHEAD_NS / 1e9, abs=0.5)
    record = RunRecord(run)
    texts = [block["says"] for block in page_of(record, "overview", {})["blocks"] if block["title"] == "Recording"]
    assert "compared with the collector's, to ± " in texts[0]


def test_reports_that_cannot_be_sent_are_left_out_and_counted(tmp_path: Path) -> None:
    """The collector's host is gone: a generation ends as if nobody had wanted to record it."""
    gone = CollectorServer("127.0.0.1", KEY)
    gone.close()
    with record_host(f"{gone.address}/1", KEY) as rings:
        assert rings is not None
        take_step(Recorder(ring=RankRing.create(ring_path(rings, 1), 1)), 1)
        time.sleep(1.2)
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert not rings.exists()
