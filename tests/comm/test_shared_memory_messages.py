"""Sends and receives over shared memory: every size and order, beside one another, and with a peer that is gone."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import RankError, RankPool
from shared_memory_jobs import data_of, group, same, traces
from torch import Tensor

from weft.comm.trace_event import TraceEvent
from weft.comm.watch import Watch
from weft.errors import CollectiveError

WEFT = "cpu:weft"
RING = 1 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
SIZES = (0, 1, 7, 4096, RING // 4, RING // 4 + 1, 1_000_003)
"""Elements: with four bytes each they end before, at and behind the end of the ring."""


def _sample(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    raw = data_of(rank, size * dtype.itemsize, torch.uint8)
    return raw.bitwise_and(1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


def _to_and_fro() -> tuple[list[str], dict[str, int]]:
    rank, wrong = dist.get_rank(), list[str]()
    before = group().served.copy()
    for dtype in DTYPES:
        for size in SIZES:
            mine, theirs = _sample(rank, size, dtype), _sample(1 - rank, size, dtype)
            found = torch.empty_like(theirs)
            if rank == 0:
                dist.send(mine, 1)
                assert dist.recv(found, 1) == 1
            else:
                dist.recv(found, 0)
                dist.send(mine, 0)
            if not torch.equal(found.view(torch.uint8), theirs.view(torch.uint8)):
                wrong.append(f"{dtype} {size}")
    return wrong, dict(group().served - before)


def test_what_is_sent_comes(ranks: RankPool) -> None:
    for wrong, served in ranks.run(2, _to_and_fro, backend=WEFT):
        assert wrong == []
        assert served == {"send": len(DTYPES) * len(SIZES), "recv": len(DTYPES) * len(SIZES)}


def _around(size: int) -> list[str]:
    """Everybody sends to everybody, itself among them, before anybody waits; then the pieces of a batch."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), list[str]()
    found = [torch.empty(size) for _ in range(world)]
    works = [group().send([data_of(rank * world + to, size, torch.float32)], to) for to in range(world)]
    works += [group().recv([tensor], source) for source, tensor in enumerate(found)]
    gc.collect()
    for work in works:
        work.wait()
    for source, tensor in enumerate(found):
        if not same(tensor, data_of(source * world + rank, size, torch.float32)):
            wrong.append(f"from {source}")
    after, before = (rank + 1) % world, (rank - 1) % world
    turned = torch.empty(size)
    given = data_of(rank, size, torch.float32)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, turned, before)]):
        work.wait()
    return wrong if same(turned, data_of(before, size, torch.float32)) else [*wrong, "batch"]


@pytest.mark.parametrize(("world", "size"), [(2, 3_000_000), (3, 400_000), (5, 100)])
def test_everybody_sends_before_anybody_receives(ranks: RankPool, world: int, size: int) -> None:
    assert ranks.run(world, _around, size, backend=WEFT) == [[]] * world


def _tags() -> list[bool]:
    """Receives in another order than the sends, of tags, from a rank named and from any."""
    rank, checks = dist.get_rank(), list[bool]()
    sizes = {7: 10, 0: 300_000, 3: 600_000, 1 << 31: 0}
    if rank == 1:
        for tag, size in sizes.items():
            dist.send(torch.full((size,), float(tag)), 0, tag=tag)
        dist.send(torch.tensor([1.0]), 0, tag=5)
        dist.send(torch.tensor([2.0]), 0, tag=5)
    elif rank == 2:
        dist.send(torch.tensor([3.0]), 0, tag=6)
    else:
        for tag in (3, 1 << 31, 7, 0):
            found = torch.empty(sizes[tag])
            dist.recv(found, 1, tag=tag)
            checks.append(bool((found == tag).all()))
        one, two, three = torch.empty(1), torch.empty(1), torch.empty(1)
        checks.append(dist.recv(three, tag=6) == 2)
        checks.append(dist.recv(one, tag=5) == 1)
        dist.recv(two, 1, tag=5)
        checks.append((one.item(), two.item(), three.item()) == (1.0, 2.0, 3.0))
    dist.barrier()
    return checks


