"""Forwards of every signature that loops call: by position, by keyword, with nested inputs, with the loss within."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, FEATURES, PLANS, Hands, fp64, plainly, samples, under
from pool import RankPool
from test_own_loop import assert_alike
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.errors import RecipeError


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 8), nn.Linear(8, 4)

    def core(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ByPlace(Core):
    def forward(self, *inputs: Tensor) -> Tensor:
        return self.core(inputs[0] + 2 * inputs[1])


class ByPlaceAlone(Core):
    def forward(self, x: Tensor, /, gate: float = 1.0) -> Tensor:
        return self.core(x * gate)


class Mixed(Core):
    def forward(self, first: Tensor, *more: Any, scale: float = 1.0, **named: Tensor) -> Tensor:
        return self.core(first + more[0]["rows"] + named["last"]) * scale


class OfKeywords(Core):
    def forward(self, x: Tensor, *, y: Tensor, mode: str = "sum") -> Tensor:
        return self.core(x + y if mode == "sum" else x)


class OfPair(Core):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.core(pair[0] - pair[1])


@dataclass
class Item:
    rows: Tensor
    weights: Tensor


class OfItem(Core):
    def forward(self, item: Item) -> Tensor:
        return self.core(item.rows) * item.weights[:, None]


class OfPictures(Core):
    """In the way of detection: a tensor of its own size and a dictionary for each sample."""

    def forward(self, pictures: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        losses = [
            self.core(one.mean(0)).square().mean() * target["boxes"].sum()
            for one, target in zip(pictures, targets, strict=True)
        ]
        return {"loss": torch.stack(losses).mean()}


def of_pictures(model: nn.Module, x: Tensor) -> Any:
    sizes = [int(row[0] > 0) + 2 for row in x]
    pictures = [row.expand(size, FEATURES) for row, size in zip(x, sizes, strict=True)]
    return model(pictures, [{"boxes": torch.ones(size, 4)} for size in sizes])


CALLS: dict[type[Core], Callable[[nn.Module, Tensor], Any]] = {
    ByPlace: lambda model, x: model(x, x.tanh()),
    ByPlaceAlone: lambda model, x: model(x, 0.5),
    Mixed: lambda model, x: model(x, {"rows": x.tanh()}, scale=2.0, last=x),
    OfKeywords: lambda model, x: model(x, y=x.tanh()),
    OfPair: lambda model, x: model((x, x.tanh())),
    OfItem: lambda model, x: model(Item(x, x[:, 0])),
    OfPictures: of_pictures,
}


def trained(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """Each model for some steps."""
    losses = list[float]()
    with fp64():
        for kind, call in CALLS.items():
            torch.manual_seed(0)
            model = kind()
            optimizer, loader = torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(samples(16), BATCH)
            model, optimizer, loader = hands.prepare(model, optimizer, loader)
            for x, _ in loader:
                outputs = call(model, x)
                loss = outputs["loss"] if isinstance(outputs, dict) else outputs.square().mean()
                hands.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(hands.mean(loss))
    return losses, []


@pytest.mark.parametrize("name", ["alone", "data", "zero-3"])
def test_any_signature_is_called_as_it_is(ranks: RankPool, name: str) -> None:
    expected = ranks.run(1, plainly, trained)[0]
    for found in ranks.run(PLANS[name].mesh.world_size, under, PLANS[name], trained):
        assert_alike(found, expected)


def test_a_chosen_plan_may_be_called_by_position() -> None:
    """A plan is chosen by what the forward shows; nothing of that stays in the model."""
    with weft.session(quiet=True, record=False) as session:
        model = ByPlace()
        prepared = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
        session.backward(prepared(torch.ones(4, FEATURES), torch.ones(4, FEATURES)).sum())
        assert "_call_impl" not in vars(model)


def test_a_forward_without_samples_is_refused() -> None:
    with weft.session(quiet=True, record=False) as session:
        model = ByPlace()
        prepared = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
        with pytest.raises(RecipeError, match="no tensor with a row for each sample"):
            prepared(4, 5)


def of_library(hands: Hands, kind: str) -> tuple[list[float], list[Tensor]]:
    """A model of Transformers that makes its loss itself, called by what the loader gives."""
    import transformers

    with fp64():
        torch.manual_seed(0)
        tokens = torch.randint(1, 32, (24, 8), generator=torch.Generator().manual_seed(0))
        sizes: dict[str, Any] = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
        }
        if kind == "llama":
            model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
            rows = [{"input_ids": row, "labels": row} for row in tokens]
        else:
            model = transformers.BertForSequenceClassification(
                transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
            )
            mask = torch.ones(8, dtype=torch.int64)
            rows = [{"input_ids": row, "attention_mask": mask, "labels": row[0] % 2} for row in tokens]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(rows, BATCH, shuffle=True)  # type: ignore[arg-type]
        model, optimizer, loader = hands.prepare(model.double(), optimizer, loader)
        losses = list[float]()
        for batch in loader:
            outputs = model(**batch)
            hands.backward(outputs.loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(hands.mean(outputs.loss))
        return losses, []


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_models_of_transformers_make_their_losses(ranks: RankPool, kind: str) -> None:
    loop = partial(of_library, kind=kind)
    expected = ranks.run(1, plainly, loop)[0]
    for name in ("data", "zero-3", "tensor"):
        for found in ranks.run(2, under, PLANS[name], loop):
            # Llama rotates and normalises in fp32, whatever its dtype.
            torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-6, atol=0)
