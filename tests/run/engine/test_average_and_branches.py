"""A moving average beside training, parameters that not every step uses, and several trainings in one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from engine_kit import BATCH, Samples, Seen, Training, agreed, plan_of, recipe_of, train
from engine_models import branches_blueprint, branches_sample, squares
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.config.recipe import OptimizerRecipe
from weft.model.blueprint import Batch, Blueprint
from weft.verify.numerics import TOLERANCES, assemble, compare, one_process

ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, epsilon=1e-8, betas=(0.9, 0.95))
STEPS = 6
PLANS = {
    "zero0": plan_of(replicate=2),
    "zero1": plan_of(replicate=2, zero=1),
    "zero2": plan_of(replicate=2, zero=2),
    "zero3": plan_of(shard=2, zero=3),
}

# ── unused and conditionally used parameters ──────────────────────────────────────────────────────────────────────────


def run_branches(plans: dict[str, Plan]) -> dict[str, Seen]:
    recipe = recipe_of(optimizer=ADAMW)
    return {name: train(recipe, plan, STEPS, branches_blueprint, branches_sample) for name, plan in plans.items()}


def branches_by_torch() -> dict[str, Tensor]:
    """One process of plain torch, where a parameter without a gradient is left alone."""
    module = branches_blueprint().module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(STEPS):
        samples = [branches_sample(step * BATCH + i) for i in range(BATCH)]
        batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        loss, count = squares(module(batch["features"], batch["asks"]), batch)
        optimizer.zero_grad()
        (loss / count).backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    return {f"model/{name}": parameter.detach() for name, parameter in module.named_parameters()}


def test_unused_parameters_are_left_alone_as_in_plain_torch(ranks: Any) -> None:
    expected, first = branches_by_torch(), branches_blueprint().module.state_dict()
    assert not torch.equal(expected["model/rare.weight"], first["rare.weight"]), "two of six steps use it"
    actual = ranks.run(2, run_branches, PLANS)
    for name in PLANS:
        agreed([one[name] for one in actual])
        state = assemble([one[name].state for one in actual])
        worst = compare(expected, {key: tensor for key, tensor in state.items() if key.startswith("model/")})[0]
        assert worst.relative < TOLERANCES["fp64"], f"{name}: {worst}"
        assert torch.equal(state["model/never.weight"], first["never.weight"]), name
        assert float(state["optimizer/step/rare.weight"]) == 2.0, name
        assert float(state["optimizer/step/never.weight"]) == 0.0, name


# ── the moving average ────────────────────────────────────────────────────────────────────────────────────────────────


def run_averages(plans: dict[str, Plan]) -> dict[str, tuple[Seen, Seen, float, float]]:
    """With and without an average, evaluating after every step; and the loss of averages and of masters."""
    results: dict[str, tuple[Seen, Seen, float, float]] = {}
    for name, plan in plans.items():
        plain = train(recipe_of(optimizer=ADAMW), plan, 4)
        training = Training(recipe_of(optimizer=replace(ADAMW, average_decay=0.8)), plan)
        average, stores = training.state.average, training.state.model.stores
        assert average is not None
        inside = 0.0
        for step in range(4):
            training.step(step)
            with average.swapped(stores.gather_weights):
                inside = float(training.state.model.runner.evaluate(training.data.microbatches(0), step=0, seed=1).sum)
        outside = float(training.state.model.runner.evaluate(training.data.microbatches(0), step=0, seed=1).sum)
        results[name] = plain, training.finished(), inside, outside
    return results


def test_evaluation_takes_the_average_and_training_does_not_notice(ranks: Any) -> None:
    ((alone, _, _, _),) = [one["one"] for one in ranks.run(1, run_averages, {"one": one_process(PLANS["zero1"])})]
    single = ranks.run(1, run_averages, {"one": one_process(PLANS["zero1"])})[0]["one"]
    assert alone.losses == single[0].losses
    results = ranks.run(2, run_averages, PLANS)
    for name in PLANS:
        for plain, averaged, _, _ in (one[name] for one in results):
            assert averaged.losses == plain.losses, f"{name}: the average changes training"
            masters = [stored for stored in averaged.state if not stored.name.startswith("average/")]
            for ours, theirs in zip(masters, plain.state, strict=True):
                assert torch.equal(ours.tensor, theirs.tensor), f"{name}: {ours.name}"
        inside, outside = (sum(one[name][i] for one in results) for i in (2, 3))
        assert abs(inside - single[2]) <= 1e-10 * abs(inside), name
        assert abs(outside - single[3]) <= 1e-10 * abs(outside), name
        assert abs(inside - outside) > 1e-3, "the average is not the last weights"


# ── several models and optimizers in one loop ─────────────────────────────────────────────────────────────────────────


def dense(name: str, sizes: Sequence[int], loss: Callable[[Any, Batch], Any]) -> Blueprint:
    torch.manual_seed(len(name))
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return Blueprint(
        module=nn.Sequential(*layers[:-1]).double(), inputs={"input": "features"}, loss=loss, initialise=None
    )


def distil(plan: Plan) -> Seen:
    """A student learns what a frozen teacher of the user's says: the loss closes over it."""
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).double().requires_grad_(False)

    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return (outputs - teacher(batch["features"])).square().sum(), torch.tensor(float(len(outputs)))

    return train(recipe_of(optimizer=ADAMW), plan, 4, lambda: dense("student", (6, 8, 3), loss), branches_sample)