def test_tags_choose_and_keep_their_order(ranks: RankPool) -> None:
    checks, *_ = ranks.run(3, _tags, backend=WEFT)
    assert checks == [True] * 7


def _strided() -> tuple[list[float], bool]:
    whole = torch.zeros(6, 4)
    if dist.get_rank() == 0:
        whole[:, 1] = torch.arange(6.0)
        dist.send(whole[:, 1], 1)
        return [], True
    work = dist.irecv(whole[:, 2], 0)
    assert work is not None
    work.wait()
    return whole[:, 2].tolist(), bool((whole[:, :2] == 0).all())


def test_tensors_need_not_be_contiguous(ranks: RankPool) -> None:
    assert ranks.run(2, _strided, backend=WEFT)[1] == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True)


def _forgotten() -> tuple[list[float], int]:
    """Works that nobody keeps: what they receive is theirs, not the next one's; and the tensors are let go of."""
    if dist.get_rank() == 0:
        for value in range(100):
            dist.isend(torch.full((1000,), float(value)), 1)
        dist.barrier()
        return [], 0
    kept = [torch.empty(1000) for _ in range(100)]
    for tensor in kept:
        dist.irecv(tensor, 0)  # and its work is garbage
    gc.collect()
    dist.barrier()
    last = torch.empty(1)
    group().send([torch.ones(1)], 1)
    group().recv([last], 1).wait()  # the messages before it have come, or come with it
    values = [tensor[0].item() for tensor in kept]
    watched = [weakref.ref(tensor) for tensor in kept]
    del kept, tensor
    for _ in range(3):
        group().send([last], 1).wait()
        group().recv([last], 1).wait()
    gc.collect()
    return values, sum(ref() is not None for ref in watched)


def test_a_receive_that_nobody_keeps_takes_its_own_message(ranks: RankPool) -> None:
    values, left = ranks.run(2, _forgotten, backend=WEFT)[1]
    assert values == [float(value) for value in range(100)]
    assert left <= 33  # some wait until the next look


def _ahead_of_time() -> tuple[bool, bool, list[float]]:
    """A large message moves while its receiver computes; futures are completed by a thread."""
    tensor = torch.full((2_000_000,), 3.0) if dist.get_rank() == 0 else torch.empty(2_000_000)
    work = group().send([tensor], 1) if dist.get_rank() == 0 else group().recv([tensor], 0)
    limit = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < limit:
        time.sleep(0.01)
    future = work.get_future().then(lambda done: done.value()[0][:2].tolist())
    return work.is_completed(), work.is_success(), future.wait()


def test_messages_move_while_nobody_waits(ranks: RankPool) -> None:
    assert ranks.run(2, _ahead_of_time, backend=WEFT) == [(True, True, [3.0, 3.0])] * 2


def _beside_collectives() -> bool:
    """Messages and collectives have orders of their own."""
    rank, is_right = dist.get_rank(), True
    for round_ in range(20):
        summed, found = torch.ones(100_000), torch.empty(200_000)
        late = dist.all_reduce(summed, async_op=True)
        sent = dist.isend(torch.full((200_000,), float(round_)), 1 - rank)
        dist.recv(found, 1 - rank)
        assert sent is not None
        assert late is not None
        sent.wait()
        late.wait()
        is_right &= bool((found == round_).all() and (summed == 2).all())
    return is_right


def test_beside_collectives(ranks: RankPool) -> None:
    assert ranks.run(2, _beside_collectives, backend=WEFT) == [True, True]


@dataclass(frozen=True)
class _Letter:
    source: int
    target: int
    tag: int
    size: int


