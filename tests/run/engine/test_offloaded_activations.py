"""Activations on a disk: the same training bit for bit, what leaves and what stays, in-place writes, refusals."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Seen, Training, agreed, plan_of, recipe_of
from torch import Tensor, nn

from weft.config.plan import ComputePlan, MemoryPlan, Plan
from weft.errors import PlanError
from weft.model.build import build_model
from weft.techniques.check import check_runnable
from weft.techniques.offload.activations import SMALLEST_BYTES, ActivationKeeper
from weft.techniques.offload.depot import FileDepot, Runs
from weft.techniques.offload.storage import ALIGNMENT, FileStorage, new_buffer
from weft.verify.dry_run import dry_run_rank

SHAPE: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "sequence_length": 24, "dropout": 0.1}
"""Large enough that most of what is kept is larger than a page."""
STEPS = 3
CPU = torch.device("cpu")
CASES: dict[str, Plan] = {
    "one process": plan_of(micro=4),
    "zero 2, fp32": plan_of("fp32", replicate=2, zero=2),
    "zero 3, bf16": plan_of("bf16", shard=2, zero=3, micro=4),
    "tensor, sequence": plan_of(tensor=2, sequence=True),
    "stages": plan_of(pipeline=2),
    "interleaved stages": plan_of(pipeline=2, schedule="interleaved_1f1b", chunks=2),
}


def away(plan: Plan, what: str = "activations", recompute: Any = None) -> Plan:
    words = plan.memory.recompute if recompute is None else recompute
    memory = MemoryPlan(offload=what, offload_to="disk", recompute=words)  # type: ignore[arg-type]
    return replace(plan, memory=memory)


def keeper_of(training: Training) -> ActivationKeeper:
    keeper = training.state.model.parts[0].context.activation_store
    assert isinstance(keeper, ActivationKeeper)
    return keeper


def trained(plan: Plan) -> tuple[Seen, int]:
    """What a rank saw, and the bytes that were written for it."""
    training = Training(recipe_of(plan.compute.precision, steps=STEPS, **SHAPE), plan)
    for step in range(STEPS):
        training.step(step)
    moved = keeper_of(training).moved_bytes if plan.memory.offloads_activations else 0
    return training.finished(), moved


def both(plan: Plan, what: str = "activations", recompute: Any = "none") -> tuple[Seen, Seen, int]:
    plain = replace(plan, memory=MemoryPlan(recompute=recompute))
    return trained(plain)[0], *trained(away(plan, what, recompute))


def differing(one: Seen, other: Seen) -> list[str]:
    pairs = zip(one.state, other.state, strict=True)
    return [a.name for a, b in pairs if a.name != b.name or not torch.equal(a.tensor, b.tensor)]


@pytest.mark.parametrize("name", CASES)
def test_activations_on_a_disk_change_no_bit(ranks: Any, name: str) -> None:
    plan = CASES[name]
    results = ranks.run(plan.mesh.world_size, both, plan)
    assert agreed([other for _, other, _ in results]).losses == agreed([one for one, _, _ in results]).losses
    for one, other, moved in results:
        assert differing(one, other) == []
        assert moved > 0


@pytest.mark.parametrize("recompute", ["full", "selective", ("none", "selective", "full", "none")], ids=str)
def test_what_recomputation_keeps_leaves_too(ranks: Any, recompute: Any) -> None:
    for one, other, moved in ranks.run(2, both, plan_of("bf16", shard=2, zero=3, micro=4), "activations", recompute):
        assert differing(one, other) == []
        assert moved > 0


def test_with_the_optimizer(ranks: Any) -> None:
    for one, other, moved in ranks.run(2, both, plan_of("bf16", replicate=2, zero=1), "optimizer+activations"):
        assert differing(one, other) == []
        assert moved > 0
        assert other.bytes["optimizer"] < one.bytes["optimizer"]


def left_behind() -> tuple[int, int, list[str]]:
    """Open descriptors before and after a training, and its threads that go on."""
    before = len(os.listdir("/proc/self/fd"))
    training = Training(recipe_of(steps=STEPS, **SHAPE), away(plan_of(micro=4)))
    training.step(0)
    training.state.close()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("weft-offload")]
    return before, len(os.listdir("/proc/self/fd")), names


def test_nothing_is_left(ranks: Any) -> None:
    ((before, after, names),) = ranks.run(1, left_behind)
    assert after <= before
    assert names == []


# ── the keeper itself ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def keeper(tmp_path: Path) -> Any:
    made = ActivationKeeper(CPU, lambda: FileDepot(FileStorage(0, tmp_path, CPU), CPU))
    yield made
    made.close()


class Squares(nn.Module):
    """Saves its input, views of one memory, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, given: Tensor) -> Tensor:
        mixed = (given @ self.weight).sin()
        left, right = mixed.chunk(2, dim=1)
        return given + torch.cat([left * right.exp(), right.exp() * left.t().contiguous().t()], dim=1)


