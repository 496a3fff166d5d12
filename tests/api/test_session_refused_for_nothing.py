"""Models that a session once refused, or failed on, for no reason: each trains as plain PyTorch does, under every plan
that can hold it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import PlanError, RecipeError
from weft.model.families import CutTable

BATCH, STEPS = 8, 3
LENGTH, WIDTH = 5, 16


def plan_of(kind: str) -> Plan:
    """A plan by its name; all but those of one process are for two ranks."""
    mesh = {"data": {"replicate": 2}, "zero3": {"shard": 2}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    axes = mesh.get(kind, {})
    size = {"one": BATCH, "tensor": BATCH}.get(kind, BATCH // 2)
    per_step = BATCH // size if kind in ("pipeline", "accumulation") else 1
    return Plan(
        mesh=MeshPlan(**axes),
        data_parallel=DataParallelPlan(zero=3 if kind == "zero3" else 0),
        microbatch=MicrobatchPlan(size=size, per_step=per_step),
        compute=ComputePlan(precision="fp64"),
    )


def loss_fn(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return (outputs - batch[-1]).square().sum(), len(outputs)


def sequences(number: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, LENGTH, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, 0, :4].square())


Found = tuple[list[float], float, Tensor]
"""Losses of steps, the loss of an evaluation, and all predictions."""


def plain(build: Callable[[], nn.Module], data: Any) -> Found:
    """The same by plain PyTorch on one process."""
    model, loader = build(), DataLoader(data, batch_size=BATCH)
    optimizer, losses = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2), list[float]()
    for batch, _ in zip(loader, range(STEPS), strict=False):
        total, count = loss_fn(model(batch[0]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(batch[0]) for batch in loader])
    total, count = loss_fn(outputs, [torch.cat([batch[-1] for batch in loader])])
    return losses, float(total) / count, outputs


def trained(build: Callable[[], nn.Module], data: Any, kind: str, folder: str, **changes: Any) -> Found:
    model, loader = build(), DataLoader(data, batch_size=BATCH)
    run = weft.session(plan=plan_of(kind), permit=("fp64",), folder=folder, quiet=True)
    with warnings.catch_warnings(), run as session:
        warnings.filterwarnings("ignore", message=".*nested tensors")  # torch's own, where it packs padded samples
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        state = session.prepare(model, optimizer, loader, **({"loss": loss_fn} | changes))
        losses = [state.step(batch).loss for batch in state.batches(STEPS)]
        return losses, state.evaluate(loader), state.predict(loader, outputs=lambda outputs, batch: outputs)


def check(ranks: RankPool, kinds: str, build: Callable[[], nn.Module], data: Any, folder: Path, **changes: Any) -> None:
    """Hold a model under plans to plain PyTorch; `kinds` are their names."""
    losses, evaluated, outputs = plain(build, data)
    for kind in kinds.split():
        world = 1 if kind in ("one", "accumulation") else 2
        for found in ranks.run(world, trained, build, data, kind, str(folder / kind), **changes):
            assert found[0] == pytest.approx(losses, rel=1e-10), kind
            assert found[1] == pytest.approx(evaluated, rel=1e-10), kind
            torch.testing.assert_close(found[2], outputs, rtol=1e-10, atol=1e-10)


class Padded(nn.Module):
    """An encoder of torch's over samples that are padded at their ends, or in the midst."""

    def __init__(self, *, at_end: bool, norm: bool) -> None:
        super().__init__()
        self.at_end = at_end
        self.enter = nn.Linear(6, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH) if norm else None)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 2 + (x[:, 0, :3] > 0).sum(1)
        padded = torch.arange(LENGTH) >= lengths[:, None] if self.at_end else x[..., 0] > 1.5
        return self.leave(self.encoder(self.enter(x), src_key_padding_mask=padded).mean(1))


def padded(at_end: bool = True, norm: bool = False) -> nn.Module:
    torch.manual_seed(5)
    return Padded(at_end=at_end, norm=norm).double()


def padded_before_norm() -> nn.Module:
    return padded(norm=True)


def padded_anywhere() -> nn.Module:
    return padded(at_end=False)


