"""Samples that meet in a loss are gathered, as one process has them together; those that meet in a forward are refused
with the module's name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import DataError, PlanError

BATCH, STEPS = 8, 4


class Forward(nn.Module):
    """What stands between two layers, by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _normalised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def _mixed(x: Tensor) -> Tensor:
    order = torch.arange(len(x) - 1, -1, -1)
    return 0.7 * x + 0.3 * x[order]


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "a batch norm by hand": _normalised,
    "less the mean": lambda x: x - x.mean(0, keepdim=True),
    "distances": lambda x: torch.cdist(x, x).softmax(1) @ x,
    "softmax over samples": lambda x: x.softmax(0),
    "sorting": lambda x: x.sort(0)[0] * torch.linspace(1, 2, len(x), dtype=x.dtype)[:, None],
    "the largest": lambda x: x / x.abs().max(),
    "mixing": _mixed,
    "attention over samples": lambda x: F.scaled_dot_product_attention(x, x, x),
}
ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "softmax over features": lambda x: x.softmax(1),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "a batch as a row": lambda x: x.reshape(1, -1).reshape(len(x), -1),
}


class Pair(nn.Module):
    """Two encoders of a sample; `joined`: their products, as CLIP returns them."""

    def __init__(self, *, joined: bool = False) -> None:
        super().__init__()
        self.one, self.other, self.joined = nn.Linear(6, 4), nn.Linear(6, 4), joined
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Any:
        one, other = F.normalize(self.one(x), dim=1), F.normalize(self.other(x.cos()), dim=1)
        return self.scale.exp() * one @ other.T if self.joined else (one, other, self.scale)


def _of_logits(logits: Tensor) -> Tensor:
    numbers = torch.arange(len(logits))
    return F.cross_entropy(logits, numbers, reduction="sum") + F.cross_entropy(logits.T, numbers, reduction="sum")