def blocks_of(count: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Squares() for _ in range(count)))


def run_blocks(blocks: nn.Sequential, given: Tensor, keeper: ActivationKeeper | None, microbatch: object) -> Tensor:
    for block in blocks:
        if keeper is None:
            given = block(given)
        else:
            with keeper.within(microbatch, block.parameters()):
                given = block(given)
    return given


def gradients(blocks: nn.Sequential, keeper: ActivationKeeper | None, microbatches: int) -> list[Tensor]:
    """Of all forwards before all backwards, the first first, as a pipeline has them."""
    blocks.zero_grad()
    torch.manual_seed(5)
    given = [torch.randn(128, 64, requires_grad=True) for _ in range(microbatches)]
    results = [run_blocks(blocks, each, keeper, object()) for each in given]
    for result in results:
        result.square().sum().backward()
    return [tensor.grad for tensor in (*blocks.parameters(), *given) if tensor.grad is not None]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_are_the_same_bits(keeper: ActivationKeeper, microbatches: int) -> None:
    blocks = blocks_of(6)
    expected = gradients(blocks, None, microbatches)
    actual = gradients(blocks, keeper, microbatches)
    assert len(actual) == len(expected) == 6 + microbatches
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_memory_is_moved_once_and_weights_never(keeper: ActivationKeeper) -> None:
    class Saves(nn.Module):
        def forward(self, given: Tensor, weight: Tensor) -> Tensor:
            return (given * given.sin() * given.view(-1).view(128, 64)) @ weight

    weight, given = nn.Parameter(torch.randn(64, 64)), torch.randn(128, 64, requires_grad=True)
    with keeper.within(None, [weight]):
        result = Saves()(given, weight)
    with keeper.within(None, []):  # the next block waits for the writes of all but this one
        pass
    with keeper.within(None, []):
        pass
    # The input (seen four times), its sine, both products before the last.
    assert keeper.moved_bytes == keeper.peak_bytes == 4 * given.untyped_storage().nbytes()
    result.sum().backward()
    assert given.grad is not None


def held_bytes(blocks: nn.Sequential, keeper: ActivationKeeper) -> list[int]:
    """Bytes of what has not left, before each block's forward and at the end."""
    results: list[int] = []
    given = torch.randn(128, 64, requires_grad=True)
    for block in blocks:
        with keeper.within(None, block.parameters()):
            results.append(keeper.bytes_here())
            given = block(given)
    given.sum().backward()
    return results


def test_no_more_than_a_block_waits_to_be_written(keeper: ActivationKeeper) -> None:
    results = held_bytes(blocks_of(12), keeper)
    assert results[0] == 0
    assert max(results[2:]) <= 2 * keeper.peak_bytes / 12


def test_what_was_written_to_is_told_as_autograd_tells_it(keeper: ActivationKeeper) -> None:
    for large in (True, False):
        given = torch.randn(128 if large else 2, 64, requires_grad=True)
        with keeper.within(None, []):
            saved = given.exp()
            result = saved * 2
        saved.mul_(3)
        with pytest.raises(RuntimeError, match=r"version 1\D+0"):
            result.sum().backward()
    kept = torch.randn(128, 64, requires_grad=True)
    with keeper.within(None, []):
        first = kept.exp()
        second = first.detach().clone().mul_(2).requires_grad_()
        both = (first.sin() + second.sin()).sum()
    both.backward()
    assert torch.equal(kept.grad, kept.exp().cos() * kept.exp())  # type: ignore[arg-type]


