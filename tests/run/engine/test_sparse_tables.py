"""Embeddings with sparse gradients under every data plan, against plain torch loops in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_kit import BATCH, Seen, Training, agreed, plan_of, recipe_of, train
from engine_models import Tables, squares, tables_blueprint, tables_sample
from torch import Tensor, nn

from weft.config.plan import Plan
from weft.config.recipe import OptimizerRecipe, ParameterGroup
from weft.errors import PlanError, RecipeError
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.techniques.data.sparse import SparseReducer
from weft.verify.numerics import TOLERANCES, assemble, compare, one_process

STEPS = 5
RATE = 0.05
PLAIN = OptimizerRecipe(name="sgd", momentum=0.0, learning_rate=RATE, max_grad_norm=0.5)
RULES = {
    rule: OptimizerRecipe(
        learning_rate=RATE,
        betas=(0.9, 0.99),
        sparse_rule=rule,
        max_grad_norm=0.5,
        epsilon=1e-8,  # type: ignore[arg-type]
    )
    for rule in ("sgd", "adagrad", "adam")
}
PLANS = {
    1: {"one": plan_of()},
    2: {
        "replicate": plan_of(replicate=2),
        "zero1": plan_of(replicate=2, zero=1),
        "zero2": plan_of(replicate=2, zero=2),
        "zero3": plan_of(shard=2, zero=3),
        "uneven": plan_of(replicate=2, zero=1, shares=(3, 1)),
        "tensor": plan_of(tensor=2),
    },
}


def masters(seen: list[Seen]) -> dict[str, Tensor]:
    return {name: t for name, t in assemble([one.state for one in seen]).items() if name.startswith("model/")}


def torch_loop(optimizers: Callable[[Tables], list[torch.optim.Optimizer]], *, sparse: bool) -> dict[str, Tensor]:
    """One process, no Weft: the mean loss of the batch, torch's clipping and torch's optimizers."""
    module = tables_blueprint(sparse=sparse).module
    assert isinstance(module, Tables)
    made = optimizers(module)
    for step in range(STEPS):
        samples = [tables_sample(step * BATCH + i) for i in range(BATCH)]
        batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
        loss, count = squares(module(batch["tokens"], batch["tags"]), batch)
        module.zero_grad()
        (loss / count).backward()
        norm = sum(
            float((p.grad.to_dense() if p.grad.is_sparse else p.grad).square().sum()) for p in _with_grad(module)
        )
        for parameter in _with_grad(module):
            assert parameter.grad is not None
            parameter.grad *= min(1.0, 0.5 / (norm**0.5 + 1e-6))
        for optimizer in made:
            with torch.sparse.check_sparse_tensor_invariants():  # torch warns where nobody says whether to check
                optimizer.step()
    return {f"model/{name}": parameter.detach() for name, parameter in module.named_parameters()}


def _with_grad(module: nn.Module) -> list[Any]:
    return [parameter for parameter in module.parameters() if parameter.grad is not None]


def _split(module: Tables) -> tuple[list[Tensor], list[nn.Parameter]]:
    tables = [module.words.weight, module.tags.weight]
    return tables, [p for p in module.parameters() if all(p is not t for t in tables)]


def rest(module: Tables) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_split(module)[1], lr=RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


REFERENCES: dict[str, tuple[Callable[[Tables], list[torch.optim.Optimizer]], bool]] = {
    "plain": (lambda m: [torch.optim.SGD(m.parameters(), lr=RATE)], False),
    "sgd": (lambda m: [torch.optim.SGD(_split(m)[0], lr=RATE), rest(m)], False),
    "adagrad": (lambda m: [torch.optim.Adagrad(_split(m)[0], lr=RATE, eps=1e-8), rest(m)], False),
    "adam": (lambda m: [torch.optim.SparseAdam(_split(m)[0], lr=RATE, betas=(0.9, 0.99)), rest(m)], True),
}


def run_rules(plans: dict[str, Plan]) -> dict[str, dict[str, Seen]]:
    """All rules under all plans on one rank, one after the other."""
    build = partial(tables_blueprint, sparse=True)
    optimizers = {"plain": PLAIN, **RULES}
    return {
        name: {
            rule: train(recipe_of(optimizer=optimizer), plan, STEPS, build, tables_sample)
            for rule, optimizer in optimizers.items()
        }
        for name, plan in plans.items()
    }


@pytest.mark.parametrize("world", PLANS)
def test_tables_equal_a_dense_process_of_plain_torch(ranks: Any, world: int) -> None:
    seen = ranks.run(world, run_rules, PLANS[world])
    expected = {rule: torch_loop(optimizers, sparse=sparse) for rule, (optimizers, sparse) in REFERENCES.items()}
    for name in PLANS[world]:
        for rule in REFERENCES:
            actual = [one[name][rule] for one in seen]
            agreed(actual)
            worst = compare(expected[rule], masters(actual))[0]
            assert worst.relative < TOLERANCES["fp64"], f"{rule} under {name}: {worst}"


def sparse_decoder(*, sparse: bool) -> Blueprint:
    blueprint = build_model(DECODER)
    blueprint.module.get_submodule("embedding").sparse = sparse  # type: ignore[assignment]
    return blueprint


DECODER = recipe_of(optimizer=PLAIN, tie_embeddings=False)


def run_decoders(plans: dict[str, Plan], sparse: bool) -> dict[str, Seen]:
    return {name: train(DECODER, plan, 3, partial(sparse_decoder, sparse=sparse)) for name, plan in plans.items()}


def test_a_table_in_a_pipeline_and_under_sequence_parallelism(ranks: Any) -> None:
    """The decoder's table: of the first stage, of a zero-bubble schedule, cut over the vocabulary, and of ZeRO-3."""
    plans = {
        "pipeline": plan_of(pipeline=2, replicate=2, zero=1),
        "zero bubble": plan_of(pipeline=2, tensor=2, schedule="zbv", chunks=2),
        "sequence": plan_of(tensor=2, replicate=2, zero=2, sequence=True),
        "zero3": plan_of(pipeline=2, shard=2, zero=3),
    }
    (expected,) = ranks.run(1, run_decoders, {"one": one_process(plan_of())}, sparse=False)
    actual = ranks.run(4, run_decoders, plans, sparse=True)
    for name in plans:
        worst = compare(masters([expected["one"]]), masters([one[name] for one in actual]))[0]
        assert worst.relative < TOLERANCES["fp64"], f"{name}: {worst}"


