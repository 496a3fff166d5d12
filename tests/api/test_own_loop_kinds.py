"""Loops under what a plan or the loop changes of the computation itself: precisions, compilation, recomputation, lossy
sums, local steps; and evaluations between steps."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, Hands, plainly, samples
from pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, Plan
from weft.errors import RecipeError
from weft.run.launch.launcher import launch_script

PERMIT = ("fp64", "fp32", "bf16", "fp16")
MESHES = {
    "alone": (MeshPlan(), 0),
    "data": (MeshPlan(replicate=2), 0),
    "zero-1": (MeshPlan(shard=2), 1),
    "zero-2": (MeshPlan(shard=2), 2),
    "zero-3": (MeshPlan(shard=2), 3),
}


class Block(nn.Module):
    def __init__(self, drops: float) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(drops)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(x).tanh())


class Deep(nn.Module):
    """Blocks, as a plan compiles or recomputes them; `checkpoints`: or as the model recomputes them itself."""

    def __init__(self, *, drops: float = 0.0, checkpoints: bool = False) -> None:
        super().__init__()
        self.stem, self.head, self.checkpoints = nn.Linear(6, 8), nn.Linear(8, 4), checkpoints
        self.blocks = nn.ModuleList(Block(drops) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        made = self.stem(x)
        for block in self.blocks:
            made = checkpoint(block, made, use_reentrant=False) if self.checkpoints else block(made)
        return self.head(made)


def loop(
    hands: Hands, *, dtype: torch.dtype, autocast: bool = False, passes: int = 1, **how: Any
) -> tuple[list[float], list[Tensor]]:
    """A classifier that is looked at between its steps, by itself and under autocast, and accumulates at times."""
    torch.manual_seed(0)
    model = Deep(**how).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = samples(32)
    x, y = data.tensors
    rows = [(one.to(dtype), other) for one, other in zip(x, y, strict=True)]
    things = model, optimizer, DataLoader(rows, BATCH, shuffle=True), DataLoader(rows, 16)  # type: ignore[arg-type]
    model, optimizer, loader, others = hands.prepare(*things)
    losses = list[float]()
    for _ in range(passes):
        for number, (x, y) in enumerate(loader):
            cast: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
            with cast:
                loss = F.cross_entropy(model(x), y)
            hands.backward(loss)
            losses.append(hands.mean(loss))
            if number % 3 == 0:
                continue
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                for x, y in others:
                    losses.append(hands.mean(F.cross_entropy(model(x), y)))
            model.train()
    return losses, []


def session_loop(plan: Plan, run: Any) -> Any:
    data = plan.data_parallel
    lossy = (data.compression,) if data.compression != "none" else ()
    told: dict[str, Any] = {"permit": PERMIT, "compression": lossy, "local_steps": data.local_steps}
    with weft.session(plan=plan, quiet=True, record=False, **told) as session:
        return run(Hands(session))


def made(ranks: RankPool, name: str, run: Any, **parts: Any) -> list[Any]:
    mesh, zero = MESHES[name]
    data = parts.pop("data_parallel", DataParallelPlan())
    plan = Plan(mesh=mesh, data_parallel=replace(data, zero=zero), **parts)  # type: ignore[arg-type]
    return ranks.run(mesh.world_size, session_loop, plan, run)


def close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["data", "zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(ranks: RankPool, precision: str, name: str) -> None:
    """Masters stay fp32.  Losses of fp16 are scaled by the session, whose first steps find the scale."""
    run, compute = partial(loop, dtype=torch.float32), ComputePlan(precision=precision)  # type: ignore[arg-type]
    (expected,) = made(ranks, "alone", run, compute=compute)
    if precision == "bf16":
        close(expected, ranks.run(1, plainly, run)[0], 3e-2)
    for found in made(ranks, name, run, compute=compute):
        close(found, expected, 1e-2)


@pytest.mark.parametrize("name", ["alone", "data", "zero-3"])
def test_autocast_of_the_loop(ranks: RankPool, name: str) -> None:
    run = partial(loop, dtype=torch.float32, autocast=True)
    expected = ranks.run(1, plainly, run)[0]
    for found in made(ranks, name, run):
        close(found, expected, 1e-2)


COMPILED = """
import sys
from functools import partial

import torch

import weft
from own_loops import plainly
from test_own_loop_kinds import MESHES, close, loop, session_loop
from weft.config.plan import ComputePlan, DataParallelPlan, Plan

