"""Local steps in a loop of one's own: what `weft train`'s loop computes, where the last round ends, what is looked at
within one, and how a session is told."""

from __future__ import annotations

import warnings
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
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.blueprint import Batch, Blueprint
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.export import export_checkpoint
from weft.run.data import rank_range
from weft.run.engine import Trainer, create_training

BATCH, ROWS, WIDTH, CLASSES = 12, 50, 7, 3
STEPS, ROUND, SEED = 8, 3, 5
"""Rounds end after steps 3 and 6, and with the loop after 8."""
EPOCH = 5
"""Steps of an epoch."""


class Net(nn.Module):
    """Of odd sizes, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(WIDTH, 13)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(13, CLASSES)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.drop(self.stem(rows).tanh()))


def samples(size: int = ROWS) -> TensorDataset:
    rows = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(rows, rows[:, :CLASSES].argmax(-1))


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


PLANS: dict[str, tuple[dict[str, int], int, Any]] = {
    "2 replicas": ({"replicate": 2}, 0, 3),
    "2 uneven replicas": ({"replicate": 2}, 0, (1, 5)),
    "4 uneven replicas": ({"replicate": 4}, 0, (1, 3, 1, 1)),
    "2 replicas of zero 1": ({"replicate": 2, "shard": 2}, 1, (2, 1, 2, 1)),
    "2 replicas of zero 3": ({"replicate": 2, "shard": 2}, 3, (2, 2, 1, 1)),
}


def plan_for(kind: str, *, rate: float = 0.7, momentum: float = 0.5) -> Plan:
    axes, zero, per_step = PLANS[kind]
    mesh: dict[str, Any] = dict(axes)
    rounds = {"local_steps": ROUND, "outer_learning_rate": rate, "outer_momentum": momentum}
    return Plan(
        mesh=MeshPlan(**mesh),
        data_parallel=DataParallelPlan(zero=zero, **rounds),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=2, per_step=per_step),
        compute=ComputePlan(precision="fp64"),
    )


def prepared(session: weft.Session, **given: Any) -> weft.TrainState:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    loader = DataLoader(samples(), batch_size=BATCH)
    return session.prepare(model, optimizer, loader, loss=loss_fn, max_grad_norm=0.5, **given)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


# ── what is computed ──────────────────────────────────────────────────────────────────────────────────────────────────


def in_session(kind: str, folder: str) -> tuple[list[float], float, float]:
    """Losses, that of an evaluation in the middle of a round, and that at the end; the weights are exported."""
    with weft.session(
        plan_for(kind), permit=("fp64",), local_steps=ROUND, seed=SEED, folder=folder, quiet=True
    ) as session:
        state = prepared(session)
        losses = [state.step(batch).loss for batch in state.batches(4)]
        with pytest.warns(UserWarning, match=r"evaluate\(\) is in the middle of a round of 3 .*state.end_round\(\)"):
            within = state.evaluate(DataLoader(samples(31), batch_size=9))
        losses += [state.step(batch).loss for batch in state.batches(STEPS - 4)]
        state.end_round()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            end = state.evaluate(DataLoader(samples(31), batch_size=9))
            state.export(Path(folder) / "whole")
        return losses, within, end


class Read:
    """The loader's batches, as the loop of `weft train` asks for them."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._size, (self._start, self._stop) = (
            plan.microbatch.size,
            rank_range(plan.microbatch, plan.mesh.data, mesh.data_index),
        )

    def _cut(self, ids: Tensor) -> list[Batch]:
        rows, labels = samples().tensors
        return [{"0": rows[own % ROWS], "1": labels[own % ROWS], "sample_ids": own} for own in ids.split(self._size)]

    def microbatches(self, step: int) -> list[Batch]:
        return self._cut(torch.arange(self._start, self._stop) + step * BATCH)

    def evaluation(self, global_batches: int | None) -> list[list[Batch]]:
        raise AssertionError("nothing is evaluated")

    def state(self, step: int) -> dict[str, Any]:
        return {"cursor": step * BATCH}

    def step_of(self, state: Any) -> int:
        return int(state["cursor"]) // BATCH


