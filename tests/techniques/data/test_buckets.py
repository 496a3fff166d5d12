"""Buckets and ZeRO-0, 1, 2: the sum over data ranks equals one process, whatever is cut, unused or uneven."""

from __future__ import annotations

import threading
from typing import Literal

import pytest
import torch
from torch import nn

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import MeshPlan
from weft.techniques.buckets.bucket_state import BucketMember, compose_buckets
from weft.techniques.core import ParameterLayout
from weft.techniques.data.gradient_reducer import BucketReducer


class Net(nn.Module):
    """Odd sizes, a parameter used by odd samples only, one never used, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.twice = nn.Linear(13, 13, bias=False)
        self.sometimes = nn.Linear(13, 13)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(13, 5)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.twice(torch.tanh(self.twice(x)))
        if use:
            x = x + self.sometimes(x)
        return self.last(x)


def build(dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def members_of(net: nn.Module, mesh: Mesh) -> list[BucketMember]:
    return [
        BucketMember(
            mesh=mesh,
            parameter=parameter,
            layout=ParameterLayout(name=name, shape=parameter.shape),
            part=0,
            group=0 if parameter.ndim > 1 else 1,
        )
        for name, parameter in net.named_parameters()
    ]


def samples(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(1), dtype=dtype)


def reference() -> dict[str, torch.Tensor]:
    net = build(torch.float64)
    for index, sample in enumerate(samples(torch.float64)):
        net(sample[None], index % 4 == 3).square().sum().backward()
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in net.named_parameters()}


def job(
    zero: Literal[0, 1, 2],
    cuts: Literal["anywhere", "parameter"],
    shares: tuple[int, ...],
    bucket: int,
    algorithm: str = "auto",
) -> dict[str, float]:
    mesh = Mesh(MeshPlan(replicate=len(shares)), torch.device("cpu"))
    net = build(torch.float64)
    store = BucketReducer(
        members_of(net, mesh),
        mesh,
        stage=zero,
        compute_dtype=torch.float64,
        gradient_dtype=torch.float64,
        cuts=cuts,
        bucket_limits=(bucket // 4, bucket),
        reduce_rounds=min(shares),
        algorithm=algorithm,
    )
    expected = reference()
    scale = torch.sqrt(sum((g.square().sum() for g in expected.values()), torch.zeros(())))
    first = sum(shares[: mesh.rank])
    worst = 0.0
    for _ in range(3):
        store.begin_step()
        for index in range(first, first + shares[mesh.rank]):
            loss = net(samples(torch.float64)[index][None], index % 4 == 3).square().sum()
            remaining = first + shares[mesh.rank] - 1 - index
            store.on_microbatch(remaining)
            if remaining == 0:
                store.on_last_forward(0)
            loss.backward()
        store.on_last_backward(0)
        store.finish()
        for shard in store.shards:
            assert shard.gradient is not None
            for segment in shard.segments:
                wanted = expected[segment.layout.name].flatten()[segment.start : segment.start + segment.length]
                got = shard.gradient[segment.offset : segment.offset + segment.length]
                worst = max(worst, float((wanted - got).norm() / max(wanted.norm(), 1e-6 * scale)))
    held = sum(segment.length for shard in store.shards for segment in shard.segments)
    store.start_weight_gather()
    sent = sum(each.num_messages for each in store._collectives.values())
    store.close()
    assert not any(thread.name == "weft-messages" for thread in threading.enumerate())
    return {
        "sent": sent,
        "worst": worst,
        "held": held,
        "never": float("never.weight" in store.unused()),
        **{f"bytes_{kind}": size for kind, size in store.model_state_bytes().items()},
    }


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("cuts", ["anywhere", "parameter"])
@pytest.mark.parametrize("shares", [(12,), (6, 6), (5, 7), (3, 2, 4, 3)])
def test_gradients_equal_one_process(ranks, zero, cuts, shares) -> None:
    results = ranks.run(len(shares), job, zero, cuts, shares, 512)
    assert max(r["worst"] for r in results) <= 1e-10
    assert all(r["never"] for r in results)
    total = sum(p.numel() for p in build(torch.float64).parameters())
    held = sum(r["held"] for r in results)
    assert held == (total if zero else total * len(shares))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "hierarchical", "tree:0-256;ring:256-max"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_equal_one_process_by_every_kind_of_algorithm(ranks, zero, algorithm) -> None:
    results = ranks.run(3, job, zero, "parameter", (3, 5, 4), 512, algorithm)
    assert max(r["worst"] for r in results) <= 1e-10
    assert sum(r["sent"] for r in results) > 0


def update_job(zero: Literal[0, 1, 2], compute: torch.dtype) -> list[float]:
    """One step of plain gradient descent on the masters, published into the parameters."""
    mesh = Mesh(MeshPlan(replicate=2), torch.device("cpu"))
    net = build(torch.float32)
    store = BucketReducer(
        members_of(net, mesh),
        mesh,
        stage=zero,
        compute_dtype=compute,
        gradient_dtype=torch.float32,
        bucket_limits=(400, 400),
    )
    for shard in store.shards:
        shard.master.add_(1.0)
    store.start_weight_gather()
    fresh = build(torch.float32)
    return [
        float((mine.detach().float() - (whole.detach() + 1).to(compute).float()).abs().max())
        for mine, whole in zip(net.parameters(), fresh.parameters(), strict=True)
    ]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_published_weights_are_the_cast_masters(ranks, zero, compute) -> None:
    for worst in ranks.run(2, update_job, zero, compute):
        assert max(worst) == 0.0


def test_every_parameter_lies_in_one_bucket_and_one_region() -> None:
    net, three = build(torch.float32), GroupView((0, 1, 2), 0, None)
    alone = Mesh(MeshPlan(), torch.device("cpu"))
    members = members_of(net, alone)
    for member in members:
        member.reducing = three
    for cuts in ("anywhere", "parameter"):
        buckets = compose_buckets(members, sharded=True, cuts=cuts, limits=(100, 600))
        covered: dict[str, int] = {}
        for bucket in buckets:
            for start, stop in bucket.regions:
                for segment in bucket.segments(start, stop):
                    covered[segment.layout.name] = covered.get(segment.layout.name, 0) + segment.length
                    assert segment.is_whole or cuts == "anywhere"
        assert covered == {name: p.numel() for name, p in net.named_parameters()}
