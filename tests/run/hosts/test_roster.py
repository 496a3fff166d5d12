"""How ranks are shared out over hosts, and how the ends of hosts become the end of one job."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import replace

import pytest

from weft.events.progress import Position
from weft.run.hosts.roster import HostFacts, Roster, end_of_json, end_to_json, merged, seats_of
from weft.run.launch.job_end import HOST_LOST, JobEnd, RankExit


def hosts_with(*devices: int) -> dict[str, HostFacts]:
    return {
        f"m{number}": HostFacts(host=f"h{number}", address="", num_devices=count, version="", recipe="")
        for number, count in enumerate(devices)
    }


@pytest.mark.parametrize("seed", range(50))
def test_every_rank_has_one_seat(seed: int) -> None:
    draw = random.Random(seed)
    hosts = hosts_with(*(draw.randint(1, 8) for _ in range(draw.randint(1, 6))))
    devices = sum(facts.num_devices for facts in hosts.values())
    world_size = draw.randint(1, devices)
    seats = seats_of(hosts, world_size)
    ranks = [rank for seat in seats for rank in range(seat.first_rank, seat.first_rank + seat.num_ranks)]
    assert ranks == list(range(world_size))
    assert all(0 < seat.num_ranks <= hosts[seat.member].num_devices for seat in seats)
    assert seats[0].member == "m0"  # rank 0 is the leader's


def test_ranks_are_shared_evenly_where_that_is_possible() -> None:
    assert [seat.num_ranks for seat in seats_of(hosts_with(4, 4), 4)] == [2, 2]
    assert [seat.num_ranks for seat in seats_of(hosts_with(4, 4, 4), 8)] == [4, 4]
    assert [seat.num_ranks for seat in seats_of(hosts_with(1, 1), 4)] == [1, 3]  # cores may be shared


def test_hosts_that_do_not_belong_together_are_told_by_what_differs() -> None:
    first, second = hosts_with(2, 4).values()
    assert not second.difference(first)
    changed = replace(second, recipe="r", version="2")
    assert "h1 was started with another recipe (r) than host h0 (none). Start the same" in changed.difference(first)
    assert "another version (2)" in replace(second, version="2").difference(first)
    assert "another accelerator" in replace(second, accelerator="cuda").difference(first)


def test_what_hosts_say_survives_json() -> None:
    exit_ = RankExit(rank=3, host="b", when=1.5, value={"a": [1]}, error="ValueError", message="m", status=1)
    place = Position(pid=7, step=4, phase="optimizer", moves=9, has_begun=True, has_ended=False, first_step=0)
    end = JobEnd(
        num_processes=2, outcomes={2: None, 3: exit_}, cause=exit_, signals=(signal.SIGTERM,), positions={3: place}
    )
    assert end_of_json(json.loads(json.dumps(end_to_json(end)))) == end
    roster = Roster(
        number=3, seats=seats_of(hosts_with(2, 2), 3), store="a:1", function="f", arguments={"x": None},
        threads_per_rank=1, stopped_timeout_seconds=1.0, hang_seconds=None, collective_timeout_seconds=2.0,
    )  # fmt: skip
    assert Roster.of_json(json.loads(json.dumps(roster.to_json()))) == roster
    assert roster.world_size == 3
    assert roster.seat_of("m9") is None


def _end(rank: int, error: str | None, message: str = "", **more: object) -> JobEnd:
    cause = None if error is None else RankExit(rank=rank, host="h", when=0.0, error=error, message=message)
    return JobEnd(num_processes=1, outcomes={rank: cause}, cause=cause, **more)  # pyright: ignore[reportArgumentType]


def test_the_first_cause_is_no_error_that_another_host_has_made() -> None:
    lost_peer = _end(0, "RuntimeError", "[gloo] Connection closed by peer [10.0.0.2]:5")
    ends = {"a": lost_peer, "b": _end(1, "ValueError", "a width of 7"), "c": _end(2, None)}
    cause = merged(ends, ["a", "b"], 3).cause
    assert cause is not None
    assert (cause.rank, cause.error) == (1, "ValueError")


def test_a_lost_host_is_the_cause_of_all_else() -> None:
    ends = {"a": _end(0, "SIGKILL", "killed by SIGKILL"), "b": _end(1, HOST_LOST, "host b was lost")}
    end = merged(ends, ["a", "b"], 2)
    assert end.cause is not None
    assert end.cause.error == HOST_LOST
    assert end.report() == "host b was lost"
