"""One host's view of its job: who leads, which generation is the newest, what a lost leader has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from weft.run.hosts.membership import JobVerdict, Membership
from weft.run.hosts.registry import FENCE_SECONDS, LEASE_SECONDS, RegistryLostError
from weft.run.hosts.roster import HostFacts, Roster, Seat
from weft.run.hosts.signed import JobSecret
from weft.run.hosts.torch_store import TorchStoreRegistry, serve_store
from weft.run.launch.job_end import JobEnd, RankExit

FACTS = HostFacts(host="a", address="127.0.0.1", num_devices=1, version="1", recipe="r")
Join = Callable[[str], Membership]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Lets another host join one job."""
    store, port = serve_store("127.0.0.1")
    secret = JobSecret.of_folder(tmp_path)
    with ExitStack() as stack:

        def join(name: str) -> Membership:
            registry = TorchStoreRegistry.connect("127.0.0.1", port)
            stack.callback(registry.close)
            facts = replace(FACTS, host=name)
            return stack.enter_context(Membership(registry, secret, facts, is_stopping=lambda: False))

        yield join
    del store


def roster_of(number: int, *members: Membership) -> Roster:
    seats = [Seat(member=one.name, host=one.facts.host, first_rank=i, num_ranks=1) for i, one in enumerate(members)]
    return Roster(
        number=number, seats=tuple(seats), store="", function="", threads_per_rank=1, stopped_timeout_seconds=1.0,
        hang_seconds=None, collective_timeout_seconds=1.0,
    )  # fmt: skip


def test_the_first_leads_and_all_see_its_generations(join: Join) -> None:
    first, second = join("a"), join("b")
    assert (first.is_leader, second.is_leader) == (True, False)
    first.propose(roster_of(1, first, second))
    assert second.wait(lambda view: view.roster is not None and view.roster.number == 1, 5)
    second.report(
        1, JobEnd(num_processes=1, outcomes={1: RankExit(rank=1, host="b", when=0.0, value=[0.5] * 10**6)}, cause=None)
    )
    assert first.wait(lambda view: second.name in view.ends, 5)
    assert first.view.ends[second.name].values == [None]  # a million losses stay where they are


def test_a_number_that_a_lost_leader_has_taken_is_passed_over(join: Join) -> None:
    lost, next_one = join("a"), join("b")
    lost._registry.create("roster/1", lost._secret.sign("roster/1", roster_of(1, lost).to_json()))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RegistryLostError, match="another host has begun generation 1"):
        next_one.propose(roster_of(1, next_one))
    lost.__exit__(None, None, None)
    assert next_one.wait(lambda view: list(view.members) == [next_one.name], 5)
    assert next_one.propose(roster_of(1, next_one)).number == 2


def test_a_verdict_is_on_the_newest_generation_alone(join: Join) -> None:
    first, second = join("a"), join("b")
    first.propose(roster_of(1, first, second))
    first.conclude(JobVerdict(number=1, status=0, text="done"))
    assert second.wait(lambda view: view.verdict is not None, 5)
    later = join("c")
    assert later.view.verdict is None  # it was there before this host
    first.propose(roster_of(2, first, second))
    assert second.wait(lambda view: view.verdict is None, 5)


def test_garbage_in_the_registry_does_not_end_the_thread(join: Join) -> None:
    one, other = join("a"), join("b")
    secret = one._secret  # pyright: ignore[reportPrivateUsage]
    registry = other._registry  # pyright: ignore[reportPrivateUsage]
    registry.put("latest", "9" * 5000)
    registry.put("end/1/x", secret.sign("end/1/x", {"no": "end"}))
    one.propose(roster_of(1, one, other))
    registry.put(f"end/1/{other.name}", secret.sign(f"end/1/{other.name}", {"no": "end"}))
    one.wait_for_change(1.0)
    one.wait_for_change(1.0)
    assert not one.is_lost
    other.report(1, JobEnd(num_processes=1, outcomes={}, cause=None))
    assert one.wait(lambda view: other.name in view.ends, 5)


def test_a_host_is_lost_before_the_others_count_it_as_gone_and_stays_so(tmp_path: Path) -> None:
    store, port = serve_store("127.0.0.1")
    registry = TorchStoreRegistry.connect("127.0.0.1", port)
    with Membership(registry, JobSecret.of_folder(tmp_path), FACTS, is_stopping=lambda: False) as membership:
        assert not membership.is_lost
        del store
        began = time.monotonic()
        while not membership.is_lost:
            assert time.monotonic() - began < LEASE_SECONDS
            time.sleep(0.02)
        assert time.monotonic() - began > FENCE_SECONDS - 1.0  # an election of etcd must not end it
        assert "has not answered for" in membership.why_lost
        assert not membership.wait(lambda _: False, 60)  # nobody waits any longer
    registry.close()
