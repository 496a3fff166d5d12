"""What the proof at the start is tried on: small models of every kind, healthy ones and ones that plans get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.model.families import CutTable

WIDTH, CLASSES, ROWS, BATCH = 8, 4, 48, 8
CUT = CutTable(entry="stem", blocks=("blocks.0", "blocks.1"), tail=("head",))
SPLIT = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block(drop) for _ in "ab")
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


# ── kinds that plans get wrong ────────────────────────────────────────────────────────────────────────────────────────


class CodeBook(Net):
    """A vector quantiser whose codes are moving averages of what is nearest to them (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: Tensor
        self.register_buffer("codes", torch.randn(5, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                for code in range(5):
                    if bool((nearest == code).any()):
                        self.codes[code].mul_(0.9).add_(0.1 * x[nearest == code].mean(0))
        x = x + (self.codes[nearest] - x).detach()
        return self.head(self.blocks[1](self.blocks[0](x)))


class MaxNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 16, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.table(x[:, :CLASSES].argmax(1))
        return self.head(self.blocks[1](self.blocks[0](x)))


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)


class HandNorm(Net):
    """A batch norm written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
        return self.head(self.blocks[1](self.blocks[0](x)))


class TwoViews(Net):
    """Two dropout views of one sample (Gao et al. 2021)."""

    def __init__(self) -> None:
        super().__init__(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


def contrastive(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    """InfoNCE over the batch, as a sum over its samples."""
    scores = outputs @ outputs.T
    return F.cross_entropy(scores, torch.arange(len(outputs)), reduction="sum"), len(outputs)


def penalised(net: Net) -> Callable[..., Any]:
    """The loss reads a block's weight."""

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        weight = net.blocks[0].up.weight
        total, count = loss_of(outputs, batch)
        return total + 0.1 * count * (weight.T @ weight - torch.eye(weight.shape[1])).square().sum(), count

    return loss


class Steep(Net):
    """A gradient penalty: a derivative of a derivative (Gulrajani et al. 2017)."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        x = x.detach().requires_grad_()
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out * (1 + slope.square().sum(1, keepdim=True))


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return loss_of(outputs * self.scale, batch)


class Timed(Net):
    """An fp64 buffer with numbers that fp32 cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Tensor
        self.register_buffer("times", 1.7e9 + torch.arange(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (self.times - 1.7e9).to(x.dtype))


class Waves(Net):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(CLASSES, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.turn).abs()


class NarrowNorm(Net):
    """A norm that is computed in fp32 whatever all else is in, as those of most language models."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        wide = x.float()
        x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return self.head(self.blocks[1](self.blocks[0](x)))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module], Any] = field(default=lambda net: loss_of)


SILENT = {
    "codebook": Case(CodeBook),
    "max_norm": Case(MaxNorm),
    "spectral_norm": Case(Spectral),
    "hand-written batch norm": Case(HandNorm),
    "contrastive": Case(loss=lambda net: contrastive),
    "two views": Case(TwoViews),
    "gradient penalty": Case(Steep),
    "weights in the loss": Case(loss=penalised),
    "parameters of the loss": Case(loss=lambda net: Weighted()),
    "fp64 buffer": Case(Timed),
    "complex parameter": Case(Waves),
}


def plan_of(name: str, precision: str = "fp32") -> Plan:
    """A plan for one or two ranks by its name."""
    mesh: dict[str, int] = {}
    zero, size, per_step, memory = 0, BATCH, 1, MemoryPlan()
    match name:
        case "one":
            pass
        case "accumulation":
            size, per_step = BATCH // 2, 2
        case "data" | "zero1" | "zero2":
            mesh, size = {"replicate": 2}, BATCH // 2
            zero = int(name[-1]) if name != "data" else 0
        case "zero3":
            mesh, zero, size = {"shard": 2}, 3, BATCH // 2
        case "tensor":
            mesh = {"tensor": 2}
        case "pipeline":
            mesh, size, per_step = {"pipeline": 2}, BATCH // 4, 4
        case "recompute":
            size, per_step, memory = BATCH // 2, 2, MemoryPlan(recompute="full")
        case _:
            raise AssertionError(name)
    return Plan(
        mesh=MeshPlan(**mesh),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=size, per_step=per_step),
        memory=memory,
        compute=ComputePlan(precision=precision),  # type: ignore[arg-type]
    )


def loader(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> DataLoader[Any]:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return DataLoader(TensorDataset(x, x[:, :CLASSES].argmax(1)), batch_size=BATCH, shuffle=True)
