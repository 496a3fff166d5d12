"""Dtypes that a user's model mixes stay as they were given, and train as plain PyTorch trains them, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from test_session_traps import BATCH, loss_fn, session_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import CheckpointError, RecipeError

STEPS = 6


class Mixed(nn.Module):
    """Complex parameters and buffers beside real ones, parameters and buffers of fp64, whole numbers, switches."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.entry = nn.Linear(6, 16, dtype=dtype)
        self.spectrum = nn.Parameter(0.3 * torch.randn(4, 9, dtype=dtype.to_complex()))
        self.phase = nn.Parameter(torch.randn((), dtype=dtype.to_complex()))
        self.tail = nn.Linear(4, 4, dtype=dtype)
        self.fixed = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("turns", torch.randn(9, dtype=torch.complex128))
        self.register_buffer("sum", torch.zeros((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("coarse", torch.tensor([1.0, 2.0, 3.0, 1 / 3], dtype=torch.bfloat16))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        assert time.dtype == torch.float64
        x = torch.fft.rfft(torch.tanh(self.entry(x))) * self.turns.to(self.spectrum.dtype)
        x = torch.einsum("bf,of->bo", x, self.spectrum * self.phase).real
        x = x * self.mask + self.narrow.to(self.dtype) * self.coarse.to(self.dtype)
        late = torch.sin(time % 86400.0 * self.scale.sigmoid() + self.fixed.sum())[:, None]
        return self.tail(x) * late.to(self.dtype)


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Mixed(dtype)


def samples(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, 6, generator=generator, dtype=torch.float64)
    time = 1.7e9 + 1e4 * torch.rand(STEPS * BATCH, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), x[:, :4].square().to(dtype), time)


class InOrder:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __iter__(self) -> Any:
        return iter(DataLoader(samples(self.dtype), batch_size=BATCH))


def plain(dtype: torch.dtype, clip: float | None) -> dict[str, Tensor]:
    model = build(dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for x, y, time in InOrder(dtype):
        optimizer.zero_grad()
        ((model(x, time) - y).square().sum() / len(x)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def plan_of(kind: str, world: int, dtype: torch.dtype) -> Plan:
    axes: dict[str, int] = {"shard" if kind == "zero 3" else "replicate": world}
    accumulates = 2 if kind == "accumulation" else 1
    return Plan(
        mesh=MeshPlan(**axes),
        data_parallel=DataParallelPlan(zero=int(kind[-1]) if kind[-1].isdigit() else 0),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=BATCH // world // accumulates, per_step=accumulates),
        compute=ComputePlan(precision="fp64" if dtype == torch.float64 else "fp32"),
    )


def train(kind: str, folder: str, dtype: torch.dtype, clip: float | None) -> dict[str, Any]:
    plan = plan_of(kind, torch.distributed.get_world_size(), dtype)
    found: dict[str, Any] = {}
    for begins in (0, STEPS // 2):
        with session_of(folder, plan, permit=(plan.compute.precision,)) as session:
            model = build(dtype)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            state = session.prepare(
                model,
                optimizer,
                InOrder(dtype),
                loss=loss_fn,
                batch_size=BATCH,
                inputs={"x": "0", "time": "2"},
                max_grad_norm=clip,
            )
            if begins:
                state.load()
            while state.steps < (begins or STEPS // 2) + begins:
                for batch in state.batches(1):
                    state.step(batch)
            state.save()
            with pytest.raises(CheckpointError, match="is complex, which no file"):
                state.export(Path(folder) / "export")
            found = {name: _held(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    return found


def _held(tensor: Any) -> Tensor:
    """What this rank has of it: under ZeRO-3 some rows."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


@pytest.mark.parametrize(
    ("world", "kind"), [(1, "data"), (2, "data"), (2, "accumulation"), (2, "zero 1"), (2, "zero 3")]
)
def test_dtypes_stay_and_train_as_in_plain_torch(ranks: RankPool, tmp_path: Path, world: int, kind: str) -> None:
    for number, (dtype, clip, most) in enumerate(((torch.float64, None, 1e-10), (torch.float32, 0.05, 2e-6))):
        right = plain(dtype, clip)
        for rank, found in enumerate(ranks.run(world, train, kind, str(tmp_path / str(number)), dtype, clip)):
            assert {name: each.dtype for name, each in found.items()} == {n: e.dtype for n, e in right.items()}
            for name, each in right.items():
                other = each if found[name].shape == each.shape else each.chunk(world)[rank]
                mine, other = found[name].to(torch.complex128), other.to(torch.complex128)
                assert float((mine - other).abs().max()) <= most * float(other.abs().max()), name


class Averaging(nn.Module):
    """A sum kept in fp64 beside weights in fp32, that fp32 would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(6, 4)
        self.register_buffer("big", torch.tensor(1e9 + 1 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x) * (self.big - 1e9).float()


def test_a_buffer_of_fp64_keeps_its_digits_in_fp32(tmp_path: Path) -> None:
    with session_of(tmp_path, permit=("fp32",), plan="auto") as session:
        model = Averaging()
        session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), InOrder(torch.float32), loss=loss_fn, batch_size=BATCH
        )
        assert model.big.dtype == torch.float64
        assert float(model.big) == 1e9 + 1 / 3


class _Own(torch.optim.SGD):
    pass


def _complex() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4))
    model[0].turn = nn.Parameter(torch.ones((), dtype=torch.complex64))
    return model


@pytest.mark.parametrize(
    ("model", "precision", "optimizer", "match"),
    [
        (
            lambda: nn.Linear(6, 4).bfloat16(),
            "fp32",
            torch.optim.SGD,
            r"weight is bfloat16 and to be trained.*permit bf16",
        ),
        (lambda: nn.Linear(6, 4).half(), "fp64", torch.optim.SGD, r"weight is float16 and to be trained.*permit fp16"),
        (lambda: nn.Linear(6, 4).double(), "fp32", torch.optim.SGD, r"weight is float64.*would round it.*permit fp64"),
        (_complex, "bf16", torch.optim.SGD, r"0\.turn is complex, and torch has no complex numbers of bf16"),
        (_complex, "fp32", _Own, r"0\.turn is complex, and a _Own may look at more.*view_as_complex"),
    ],
)
def test_what_a_plan_would_train_otherwise_is_refused(
    tmp_path: Path, model: Callable[[], nn.Module], precision: Any, optimizer: Any, match: str
) -> None:
    plan = Plan(
        mesh=MeshPlan(), microbatch=MicrobatchPlan(size=BATCH, per_step=1), compute=ComputePlan(precision=precision)
    )
    own = model()
    given = (own, optimizer(own.parameters(), lr=0.1), InOrder(torch.float32))
    with session_of(tmp_path, plan, permit=(precision,)) as session, pytest.raises(RecipeError, match=match):
        session.prepare(*given, loss=loss_fn, batch_size=BATCH)
