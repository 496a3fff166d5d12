"""Draws in a loop of one's own: keyed in the model and the loss, seen and refused where the loop itself draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import DataError, PlanError, RecipeError
from weft.techniques.randomness.sample_draws import SampleDraws

BATCH, LENGTH, VOCABULARY = 8, 6, 24


def plan_for(world: int, size: int = 2) -> Plan:
    return Plan(
        mesh=MeshPlan(shard=world),
        data_parallel=DataParallelPlan(zero=1),
        microbatch=MicrobatchPlan(size=size, per_step=BATCH // size // world),
        compute=ComputePlan(precision="fp64"),
    )


def language_model(family: str) -> nn.Module:
    """With the dropout that the configuration has by default, and in attention where the family's is off."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 24, "max_position_embeddings": 16}  # fmt: skip
    if family == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).double()
    config = transformers.GPTNeoXConfig(**sizes, attention_dropout=0.1, hidden_dropout=0.1)
    config._attn_implementation = family.rpartition("-")[2]
    return transformers.GPTNeoXForCausalLM(config).double()


def token_loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = outputs.logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["input_ids"].flatten(), reduction="sum"), len(logits)


def language_loop(plan: Plan, folder: str, family: str) -> list[float]:
    model = language_model(family)
    tokens = torch.randint(0, VOCABULARY, (32, LENGTH), generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"input_ids": row} for row in tokens], batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        state = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader, loss=token_loss)
        return [state.step(batch).loss for batch in state.batches(3)]


@pytest.mark.parametrize("family", ["bert", "neox-sdpa", "neox-eager"])
def test_a_library_models_own_dropout_is_the_same_on_any_number_of_ranks(ranks: RankPool, tmp_path, family):
    alone = ranks.run(1, language_loop, plan_for(1, BATCH), str(tmp_path / "1"), family)[0]
    for world, size in ((1, 2), (2, 4), (4, 1)):
        for losses in ranks.run(world, language_loop, plan_for(world, size), str(tmp_path / f"{world}"), family):
            assert losses == pytest.approx(alone, rel=1e-12)


class Rows(torch.utils.data.Dataset[list[Tensor]]):
    """`augment` draws in the dataset, which is seeded by sample."""

    def __init__(self, augment: bool) -> None:
        self._rows = torch.randn(32, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self._augment = augment

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> list[Tensor]:
        row = self._rows[index]
        return [row + 0.1 * torch.randn(6, dtype=row.dtype) if self._augment else row, row[:2]]


class Forgetful(nn.Module):
    """Drops by a function, which no module shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(rows), 0.3, self.training)


class Sourced(nn.Module):
    """Draws with a generator of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.source = inner, torch.Generator().manual_seed(3)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.inner(rows)
        noise = torch.randn(rows.shape, generator=self.source, dtype=rows.dtype)
        return rows + 0.1 * noise + 0.1 * torch.zeros_like(rows).normal_(generator=self.source)


def noisy_loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1] - 0.1 * torch.randn_like(outputs)).square().sum(), len(outputs)


