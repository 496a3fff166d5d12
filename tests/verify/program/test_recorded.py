"""What ranks are recorded to send is what is predicted, where the parity matrix has no cells: local steps, optimizers
that look at whole parameters, sparse tables, compression between replicas, and fingerprints of batches."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder, StepTraffic
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.events.ring import RankRing, ring_path
from weft.model.blueprint import Batch, Blueprint
from weft.model.build import build_model
from weft.model.losses import count_labels
from weft.run.engine import create_training
from weft.techniques.data.sparse import SparseReducer
from weft.verify.dry_run import trace_sends, unlike_plan
from weft.verify.numerics import TrialData
from weft.watch.rings import RingReader

STEPS = 5
SHAPE = DecoderShape(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, vocabulary_size=64, sequence_length=11
)


@dataclass(frozen=True)
class Case:
    mesh: MeshPlan
    zero: int
    data: dict[str, Any]
    optimizer: dict[str, Any]
    build: Callable[[Recipe], Blueprint] = build_model
    is_fingerprinted: bool = False

    @property
    def plan(self) -> Plan:
        data = DataParallelPlan(
            zero=self.zero,  # type: ignore[arg-type]
            bucket_bytes=8192,
            first_bucket_bytes=1024,
            **self.data,
        )
        return Plan(mesh=self.mesh, data_parallel=data, microbatch=MicrobatchPlan(size=1, per_step=3))

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            model=ModelRecipe(reference="decoder", shape=SHAPE),
            batch=BatchRecipe(global_batch_size=self.plan.global_batch_size),
            optimizer=OptimizerRecipe(**self.optimizer),
            run=RunRecipe(steps=STEPS),
            permit=PermitRecipe(precision=("fp32",), compression=("int8",), local_steps=3),
        )


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 6, sparse=True)
        self.head = nn.Linear(6, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).mean(1))


def build_tables(recipe: Recipe) -> Blueprint:
    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs.square().sum(), torch.tensor(float(len(outputs)))

    return Blueprint(
        module=Tables(),
        inputs={"tokens": "tokens"},
        loss=loss,
        initialise=None,
        vocabulary_size=64,
        example=lambda size: {"tokens": torch.empty(size, 7, dtype=torch.int64, device="meta")},
    )


def case(mesh: MeshPlan, zero: int, optimizer: str = "adamw", **data: Any) -> Case:
    return Case(mesh, zero, data, {"name": optimizer})


ROUNDS = partial(case, local_steps=2)
CASES: dict[int, dict[str, Case]] = {
    2: {
        "local_sgd": ROUNDS(MeshPlan(replicate=2), 0, outer_learning_rate=1.0, outer_momentum=0.0),
        "lamb": case(MeshPlan(replicate=2), 1, "lamb"),
        "adafactor": case(MeshPlan(shard=2), 3, "adafactor"),
        "adafactor_tensor": case(MeshPlan(tensor=2), 0, "adafactor"),
        "uneven_buckets": case(MeshPlan(replicate=2), 2, "adafactor"),
        "tables": replace(case(MeshPlan(replicate=2), 1), build=build_tables, optimizer={"sparse_rule": "adagrad"}),
        "fingerprint": replace(case(MeshPlan(replicate=2), 0), is_fingerprinted=True),
    },
    4: {
        "diloco": ROUNDS(MeshPlan(replicate=2, shard=2), 1),
        "diloco_zero3": ROUNDS(MeshPlan(replicate=2, shard=2), 3),
        "lars": case(MeshPlan(shard=2, tensor=2), 2, "lars"),
        "lamb_pipeline": case(MeshPlan(shard=2, pipeline=2), 3, "lamb"),
        "adafactor_hybrid": case(MeshPlan(replicate=2, shard=2), 3, "adafactor"),
        "int8_hybrid": case(MeshPlan(replicate=2, shard=2), 3, compression="int8"),
        "onebit_tensor": replace(
            case(MeshPlan(replicate=2, tensor=2), 1, compression="onebit", onebit_warmup_steps=2),
            optimizer={"max_grad_norm": None},
        ),
    },
}


def recorded(cases: dict[str, Case]) -> dict[str, list[list[str]]]:
    """On this rank: what each step of each case sent otherwise than predicted."""
    results: dict[str, list[list[str]]] = {}
    for name, one in cases.items():
        recipe, plan = one.recipe, one.plan
        mesh = Mesh(plan.mesh, torch.device("cpu"))
        stack = ExitStack()
        where = ring_path(Path(stack.enter_context(tempfile.TemporaryDirectory())), mesh.rank)
        recorder = Recorder(ring=RankRing.create(where, mesh.rank))
        reader = RingReader(where)
        blueprint = one.build(recipe)
        outline = trace_sends(blueprint)
        training = create_training(recipe, plan, blueprint, mesh, recorder)
        tables = [store for store in training.model.stores.stores if isinstance(store, SparseReducer)]
        data = TrialData(blueprint, plan, data_index=mesh.data_index, seed=7)
        results[name] = []
        for step in range(STEPS):
            batches, fingerprint = data.microbatches(step), 7.0 if one.is_fingerprinted else None
            recorder.collectives.take_launched()
            first = recorder.ring.num_collectives
            result = training.stepper(batches, step=step, learning_rate=1e-3, fingerprint=fingerprint)
            launched = recorder.collectives.take_launched()
            traffic = StepTraffic(
                step=step,
                is_first=step == 0,
                some_unused=result.some_unused,
                labels=[count_labels(batch) for batch in batches],
                rows=[(*key, most) for store in tables for key, most in store.most_rows.items()],
                sent=[(*kind, count) for kind, count in launched.items()],
            )
            fingerprinted = one.is_fingerprinted
            results[name].append(unlike_plan(recipe, plan, outline, mesh.rank, traffic, is_fingerprinted=fingerprinted))
            rows, names = reader.launched(), reader.names
            seen = Counter((names[r["axis"]], names[r["operation"]], int(r["num_bytes"])) for r in rows[first:])
            results[name][-1] += [] if seen == launched else [f"the ring has {seen}, and {launched} was launched"]
        stack.close()
        training.close()
        mesh.leave()
    return results


@pytest.mark.parametrize("backend", ["gloo", "cpu:weft"])
@pytest.mark.parametrize("world", CASES)
def test_recorded_is_predicted(ranks: Any, world: int, backend: str) -> None:
    for rank, results in enumerate(ranks.run(world, recorded, CASES[world], timeout=240.0, backend=backend)):
        for name, steps in results.items():
            assert steps == [[]] * STEPS, f"rank {rank} of {name}"
