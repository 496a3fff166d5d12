"""What one plan saves, every other plan loads: real models, real ranks, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from pool import RankPool
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan, TensorParallelPlan
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
)
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.export import read_tensors
from weft.run.engine import create_training
from weft.techniques.tensor.settings import TensorScheme

PREFIXES = ("model/", "buffer/", "optimizer/", "average/")


def recipe_of(model: ModelRecipe, optimizer: str = "adamw") -> Recipe:
    return Recipe(
        model=model,
        batch=BatchRecipe(global_batch_size=8),
        optimizer=OptimizerRecipe(name=optimizer, average_decay=0.9),  # type: ignore[arg-type]
        run=RunRecipe(steps=10),
    )


def decoder(optimizer: str = "adamw", *, tied: bool = True) -> Recipe:
    shape = DecoderShape(
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        vocabulary_size=64,
        sequence_length=8,
        tie_embeddings=tied,
    )
    return recipe_of(ModelRecipe(reference="decoder", shape=shape, freeze=("*norm*",)), optimizer)


def convnet() -> Recipe:
    shape = ConvNetShape(num_layers=2, channels=6)
    return recipe_of(ModelRecipe(reference="convnet", shape=shape))


def plan_of(zero: int = 0, samples: int = 8, scheme: TensorScheme = "1d", **mesh: int) -> Plan:
    made = MeshPlan(**mesh)  # type: ignore[arg-type]
    return Plan(
        mesh=made,
        data_parallel=DataParallelPlan(zero=zero, bucket_bytes=2000, first_bucket_bytes=500),  # type: ignore[arg-type]
        tensor_parallel=TensorParallelPlan(scheme=scheme),
        microbatch=MicrobatchPlan(size=samples // made.data // 2, per_step=2),
        memory=MemoryPlan(fused_loss=scheme != "3d"),
    )


def pass_on(recipe: Recipe, plan: Plan, source: str | None, target: str) -> None:
    """Load what is in `source` under the plan (or, without one, make values up) and save it into `target`."""
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    training = create_training(recipe, plan, build_model(recipe), mesh, Recorder())
    shards = training.checkpoint_shards()
    peers = Peers.of_group(mesh["world"])
    if source is not None:
        Checkpointer(Path(source), peers).load("latest", shards)
    else:
        generator = torch.Generator().manual_seed(3)
        for shard in shards:
            made = torch.rand(shard.tensor.shape, generator=generator) * 100
            shard.tensor.copy_(made.to(shard.tensor.dtype))
    Checkpointer(Path(target), peers, file_bytes=5000).save(1, shards, {})


def content(folder: Path) -> dict[str, Tensor]:
    return {prefix + name: tensor for prefix in PREFIXES for name, tensor in read_tensors(folder, prefix)}


CHAINS = {
    "decoder": (
        decoder(),
        [
            plan_of(1, replicate=2),
            plan_of(3, shard=2),
            plan_of(1, tensor=2, replicate=2),
            plan_of(0, pipeline=2, tensor=2),
        ],
    ),
    "decoder untied": (
        decoder(tied=False),
        [plan_of(3, shard=2, tensor=2), plan_of(2, replicate=2, pipeline=2), plan_of(3, replicate=2, shard=2)],
    ),
    "decoder on grids": (
        decoder(),
        [
            plan_of(3, shard=2, tensor=4, scheme="2d"),
            plan_of(0, tensor=8, scheme="2.5d"),
            plan_of(0, tensor=2),
            plan_of(0, tensor=8, scheme="3d"),
        ],
    ),
    "decoder adafactor": (
        decoder("adafactor"),
        [plan_of(1, replicate=2), plan_of(1, tensor=2), plan_of(0, pipeline=2)],
    ),
    "convnet": (
        convnet(),
        [plan_of(1, replicate=2), plan_of(3, shard=2, tensor=2), plan_of(0, tensor=3), plan_of(0, pipeline=2)],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_state_goes_through_every_plan_unchanged(ranks: RankPool, tmp_path: Path, name: str) -> None:
    recipe, plans = CHAINS[name]
    folders = [tmp_path / str(at) for at in range(len(plans) + 1)]
    ranks.run(1, pass_on, recipe, plan_of(), None, str(folders[0]))
    expected = content(folders[0])
    assert {key.split("/")[0] for key in expected} >= {"model", "optimizer", "average"}
    for plan, (source, target) in zip(plans, itertools.pairwise(folders), strict=True):
        ranks.run(plan.mesh.world_size, pass_on, recipe, plan, str(source), str(target))
        actual = content(target)
        assert actual.keys() == expected.keys()
        different = [key for key in expected if not torch.equal(actual[key], expected[key])]
        assert different == [], f"under {plan.mesh}"
