"""What ranks with compressed gradients compute, written down for one process in plain torch.

One process holds the weights once and every rank's residuals.  Codecs are written again here as their papers have them,
with loops and without a thought of speed.  Of Weft are only the layout of its buckets, the first bases of PowerSGD and
the places that random-k draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.techniques.compression.codecs import CodecSpec, Frame, create_codec
from weft.techniques.compression.codecs.randomk import drawn_places
from weft.techniques.compression.wire import count_of

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Memory:
    """What a bucket keeps from step to step."""

    owed: list[Tensor]
    """Of each rank."""
    bases: Mapping[str, Tensor]
    momentum: Tensor
    rounds: int = 0
    """Reductions so far."""


Reduce = Callable[[list[Tensor], Frame, CodecSpec, Memory], tuple[Tensor, Memory]]
"""Every rank's gradients, with what it owes → their sum as all ranks get it, and what is kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """A codec of the table: how it sums, and under which settings of a plan."""

    reduce: Reduce
    has_feedback: bool
    is_linear: bool = False
    """Whether only the sum of what the ranks owe matters, and not which of them owes it."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def no_memory(frame: Frame, compression: CodecSpec, world: int) -> Memory:
    """Nothing is owed and nothing learnt."""
    like = torch.zeros(frame.num_elements, dtype=torch.float64)
    first = create_codec(compression, frame, like).kept(frame)
    bases = {kept.name: kept.tensor.clone() for kept in first if kept.kind.startswith("basis")}
    return Memory([like.clone() for _ in range(world)], bases, like.clone())


def summed(shares: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks."""
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total


def exact(shares: list[Tensor], frame: Frame, compression: CodecSpec, memory: Memory) -> tuple[Tensor, Memory]:
    """No compression at all: the negative control of every codec."""
    return summed(shares), memory


# ── two phases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_two_phases(rounded: Callable[[Tensor], Tensor], multiple: int) -> Reduce:
    """Each rank sends rounded shares to the owners of the parts, who add up and send the rounded sum back."""

    def reduce(shares: list[Tensor], frame: Frame, compression: CodecSpec, memory: Memory) -> tuple[Tensor, Memory]:
        world = len(shares)
        total, owed = torch.zeros_like(shares[0]), [torch.zeros_like(share) for share in shares]
        is_value = torch.zeros_like(total)
        for span in frame.spans:
            is_value[span.offset : span.stop] = 1
        width = math.ceil(frame.num_elements / (world * multiple)) * multiple
        edges = [min(rank * width, frame.num_elements) for rank in range(world + 1)]
        for owner, bounds in enumerate(frame.regions or zip(edges, edges[1:], strict=False)):
            part = slice(*bounds)
            sent = [
                share[part] if rank == owner else rounded(share[part]) * is_value[part]
                for rank, share in enumerate(shares)
            ]
            added = summed(sent)
            total[part] = added if frame.regions is not None else rounded(added) * is_value[part]
            for rank, share in enumerate(shares):
                owed[rank][part] = share[part] - sent[rank]
            owed[owner][part] += added - total[part]
        return total, replace(memory, owed=owed)

    return reduce


def to_bf16(run: Tensor) -> Tensor:
    """Rounded to nearest even."""
    return run.to(torch.bfloat16).to(run.dtype)


def to_int8(run: Tensor) -> Tensor:
    """Blocks in units of 1/127 of their largest magnitude; units are fp32."""
    found = torch.zeros_like(run)
    for start in range(0, len(run), BLOCK):
        block = run[start : start + BLOCK]
        unit = block.abs().max() / 127
        if unit > 0:
            found[start : start + BLOCK] = (block / unit).round() * unit.float().double()
    return found


def to_signs(run: Tensor) -> Tensor:
    """Blocks as their mean magnitude, which is fp32, with each value's sign."""
    found = torch.zeros_like(run)
    for start in range(0, len(run), BLOCK):
        block = run[start : start + BLOCK]
        size = block.abs().mean().float().double()
        found[start : start + BLOCK] = torch.where(block >= 0, size, -size)
    return found