def info_nce(outputs: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
    one, other, scale = outputs
    return _of_logits(scale.exp() * one @ other.T), len(one)


def mean_of_info_nce(outputs: Any, batch: list[Tensor]) -> Tensor:
    return info_nce(outputs, batch)[0] / len(batch[0])


def of_products(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return _of_logits(outputs), len(outputs)


def squares(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def of_largest(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    """By the hardest samples of the batch, and their labels."""
    each = (outputs - batch[1]).square().sum(1)
    return (each * each.detach().softmax(0)).sum(), 1


def masked_mean(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    wanted = batch[1] > 0.3
    return ((outputs - batch[1]).square() * wanted).sum() / wanted.sum(), 1


def beyond(outputs: Tensor, batch: list[Tensor]) -> Tensor:
    """As long as the mean is above 0.7, it counts twice."""
    mean = (outputs - batch[1]).square().mean()
    return mean + (mean - 0.7).clamp(min=0)


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "info_nce": (Pair, info_nce),
    "products": (lambda: Pair(joined=True), of_products),
    "largest": (lambda: nn.Linear(6, 4), of_largest),
    "masked mean": (lambda: nn.Linear(6, 4), masked_mean),
    "beyond": (lambda: nn.Linear(6, 4), beyond),
}


def build(kind: str) -> tuple[nn.Module, Callable[..., Any]]:
    torch.manual_seed(5)
    function = {**COUPLED, **ALONE}.get(kind)
    if function is None:
        make, loss = LOSSES[kind]
        return make().double(), loss
    return nn.Sequential(nn.Linear(6, 4), Forward(function), nn.Linear(4, 4)).double(), squares


def samples() -> TensorDataset:
    x = torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x[:, :4].square())


def in_plain_torch(kind: str) -> list[float]:
    model, loss_fn = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for batch in DataLoader(samples(), batch_size=BATCH):
        optimizer.zero_grad()
        found = loss_fn(model(batch[0]), batch)
        mean = found[0] / found[1] if isinstance(found, tuple) else found
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses


def plan_for(world: int, *, zero: int = 0, per_step: int = 1, tensor: int = 1) -> Plan:
    data = world // tensor
    axes: dict[str, int] = {"shard": data} if zero == 3 else {"replicate": data}
    return Plan(
        mesh=MeshPlan(tensor=tensor, **axes),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=BATCH // data // per_step, per_step=per_step),
        compute=ComputePlan(precision="fp64"),
    )


def trained(kind: str, plan: Any, folder: str) -> list[float]:
    with (
        warnings.catch_warnings(action="ignore"),  # it says that one number is taken as a mean over samples
        weft.session(plan, permit=("fp64",), folder=folder, quiet=True) as session,
    ):
        model, loss = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        state = session.prepare(model, optimizer, DataLoader(samples(), batch_size=BATCH), loss=loss)
        return [state.step(batch).loss for batch in state.batches(STEPS)]


@pytest.mark.parametrize("kind", [*COUPLED, *LOSSES])
def test_one_process_with_the_whole_batch_is_right(kind: str, tmp_path: Path) -> None:
    assert trained(kind, plan_for(1), str(tmp_path)) == pytest.approx(in_plain_torch(kind), rel=1e-10)


@pytest.mark.parametrize("kind", COUPLED)
def test_samples_that_meet_in_a_forward_are_refused_on_ranks(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the forward of 1 in Sequential lets the samples of a batch meet"):
        ranks.run(2, trained, kind, plan_for(2), str(tmp_path))


@pytest.mark.parametrize("kind", COUPLED)
def test_and_in_microbatches(kind: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the forward of 1 in Sequential lets the samples of a batch meet"):
        trained(kind, plan_for(1, per_step=2), str(tmp_path))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("kind", LOSSES)
def test_samples_that_meet_in_the_loss_are_gathered(kind: str, zero: int, ranks: RankPool, tmp_path: Path) -> None:
    for losses in ranks.run(2, trained, kind, plan_for(2, zero=zero), str(tmp_path)):
        assert losses == pytest.approx(in_plain_torch(kind), rel=1e-10)


@pytest.mark.parametrize("kind", LOSSES)
def test_but_not_in_microbatches(kind: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the loss is no sum over samples: .* Use microbatch\.per_step = 1"):
        trained(kind, plan_for(1, per_step=2), str(tmp_path))


@pytest.mark.parametrize("kind", LOSSES)
def test_auto_gathers_on_ranks(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    for losses in ranks.run(2, trained, kind, "auto", str(tmp_path)):
        assert losses == pytest.approx(in_plain_torch(kind), rel=1e-10)


@pytest.mark.parametrize("kind", [*LOSSES, "a batch norm by hand"])
def test_auto_takes_the_whole_batch_at_once_on_one_process(kind: str, tmp_path: Path) -> None:
    assert trained(kind, "auto", str(tmp_path)) == pytest.approx(in_plain_torch(kind), rel=1e-10)


def test_auto_refuses_ranks_where_a_forward_lets_samples_meet(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the forward of 1 in Sequential lets the samples of a batch meet"):
        ranks.run(2, trained, "a batch norm by hand", "auto", str(tmp_path))


@pytest.mark.parametrize("kind", ALONE)
def test_where_samples_go_by_themselves_nothing_is_refused(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    alone = trained(kind, plan_for(1), str(tmp_path / "a"))
    assert trained(kind, plan_for(1, per_step=2), str(tmp_path / "b")) == pytest.approx(alone, rel=1e-10)
    for losses in ranks.run(2, trained, kind, plan_for(2), str(tmp_path / "c")):
        assert losses == pytest.approx(alone, rel=1e-10)


class Heads(nn.Module):
    """Logits, probabilities, and a term that is a mean already."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"logits": logits, "probabilities": logits.sigmoid(), "size": self.layer.weight.square().mean()}


class Counting:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: dict[str, Tensor], batch: list[Tensor]) -> Tensor:
        self.calls += 1
        return (outputs["logits"] - batch[1]).square().mean()


def _labels(batch: list[Tensor]) -> Tensor:
    return batch[1].argmax(1)


SUMS: dict[str, Callable[..., Any]] = {
    "cross entropy": lambda outputs, batch: F.cross_entropy(outputs["logits"], _labels(batch)),
    "smoothed": lambda outputs, batch: F.cross_entropy(outputs["logits"], _labels(batch), label_smoothing=0.1),
    "of probabilities": lambda outputs, batch: F.binary_cross_entropy(outputs["probabilities"], batch[1].clamp(0, 1)),
    "huber and a term": lambda outputs, batch: F.huber_loss(outputs["logits"], batch[1]) + outputs["size"],
    "clamped by sample": lambda outputs, batch: (outputs["logits"] - batch[1]).square().mean(1).clamp(max=0.5).mean(),
    "hinge": lambda outputs, batch: F.multi_margin_loss(outputs["logits"], _labels(batch)),
    "focal": lambda outputs, batch: ((1 - outputs["probabilities"]).square() * outputs["logits"].exp()).sum(1).mean(),
    "log of variance": lambda outputs, batch: (outputs["logits"].var(1) + 1e-6).log().mean(),
    "counting": Counting(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", SUMS)
def test_sums_over_samples_are_no_meeting(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model, precision = Heads().to(dtype), "fp64" if dtype == torch.float64 else "fp32"
    rows = TensorDataset(*(each.to(dtype) for each in samples().tensors))
    plan = replace(plan_for(1, per_step=2), compute=ComputePlan(precision=precision))  # type: ignore[arg-type]
    with (
        warnings.catch_warnings(action="ignore"),
        weft.session(plan, permit=(precision,), folder=tmp_path, quiet=True, prove="never") as session,  # type: ignore[arg-type]
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.prepare(model, optimizer, DataLoader(rows, batch_size=BATCH), loss=SUMS[kind])


def _padded(plan: Any | None, folder: str = "") -> list[float]:
    """A mean over tokens, of which only the seventh sample of every batch has fewer: the first four tell nothing."""
    tokens = torch.randint(1, 9, (BATCH * STEPS, 5), generator=torch.Generator().manual_seed(0))
    tokens[6::BATCH, 2:] = 0
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(tokens), batch_size=BATCH)

    def loss_fn(outputs: Tensor, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[0].flatten(), ignore_index=0)

    if plan is not None:
        with (
            warnings.catch_warnings(action="ignore"),  # it says that one number is taken as a mean over samples
            weft.session(plan, permit=("fp64",), folder=folder, quiet=True, prove="never") as session,
        ):
            state = session.prepare(model, optimizer, loader, loss=loss_fn)
            return [state.step(batch).loss for batch in state.batches(STEPS)]
    losses: list[float] = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_more_than_the_first_samples_are_looked_at(ranks: RankPool, tmp_path: Path) -> None:
    right = _padded(None)
    for zero in (0, 3):
        for losses in ranks.run(2, _padded, plan_for(2, zero=zero), str(tmp_path / str(zero))):
            assert losses == pytest.approx(right, rel=1e-10)
    with pytest.raises(PlanError, match=r"If it is a mean over something else than samples \(tokens, pixels\)"):
        _padded(plan_for(1, per_step=2), str(tmp_path / "split"))


def _student(folder: str, plan: Plan) -> list[float]:
    """A student that begins as its teacher: the loss is what roundings leave of 2 − 2."""
    torch.manual_seed(5)
    model = nn.Linear(6, 4).double()
    weight = model.weight.detach().clone()

    def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        teacher = F.linear(batch[0], weight) + model.bias.detach()
        return (2 - 2 * F.cosine_similarity(outputs, teacher)).sum(), len(outputs)

    with weft.session(plan, permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        state = session.prepare(model, optimizer, DataLoader(samples(), batch_size=BATCH), loss=loss_fn)
        return [state.step(batch).loss for batch in state.batches(STEPS)]


def test_roundings_of_a_loss_that_cancels_out_are_no_meeting(ranks: RankPool, tmp_path: Path) -> None:
    assert max(map(abs, _student(str(tmp_path / "a"), plan_for(1, per_step=2)))) < 1e-12
    for losses in ranks.run(2, _student, str(tmp_path / "b"), plan_for(2)):
        assert max(map(abs, losses)) < 1e-12


def _evaluated(folder: str, sizes: tuple[int, ...]) -> list[Any]:
    """Losses of a loader, predictions for it, and a metric."""
    world = torch.distributed.get_world_size()
    with weft.session(plan_for(world), permit=("fp64",), folder=folder, quiet=True) as session:
        model, loss = build("info_nce")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        state = session.prepare(model, optimizer, DataLoader(samples(), batch_size=BATCH), loss=loss)
        loader = [list(part) for part in zip(*(each.split(sizes) for each in samples()[: sum(sizes)]), strict=True)]
        metrics = {"one": lambda mine, labels: float((mine.sum(1) * labels[:, 0]).sum())}
        found = state.evaluate(loader, metrics, outputs=lambda outputs, batch: (outputs[0], batch[1]))
        return [found["loss"], found["one"], state.predict(loader, outputs=lambda outputs, batch: outputs[0]).tolist()]


def test_evaluation_gathers_as_well_and_shows_each_sample_once(ranks: RankPool, tmp_path: Path) -> None:
    sizes = (8, 4, 2)
    alone = ranks.run(1, _evaluated, str(tmp_path / "a"), sizes)[0]
    for found in ranks.run(2, _evaluated, str(tmp_path / "b"), sizes):
        assert found[:2] == pytest.approx(alone[:2], rel=1e-10)
        torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(alone[2]))
    with pytest.raises(DataError, match=r"a batch of 5 samples cannot be shared out equally over 2 data ranks"):
        ranks.run(2, _evaluated, str(tmp_path / "c"), (8, 5))
