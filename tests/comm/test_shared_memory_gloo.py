"""Drawn calls on Gloo and over shared memory: what Gloo can do comes out the same, or is refused as listed here."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from pool import RankPool
from torch import Tensor

from weft.errors import CollectiveError

WEFT = "cpu:weft"
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
SUMMED = [torch.int8, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]
ARITHMETIC, BITWISE = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"], ["BAND", "BOR", "BXOR"]
SHAPES = [(), (0,), (1,), (7,), (4, 6), (3, 0, 2), (2, 3, 5), (5000,), (130, 257)]

REFUSED: dict[tuple[str, str], str] = {}
"""What Gloo does and `cpu:weft` refuses, by collective and kind of case: why."""


@dataclass(frozen=True)
class Case:
    """One call, the same on all ranks."""

    name: str
    seed: int
    dtype: torch.dtype
    op: str
    shape: tuple[int, ...]
    layout: str
    is_async: bool
    root: int

    @classmethod
    def drawn(cls, draw: random.Random, world: int) -> Case:
        name = draw.choice(sorted(CALLS))
        # Gloo crashes over a reduce-scatter that it has no sum for, and over one of no dim.
        kinds = draw.choice([FLOATS, SUMMED] if name.startswith("reduce_scatter") else [FLOATS, WHOLE, COMPLEX, MOVED])
        return cls(
            name=name,
            seed=draw.randrange(1 << 30),
            dtype=draw.choice(kinds),
            op=draw.choice(
                [*ARITHMETIC, *(BITWISE if kinds in (WHOLE, SUMMED) else [])]
            ),  # Gloo crashes over bits of floats
            shape=draw.choice(SHAPES[1:] if name.startswith("reduce_scatter") else SHAPES),
            layout=draw.choice(["plain", "plain", "turned", "every second", "within"]),
            is_async=draw.random() < 0.5,
            root=draw.randrange(world),
        )

    def tensor(self, which: int, *, lead: int = 1) -> Tensor:
        """Values that depend on `which`, `lead` times as many along dim 0, in memory as the layout says."""
        shape = (lead * self.shape[0], *self.shape[1:]) if self.shape else ((lead,) if lead > 1 else ())
        generator = torch.Generator().manual_seed(self.seed + which)
        values = torch.randint(-3, 4, shape, generator=generator)
        if self.dtype.is_complex:
            values = torch.complex(values.double(), torch.randint(-3, 4, shape, generator=generator).double())
        elif self.dtype.is_floating_point:
            values = values + torch.rand(shape, generator=generator, dtype=torch.float64)
        return self.laid(values.abs().to(self.dtype) if self.dtype is torch.uint16 else values.to(self.dtype))

    def laid(self, values: Tensor) -> Tensor:
        """The same values, in memory in another way."""
        match self.layout:
            case "turned" if values.dim() > 1:
                return values.transpose(0, -1).contiguous().transpose(0, -1)
            case "every second" if values.dim():
                room = values.new_zeros(*values.shape[:-1], 2 * values.shape[-1])
                room[..., ::2] = values
                return room[..., ::2]
            case "within":
                room = values.new_zeros(values.numel() + 3)
                room[3:] = values.reshape(-1)
                return room[3:].view(values.shape)
            case _:
                return values


Group = dist.ProcessGroup
Call = Callable[[Case, Group], list[Tensor]]


def _ends(case: Case, work: Any) -> None:
    if case.is_async:
        work.wait()


def _op(case: Case) -> Any:
    return getattr(dist.ReduceOp, case.op)


def _all_reduce(case: Case, group: Group) -> list[Tensor]:
    tensor = case.tensor(group.rank())
    _ends(case, dist.all_reduce(tensor, _op(case), group=group, async_op=case.is_async))
    return [tensor]


def _reduce(case: Case, group: Group) -> list[Tensor]:
    tensor = case.tensor(group.rank())
    _ends(case, dist.reduce(tensor, group_dst=case.root, op=_op(case), group=group, async_op=case.is_async))
    return [tensor] if group.rank() == case.root else []


def _broadcast(case: Case, group: Group) -> list[Tensor]:
    tensor = case.tensor(group.rank())
    _ends(case, dist.broadcast(tensor, group_src=case.root, group=group, async_op=case.is_async))
    return [tensor]


def _all_gather(case: Case, group: Group) -> list[Tensor]:
    outputs = [case.tensor(100 + rank) for rank in range(group.size())]
    _ends(case, dist.all_gather(outputs, case.tensor(group.rank()), group=group, async_op=case.is_async))
    return outputs


def _all_gather_into(case: Case, group: Group) -> list[Tensor]:
    output = case.tensor(100, lead=group.size())
    given = case.tensor(group.rank())
    _ends(case, dist.all_gather_into_tensor(output, given, group=group, async_op=case.is_async))
    return [output]


def _gather(case: Case, group: Group) -> list[Tensor]:
    outputs = [case.tensor(100 + r) for r in range(group.size())] if group.rank() == case.root else None
    given = case.tensor(group.rank())
    _ends(case, dist.gather(given, outputs, group_dst=case.root, group=group, async_op=case.is_async))
    return outputs or []


def _scatter(case: Case, group: Group) -> list[Tensor]:
    output = case.tensor(100)
    given = [case.tensor(r) for r in range(group.size())] if group.rank() == case.root else None
    _ends(case, dist.scatter(output, given, group_src=case.root, group=group, async_op=case.is_async))
    return [output]


def _reduce_scatter(case: Case, group: Group) -> list[Tensor]:
    output = case.tensor(100)
    given = [case.tensor(group.size() * group.rank() + r) for r in range(group.size())]
    _ends(case, dist.reduce_scatter(output, given, _op(case), group=group, async_op=case.is_async))
    return [output]


def _reduce_scatter_single(case: Case, group: Group) -> list[Tensor]:
    output = case.tensor(100)
    given = case.tensor(group.rank(), lead=group.size())
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in 2.13
    _ends(case, scatter(output, given, _op(case), group=group, async_op=case.is_async))
    return [output]


def _all_to_all(case: Case, group: Group) -> list[Tensor]:
    outputs = [case.tensor(100 + rank) for rank in range(group.size())]
    given = [case.tensor(group.size() * group.rank() + r) for r in range(group.size())]
    _ends(case, dist.all_to_all(outputs, given, group=group, async_op=case.is_async))
    return outputs


def _all_to_all_uneven(case: Case, group: Group) -> list[Tensor]:
    world, rank = group.size(), group.rank()
    lengths = [[random.Random(case.seed + 10 * a + b).randrange(4) for b in range(world)] for a in range(world)]
    send, receive = lengths[rank], [lengths[other][rank] for other in range(world)]
    given = torch.randn(sum(send), 3).to(case.dtype)
    given.copy_((torch.arange(given.numel()).view(given.shape) % 100 + rank).to(case.dtype))
    output = torch.zeros(sum(receive), 3, dtype=case.dtype)
    work = dist.all_to_all_single(output, given, receive, send, group=group, async_op=case.is_async)
    _ends(case, work)
    return [output]


def _batch(case: Case, group: Group) -> list[Tensor]:
    world, rank = group.size(), group.rank()
    here = [case.tensor(100 + r) for r in range(world)]
    there = [case.tensor(world * rank + r) for r in range(world)]
    others = [r for r in range(world) if r != rank]
    ops = [dist.P2POp(dist.isend, there[r], group=group, group_peer=r) for r in others]
    ops += [dist.P2POp(dist.irecv, here[r], group=group, group_peer=r) for r in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return here


def _coalesced(case: Case, group: Group) -> list[Tensor]:
    tensors = [case.tensor(group.rank() + 10 * part) for part in range(3)]
    with dist._coalescing_manager(group, async_ops=case.is_async) as waiting:
        for tensor in tensors:
            dist.all_reduce(tensor, _op(case), group=group)
    if case.is_async:
        waiting.wait()
    return tensors


def _functional(case: Case, group: Group) -> list[Tensor]:
    given = case.tensor(group.rank(), lead=group.size())
    op = case.op.lower()
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    found = [functional.all_reduce(given, op, group), functional.broadcast(given, case.root, group)]
    if given.dim():
        found += [gather(given, 0, group), scatter(given, op, 0, group)]
    return [tensor.wait() if hasattr(tensor, "wait") else tensor for tensor in found]


def _objects(case: Case, group: Group) -> list[Tensor]:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, {"rank": group.rank(), "values": list(case.shape)}, group=group)
    told = [case.seed if group.rank() == case.root else None]
    dist.broadcast_object_list(told, group_src=case.root, group=group)
    return [torch.tensor([found["rank"], *found["values"]]) for found in every] + [torch.tensor(told)]


CALLS: dict[str, Call] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_uneven,
    "batch_isend_irecv": _batch,
    "coalescing_manager": _coalesced,
    "functional": _functional,
    "objects": _objects,
}


def _outcome(case: Case, group: Group) -> list[Tensor] | str:
    try:
        return CALLS[case.name](case, group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _differ(found: list[Tensor], expected: list[Tensor], world: int) -> str:
    for here, there in zip(found, expected, strict=True):
        if here.dtype != there.dtype or here.shape != there.shape:
            return f"{here.dtype} {tuple(here.shape)}, Gloo {there.dtype} {tuple(there.shape)}"
        a, b = here.contiguous(), there.contiguous()
        if a.dtype.itemsize == 1 and a.dtype.is_floating_point:
            a, b = a.float(), b.float()
        loose = world > 2 or a.dtype in (torch.bfloat16, torch.float16)
        bound = 6e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-5
        same = torch.allclose(a, b, rtol=bound, atol=bound, equal_nan=True) if loose else torch.equal(a, b)
        if not same:
            return f"{a.flatten()[:6].tolist()}, Gloo {b.flatten()[:6].tolist()}"
    return ""


def _draw(seed: int, count: int) -> tuple[list[str], dict[str, int]]:
    world = dist.get_world_size()
    weft, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert weft is not None
    draw = random.Random(seed)
    wrong: list[str] = []
    done: dict[str, int] = {}
    for _ in range(count):
        case = Case.drawn(draw, world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that torch gives up
            # Gloo takes the memory of a tensor with gaps for its values.
            theirs, ours = _outcome(replace(case, layout="plain"), gloo), _outcome(case, weft)
        if isinstance(theirs, str):
            continue  # Gloo cannot
        if isinstance(ours, str):
            if (case.name, str(case.dtype)) not in REFUSED:
                wrong.append(f"{case}: refused, {ours[:160]}")
        elif difference := _differ(ours, theirs, world):
            wrong.append(f"{case}: {difference}")
        done[case.name] = done.get(case.name, 0) + 1
    dist.barrier()
    return wrong, done


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (3, 2), (2, 3), (4, 4)])
def test_drawn_calls_are_those_of_gloo(world: int, seed: int) -> None:
    with closing(RankPool(world)) as pool:  # torch's functional collectives keep their groups for ever
        outcomes = pool.run(world, _draw, seed, 400, backend=WEFT, timeout=120.0)
    for wrong, done in outcomes:
        assert wrong == []
        assert len(done) >= len(CALLS) - 1, "some were never drawn, or never done by Gloo"


def _complex_sums() -> list[str]:
    world, rank = dist.get_world_size(), dist.get_rank()
    wrong: list[str] = []
    for dtype in COMPLEX:
        every = [
            torch.randn(2 * world, dtype=dtype, generator=torch.Generator().manual_seed(other)).conj()
            for other in range(world)
        ]
        for name, over in (("SUM", 1), ("AVG", world)):
            op = getattr(dist.ReduceOp, name)
            expected = torch.stack([part.resolve_conj() for part in every]).sum(0) / over
            own = expected[2 * rank : 2 * rank + 2]
            for is_marked in (True, False):
                given = every[rank] if is_marked else every[rank].resolve_conj()
                whole, part, single = given.clone(), torch.empty(2, dtype=dtype), torch.empty(2, dtype=dtype)
                dist.reduce(whole, 1, op)
                dist.reduce_scatter(part, list(given.clone().chunk(world)), op)
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                scatter(single, given.clone(), op)
                rights = {
                    "reduce": rank != 1 or torch.allclose(whole.resolve_conj(), expected),
                    "reduce_scatter": torch.allclose(part, own),
                    "reduce_scatter_single": torch.allclose(single, own),
                }
                wrong += [f"{what} {dtype} {name} {is_marked}" for what, is_right in rights.items() if not is_right]
    with pytest.raises(CollectiveError, match=r"\(product\) of torch.complex64 .* there are sums and averages"):
        dist.reduce(torch.ones(3, dtype=torch.complex64), 0, dist.ReduceOp.PRODUCT)
    with pytest.raises(CollectiveError, match=r"\(premul_sum\) .* Multiply the tensor first"):
        dist.all_reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0))
    return wrong


def test_complex_numbers_are_summed_by_their_parts(ranks: RankPool) -> None:
    assert ranks.run(2, _complex_sums, backend=WEFT) == [[], []]
