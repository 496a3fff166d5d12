"""Loops in the way of plain PyTorch, each written once for it and for `session.prepare` without a loss."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, Plan

BATCH, FEATURES, CLASSES = 8, 6, 4


class Hands:
    """What a loop is given: a session's hands, or plain PyTorch's."""

    def __init__(self, session: weft.Session | None) -> None:
        self.session = session

    def prepare(self, *things: Any, **more: Any) -> Any:
        if self.session is None:
            return things[0] if len(things) == 1 else things
        return self.session.prepare(*things, **more)

    def backward(self, loss: Tensor, **how: Any) -> None:
        loss.backward(**how) if self.session is None else self.session.backward(loss, **how)

    def clip(self, model: nn.Module, limit: float) -> float:
        if self.session is None:
            return float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        return float(self.session.clip_grad_norm_(model, limit))

    def mean(self, loss: Tensor) -> float:
        """The loss of the whole batch."""
        return loss.item() if self.session is None else self.session.mean(loss)

    def gather(self, rows: Tensor) -> Tensor:
        return rows if self.session is None else self.session.gather(rows)


Loop = Callable[[Hands], tuple[list[float], list[Tensor]]]


def plan_for(replicate: int = 1, shard: int = 1, zero: int = 0, tensor: int = 1) -> Plan:
    return Plan(
        mesh=MeshPlan(replicate=replicate, shard=shard, tensor=tensor),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        compute=ComputePlan(precision="fp64"),
    )


PLANS = {
    "alone": plan_for(),
    "data": plan_for(2),
    "data of 4": plan_for(4),
    "zero-1": plan_for(shard=2, zero=1),
    "zero-2": plan_for(shard=2, zero=2),
    "zero-3": plan_for(shard=2, zero=3),
    "zero-3 of 4": plan_for(shard=4, zero=3),
    "hybrid": plan_for(2, 2, zero=3),
    "tensor": plan_for(tensor=2),
    "data and tensor": plan_for(2, tensor=2),
}


def under(plan: Plan, loop: Loop, folder: str = "") -> tuple[list[float], list[Tensor]]:
    """Losses, and outputs at the end, of a loop in a session."""
    record = {"folder": folder} if folder else {"record": False}
    with weft.session(plan=plan, permit=("fp64",), quiet=True, **record) as session:  # type: ignore[arg-type]
        return loop(Hands(session))


def plainly(loop: Loop) -> tuple[list[float], list[Tensor]]:
    return loop(Hands(None))


@contextmanager
def fp64() -> Generator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def samples(number: int = 27) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(number, FEATURES, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, CLASSES, (number,), generator=draw))


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 12), nn.Linear(12, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES) if norm else nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


SPLIT = {"up": "column", "down": "row"}


def seen(model: nn.Module) -> list[Tensor]:
    """What a model has become, by its outputs: ranks may hold parts of its weights."""
    model.eval()
    with torch.no_grad():
        return [model(samples().tensors[0])]


def classifier(hands: Hands, *, norm: bool = False, order: str = "after") -> tuple[list[float], list[Tensor]]:
    """An MNIST loop: shuffled, with a short last batch, a schedule, and `zero_grad` in any place."""
    with fp64():
        torch.manual_seed(0)
        model = Net(norm)
        # Adam takes whole steps by what rounding leaves of a bias in front of a norm.
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if norm else torch.optim.AdamW(model.parameters(), 1e-2)
        loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
        split = {} if hands.session is None else {"split": SPLIT}
        model, optimizer, loader = hands.prepare(model, optimizer, loader, **split)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=8, cycle_momentum=not norm)
        losses = list[float]()
        for _ in range(2):
            for x, y in loader:
                if order == "before":
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if order == "between":
                    optimizer.zero_grad()
                hands.backward(loss)
                optimizer.step()
                schedule.step()
                if order == "after":
                    model.zero_grad()
                losses.append(hands.mean(loss))
        return losses, seen(model)


class Vae(nn.Module):
    """Draws in its forward, by dropout and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(FEATURES, 6), nn.Linear(3, FEATURES), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.up(self.dropout(x)).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.down(latent), mean, log_variance


