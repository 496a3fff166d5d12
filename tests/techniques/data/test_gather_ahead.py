"""Updated weights travel behind the next forward: in the order of need, waited for where they are read, never half."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.comm.trace_event import TraceEvent
from weft.config.plan import MeshPlan
from weft.techniques.buckets.bucket_state import BucketMember
from weft.techniques.core import ParameterLayout
from weft.techniques.data._weight_prefetch import needs_of
from weft.techniques.data.gradient_reducer import BucketReducer

WIDTH, NUM_BLOCKS = 24, 3
BLOCKS = tuple(f"blocks.{number}" for number in range(NUM_BLOCKS))


class Model(nn.Module):
    """Blocks between an embedding and a head; what a test asks for it does wrong, or leaves out."""

    def __init__(self, *, peeks: bool = False, left_out: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        self.peeks, self.left_out = peeks, left_out
        self.ended_ns: list[int] = []
        """When the forwards of the blocks ended."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        for number, block in enumerate(self.blocks):
            if number == self.left_out:
                continue
            hidden = nn.functional.linear(hidden, block.weight) if self.peeks else block(hidden)
            self.ended_ns.append(time.perf_counter_ns())
        return self.head(hidden)


def _begin(model: Model, zero: Any, bucket_bytes: int) -> tuple[BucketReducer, list[TraceEvent]]:
    mesh = Mesh(MeshPlan(replicate=2), torch.device("cpu"))
    found: list[TraceEvent] = []
    members = [
        BucketMember(mesh=mesh, parameter=p, layout=ParameterLayout(name=name, shape=p.shape), part=0, group=0)
        for name, p in model.named_parameters()
    ]
    store = BucketReducer(
        members, mesh, stage=zero, compute_dtype=torch.float32, gradient_dtype=torch.float32,
        bucket_limits=(bucket_bytes, bucket_bytes),
    )  # fmt: skip
    store.gather_ahead([model], BLOCKS)
    mesh.watch(found.append)
    return store, found


def _step(model: Model, store: BucketReducer, inputs: Tensor) -> Tensor:
    store.begin_step()
    store.on_microbatch(0)
    store.on_last_forward(0)
    outputs = model(inputs)
    outputs.square().sum().backward()
    store.on_last_backward(0)
    store.finish()
    with torch.no_grad():
        for shard in store.shards:
            assert shard.gradient is not None
            shard.master.sub_(shard.gradient, alpha=0.01)
    store.start_weight_gather()
    return outputs.detach()


def _gathers() -> tuple[list[tuple[int, int, int]], list[int]]:
    """(bytes, when launched, when waited for) of the gathers of the second step, and when its blocks ended."""
    torch.manual_seed(0)
    model = Model()
    store, found = _begin(model, 1, 1)  # a bucket for every parameter
    _step(model, store, torch.ones(4, 5))
    gathers = [seen for seen in found if seen.operation == "all_gather"]
    assert not any(seen.is_over for seen in gathers), "somebody waited before the forward"
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    model.ended_ns.clear()
    model(torch.ones(4, 5))
    store.close()
    return [(seen.num_bytes, seen.launched_ns, seen.wait_entered_ns) for seen in gathers], model.ended_ns


def test_what_is_needed_first_goes_first_and_each_block_waits_for_its_own(ranks: Any) -> None:
    for gathers, ended in ranks.run(2, _gathers):
        assert len(gathers) == 2 * (NUM_BLOCKS + 2)
        launched = [when for _, when, _ in gathers]
        assert launched == sorted(launched)
        outside, blocks = gathers[:4], gathers[4:]
        assert sorted(size for size, *_ in outside) == [128, 128, 384, 512]  # padded to multiples of 16 per rank
        first_ended = ended[0]
        assert all(waited < first_ended for _, _, waited in [*outside, *blocks[:2]])
        for number in range(1, NUM_BLOCKS):
            for _, _, waited in blocks[2 * number : 2 * number + 2]:
                assert ended[number - 1] <= waited < ended[number]


def _losses(zero: int, ahead: bool, left_out: int | None, bucket_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Model(left_out=left_out)
    store, _ = _begin(model, zero, bucket_bytes)
    if not ahead:
        store._is_ahead = False  # as where blocks are compiled
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    outputs = [_step(model, store, inputs) for _ in range(4)]
    outputs.append(model(inputs).detach())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    store.close()
    return outputs, weights


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1_000_000])
@pytest.mark.parametrize("left_out", [None, 1])
@pytest.mark.parametrize("zero", [1, 2])
def test_the_same_bits_as_when_all_is_waited_for(
    ranks: Any, zero: int, left_out: int | None, bucket_bytes: int
) -> None:
    ahead = ranks.run(2, _losses, zero, True, left_out, bucket_bytes)
    plain = ranks.run(2, _losses, zero, False, left_out, bucket_bytes)
    for mine, other in zip(ahead, plain, strict=True):
        for these, those in zip(mine, other, strict=True):
            assert len(these) == len(those)
            assert all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def _peek() -> str:
    torch.manual_seed(0)
    model = Model()
    store, _ = _begin(model, 1, 1)
    _step(model, store, torch.ones(4, 5))
    model.peeks = True
    try:
        model(torch.ones(4, 5))
    except RuntimeError as error:
        return str(error)
    finally:
        store.close()
    return ""


def test_weights_that_are_read_elsewhere_are_an_error_and_not_old_numbers(ranks: Any) -> None:
    assert all("size" in message or "shape" in message or "dim" in message for message in ranks.run(2, _peek))


def test_needs_follow_the_forward() -> None:
    model = Model()
    model.blocks[2].weight = model.embedding.weight  # read inside of a block and outside
    bucket_of = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    needs = needs_of(model, [*BLOCKS, "blocks.9"], bucket_of)
    assert [need.module for need in needs] == [model, *model.blocks]

    def names(buckets: Sequence[int]) -> list[str]:
        every = [name for name, _ in model.named_parameters()]
        return [every[bucket] for bucket in buckets]

    assert names(needs[0].buckets) == ["embedding.weight", "embedding.bias", "head.weight", "head.bias"]
    assert names(needs[3].buckets) == ["embedding.weight", "blocks.2.bias"]
    assert needs_of(model, [], bucket_of)[0].buckets == tuple(range(len(bucket_of)))
