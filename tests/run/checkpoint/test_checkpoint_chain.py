"""One state through a chain of layouts, each saving what the one before has saved: digests of every tensor stay."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import xxhash
from pool import RankPool
from test_checkpoint_plans import plan_of, recipe_of

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import Plan
from weft.config.recipe import DecoderShape, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers, StoredCheckpoint
from weft.run.engine import create_training

OPTIMIZERS = {
    "adamw": OptimizerRecipe(average_decay=0.9),
    "adamw alone": OptimizerRecipe(),
    "sgd": OptimizerRecipe(name="sgd", average_decay=0.9),
    "plain sgd": OptimizerRecipe(name="sgd", momentum=0.0),
    "adafactor": OptimizerRecipe(name="adafactor", average_decay=0.9),
    "lamb": OptimizerRecipe(name="lamb", average_decay=0.9),
    "lars": OptimizerRecipe(name="lars", average_decay=0.9),
}
DENSE = DecoderShape(num_layers=4, hidden_size=16, num_heads=4, vocabulary_size=64, sequence_length=8)
MIXTURE = replace(DENSE, num_experts=4, top_k=2, expert_ffn_size=8, ffn_size=16, first_dense_layers=1)
MODELS = {"dense": DENSE, "dense untied": replace(DENSE, tie_embeddings=False), "mixture": MIXTURE}

LAYOUTS: dict[str, Plan] = {
    "data 4": plan_of(replicate=4),
    "tensor 4": plan_of(tensor=4),
    "pipeline 4": plan_of(pipeline=4),
    "tensor 2 x pipeline 2": plan_of(tensor=2, pipeline=2),
    "ZeRO-3 2": plan_of(3, shard=2),
    "context 2": plan_of(context=2),
    "expert 2": plan_of(1, shard=2, expert=2),
    "one process": plan_of(),
}
OWING = {
    "compression": {"compression": "topk", "topk_share": 0.25},
    "local steps": {"local_steps": 4},
}


def layouts_of(model: str) -> dict[str, Plan]:
    """The chain; a model without experts goes through ZeRO-2 instead of expert parallelism."""
    return LAYOUTS if model == "mixture" else {**LAYOUTS, "expert 2": plan_of(2, shard=2)}


def recipe_for(model: str, optimizer: str) -> Recipe:
    made = recipe_of(ModelRecipe(reference="decoder", shape=MODELS[model], freeze=("*norm*",)))
    permit = PermitRecipe(compression=("topk",), local_steps=8)
    return replace(made, optimizer=OPTIMIZERS[optimizer], permit=permit)


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def pass_on(recipe: Recipe, plan: Plan, source: str | None, target: str) -> list[str]:
    """Load what is in `source` under the plan, or make values up, and save it into `target`; return the warnings."""
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    training = create_training(recipe, plan, build_model(recipe), mesh, Recorder())
    shards = training.checkpoint_shards()
    peers = Peers.of_group(mesh["world"])
    listener = Listener()
    logging.getLogger("weft.run.checkpoint").addHandler(listener)
    try:
        if source is not None:
            Checkpointer(Path(source), peers).load("latest", shards)
        else:
            generator = torch.Generator().manual_seed(3)
            for shard in shards:
                made = torch.rand(shard.tensor.shape, generator=generator) * 100
                shard.tensor.copy_(made.to(shard.tensor.dtype))
        Checkpointer(Path(target), peers, file_bytes=5000).save(1, shards, {})
    finally:
        logging.getLogger("weft.run.checkpoint").removeHandler(listener)
    return listener.texts


@dataclass(frozen=True)
class Chain:
    """Passes one state on from folder to folder."""

    ranks: RankPool
    folder: Path
    recipe: Recipe

    def step(self, plan: Plan, source: str | None, target: str) -> list[str]:
        """Return what rank 0 warned of, and the others did not."""
        came_from = None if source is None else str(self.folder / source)
        results = self.ranks.run(plan.mesh.world_size, pass_on, self.recipe, plan, came_from, str(self.folder / target))
        assert not [texts for texts in results[1:] if texts]
        return results[0]

    def digests(self, name: str, *, of_plan: bool = False) -> dict[str, str]:
        """Digest of each tensor, without those of one plan alone unless they are asked for."""
        stored = StoredCheckpoint(self.folder / name / "step-000001")
        return {
            key: xxhash.xxh3_128_hexdigest(stored.whole(key).reshape(-1).view(torch.uint8).numpy().tobytes())
            for key in stored.runs
            if of_plan or not key.startswith(("compression/", "local/"))
        }


def go_through(chain: Chain, layouts: dict[str, Plan], first: str, expected: dict[str, str]) -> None:
    source = first
    for name, plan in layouts.items():
        warnings = chain.step(plan, source, name)
        assert warnings == [] or source == first, f"under {name}"
        actual = chain.digests(name, of_plan=True)
        assert actual.keys() == expected.keys(), f"under {name}"
        assert [key for key in expected if actual[key] != expected[key]] == [], f"under {name}"
        source = name


CASES = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_digests_stay_through_eight_layouts(ranks: RankPool, tmp_path: Path, model: str, optimizer: str) -> None:
    chain = Chain(ranks, tmp_path, recipe_for(model, optimizer))
    chain.step(plan_of(), None, "begin")
    expected = chain.digests("begin", of_plan=True)
    kinds = {key.split("/")[0] for key in expected}
    assert kinds >= {"model", "optimizer" if optimizer != "plain sgd" else "model"}
    assert len(set(expected.values())) > len(expected) // 2, "made-up values differ"
    go_through(chain, layouts_of(model), "begin", expected)


@pytest.mark.parametrize("owing", OWING)
def test_what_one_plan_alone_has_is_kept_by_it_and_named_by_others(ranks: RankPool, tmp_path: Path, owing: str) -> None:
    """Residuals of compressed gradients, and replicas that step by themselves."""
    plan = LAYOUTS["data 4"]
    plan = replace(plan, data_parallel=replace(plan.data_parallel, **OWING[owing]))
    chain = Chain(ranks, tmp_path, recipe_for("dense", "adamw alone"))
    chain.step(plan, None, "begin")
    assert chain.step(plan, "begin", "again") == []
    own = chain.digests("begin", of_plan=True)
    assert own == chain.digests("again", of_plan=True)
    expected = chain.digests("begin")
    assert own.keys() > expected.keys()
    (warning,) = chain.step(LAYOUTS["tensor 4"], "again", "without")
    assert ("compressed gradients still owed" if owing == "compression" else "the local_steps that") in warning
    assert "dropped" in warning
    assert chain.digests("without", of_plan=True) == expected