def _letters(letters: Sequence[_Letter], seed: int) -> bool:
    """Send and ask for a list of messages, each rank in an order of its own; those of one tag keep theirs."""
    rank, draw = dist.get_rank(), random.Random(seed + dist.get_rank())
    todo = [(at, letter) for at, letter in enumerate(letters) if rank in (letter.source, letter.target)]
    places = sorted(range(len(todo)), key=lambda _: draw.random())
    streams: dict[tuple[int, int, int], list[int]] = {}
    for place in sorted(places):
        letter = todo[place][1]
        streams.setdefault((letter.source, letter.target, letter.tag), []).append(place)
    works: list[tuple[dist.Work, Tensor, Tensor | None]] = []
    for drawn in places:  # the drawn order says which stream goes on, the stream which message of it
        letter = todo[drawn][1]
        at, letter = todo[streams[letter.source, letter.target, letter.tag].pop(0)]
        content = data_of(at, letter.size, torch.float32)
        if letter.source == rank:
            works.append((group().send([content], letter.target, letter.tag), content, None))
        if letter.target == rank:
            found = torch.empty(letter.size)
            works.append((group().recv([found], letter.source, letter.tag), found, content))
    draw.shuffle(works)
    is_right = True
    for work, found, content in works:
        work.wait()
        is_right &= content is None or same(found, content)
    dist.barrier()
    return is_right


_LETTERS = st.lists(
    st.builds(
        _Letter, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from((0, 1, 65_537, 500_000))
    ),
    max_size=24,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(letters=_LETTERS, seed=st.integers(0, 1 << 16))
def test_any_messages_in_any_order(ranks: RankPool, letters: list[_Letter], seed: int) -> None:
    assert ranks.run(3, _letters, letters, seed, backend=WEFT) == [True] * 3


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────────────────────────────


def _tell(folder: str, seconds: float, text: str) -> None:
    (Path(folder) / f"rank{dist.get_rank()}").write_text(json.dumps([seconds, text]))


def _killed(folder: str, call: str) -> None:
    """Rank 1 dies; 0 is at a message with it, 2 waits for rank 0."""
    when, rank = Path(folder) / "when", dist.get_rank()
    tensor = torch.ones(10 if call == "receive" else 3_000_000)
    dist.barrier()
    if rank == 1:
        if call == "halfway":
            group().send([tensor], 0)
            time.sleep(0.2)
        when.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if rank == 2:
            dist.recv(tensor, 0)
        elif call == "send":
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 1) if call == "receive" else _receive_late(tensor)
    except CollectiveError as error:
        _tell(folder, time.time() - float(when.read_text()), str(error))
        raise


def _receive_late(tensor: Tensor) -> None:
    """Take what fits of a message whose sender dies on the way: the rest never comes."""
    time.sleep(0.5)
    group().recv([tensor], 1).wait()


@pytest.mark.parametrize("call", ["receive", "send", "halfway"])
def test_a_killed_rank_is_named(ranks: RankPool, tmp_path: Path, call: str) -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        ranks.run(3, _killed, str(tmp_path), call, backend=WEFT)
    for rank in (0, 2):
        seconds, text = json.loads((tmp_path / f"rank{rank}").read_text())
        assert "the process of rank 1 has died" in text
        assert seconds <= 1.0
        size = 40 if call == "receive" else 12_000_000
        action = f"Sending {size:,} bytes to" if (rank, call) == (0, "send") else f"Receiving {size:,} bytes from"
        assert text.startswith(f"{action} rank {1 if rank == 0 else 0} (tag 0) cannot be finished")


def _broken(kind: str) -> str:
    """Both ranks are to receive, and rank 1 does something else before."""
    rank = dist.get_rank()
    group().set_timeout(timedelta(seconds=0.4 if kind == "late" else 20))
    if rank == 1 and kind == "late":
        time.sleep(0.8)
    elif rank == 1 and kind == "aborted":
        time.sleep(0.1)
        group().abort()
    elif rank == 1 and kind == "size":
        dist.send(torch.ones(11), 0)
    with pytest.raises(CollectiveError) as caught:
        dist.recv(torch.ones(10), 1 - rank)
    with pytest.raises(CollectiveError):
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return str(caught.value)


