"""Under ZeRO-3, blocks that only some samples run: as on one process where the first batch shows them, and else refused
in a sentence; right under ZeRO-2."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pool import RankPool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import PlanError
from weft.model.families import CutTable

BATCH, WIDTH = 8, 6
CUT = CutTable(entry="entry", blocks=tuple(f"blocks.{number}" for number in range(4)), tail=("head",))


class Routed(nn.Module):
    """Rows that are positive go through the second block, rows that are large through the third, all of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        positive, large = x[:, 0] > 0, x[:, 1] > 10
        x = self.blocks[0](self.entry(x))
        for number, rows in ((1, positive), (2, large)):
            if rows.any():
                x = x.index_put((rows,), self.blocks[number](x[rows]))
        return self.head(self.blocks[3](x))


def built() -> tuple[Routed, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Routed().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def squares(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def shown() -> Tensor:
    """Batches, (5, rows, features), in which: some rows are positive; those of the last quarter are; none is; the first
    row is large; all are positive."""
    x = torch.randn(5, BATCH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[..., 0] = -x[..., 0].abs()
    x[0, ::2, 0] *= -1
    x[1, -2:, 0] *= -1
    x[3, 0, 1] = 11.0
    x[4, :, 0] *= -1
    return x


def unshown(place: int) -> Tensor:
    """Batches of which all rows of the first are positive and large.  In the second the last half is large alone; where
    `place` is 1, the first is positive alone: so many blocks as the others run, but another one."""
    x = shown()[:2].abs()
    x[:, :, 1] = 11.0
    x[1, -4:, 0] *= -1
    x[1, :4, 1] -= 11.0 * place
    return x


def prepared(session: weft.Session, x: Tensor, optimizer: Any, model: nn.Module) -> Any:
    rows = x.flatten(0, 1)
    loader = DataLoader(TensorDataset(rows, rows[:, :2].sin()), batch_size=BATCH)
    return session.prepare(model, optimizer, loader, loss=squares, cut=CUT)


def trained(
    folder: str,
    x: Tensor,
    zero: Literal[1, 2, 3],
    world: int,
    per_step: int = 1,
    reduce_every: Literal["step", "microbatch", "auto"] = "auto",
    by_hand: bool = False,
) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses, weights, and what was said."""
    model, optimizer = built()
    plan = Plan(
        mesh=MeshPlan(shard=world),
        data_parallel=DataParallelPlan(zero=zero, reduce_every=reduce_every),
        microbatch=MicrobatchPlan(size=BATCH // world // per_step, per_step=per_step),
        compute=ComputePlan(precision="fp64"),
    )
    losses: list[float] = []
    told = io.StringIO()
    with weft.session(plan=plan, permit=("fp64",), folder=folder) as session, redirect_stdout(told):
        state = prepared(session, x, optimizer, model)
        for batch in state.batches(len(x)):
            if not by_hand:
                losses.append(state.step(batch).loss)
                continue
            with state.manual_step(batch) as step:
                for part in step.parts():
                    loss_sum, count = squares(model(part[0]), part)
                    step.backward(loss_sum / count)
            losses.append(step.event.loss)
        weights = load_file(state.export(f"{folder}/exported") / "model.safetensors")
    return losses, weights, told.getvalue()


def plain(x: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = built()
    losses: list[float] = []
    for rows in x:
        optimizer.zero_grad()
        loss_sum, count = squares(model(rows), [rows, rows[:, :2].sin()])
        (loss_sum / count).backward()
        optimizer.step()
        losses.append(float(loss_sum.detach()) / count)
    return losses, dict(model.named_parameters())


def check_as_plain(found: tuple[list[float], dict[str, Tensor], str], x: Tensor) -> None:
    losses, weights = plain(x)
    assert found[0] == pytest.approx(losses, rel=1e-10)
    for name, weight in weights.items():
        assert torch.allclose(found[1][name], weight, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("world", "per_step", "reduce_every", "by_hand"),
    [(2, 1, "auto", False), (2, 2, "step", False), (4, 1, "auto", False), (2, 2, "microbatch", True)],
)
def test_branches_that_the_first_batch_shows(
    ranks: RankPool, tmp_path: Path, world: int, per_step: int, reduce_every: str, by_hand: bool
) -> None:
    """AdamW decays no weight that no rank has used in a step, as on one process."""
    found = ranks.run(world, trained, str(tmp_path), shown(), 3, world, per_step, reduce_every, by_hand)
    for one in found:
        check_as_plain(one, shown())
    assert "whether a forward runs blocks.1, blocks.2: so all ranks gather" in found[0][2]


@pytest.mark.parametrize("backend", ["cpu:weft", "gloo"])
@pytest.mark.parametrize("place", [0, 1])
def test_one_that_it_does_not_show_is_refused(ranks: RankPool, tmp_path: Path, backend: str, place: int) -> None:
    """Before anything is gathered that is not of the same weights; over Gloo ranks would wait for one another for ever,
    and where all gather equally often, they would train on each other's blocks without a word."""
    with pytest.raises(
        PlanError, match=r"same blocks .*rank 1 came to blocks\.2, that of rank 0 to blocks\.1\): .*zero = 2"
    ):
        ranks.run(2, trained, str(tmp_path), unshown(place), 3, 2, backend=backend)


@pytest.mark.parametrize("zero", [1, 2])
def test_and_is_right_where_weights_are_whole(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    for one in ranks.run(2, trained, str(tmp_path), unshown(0), zero, 2):
        check_as_plain(one, unshown(0))
        assert "note" not in one[2]