def in_trainer(kind: str, folder: str) -> list[float]:
    """What a rank of `weft train` does."""
    plan = plan_for(kind)
    recipe = Recipe(
        model=ModelRecipe(factory="tests:Net"),
        batch=BatchRecipe(global_batch_size=BATCH),
        optimizer=OptimizerRecipe(learning_rate=1e-2, epsilon=1e-8, max_grad_norm=0.5),
        run=RunRecipe(steps=STEPS, seed=SEED),
        permit=PermitRecipe(precision=("fp64",), local_steps=ROUND),
    )

    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        found, count = loss_fn(outputs, [batch["0"], batch["1"]])
        return found, torch.tensor(float(count), dtype=torch.float64)

    def example(number: int) -> dict[str, Tensor]:
        labels = torch.empty(number, dtype=torch.int64, device="meta")
        return {"0": torch.empty(number, WIDTH, dtype=torch.float64, device="meta"), "1": labels}

    mesh = Mesh(plan.mesh, torch.device("cpu"))
    blueprint = Blueprint(module=Net(), inputs={"rows": "0"}, loss=loss, initialise=None, example=example)
    training = create_training(recipe, plan, blueprint, mesh, Recorder())
    outcome = Trainer(recipe, training, Read(plan, mesh), mesh, Recorder(), checkpointer=None).run()
    peers = Peers.of_group(mesh["world"])
    stored = Checkpointer(Path(folder) / "saves", peers).save(STEPS, training.weights())
    if peers.rank == 0:
        export_checkpoint(stored, blueprint, Path(folder) / "whole")
    training.close()
    return list(outcome.losses)