@pytest.mark.parametrize("build", [padded, padded_before_norm, padded_anywhere])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_an_encoder_with_padding_trains_and_evaluates_as_in_plain_pytorch(
    ranks: RankPool, tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    check(ranks, "one data zero3 tensor pipeline", build, sequences(), tmp_path)


class Attending(nn.Module):
    """Torch's attention by itself, with both of its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.wide, self.leave = nn.Linear(WIDTH, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, padded = self.enter(x), x[..., 0] > 1.5
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        causal = causal.expand(len(x) * 4, LENGTH, LENGTH) & ~padded[:, 0].repeat_interleave(4)[:, None, None]
        padded = padded & ~padded[:, :1]
        mixed, _ = self.attention(h, h, h, key_padding_mask=padded, attn_mask=causal, need_weights=False)
        return self.leave(torch.relu(self.wide((h + mixed).mean(1))))


def attending() -> nn.Module:
    torch.manual_seed(5)
    return Attending().double()


def test_attention_with_a_mask_of_each_head_is_split_where_it_can_be(ranks: RankPool, tmp_path: Path) -> None:
    check(ranks, "one data zero3 tensor", attending, sequences(), tmp_path)


class Normed(nn.Module):
    def __init__(self, *, tracks: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(LENGTH * 6, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=tracks)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x.flatten(1)))))


def normed(*, frozen: bool = False, tracks: bool = True) -> nn.Module:
    torch.manual_seed(5)
    model = Normed(tracks=tracks).double()
    if tracks:
        nn.init.normal_(model.norm.running_mean)
    if frozen:
        model.norm.eval().requires_grad_(False)
    return model


def frozen_norm() -> nn.Module:
    return normed(frozen=True)


def test_a_batch_norm_that_takes_no_statistics_may_accumulate(ranks: RankPool, tmp_path: Path) -> None:
    check(ranks, "one accumulation data zero3", frozen_norm, sequences(), tmp_path)


def norm_without_statistics() -> nn.Module:
    return normed(tracks=False)


def test_a_batch_norm_without_statistics_is_evaluated_as_in_plain_pytorch(ranks: RankPool, tmp_path: Path) -> None:
    check(ranks, "one data zero3", norm_without_statistics, sequences(42), tmp_path)  # the last batch has two samples


def hooked() -> nn.Module:
    """A hook that reads what the model is given by position, and writes to it."""
    model = normed(tracks=False)
    model.norm = nn.LayerNorm(WIDTH).double()
    model.register_forward_pre_hook(lambda module, given: (given[0].mul_(0.9),))
    return model


def test_hooks_of_a_model_read_positions_and_write_to_inputs(ranks: RankPool, tmp_path: Path) -> None:
    check(ranks, "one accumulation data zero3", hooked, sequences(), tmp_path)


def test_a_batch_is_not_written_to_before_the_first_step(tmp_path: Path) -> None:
    rows = torch.arange(16.0, dtype=torch.float64)[:, None].expand(16, LENGTH * 6).clone()
    seen: list[float] = []
    model = hooked()
    model.register_forward_hook(lambda module, given, out: seen.append(float(given[0][0, 0])))
    batches = [[rows[at : at + BATCH], rows[at : at + BATCH, :4]] for at in (0, BATCH)]
    with weft.session(plan=plan_of("accumulation"), permit=("fp64",), folder=tmp_path, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer, batches, loss=loss_fn, batch_size=BATCH)
    assert seen, "the model was tried"
    assert torch.equal(rows[:, 0], torch.arange(16.0, dtype=torch.float64))


def accumulating(model: nn.Module, folder: Path, **changes: Any) -> Any:
    plan = {"plan": plan_of("accumulation")} | changes
    with weft.session(permit=("fp64",), folder=folder, quiet=True, **plan) as session:
        loader = DataLoader(sequences(), batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        state.step(next(state.batches()))
        model.train()
        state.step(next(state.batches()))


def test_batch_norm_is_blamed_where_gradients_accumulate(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"norm \(BatchNorm1d\) the statistics of a part(.|\n)*per_step = 1(.|\n)*eval\(\)"
    ):
        accumulating(normed(), tmp_path)
    with pytest.raises(PlanError, match=r"norm \(BatchNorm1d\) the statistics of a part"):
        accumulating(normed(frozen=True, tracks=False), tmp_path)
    with pytest.raises(PlanError, match="Its BatchNorm takes the statistics of the whole batch"):
        accumulating(normed(), tmp_path, plan="auto", microbatches=2)
    with pytest.raises(RecipeError, match=r"norm \(BatchNorm1d\) was in evaluation mode(.|\n)*after each model\.train"):
        accumulating(frozen_norm(), tmp_path)


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers, whose caller may give it a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, WIDTH, 2, batch_first=True, dropout=0.3)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, hidden: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if hidden is None:
            hidden = torch.zeros(2, len(x), WIDTH, dtype=x.dtype), torch.zeros(2, len(x), WIDTH, dtype=x.dtype)
        return self.leave(self.lstm(x, hidden)[0][:, -1])


def recurrent() -> nn.Module:
    torch.manual_seed(5)
    return Recurrent().double()


def test_a_recurrent_layer_with_dropout_draws_the_same_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(1, trained, recurrent, sequences(), "one", str(tmp_path / "one"))[0]
    without = plain(recurrent, sequences())
    assert alone[0][0] != pytest.approx(without[0][0], rel=1e-6), "it drops by numbers of its own"
    for kind in ("data", "zero3"):
        for found in ranks.run(2, trained, recurrent, sequences(), kind, str(tmp_path / kind)):
            assert found[0] == pytest.approx(alone[0], rel=1e-10)
            torch.testing.assert_close(found[2], alone[2], rtol=1e-10, atol=1e-10)


class WithEmpty(nn.Module):
    """Parameters without elements, as a layer has whose feature is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(LENGTH * 6, WIDTH), nn.Linear(WIDTH, 4)
        self.none, self.rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x.flatten(1)))) + self.none.sum() + self.rows.sum()


