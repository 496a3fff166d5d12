"""Auxiliary losses that are statistics over the whole batch: the same under every plan, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from engine_kit import ADAMW, BATCH, Seen, Training, agreed, plan_of, recipe_of
from torch import Tensor, nn

from weft.analysis.facts import facts_of_blueprint
from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan, Plan
from weft.config.recipe import OptimizerRecipe
from weft.errors import PlanError, RecipeError
from weft.events import StepEvent
from weft.model.auxiliary import AuxiliaryLoss
from weft.model.blueprint import Batch, Blueprint
from weft.model.families import CutTable
from weft.techniques.data.auxiliary import auxiliary_runner
from weft.techniques.randomness.keyed_dropout import KeyedDropout
from weft.verify.numerics import TOLERANCES, assemble, compare, one_process

LENGTH, EXPERTS, STEPS = 6, 3, 3
WEIGHT = 0.7
PLAIN = OptimizerRecipe(name="sgd", learning_rate=0.5, max_grad_norm=None, momentum=0.0)
PLANS = {
    2: {
        "unequal shares": plan_of(replicate=2, micro=2, shares=(3, 1)),
        "zero 1": plan_of(replicate=2, micro=4, zero=1),
        "zero 2": plan_of(replicate=2, micro=2, zero=2),
        "zero 3": plan_of(shard=2, micro=2, zero=3),
        "zero 3, unequal": plan_of(shard=2, micro=2, zero=3, shares=(3, 1)),
    },
    1: {"accumulation": plan_of(micro=2), "many": plan_of(micro=1)},
}


class Output(NamedTuple):
    predicted: Tensor
    probabilities: Tensor


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.dropout = nn.Dropout(0.3)
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 6))

    def forward(self, features: Tensor) -> Output:
        x = torch.tanh(self.dropout(self.stem(features)))
        probabilities = self.router(x).softmax(-1)
        return Output((x * (probabilities @ self.experts)).sum(-1), probabilities)


def squares(outputs: Output, batch: Batch) -> tuple[Tensor, Tensor]:
    weights = batch["weights"]
    return ((outputs.predicted - batch["labels"]).square() * weights).sum(), weights.sum()


def loads(outputs: Output, batch: Batch) -> tuple[Tensor, Tensor]:
    """Over all tokens, also those without a label: which expert comes first, and the probabilities."""
    p = outputs.probabilities.flatten(0, -2)
    return torch.stack([nn.functional.one_hot(p.argmax(-1), EXPERTS).to(p), p]).sum(1), p.new_tensor(len(p))


def balance(means: Tensor) -> Tensor:
    return EXPERTS * (means[0] * means[1]).sum()


def entropy(means: Tensor) -> Tensor:
    return (means[1] * means[1].log()).sum()


TERMS = {
    "balance": AuxiliaryLoss(sums=loads, value=balance, weight=WEIGHT),
    "entropy": AuxiliaryLoss(sums=loads, value=entropy, weight=0.2),
}


def loss(outputs: Output, batch: Batch) -> tuple[Tensor, Tensor]:
    return squares(outputs, batch)


loss.auxiliary = TERMS  # type: ignore[attr-defined]  # as a user writes it


def blueprint(given: Callable[..., Any] = loss, cut: CutTable | None = None) -> Blueprint:
    torch.manual_seed(8)
    return Blueprint(
        module=Routed().double(), inputs={"features": "features"}, loss=given, initialise=None,
        sequence_length=LENGTH, cut=cut,
    )  # fmt: skip


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "features": torch.randn(1, LENGTH, 4, generator=generator, dtype=torch.float64) + index % 8 / 4,
        "labels": torch.randn(1, LENGTH, generator=generator, dtype=torch.float64),
        "weights": (torch.rand(1, LENGTH, generator=generator) < 0.1 + index % 8 / 9).double(),
    }


def train(plans: dict[str, Plan], optimizer: OptimizerRecipe = ADAMW) -> dict[str, tuple[Seen, list[dict[str, float]]]]:
    results: dict[str, tuple[Seen, list[dict[str, float]]]] = {}
    for name, plan in plans.items():
        training = Training(recipe_of(optimizer=optimizer), plan, blueprint, sample)
        values: list[dict[str, float]] = []

        def note(result: StepEvent, values: list[dict[str, float]] = values) -> StepEvent:
            values.append(dict(result.auxiliary))
            return result

        stepper = training.state.stepper
        training.state.stepper = lambda *given, stepper=stepper, **more: note(stepper(*given, **more))  # type: ignore[assignment]
        for step in range(STEPS):
            training.step(step)
        results[name] = training.finished(), values
        training.state.close()
    return results


@pytest.mark.parametrize("world", PLANS)
def test_terms_are_those_of_the_whole_batch_under_every_plan(ranks: Any, world: int) -> None:
    (alone,) = ranks.run(1, train, {"alone": one_process(PLANS[world][next(iter(PLANS[world]))])})
    expected, values = alone["alone"]
    actual = ranks.run(world, train, PLANS[world])
    for name in PLANS[world]:
        seen = agreed([one[name][0] for one in actual])
        assert seen.losses == pytest.approx(expected.losses, rel=1e-10), name
        assert seen.norms == pytest.approx(expected.norms, rel=1e-10), name
        worst = compare(assemble([expected.state]), assemble([one[name][0].state for one in actual]))[0]
        assert worst.relative < TOLERANCES["fp64"], f"{name}: {worst}"
        for one in actual:
            for ours, theirs in zip(one[name][1], values, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10), name


def test_one_step_is_that_of_plain_torch(ranks: Any) -> None:
    """The objective written down as one expression: mean loss, and weighted terms, which the loss does not hold."""
    plan = plan_of(micro=2)
    (actual,) = ranks.run(1, one_plain_step, plan)
    module = blueprint().module
    dropout = KeyedDropout(0.3, "dropout", actual["context"])
    module.dropout = dropout
    batch = {name: torch.cat([sample(i)[name] for i in range(BATCH)]) for name in sample(0)}
    with actual["context"].entered(actual["state"]):
        outputs = module(batch["features"])
    total, count = squares(outputs, batch)
    sums, number = loads(outputs, batch)
    mean = total / count
    (mean + WEIGHT * balance(sums / number) + 0.2 * entropy(sums / number)).backward()
    assert actual["loss"] == pytest.approx(float(mean.detach()), rel=1e-12)
    for name, parameter in module.named_parameters():
        expected = parameter.detach() - 0.5 * parameter.grad
        torch.testing.assert_close(actual["weights"][name], expected, rtol=1e-10, atol=1e-12)


def one_plain_step(plan: Plan) -> dict[str, Any]:
    from weft.techniques.core import MicrobatchState

    training = Training(recipe_of(optimizer=PLAIN), plan, blueprint, sample)
    training.step(0)
    part = training.state.model.parts[0]
    ids = torch.arange(BATCH)
    part.context.current = None
    return {
        "loss": training.seen.losses[0],
        "weights": {name: p.detach().clone() for name, p in part.module.named_parameters()},
        "context": part.context,
        "state": MicrobatchState(seed=training.recipe.run.seed, step=0, sample_ids=ids, sequence_length=None),
    }


def test_a_pipeline_is_refused_with_its_reason() -> None:
    cut = CutTable(entry="stem", blocks=("dropout",), tail=("router",))
    facts = facts_of_blueprint(blueprint(cut=cut), recipe_of())
    assert facts.num_blocks == 1
    assert "its loss has auxiliary terms (balance, entropy), which need the forwards of all" in facts.why_not(
        "pipeline"
    )
    assert facts_of_blueprint(blueprint(squares, cut), recipe_of()).why_not("pipeline") == ""


def test_a_runner_of_a_technique_is_refused() -> None:
    """What no check has seen, such as a plan that a program hands over."""
    known: Any = SimpleNamespace(blueprint=blueprint())
    stages: Any = object()
    with pytest.raises(PlanError, match=r"auxiliary terms \(balance, entropy\).*Use plan.mesh.pipeline = 1"):
        auxiliary_runner(known, [], Mesh(MeshPlan(), torch.device("cpu")), stages)


def test_what_is_no_term_is_refused() -> None:
    def wrong(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return squares(outputs, batch)

    wrong.auxiliary = {"balance": loads}  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match="which is not name → AuxiliaryLoss"):
        Training(recipe_of(), replace(plan_of(micro=BATCH)), lambda: blueprint(wrong), sample)
