"""A script with a session, for the tests of `weft launch`: it prints nothing, and fails as it is asked to."""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.model.families import CutTable

PLANS = {
    "data": weft.Plan.ddp(replicate=2),
    "ZeRO-3": weft.Plan.fsdp(shard=2),
    "tensor": weft.Plan.tensor(2),
    "pipeline": weft.Plan.pipeline(2),
}
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--plan", default="data")
parser.add_argument("--fault", default="")
parser.add_argument("--at", type=int, default=0)
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--times", type=int, default=1)
parser.add_argument("--save", type=int, default=3)
parser.add_argument("--loop", default="epochs")
parser.add_argument("--pause", type=float, default=0.0)
asked = parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(F.relu(self.up(hidden))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.blocks, self.tail = (
            nn.Linear(8, 16),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.tail(hidden)


def fail(step: int) -> None:
    """Fail as it is asked, once or several times."""
    marks = [asked.folder.with_suffix(f".mark{number}") for number in range(asked.times)]
    left = [mark for mark in marks if not mark.exists()]
    if step != asked.at or int(os.environ["RANK"]) != asked.rank or not left:
        return
    left[0].touch()
    if asked.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if asked.fault == "raise":
        raise ValueError("a width of 7 was not expected")
    if asked.fault == "wait":
        time.sleep(1000)


def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    if torch.is_grad_enabled() and asked.fault == "wait" and steps:
        fail(steps[-1] + 1)
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


steps: list[int] = []
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(40, 8), torch.randint(0, 4, (40,)))
loader = DataLoader(data, batch_size=8, shuffle=True)  # five steps in an epoch
with weft.session(PLANS[asked.plan], folder=asked.folder, quiet=True, prove="never") as session:
    changes = asked.folder.with_suffix(".changes")
    session.on_change(
        lambda change: changes.open("a").write(
            f"{session.rank} {change.old.mesh.world_size} {change.new.mesh.world_size} {change.step}\n"
        )
    )
    split = {"blocks.*.up": "column", "blocks.*.down": "row"}
    cut = CutTable(entry="entry", blocks=tuple(f"blocks.{number}" for number in range(4)), tail=("tail",))
    state = session.prepare(model, optimizer, loader, loss=loss, split=split, cut=cut)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    state.attach(schedule=schedule)

    def take(batch: object) -> None:
        if asked.fault != "wait":
            fail(steps[-1] + 1 if steps else 0)
        steps.append(state.step(batch).step)  # pyright: ignore[reportArgumentType]
        time.sleep(asked.pause)
        if asked.save and steps[-1] % asked.save == 0:
            state.save()

    if asked.loop == "epochs":
        for epoch in state.epochs(4):
            for batch in epoch:
                take(batch)
            schedule.step()
    elif asked.loop == "while":
        while state.steps < 20:
            for batch in state.batches():
                take(batch)
            schedule.step()
    else:
        for _ in range(4):
            for batch in state.batches():
                take(batch)
            schedule.step()