def with_empty() -> nn.Module:
    torch.manual_seed(5)
    return WithEmpty().double()


def resumed(zero: int, folder: str) -> tuple[list[float], set[str]]:
    model, loader = with_empty(), DataLoader(sequences(), batch_size=BATCH)
    plan = replace(plan_of("data"), data_parallel=DataParallelPlan(zero=zero))  # type: ignore[arg-type]
    if zero == 3:
        plan = plan_of("zero3")
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        state = session.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), loader, loss=loss_fn)
        losses = [state.step(batch).loss for batch in state.batches(2)]
        state.save()
        losses.append(state.step(next(state.batches())).loss)
        assert state.load() == 2
        assert state.step(next(state.batches())).loss == losses[2]
        return losses, set(load_file(state.export(f"{folder}/exported") / "model.safetensors"))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_parameter_without_elements_is_trained_saved_and_exported(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    losses, _, _ = plain(with_empty, sequences())
    for found, names in ranks.run(2, resumed, zero, str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-10)
        assert {"none", "rows"} <= names


def classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(5)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 16, "num_labels": 4}
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config).double()


def classified(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="sum"), len(batch["labels"])


def classes() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 50, (40, 7), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 4} for row in tokens]


def classifying(kind: str, folder: str, cut: Any = None) -> list[float]:
    model, loader = classifier(), DataLoader(classes(), batch_size=BATCH)  # type: ignore[arg-type]
    with weft.session(plan=plan_of(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        state = session.prepare(model, optimizer, loader, loss=classified, cut=cut)
        return [state.step(batch).loss for batch in state.batches(STEPS)]


def test_a_model_with_another_head_than_its_familys_is_cut_into_stages(ranks: RankPool, tmp_path: Path) -> None:
    model, losses = classifier(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch, _ in zip(DataLoader(classes(), batch_size=BATCH), range(STEPS), strict=False):  # type: ignore[arg-type]
        total, count = classified(model(batch["input_ids"], batch["attention_mask"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    for kind in ("data", "tensor", "pipeline"):
        for found in ranks.run(2, classifying, kind, str(tmp_path / kind)):
            assert found == pytest.approx(losses, rel=1e-10), kind
    table = CutTable(entry="bert.embeddings", blocks=("bert.encoder.layer.0", "bert.encoder.layer.1"), tail=("cls",))
    with pytest.raises(PlanError, match="names modules that it has not: cls"):
        ranks.run(2, classifying, "pipeline", str(tmp_path / "by hand"), cut=table)