# ── what leaves out ───────────────────────────────────────────────────────────────────────────────────────────────────


def by_top_k(shares: list[Tensor], frame: Frame, compression: CodecSpec, memory: Memory) -> tuple[Tensor, Memory]:
    """Each rank's own largest."""
    count = max(1, math.ceil(compression.topk_share * sum(span.num_elements for span in frame.spans)))
    sent = [torch.zeros_like(share) for share in shares]
    for share, mine in zip(shares, sent, strict=True):
        largest = torch.argsort(share.abs(), descending=True)[:count]
        mine[largest] = share[largest]
    owed = [share - mine for share, mine in zip(shares, sent, strict=True)]
    return summed(sent), replace(memory, owed=owed)


def by_random_k(shares: list[Tensor], frame: Frame, compression: CodecSpec, memory: Memory) -> tuple[Tensor, Memory]:
    """The same places on every rank."""
    is_drawn = torch.zeros_like(shares[0])
    for span in frame.spans:
        length = span.num_elements
        count = count_of(length, compression.randomk_share)
        key = f"{compression.seed}/{span.name}/{memory.rounds}"
        is_drawn[span.offset + drawn_places(length, count, key)] = 1
    owed = [share * (1 - is_drawn) for share in shares]
    return summed(shares) * is_drawn, replace(memory, owed=owed, rounds=memory.rounds + 1)


def by_low_rank(shares: list[Tensor], frame: Frame, compression: CodecSpec, memory: Memory) -> tuple[Tensor, Memory]:
    """One step of subspace iteration for every matrix."""
    total, owed = torch.zeros_like(shares[0]), [torch.zeros_like(share) for share in shares]
    bases = dict(memory.bases)
    for span in frame.spans:
        here = slice(span.offset, span.stop)
        matrices = [share[here].view(span.shape[0], -1) for share in shares]
        left = torch.linalg.qr(summed([matrix @ bases[span.name] for matrix in matrices]))[0]
        rights = [matrix.T @ left for matrix in matrices]
        total[here] = (left @ summed(rights).T).flatten()
        for mine, matrix, right in zip(owed, matrices, rights, strict=True):
            mine[here] = (matrix - left @ right.T).flatten()
        sizes = summed(rights).norm(dim=0)
        bases[span.name] = torch.where(sizes > 0, summed(rights) / sizes, bases[span.name])
    return total, replace(memory, owed=owed, bases=bases)


def by_momentum(shares: list[Tensor], frame: Frame, compression: CodecSpec, memory: Memory) -> tuple[Tensor, Memory]:
    """Exact sums at first, then the signs of each rank's momentum; what comes out is the step between two momenta."""
    decay, world = compression.onebit_decay, len(shares)
    momentum, rounds = memory.momentum, memory.rounds + 1
    if rounds <= compression.onebit_warmup_steps:
        total = summed(shares)
        return total, replace(memory, momentum=decay * momentum + total, rounds=rounds)
    vote = in_two_phases(to_signs, BLOCK)
    mine = [share + decay / world * momentum for share in shares]
    total, after = vote(mine, replace(frame, regions=None), compression, memory)
    return total - decay * momentum, replace(after, momentum=total, rounds=rounds)


ROWS: Mapping[str, Row] = {
    "bf16": Row(in_two_phases(to_bf16, 2), has_feedback=False),
    "int8": Row(in_two_phases(to_int8, BLOCK), has_feedback=False),
    "powersgd": Row(by_low_rank, has_feedback=True, is_linear=True, settings={"powersgd_rank": 2}),
    "topk": Row(by_top_k, has_feedback=True, settings={"topk_share": 0.05}),
    "onebit": Row(by_momentum, has_feedback=True, settings={"onebit_warmup_steps": 2}),
    "randomk": Row(by_random_k, has_feedback=True, is_linear=True, settings={"randomk_share": 0.25}),
    "signsgd": Row(in_two_phases(to_signs, BLOCK), has_feedback=True),
}
"""Every codec that the engine runs: one without a row fails `test_every_codec_has_a_row`."""
