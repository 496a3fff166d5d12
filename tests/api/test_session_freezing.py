"""Parameters that a loop freezes after prepare, and thaws: trained as plain PyTorch trains them, saved, loaded and
exported under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from test_session_kept import InOrder, check_equal, in_order, whole_weights
from test_session_traps import BATCH, loss_fn, plan_for, prepared, session_of
from torch import Tensor, nn

from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.model.families import CutTable

STEPS, FROZEN, THAWED = 8, 2, 5
"""Steps in all; some parameters are frozen after two, and thawed after five; others from the beginning, until then."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.tail = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


def build() -> nn.Module:
    torch.manual_seed(5)
    return Net().double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)


PATTERNS = {"some": ("blocks.0.weight", "tail.bias"), "all but the tail": ("entry", "blocks")}


def switch(model: Any, step: int, pattern: str = "some") -> None:
    first = FROZEN if pattern == "some" else 0
    if step in (first, THAWED):
        for name, parameter in model.named_parameters():
            if name.startswith(PATTERNS[pattern]):
                parameter.requires_grad_(step == THAWED)


def plain(number: int = STEPS, pattern: str = "some") -> list[Tensor]:
    model = build()
    optimizer = adamw(model)
    for step, batch in enumerate([*in_order()] * 2):
        if step == number:
            break
        switch(model, step, pattern)
        optimizer.zero_grad()
        (loss_fn(model(batch[0]), batch)[0] / len(batch[0])).backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def plan_of(kind: str, world: int) -> Plan:
    precision: Any = "bf16" if kind == "bf16" else "fp64"
    if kind in ("data", "zero 1", "zero 2", "zero 3", "tensor"):
        return plan_for(world, int(kind[-1]) if kind[-1].isdigit() else 0, world if kind == "tensor" else 1)
    if kind == "pipeline":
        return Plan(
            mesh=MeshPlan(pipeline=world),
            microbatch=MicrobatchPlan(size=BATCH // 2, per_step=2),
            compute=ComputePlan(precision=precision),
        )
    return Plan(
        mesh=MeshPlan(replicate=world),
        data_parallel=DataParallelPlan(zero=0),
        microbatch=MicrobatchPlan(size=BATCH // world // 2, per_step=2),
        compute=ComputePlan(precision=precision),
    )


def train(
    kind: str, folder: str, pattern: str = "some", *, loads: str | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights in the midst of the time of freezing, as exported, and at the end."""
    world = torch.distributed.get_world_size()
    plan = plan_of(kind, world)
    with session_of(folder, plan, permit=(plan.compute.precision,)) as session:
        model = build()
        state = prepared(
            session,
            model,
            InOrder(),
            optimizer=adamw(model),
            batch_size=BATCH,
            split={"entry": "column", "blocks.0": "row"} if kind == "tensor" else (),
            cut=CutTable(entry="entry", blocks=("blocks.0", "blocks.1"), tail=("tail",)),
        )
        if loads is not None:
            state.load(Path(loads))
            switch(state.model, FROZEN if pattern == "some" else 0, pattern)
        early: list[Tensor] = []
        while state.steps < STEPS:
            switch(state.model, state.steps, pattern)
            for batch in state.batches(1):
                state.step(batch)
            if state.steps == FROZEN + 2:
                state.save()
                early = whole_weights(state, folder, build())
        return early, whole_weights(state, folder, build())


KINDS = ("data", "zero 1", "zero 2", "zero 3", "tensor", "pipeline", "accumulation")


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
@pytest.mark.parametrize("kind", KINDS)
def test_freezing_and_thawing_is_that_of_plain_torch(ranks: RankPool, tmp_path: Path, kind: str, pattern: str) -> None:
    middle, right = plain(FROZEN + 2, pattern), plain(STEPS, pattern)
    for early, late in ranks.run(2, train, kind, str(tmp_path / "first"), pattern):
        check_equal(early, middle)
        check_equal(late, right)
    saved = str(next((tmp_path / "first").glob(f"**/step-{FROZEN + 2:06d}")))
    for number, other in ((1, "data"), (2, kind)):
        _, late = ranks.run(number, train, other, str(tmp_path / f"{number}"), pattern, loads=saved)[0]
        check_equal(late, right)


def test_freezing_on_one_process(ranks: RankPool, tmp_path: Path) -> None:
    ((early, late),) = ranks.run(1, train, "data", str(tmp_path))
    check_equal(early, plain(FROZEN + 2))
    check_equal(late, plain())


def test_freezing_in_bf16(ranks: RankPool, tmp_path: Path) -> None:
    """Masters of what is frozen stand still, to the bit."""
    for world in (1, 2):
        early, late = ranks.run(world, train, "bf16", str(tmp_path / str(world)))[0]
        saved = str(next((tmp_path / str(world)).glob(f"**/step-{FROZEN + 2:06d}")))
        again, resumed = ranks.run(world, train, "bf16", str(tmp_path / f"{world} again"), loads=saved)[0]
        assert not again
        assert all(torch.equal(one, other) for one, other in zip(late, resumed, strict=True))
        assert not torch.equal(early[0], late[0])