@pytest.mark.parametrize("kind", PLANS)
def test_a_session_computes_what_weft_train_does(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    world = plan_for(kind).mesh.world_size
    found = ranks.run(world, in_session, kind, str(tmp_path / "session"))
    wanted = ranks.run(world, in_trainer, kind, str(tmp_path / "trainer"))
    for losses, within, end in found:
        assert losses == pytest.approx(wanted[0], rel=1e-12)
        assert (within, end) == pytest.approx(found[0][1:], rel=1e-14)
        assert end < within
    own, other = weights(tmp_path / "session" / "whole"), weights(tmp_path / "trainer" / "whole")
    assert own.keys() == other.keys()
    for name, value in own.items():
        torch.testing.assert_close(value, other[name], rtol=1e-11, atol=1e-13)


# ── rounds, saves and ends ────────────────────────────────────────────────────────────────────────────────────────────


def ended(folder: str, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses over two epochs, of which the second is ended in one of several ways, and this rank's weights then."""
    kind = "2 uneven replicas"
    with weft.session(plan_for(kind), permit=("fp64",), local_steps=4, seed=SEED, folder=folder, quiet=True) as session:
        state = prepared(session)
        losses = [state.step(batch).loss for batch in state.batches()]
        if how == "epochs":
            losses += [state.step(batch).loss for epoch in state.epochs(2) for batch in epoch]
        else:
            losses += [state.step(batch).loss for batch in state.batches()]
        if how == "end_round":
            state.end_round()
        if how == "close":
            state.close()
        if how == "forgotten":
            model = state.model
            del state
        else:
            model = state.model
        within = {name: value.detach().clone() for name, value in model.named_parameters()}
    after = {name: value.detach() for name, value in model.named_parameters()}
    changed = any(not torch.equal(within[name], after[name]) for name in after)
    assert changed == (how in ("session", "forgotten"))
    return losses, after


def test_the_last_round_ends_with_the_loop_however_that_is_said(ranks: RankPool, tmp_path: Path) -> None:
    """Ten steps in rounds of three; with the epochs, at the user's word, with the state, with the session."""
    found = {how: ranks.run(2, ended, str(tmp_path / how), how) for how in ("epochs", "end_round", "close", "session")}
    found["forgotten"] = ranks.run(2, ended, str(tmp_path / "forgotten"), "forgotten")
    losses, wanted = found["epochs"][0]
    for of_ranks in found.values():
        for own, held in of_ranks:
            assert own == losses
            assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def resumed(folder: str, kind: str, at: int) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that is saved after `at` steps and goes on in another session."""
    given: dict[str, Any] = {"permit": ("fp64",), "local_steps": ROUND, "seed": SEED, "quiet": True}
    with weft.session(plan_for(kind), folder=Path(folder) / "whole", **given) as session:
        state = prepared(session)
        whole = [state.step(batch).loss for batch in state.batches(STEPS)]
        state.end_round()
        state.export(Path(folder) / "of-whole")
    with weft.session(plan_for(kind), folder=Path(folder) / "part", **given) as session:
        state = prepared(session)
        part = [state.step(batch).loss for batch in state.batches(at)]
        state.save()
        for batch in state.batches(1):
            state.step(batch)  # what is not saved is gone
    with weft.session(plan_for(kind), folder=Path(folder) / "part", **given) as session:
        state = prepared(session)
        assert state.load() == at
        part += [state.step(batch).loss for batch in state.batches(STEPS - at)]
        state.end_round()
        state.export(Path(folder) / "of-part")
    return whole, part


@pytest.mark.parametrize(("kind", "at"), [("2 uneven replicas", 4), ("2 replicas", 6), ("2 replicas of zero 1", 5)])
def test_a_resume_in_the_middle_of_a_round_is_exact(ranks: RankPool, tmp_path: Path, kind: str, at: int) -> None:
    for whole, part in ranks.run(plan_for(kind).mesh.world_size, resumed, str(tmp_path), kind, at):
        assert part == whole
    ended, other = weights(tmp_path / "of-part"), weights(tmp_path / "of-whole")
    assert all(torch.equal(ended[name], other[name]) for name in other)


# ── how a session is told ─────────────────────────────────────────────────────────────────────────────────────────────


def told(folder: str, given: dict[str, Any]) -> tuple[Plan, list[float]]:
    with weft.session(permit=("fp64",), seed=SEED, folder=folder, quiet=True, **given) as session:
        state = prepared(session)
        return state.plan, [state.step(batch).loss for epoch in state.epochs(1) for batch in epoch]


def test_beside_auto_every_rank_is_a_replica_and_one_process_has_none(ranks: RankPool, tmp_path: Path) -> None:
    ((alone, plain),) = ranks.run(1, told, str(tmp_path / "plain"), {})
    outer = {"data_parallel.outer_learning_rate": 0.7, "data_parallel.outer_momentum": 0.9}
    ((plan, found),) = ranks.run(1, told, str(tmp_path / "1"), {"local_steps": 2, "settings": outer})
    assert (plan.data_parallel, found) == (alone.data_parallel, plain)
    assert "one process has nobody to average with" in plan.origins["data_parallel.local_steps"]
    for plan, _ in ranks.run(2, told, str(tmp_path / "2"), {"local_steps": 2}):
        data = plan.data_parallel
        assert (plan.mesh.replicate, plan.mesh.shard) == (2, 1)
        assert (data.local_steps, data.outer_learning_rate, data.outer_momentum) == (2, 1.0, 0.0)
    settings = {**outer, "mesh.shard": 2, "data_parallel.local_steps": 2}
    for plan, _ in ranks.run(4, told, str(tmp_path / "4"), {"local_steps": 3, "settings": settings, "microbatches": 1}):
        data = plan.data_parallel
        assert (plan.mesh.replicate, plan.mesh.shard) == (2, 2)
        assert (data.local_steps, data.outer_learning_rate, data.outer_momentum) == (2, 0.7, 0.9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"local_steps": -1}, r"local_steps=…\) = -1 is no number of steps"),
        ({"local_steps": True}, r"local_steps=…\) = True is no number of steps"),
        (
            {"settings": {"data_parallel.local_steps": 4}},
            r"not permitted by this session.*Use 0, or weft.session\(local_steps=4\)",
        ),
        (
            {"local_steps": 2, "settings": {"data_parallel.local_steps": 4}},
            r"whose local_steps = 2.*Use 2, or weft.session\(local_steps=4\)",
        ),
    ],
)
def test_what_is_not_permitted_is_refused(ranks: RankPool, tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=rf"(?s){message}"):
        ranks.run(2, told, str(tmp_path), given)


def forbidden(folder: str) -> str:
    """A model whose replicas would drift apart unseen."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    loader = DataLoader(samples(), batch_size=BATCH)
    with weft.session(permit=("fp64",), local_steps=2, folder=folder, quiet=True) as session:
        with pytest.raises(PlanError) as refused:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
        return str(refused.value)


def test_batch_norm_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, forbidden, str(tmp_path)):
        assert "running statistics of BatchNorm drift apart" in text


def two_models(folder: str) -> list[Tensor]:
    """Two models with open rounds at the end of the session, of which one's state is forgotten on this rank alone."""
    plan = replace(plan_for("2 replicas", rate=1.0, momentum=0.0), microbatch=MicrobatchPlan(size=6, per_step=1))
    with weft.session(plan, permit=("fp64",), local_steps=ROUND, folder=folder, quiet=True) as session:
        first, second = prepared(session), prepared(session)
        for state in (first, second):
            for batch in state.batches(2):
                state.step(batch)
        models = first.model, second.model
        if session.rank:
            del first, state
    return [parameter.detach() for model in models for parameter in model.parameters()]


def test_open_rounds_of_several_models_end_in_one_order(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, two_models, str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