def test_a_second_write_of_the_same_memory_is_kept_apart(keeper: ActivationKeeper) -> None:
    """What a buffer held is saved, then what it holds next."""
    buffer = torch.zeros(128, 64)
    given = torch.randn(128, 64, requires_grad=True)

    class Reused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor, factor: Tensor) -> Tensor:
            ctx.save_for_backward(factor.clone())
            return given * factor

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] * ctx.saved_tensors[0], None

    total = torch.zeros(())
    for number in (1.0, 2.0):
        with keeper.within(None, []):
            buffer.fill_(number)
            total = total + Reused.apply(given, buffer).sum()
    total.backward()
    assert torch.equal(given.grad, torch.full((128, 64), 3.0))  # type: ignore[arg-type]


def test_what_is_small_stays(keeper: ActivationKeeper) -> None:
    given = torch.randn(SMALLEST_BYTES // 4 - 1, requires_grad=True)
    with keeper.within(None, []):
        given.exp().sum().backward()
    assert keeper.peak_bytes == 0


def test_a_pass_that_nobody_ends_gives_its_room_back(keeper: ActivationKeeper, tmp_path: Path) -> None:
    blocks = blocks_of(3)
    for _ in range(4):
        run_blocks(blocks, torch.randn(128, 64, requires_grad=True), keeper, object())
    expected = gradients(blocks, None, 1)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(blocks, keeper, 1), strict=True))
    assert list(tmp_path.iterdir()) == []


def test_runs_are_used_again() -> None:
    grown: list[int] = []
    runs = Runs(grown.append)
    first, second, third = (runs.take(size) for size in (1, 3 * ALIGNMENT, ALIGNMENT))
    assert [run.start for run in (first, second, third)] == [0, ALIGNMENT, 4 * ALIGNMENT]
    assert len(grown) == 1
    del second
    assert runs.take(2 * ALIGNMENT).start == ALIGNMENT
    del first, third
    size = runs.size
    whole = runs.take(size)
    assert (whole.start, whole.size, runs.free_bytes) == (0, size, 0)
    assert len(grown) == 1
    assert runs.take(1).start == size


def test_a_disk_that_fills_up_is_told_with_what_is_missing(tmp_path: Path) -> None:
    storage = FileStorage(0, tmp_path, CPU)
    storage.grow(ALIGNMENT)
    with pytest.raises(PlanError, match=r"needs [\d,.]+ [TP]B in .*free, [\d,.]+ [TP]B too few"):
        storage.grow(1 << 50)
    storage.write(0, new_buffer(ALIGNMENT, CPU).fill_(1))
    assert storage.view(0, 8).eq(1).all()
    storage.close()


# ── refusals, the dry run ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_does_not_go_together_is_refused() -> None:
    plan = away(plan_of())
    check_runnable(plan)
    with pytest.raises(PlanError, match=r'offload = "activations" cannot join compute.compile'):
        check_runnable(replace(plan, compute=ComputePlan(compile=True)))
    with pytest.raises(PlanError, match="its second pass, of the weights"):
        check_runnable(away(plan_of(pipeline=2, schedule="zbv", chunks=2)))
    with pytest.raises(PlanError, match="ranks compute on the host's cores"):
        check_runnable(replace(plan, memory=MemoryPlan(offload="activations"), compute=ComputePlan(device="cpu")))


def peak(plan: Plan) -> int:
    training = Training(recipe_of(plan.compute.precision, steps=STEPS, **SHAPE), plan)
    training.step(0)
    results = keeper_of(training).peak_bytes
    training.finished()
    return results


@pytest.mark.parametrize("name", ["one process", "stages"])
def test_the_dry_run_knows_the_bytes(ranks: Any, name: str) -> None:
    plan = away(CASES[name])
    results = ranks.run(plan.mesh.world_size, peak, plan)
    made = recipe_of(plan.compute.precision, steps=STEPS, **SHAPE)
    report = dry_run_rank(made, plan, lambda: build_model(made))
    (note,) = (note for note in report.notes if "activations" in note)
    from weft.formatting import format_bytes

    assert note == f"at most {format_bytes(results[0])} of activations are on the disk until their backward"
