"""Ranks that share a sequence as threads of this process: all that each scheme computes, sent through queues."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.techniques.context import exchange, ulysses
from weft.techniques.context.attention import Attend, VisitedAttention
from weft.techniques.context.exchange import GatherExchange, RingExchange
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.token_runs import runs_of
from weft.techniques.context.ulysses import HeadExchange
from weft.techniques.core.local_tokens import LocalTokens

_PATIENCE_SECONDS = 30.0


@dataclass(slots=True)
class Post:
    """What is on its way between any two ranks."""

    letters: defaultdict[tuple[int, int], Queue[Tensor]] = field(default_factory=lambda: defaultdict(Queue))
    num_elements: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """What each rank has sent to others."""

    def send(self, sender: int, receiver: int, tensor: Tensor) -> None:
        if sender != receiver:
            self.num_elements[sender] += tensor.numel()
        self.letters[sender, receiver].put(tensor.detach().clone())

    def receive(self, sender: int, receiver: int) -> Tensor:
        return self.letters[sender, receiver].get(timeout=_PATIENCE_SECONDS)


@dataclass(frozen=True, slots=True)
class _Wait:
    wait: Callable[[], None]


def deliver(monkeypatch: pytest.MonkeyPatch, post: Post) -> None:
    """Let the schemes send through the post instead of a process group, which is the number of the rank."""

    def start(leaving: Tensor, buffer: Tensor, peers: tuple[int, int], group: Any) -> list[_Wait]:
        post.send(group, peers[0], leaving)
        return [_Wait(lambda: buffer.copy_(post.receive(peers[1], group)))]  # type: ignore[arg-type,return-value]

    def every(flat: Tensor, view: GroupView) -> Tensor:
        me: Any = view.group
        for other in view.ranks:
            post.send(me, other, flat)
        return torch.stack([post.receive(other, me) for other in view.ranks])

    def sums(shards: Tensor, view: GroupView, dim: int) -> Tensor:
        me: Any = view.group
        for index, other in enumerate(view.ranks):
            post.send(me, other, shards[index : index + 1])
        return torch.stack([post.receive(other, me) for other in view.ranks]).sum(0)

    def swap(flat: Tensor, given: list[int], taken: list[int], view: GroupView) -> Tensor:
        me: Any = view.group
        for other, part in zip(view.ranks, flat.split(given), strict=True):
            post.send(me, other, part)
        arrived = [post.receive(other, me) for other in view.ranks]
        assert [part.numel() for part in arrived] == taken
        return torch.cat(arrived)

    monkeypatch.setattr(exchange, "_start", start)
    monkeypatch.setattr(exchange, "runs_on_gloo", lambda device, group: True)
    monkeypatch.setattr(exchange, "all_gather", every)
    monkeypatch.setattr(exchange, "reduce_scatter_shards", sums)
    monkeypatch.setattr(ulysses, "exchange_parts", swap)


def scheme_of(name: str, rank: int, ranks: int, exchanging: int) -> Attend:
    """The attention of one rank, as the technique makes it on a group."""

    def view(members: range) -> GroupView:
        return GroupView(tuple(members), members.index(rank), rank)  # type: ignore[arg-type]

    whole = view(range(ranks))
    if name == "ulysses":
        return HeadExchange(whole)
    if name == "usp":
        group = rank // exchanging
        heads = view(range(group * exchanging, (group + 1) * exchanging))
        ring = view(range(rank % exchanging, ranks, exchanging))
        between = VisitedAttention(ring, RingExchange(ring), together=exchanging)
        return HeadExchange(heads, group=group, groups=ranks // exchanging, between=between)
    return VisitedAttention(whole, RingExchange(whole) if name == "ring" else GatherExchange(whole))


def attend_in_threads(
    operands: list[Tensor],
    gradient: Tensor,
    form: AttentionForm,
    documents: Tensor | None,
    attends: list[Attend],
) -> tuple[Tensor, list[Tensor]]:
    """Return attention of whole samples and its gradients, each rank having its own tokens of all operands."""
    length, ranks = gradient.shape[2], len(attends)
    mixed, sums = torch.zeros_like(gradient), [torch.zeros_like(operand) for operand in operands]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            runs = runs_of(length, ranks, rank)
            places = torch.cat([torch.arange(start, stop) for start, stop in runs])
            own = [operand[:, :, places].clone().requires_grad_() for operand in operands]
            tokens = LocalTokens(length=length, runs=runs, documents=documents)
            found = attends[rank](own[0], own[1], own[2], tokens, form)
            found.backward(gradient[:, :, places])
            mixed[:, :, places] = found.detach()
            for total, leaf in zip(sums, own, strict=True):
                assert leaf.grad is not None
                total[:, :, places] = leaf.grad
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return mixed, sums


def attend_whole(
    operands: list[Tensor], scale: float, window: int | None = None, documents: Tensor | None = None
) -> Tensor:
    """Return causal attention written out."""
    query, key, value = operands
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (length if window is None else window))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)