def loop(plan: Plan, folder: str, what: str) -> list[float]:
    """Losses of a loop that draws in one way or another."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model = Forgetful(model) if what == "dropout" else Sourced(model) if what == "source" else model
    loader = DataLoader(Rows(what == "dataset"), batch_size=BATCH, shuffle=True)
    losses: list[float] = []
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=noisy_loss)
        for batch in state.batches(3):
            if what == "noise":
                batch = [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]
            elif what == "in place":
                batch[0].add_(torch.randn(1).to(batch[0]))
            elif what == "keyed":
                picked = state.randint(batch, 3, 6, low=1).to(batch[0].dtype)
                batch = [batch[0] * picked + 0.1 * state.randn(batch, 6) * state.rand(batch, 1), batch[1]]
            elif what == "keyed on one rank":
                extra = state.randn(batch, 2) if session.rank == 0 else None
                batch = [batch[0] + 0.1 * state.randn(batch, 6), batch[1]]
                del extra
            elif what == "keyed of others":
                state.randn(batch[0][:1], 2)
            elif what == "keyed of none":
                state.randint(batch, 0, 2)
            elif what == "normalised":
                batch = [batch[0] * 0.5, batch[1]]
            elif what == "elsewhere":  # a loader's iterator draws a seed, a print a sample
                next(iter(DataLoader(Rows(False), batch_size=4, shuffle=True)))
                torch.rand(2)
            losses.append(state.step(batch).loss)
    return losses


@pytest.mark.parametrize("what", ["dataset", "normalised", "elsewhere", "keyed", "dropout", "source"])
def test_what_a_loop_may_draw(ranks: RankPool, tmp_path, what):
    alone = ranks.run(1, loop, plan_for(1, BATCH), str(tmp_path / "1"), what)[0]
    for losses in ranks.run(2, loop, plan_for(2), str(tmp_path / "2"), what):
        assert losses == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("what", ["noise", "in place"])
def test_a_batch_that_the_loop_draws_into_is_refused(ranks: RankPool, tmp_path, what):
    with pytest.raises(PlanError, match=r"the loop changed 0 and drew from torch's generator"):
        ranks.run(2, loop, plan_for(2), str(tmp_path / "2"), what)
    assert len(ranks.run(1, loop, plan_for(1), str(tmp_path / "1"), what)[0]) == 3


def test_ranks_that_draw_otherwise_by_sample_are_named(ranks: RankPool, tmp_path):
    with pytest.raises(
        RecipeError, match=r"the number of draws for this step differs between the ranks: 2 on rank 0, 1"
    ):
        ranks.run(2, loop, plan_for(2), str(tmp_path / "2"), "keyed on one rank")
    with pytest.raises(DataError, match="this rank's share of a step is 4 of 8 samples, and the batch has 1"):
        ranks.run(2, loop, plan_for(2), str(tmp_path / "3"), "keyed of others")


def test_whole_numbers_of_an_empty_range_are_refused(ranks: RankPool, tmp_path):
    with pytest.raises(DataError, match="there is no such number. Give a high above low"):
        ranks.run(1, loop, plan_for(1), str(tmp_path / "1"), "keyed of none")


def test_numbers_drawn_by_sample_are_as_said() -> None:
    draws, samples = SampleDraws(seed=4), torch.arange(5000)
    normal, uniform = draws.randn(0, samples, (3,)), draws.rand(0, samples, (3,))
    assert 0 <= float(uniform.min()) < float(uniform.max()) < 1
    whole = draws.randint(0, samples, -2, 3, ())
    assert whole.shape == (5000,)
    assert whole.unique().tolist() == [-2, -1, 0, 1, 2]
    assert (draws.drawn(0), draws.drawn(1)) == (3, 0)
    again = SampleDraws(seed=4)
    assert torch.equal(again.randn(0, samples[1000:1007], (3,)), normal[1000:1007])
    assert not torch.equal(again.randn(0, samples[:7], (3,)), normal[:7])  # the second draw of a step
    assert not torch.equal(again.randn(1, samples[:7], (3,)), normal[:7])


@pytest.mark.parametrize(
    ("samples", "shape"), [(5000, (3,)), (5000, ()), (200, (100,)), (64, (8, 64)), (1, (100_000,))]
)
def test_numbers_drawn_by_sample_have_means_and_correlations_of_chance(samples: int, shape: tuple[int, ...]) -> None:
    """Of 30 seeds: sums of what has mean 0 and deviation 1, over the root of their number, spread by about 1."""
    sums: dict[str, list[Tensor]] = {}
    for seed in range(30):
        draws, ids = SampleDraws(seed), torch.arange(samples)
        normal, uniform = draws.randn(0, ids, shape), (draws.rand(0, ids, shape) - 0.5) * 12**0.5
        for name, values in (("normal", normal), ("square", (normal.square() - 1) / 2**0.5), ("uniform", uniform)):
            flat = values.flatten()
            sums.setdefault(name, []).append(flat.sum() / len(flat) ** 0.5)
            sums.setdefault(f"{name} beside it", []).append((flat[1:] * flat[:-1]).sum() / len(flat) ** 0.5)
    for name in ("normal", "square", "uniform"):
        for kind in (name, f"{name} beside it"):
            found = torch.stack(sums[kind])
            assert found.abs().max() < 4.5, kind
            assert 0.5 < found.square().mean() < 2.0, kind
