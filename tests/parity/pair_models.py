"""Two towers whose loss sees the whole batch: products of samples by samples in the forward or in the loss, as people
write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from parity_models import Block
from torch import Tensor, nn

from weft.analysis.blueprint import build_blueprint
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.model.blueprint import Batch, Blueprint
from weft.model.families import SplitRule
from weft.verify.numerics import Trial, run_trial

FORMS = ("outside", "matmul", "einsum", "linear", "distances", "both ways")
"""Where and how the towers are multiplied; `outside`: in the loss."""
LOSSES = ("softmax", "sigmoid", "hardest")


class Towers(nn.Module):
    """Two towers, and a scale that is learned."""

    def __init__(self, form: str, dropout: float) -> None:
        super().__init__()
        self.first_stem, self.second_stem = nn.Linear(6, 16), nn.Linear(6, 16)
        self.first, self.second = (nn.ModuleList(Block(dropout) for _ in range(2)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.form = form

    def forward(self, features: Tensor, others: Tensor) -> dict[str, Tensor]:
        first, second = self.first_stem(features), self.second_stem(others)
        for left, right in zip(self.first, self.second, strict=True):
            first, second = left(first), right(second)
        first, second, scale = F.normalize(first, dim=-1), F.normalize(second, dim=-1), self.scale.exp()
        if self.form == "outside":
            return {"first": first, "second": second, "scale": scale}
        match self.form:
            case "matmul":
                scores = first @ second.t()
            case "einsum":
                scores = torch.einsum("id,jd->ij", first, second)
            case "linear":
                scores = F.linear(first, second)
            case "distances":
                scores = -(first[:, None] - second[None]).square().sum(-1)
            case _:
                scores = (torch.matmul(first, second.mT) + torch.matmul(second, first.mT).mT) / 2
        return {"first": first, "scores": scores * scale}


class PairLoss:
    """It tells pairs from all others, weighted by a field of the batch."""

    per_sample = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        scores = outputs.get("scores")
        if scores is None:
            scores = outputs["first"] @ outputs["second"].t() * outputs["scale"]
        own = torch.arange(scores.shape[0], device=scores.device)
        if self.kind == "softmax":
            each = F.cross_entropy(scores, own, reduction="none") + F.cross_entropy(scores.t(), own, reduction="none")
        elif self.kind == "sigmoid":
            each = -F.logsigmoid((2 * torch.eye(len(own), dtype=scores.dtype) - 1) * scores).sum(1)
        else:
            hardest = (scores - 1e3 * torch.eye(len(own), dtype=scores.dtype)).amax(1)
            each = (1 + hardest - scores.diagonal()).relu()
        weights = 1 + batch["weights"].to(scores.dtype)[:, 0].square()
        return (each * weights).sum(), weights.sum().to(torch.float64)


def build_pairs(form: str = "outside", loss: str = "softmax", dropout: float = 0.1) -> Blueprint:
    return Blueprint(
        module=Towers(form, dropout),
        inputs={"features": "features", "others": "others"},
        loss=PairLoss(loss),
        initialise=None,
        split=tuple(
            SplitRule(match=f"{stack}.*.{name}", kind=kind)
            for stack in ("first", "second")
            for name, kind in (("up", "column"), ("down", "row"))
        ),
        divisible={"hidden_size": 24},
        example=lambda n: {
            "features": torch.empty(n, 6, device="meta"),
            "others": torch.empty(n, 6, device="meta"),
            "weights": torch.empty(n, 1, device="meta"),
        },
    )


def run_looked(recipe: Recipe, plan: Plan, steps: int) -> Trial:
    """One rank of a model by folder, split as a look at it shows."""
    return run_trial(recipe, plan, lambda: build_blueprint(recipe, plan), steps=steps)