def run_vocabulary(plan: Plan, rule: str) -> Seen:
    build = partial(tables_blueprint, sparse=True, vocabulary=True)
    return train(recipe_of(optimizer=RULES[rule]), plan, STEPS, build, tables_sample)


def test_a_table_cut_over_the_tensor_axis(ranks: Any) -> None:
    plan = plan_of(tensor=2, replicate=2, zero=1)
    results = ranks.run(4, run_vocabulary, plan, "adagrad")
    optimizers, sparse = REFERENCES["adagrad"]
    worst = compare(torch_loop(optimizers, sparse=sparse), masters(results))[0]
    assert worst.relative < 1e-10, str(worst)
    with pytest.raises(PlanError, match=r'words\.weight has sparse gradients.*Give words the kind "replicate"'):
        ranks.run(4, run_vocabulary, plan, "adam")


def run_low_precision(plan: Plan) -> tuple[Seen, dict[str, Any]]:
    training = Training(recipe_of("bf16", RULES["adam"]), plan, partial(tables_blueprint, sparse=True), tables_sample)
    for step in range(3):
        training.step(step)
    store = next(s for s in training.state.model.stores.stores if isinstance(s, SparseReducer))
    facts = {
        "copies": [bool(torch.equal(p.detach().view(-1), s.master.bfloat16())) for p, s in _tables(training, store)],
        "dtypes": {str(p.dtype) for p, _ in _tables(training, store)} | {str(s.master.dtype) for s in store.shards},
        "rows": [(s.rows.indices.numel(), str(s.rows.values.dtype)) for s in store.shards if s.rows is not None],
        "bytes": store.model_state_bytes(),
    }
    return training.finished(), facts


def _tables(training: Training, store: SparseReducer) -> list[tuple[nn.Parameter, Any]]:
    parameters = dict(training.state.model.module.named_parameters())
    return [(parameters[shard.segments[0].layout.name], shard) for shard in store.shards]


def test_tables_in_bf16_have_fp32_masters_and_fp32_rows(ranks: Any) -> None:
    for seen, facts in ranks.run(2, run_low_precision, plan_of("bf16", replicate=2, zero=2)):
        assert facts["copies"] == [True, True], "the weights are the masters, cast once per step"
        assert facts["dtypes"] == {"torch.bfloat16", "torch.float32"}
        assert all(dtype == "torch.float32" for _, dtype in facts["rows"])
        sizes = 40 * 6 + 40 * 4
        assert facts["bytes"]["parameters"] == 2 * sizes
        assert facts["bytes"]["masters"] == 4 * sizes
        names = {stored.name for stored in seen.state}
        assert {
            "optimizer/exp_avg/words.weight",
            "optimizer/exp_avg_sq/tags.weight",
            "optimizer/step/tags.weight",
        } <= names


def refuse(recipe: Any, **arguments: bool) -> None:
    Training(recipe, plan_of(), partial(tables_blueprint, sparse=True, **arguments), tables_sample)


def test_optimizers_and_ties_that_do_not_fit_are_refused(ranks: Any) -> None:
    decay = OptimizerRecipe(weight_decay=0.1, sparse_rule="adam")
    with pytest.raises(RecipeError, match=r"words\.weight has sparse gradients.*adamw also moves rows.*sparse_rule"):
        ranks.run(1, refuse, recipe_of(optimizer=OptimizerRecipe()))
    with pytest.raises(RecipeError, match=r"weight_decay = 0\.1 also moves rows"):
        ranks.run(1, refuse, recipe_of(optimizer=decay))
    group = ParameterGroup(match="*s.weight", weight_decay=0.0)
    ranks.run(1, refuse, recipe_of(optimizer=OptimizerRecipe(weight_decay=0.1, sparse_rule="adam", groups=(group,))))
    with pytest.raises(
        RecipeError, match=r"words\.weight belongs to an embedding with sparse=True and is tied to head"
    ):
        ranks.run(1, refuse, recipe_of(optimizer=PLAIN), tied=True)