def autoencoder(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """A VAE, whose loss is a sum divided by the samples that the loop sees."""
    with fp64():
        torch.manual_seed(0)
        model = Vae()
        loader = DataLoader(samples(24), batch_size=BATCH, shuffle=True)
        model = hands.prepare(model)  # one by one, as in any order
        optimizer = hands.prepare(torch.optim.Adam(model.parameters(), lr=1e-2))
        loader, losses = hands.prepare(loader), list[float]()
        for _ in range(2):
            for x, _ in loader:
                optimizer.zero_grad(set_to_none=True)
                made, mean, log_variance = model(x)
                penalty = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
                loss = (F.mse_loss(made, x, reduction="sum") + penalty) / len(x)
                hands.backward(loss)
                optimizer.step()
                losses.append(hands.mean(loss))
        model.eval()
        with torch.no_grad():
            return losses, [model.up(samples().tensors[0])] if hands.session is None else []


def accumulating(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """Two batches to a step, clipped; some steps begin with a frozen layer."""
    with fp64():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        loader = DataLoader(samples(32), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = hands.prepare(model, optimizer, loader)
        seen_norms = list[float]()
        for _ in range(2):
            for number, (x, y) in enumerate(loader, 1):
                hands.backward(F.cross_entropy(model(x), y) / 2)
                if number % 2 == 0:
                    seen_norms.append(hands.clip(model, 0.05))
                    optimizer.step()
                    optimizer.zero_grad()
        return seen_norms, seen(model)


def taken_ahead(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """Two batches are taken before the loop trains on the first, and the last has other shares."""
    with fp64():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = hands.prepare(model, optimizer, DataLoader(samples(27), batch_size=8, shuffle=True))
        losses = list[float]()
        for _ in range(2):
            batches = iter(loader)
            for first, second in zip(batches, batches, strict=True):
                for x, y in (first, second):
                    loss = F.cross_entropy(model(x), y)
                    hands.backward(loss)
                    losses.append(hands.mean(loss))
                optimizer.step()
                optimizer.zero_grad()
        return losses, seen(model)


class Cells(nn.Module):
    """A recurrent network whose state the loop carries."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(CLASSES, 5), nn.GRU(5, 7, batch_first=True)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        made, last = self.cell(self.embedding(x), state)
        return self.head(made), last


def recurrent(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """A character model: two halves of a text, whose backwards add up, and a state that goes from one to the other."""
    with fp64():
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(2)
        text = TensorDataset(torch.randint(0, CLASSES, (18, 9), generator=draw))
        model = Cells()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
        model, optimizer, loader = hands.prepare(model, optimizer, DataLoader(text, batch_size=6, shuffle=True))
        losses = list[float]()
        for (batch,) in loader:
            optimizer.zero_grad()
            state, total = None, 0.0
            for start in (0, 4):
                logits, state = model(batch[:, start : start + 4], state)
                state = state.detach()
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, start + 1 : start + 5].flatten())
                hands.backward(loss)
                total += hands.mean(loss)
            losses.append(total)
            optimizer.step()
        return losses, []


class Judge(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(8)] if norm else []
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), *norms, nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


def adversaries(hands: Hands, *, norm: bool = False) -> tuple[list[float], list[Tensor]]:
    """In the way of DCGAN's example: two models, two optimizers, and a loss that goes through both."""
    with fp64():
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, FEATURES))
        judge = Judge(norm)
        kind = torch.optim.SGD if norm else torch.optim.Adam
        judging, making = kind(judge.parameters(), lr=2e-3), kind(maker.parameters(), lr=2e-3)
        loader = DataLoader(samples(24), batch_size=BATCH, shuffle=True)
        maker, judge, judging, making, loader = hands.prepare(maker, judge, judging, making, loader)
        losses = list[float]()
        for _ in range(2):
            for x, _ in loader:
                ones, zeros = torch.ones(len(x)), torch.zeros(len(x))
                judge.zero_grad()
                of_real = F.binary_cross_entropy_with_logits(judge(x), ones)
                hands.backward(of_real)
                made = maker(x[:, :3].tanh())
                of_made = F.binary_cross_entropy_with_logits(judge(made.detach()), zeros)
                hands.backward(of_made)
                judging.step()
                maker.zero_grad()
                of_maker = F.binary_cross_entropy_with_logits(judge(made), ones)
                hands.backward(of_maker)
                making.step()
                losses += [hands.mean(of_real + of_made), hands.mean(of_maker)]
        judge.eval()
        with torch.no_grad():
            return losses, [maker(samples().tensors[0][:, :3]), judge(samples().tensors[0])]


def distilled(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """A teacher without an optimizer, and one evaluation before training."""
    with fp64():
        torch.manual_seed(0)
        teacher, model = Net(), Net()
        loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
        teacher, model, loader = hands.prepare(teacher, model, loader)
        optimizer = hands.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = list[float]()
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                losses.append(hands.mean(F.cross_entropy(model(x), y)))
        model.train()
        for x, _ in loader:
            with torch.no_grad():
                aim = teacher(x).softmax(1)
            loss = F.cross_entropy(model(x), aim)
            hands.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(hands.mean(loss))
        return losses, seen(model)