def _left(kind: str) -> str:
    """Rank 1 leaves, and rank 0 waits for a message from it, or from any."""
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(CollectiveError) as caught:
        dist.recv(torch.ones(10), 1 if kind == "left" else None)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("late", "was not finished in 0.4 s: rank 1 has not come"),
        ("aborted", "was given up: rank 1 aborted the group"),
        (
            "size",
            "does not fit what rank 1 did, which sent 44. A message must be received in a tensor of as many bytes",
        ),
    ],
)
def test_what_went_wrong_is_said(ranks: RankPool, kind: str, said: str) -> None:
    here, there = ranks.run(2, _broken, kind, backend=WEFT)
    assert said in here
    assert there.startswith("Receiving 40 bytes from rank 0 (tag 0)")


@pytest.mark.parametrize("kind", ["left", "anybody"])
def test_a_rank_that_leaves_is_named_to_who_waits_for_its_message(ranks: RankPool, kind: str) -> None:
    said, _ = ranks.run(2, _left, kind, backend=WEFT)
    assert "rank 1 has left the group" in said


def _refused() -> list[str]:
    said: list[str] = []
    own = group()
    for call in (
        lambda: own.send([torch.ones(1)], 2),
        lambda: own.recv([torch.ones(1)], 0, -1),
        lambda: own.send([torch.ones(1, device="meta")], 1),
    ):
        with pytest.raises(CollectiveError) as caught:
            call()
        said.append(str(caught.value))
    dist.destroy_process_group()
    with pytest.raises(CollectiveError, match="this rank has left the group"):
        own.send([torch.ones(1)], 0)
    return said


def test_what_cannot_be_is_refused(ranks: RankPool) -> None:
    for position, tag, device in ranks.run(2, _refused, backend=WEFT):
        assert "position 2 with tag 0: positions go from 0 to 1" in position
        assert "tags from 0 to" in tag
        assert "a tensor on meta cannot be sent over shared memory" in device


def _traceless() -> tuple[dict[str, int], dict[str, int]]:
    """A group in which messages were sent, received and left under way leaves nothing behind."""
    before = traces()
    for _ in range(3):
        other = dist.new_group(backend="weft")
        assert isinstance(other, dist.ProcessGroup)
        peer = 1 - dist.get_rank()
        other.send([torch.ones(2_000_000)], peer)  # never received
        other.recv([torch.ones(1)], peer, 9)  # never sent
        dist.barrier()
        dist.destroy_process_group(other)
        del other
        gc.collect()
    return before, traces()


def test_nothing_is_left_behind(ranks: RankPool) -> None:
    for before, after in ranks.run(2, _traceless, backend=WEFT):
        # Fewer threads than before are those of an earlier test, on their way out on a busy machine.
        assert all(after[kind] <= count for kind, count in before.items()), (before, after)


def _seen() -> list[tuple[str, str, int, bool]]:
    found: list[TraceEvent] = []
    group().watch = Watch("pipeline", found.append)
    if dist.get_rank() == 0:
        dist.send(torch.ones(10), 1)
    else:
        dist.recv(torch.ones(10), 0)
    group().watch = None
    return [
        (
            seen.axis,
            seen.operation,
            seen.num_bytes,
            seen.launched_ns <= seen.done_ns <= seen.wait_exited_ns and seen.is_done_exact and seen.wait_entered_ns > 0,
        )
        for seen in found
    ]


def test_messages_are_seen(ranks: RankPool) -> None:
    sent, received = ranks.run(2, _seen, backend=WEFT)
    assert sent == [("pipeline", "send", 40, True)]
    assert received == [("pipeline", "receive", 40, True)]