torch.set_num_threads(1)
mesh, zero = MESHES[sys.argv[1]]
plan = Plan(mesh=mesh, data_parallel=DataParallelPlan(zero=zero), compute=ComputePlan(compile=True))
run = partial(loop, dtype=torch.float32)
close(session_loop(plan, run), plainly(run), 1e-5)
"""


@pytest.mark.parametrize("name", ["alone", "zero-3"])
def test_compiled_blocks(tmp_path: Path, name: str) -> None:
    """In processes of their own, in which Dynamo leaves what it likes."""
    here = Path(__file__).parent
    paths = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent / 'support')!r}]\n"
    (tmp_path / "compiled.py").write_text(paths + COMPILED)
    ranks = MESHES[name][0].world_size
    assert launch_script(str(tmp_path / "compiled.py"), [name], num_processes=ranks) == 0


@pytest.mark.parametrize("name", ["alone", "data", "zero-3"])
@pytest.mark.parametrize("recompute", ["full", "selective", "own"])
def test_recomputation(ranks: RankPool, recompute: str, name: str) -> None:
    """Dropout draws again what it drew."""
    compute = ComputePlan(precision="fp64")
    run = partial(loop, dtype=torch.float64, drops=0.3)
    (expected,) = made(ranks, "alone", run, compute=compute)
    if recompute == "own":
        run = partial(run, checkpoints=True)
    memory = MemoryPlan() if recompute == "own" else MemoryPlan(recompute=recompute)  # type: ignore[arg-type]
    for found in made(ranks, name, run, compute=compute, memory=memory):
        close(found, expected, 1e-10)


def test_compressed_sums(ranks: RankPool) -> None:
    run = partial(loop, dtype=torch.float32)
    expected = ranks.run(1, plainly, run)[0]
    for name in ("data", "zero-1"):
        for found in made(ranks, name, run, data_parallel=DataParallelPlan(compression="int8")):
            close(found, expected, 5e-2)


def rounds(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """Two rounds of two steps.  Plainly: two copies of the model with half of every batch each, and their average."""
    torch.manual_seed(0)
    model = Deep().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(32), BATCH)
    if hands.session is None:
        return [], [by_hand(model, loader)]
    model, optimizer, loader = hands.prepare(model, optimizer, loader)
    for x, y in loader:
        hands.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return [], [model(samples().tensors[0]).detach()]


def by_hand(model: nn.Module, loader: DataLoader[Any]) -> Tensor:
    replicas = [copy.deepcopy(model) for _ in "ab"]
    for number, (x, y) in enumerate(loader):
        for half, replica in enumerate(replicas):
            rows = slice(half * BATCH // 2, (half + 1) * BATCH // 2)
            gradients = torch.autograd.grad(F.cross_entropy(replica(x[rows]), y[rows]), [*replica.parameters()])
            with torch.no_grad():
                for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
                    parameter.sub_(0.1 * gradient)
        if number % 2:
            with torch.no_grad():
                for one, other in zip(*(each.parameters() for each in replicas), strict=True):
                    one.add_(other).div_(2)
                    other.copy_(one)
    return replicas[0](samples().tensors[0]).detach()


def test_local_steps(ranks: RankPool) -> None:
    """Each rank steps by its own samples, and all average every second step."""
    expected = ranks.run(1, plainly, rounds)[0]
    data = DataParallelPlan(local_steps=2, outer_learning_rate=1.0, outer_momentum=0.0)
    for found in made(ranks, "data", rounds, data_parallel=data, compute=ComputePlan(precision="fp64")):
        torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)


def keeping_zeros(hands: Hands, *, reaches: bool) -> tuple[list[float], list[Tensor]]:
    """`zero_grad(set_to_none=False)`, and a layer that the last step may leave out."""
    torch.manual_seed(0)
    model = Branched().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, loader = hands.prepare(model, optimizer, DataLoader(samples(32), BATCH))
    losses = list[float]()
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x, reaches or number < 3), y)
        hands.backward(loss)
        optimizer.step()
        losses.append(hands.mean(loss))
    return losses, [model(samples().tensors[0], True).detach()]


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


def test_zeros_as_gradients(ranks: RankPool) -> None:
    """Accepted where every step reaches all parameters, as nearly all do."""
    run, compute = partial(keeping_zeros, reaches=True), ComputePlan(precision="fp64")
    expected = ranks.run(1, plainly, run)[0]
    for name in ("alone", "zero-2", "zero-3"):
        for found in made(ranks, name, run, compute=compute):
            close(found, expected, 1e-10)
    with pytest.raises(RecipeError, match=r"left zeros as the gradients of 2 parameters .*second.bias"):
        made(ranks, "data", partial(keeping_zeros, reaches=False), compute=compute)