def oppose(plan: Plan) -> tuple[Seen, Seen]:
    """A generator and a critic, each frozen while the other steps, with two optimizers on one mesh.

    Each reads the other's weights in its loss: under ZeRO-0 to 2 those are whole on every rank.
    """
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    pair: dict[str, Training] = {}

    def judged(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        verdict = pair["critic"].state.model.module(outputs)
        return nn.functional.softplus(-verdict).sum(), torch.tensor(float(len(outputs)))

    def told_apart(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        critic = pair["critic"].state.model.module
        made = pair["generator"].state.model.module(batch["noise"]).detach()
        false = nn.functional.softplus(critic(made)).sum()
        return nn.functional.softplus(-outputs).sum() + false, torch.tensor(float(len(outputs)))

    pair["generator"] = Training(
        recipe_of(optimizer=ADAMW), plan, lambda: dense("generator", (6, 8, 4), judged), pair_sample, mesh
    )
    sgd = OptimizerRecipe(name="sgd", learning_rate=0.1, max_grad_norm=None)
    pair["critic"] = Training(
        recipe_of(optimizer=sgd), plan, lambda: dense("critic", (4, 8, 1), told_apart), pair_sample, mesh
    )
    for step in range(5):
        for turn, other in (("critic", "generator"), ("generator", "critic")):
            pair[other].state.model.module.requires_grad_(False)
            batches = Samples(pair_sample, plan, mesh).microbatches(step)
            if turn == "critic":
                batches = [{**batch, "noise": batch["features"], "features": batch["real"]} for batch in batches]
            pair[turn].step(step, batches)
            pair[other].state.model.module.requires_grad_(True)
    return pair["generator"].finished(), pair["critic"].finished()


def pair_sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "features": torch.randn(1, 6, generator=generator, dtype=torch.float64),
        "real": torch.rand(1, 4, generator=generator, dtype=torch.float64),
    }


def run_pairs(plans: dict[str, Plan]) -> dict[str, tuple[Seen, Seen, Seen]]:
    """ZeRO-3 cuts the weights that the other model's loss reads, so a pair that reads each other's has ZeRO-0 to 2."""
    return {
        name: (distil(plan), *(oppose(plan) if plan.data_parallel.zero < 3 else (Seen(), Seen())))
        for name, plan in plans.items()
    }


def test_several_models_and_optimizers_in_one_loop_equal_one_process(ranks: Any) -> None:
    expected = ranks.run(1, run_pairs, {"one": one_process(PLANS["zero1"])})[0]["one"]
    assert expected[0].losses[-1] < expected[0].losses[0]
    actual = ranks.run(2, run_pairs, PLANS)
    for name, plan in PLANS.items():
        for index, title in enumerate(("student", "generator", "critic")):
            if plan.data_parallel.zero == 3 and index:
                continue
            agreed([one[name][index] for one in actual])
            state = assemble([one[name][index].state for one in actual])
            worst = compare(assemble([expected[index].state]), state)[0]
            assert worst.relative < TOLERANCES["fp64"], f"{title} under {name}: {worst}"
