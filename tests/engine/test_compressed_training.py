"""Trainings with compressed gradients: beside every other axis, over skipped steps, saved and resumed, on other
ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import Seen, Training, agreed, plan_of, recipe_of, snapshot, train
from torch import Tensor

from weft.checkpoint import Checkpointer, Peers
from weft.parallel import Piece
from weft.plan import Plan, check_plan, check_runnable, facts_of
from weft.prove import assemble
from weft.recipe import OptimizerRecipe, Recipe

SAVED, END = 3, 6
SIZES: dict[str, Any] = {"hidden_size": 32, "ffn_size": 64, "vocabulary_size": 64, "dropout": 0.0}
ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
CODECS = ("bf16", "int8", "powersgd", "topk")
BIASED = ("powersgd", "topk")


def recipe(precision: str = "fp32", **changes: Any) -> Recipe:
    made = recipe_of(precision, ADAMW, steps=END, **(SIZES | changes))
    return replace(made, permit=replace(made.permit, compression=CODECS))


def compressed(codec: str, precision: str = "fp32", **settings: Any) -> Plan:
    plan = plan_of(precision, **settings)
    special: dict[str, Any] = {"powersgd": {"powersgd_rank": 2}, "topk": {"topk_share": 0.05}}.get(codec, {})
    return replace(plan, data_parallel=replace(plan.data_parallel, compression=codec, **special))


MESHES: dict[str, dict[str, Any]] = {
    "zero 0": {"replicate": 2},
    "zero 1": {"replicate": 2, "zero": 1},
    "zero 2": {"replicate": 2, "zero": 2},
    "uneven shares": {"replicate": 2, "zero": 1, "shares": (3, 1)},
    "hybrid": {"replicate": 2, "shard": 2, "zero": 3, "micro": 1},
    "tensor": {"replicate": 2, "tensor": 2},
    "tensor and sequence": {"replicate": 2, "tensor": 2, "sequence": True, "zero": 1},
    "pipeline": {"replicate": 2, "pipeline": 2, "zero": 1, "micro": 1},
    "hybrid pipeline": {"replicate": 2, "shard": 2, "pipeline": 2, "zero": 3, "micro": 1},
    "hybrid tensor": {"replicate": 2, "shard": 2, "tensor": 2, "zero": 3, "micro": 1},
}


# ── beside other techniques ───────────────────────────────────────────────────────────────────────────────────────────


def train_all(plans: dict[str, Plan], steps: int) -> dict[str, Seen]:
    return {name: train(recipe(plan.compute.precision), plan, steps) for name, plan in plans.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_as_without_compression(ranks: Any, mesh: str) -> None:
    """Losses of a few steps stay near those of exact sums: rounding codecs closely, biased ones at their first step
    too, because its loss is that of the first weights."""
    plans = {codec: compressed(codec, **MESHES[mesh]) for codec in CODECS}
    plans["none"] = plan_of("fp32", **MESHES[mesh])
    for plan in plans.values():
        check_plan(plan, recipe(), facts_of(recipe()), plan.mesh.world_size)
        check_runnable(plan)
    found = ranks.run(plans["none"].mesh.world_size, train_all, plans, END)
    seen = {name: agreed([one[name] for one in found]) for name in plans}
    for name, limit in {"bf16": 1e-3, "int8": 1e-2, "powersgd": 0.1, "topk": 0.1}.items():
        assert seen[name].losses[0] == seen["none"].losses[0], name
        assert seen[name].losses == pytest.approx(seen["none"].losses, rel=limit), name
        if name not in ("int8", "topk") or mesh not in ("hybrid pipeline", "hybrid tensor"):  # shards are small
            assert seen[name].losses != seen["none"].losses, f"{name} compressed nothing"
    assert seen["topk"].bytes["compression"] > 0
    assert seen["none"].bytes["compression"] == 0
    for name in plans:  # copies of a weight on several ranks are the same bits
        copies: dict[tuple[str, int, int], Tensor] = {}
        for piece in (piece for one in found for piece in one[name].state if piece.name.startswith("model/")):
            key = (piece.name, piece.split.index if piece.split else -1, piece.start)
            first = copies.setdefault(key, piece.tensor)
            if len(first) == len(piece.tensor):
                assert torch.equal(first, piece.tensor), (name, key)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_half_precision(ranks: Any, codec: str) -> None:
    for precision in ("bf16", "fp16"):
        plan = compressed(codec, precision, replicate=2, zero=1)
        found = ranks.run(2, train_all, {"it": plan, "none": plan_of(precision, replicate=2, zero=1)}, END)
        assert found[0]["it"].losses == pytest.approx(found[0]["none"].losses, rel=0.02)


def test_biased_codecs_in_bf16(ranks: Any) -> None:
    plans = {codec: compressed(codec, "bf16", replicate=2, zero=2) for codec in BIASED}
    plans["none"] = plan_of("bf16", replicate=2, zero=2)
    found = ranks.run(2, train_all, plans, END)
    for codec in BIASED:
        assert agreed([one[codec] for one in found]).losses == pytest.approx(found[0]["none"].losses, rel=0.1)


# ── skipped steps ─────────────────────────────────────────────────────────────────────────────────────────────────────


def skip(plan: Plan, broken: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
    """Train with a loss that one rank breaks at a step: all state before and after that step."""
    training = Training(recipe(), plan)
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for step in range(END):
        if step == broken:
            before = {piece.name: piece.tensor for piece in snapshot(training.state)}
            layer = next(m for m in training.state.model.module.modules() if isinstance(m, torch.nn.Linear))
            if training.mesh.rank == 1:
                handle = layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
                training.step(step)
                handle.remove()
            else:
                training.step(step)
            after = {piece.name: piece.tensor for piece in snapshot(training.state)}
        else:
            training.step(step)
    return before, after, training.seen.skipped


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("codec", BIASED)
def test_a_skipped_step_freezes_everything(ranks: Any, codec: str, zero: int) -> None:
    for before, after, skipped in ranks.run(2, skip, compressed(codec, replicate=2, zero=zero), SAVED):
        assert skipped == [step == SAVED for step in range(END)]
        assert [name for name in before if name.startswith("compression/residual/")]
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


# ── saved and resumed ─────────────────────────────────────────────────────────────────────────────────────────────────


def interrupt(plans: dict[str, Plan], folder: Path) -> dict[str, tuple[Seen, Seen]]:
    """Train to the end with a save on the way; and again from that save, by objects made anew."""
    found: dict[str, tuple[Seen, Seen]] = {}
    for name, plan in plans.items():
        whole = Training(recipe(), plan)
        keeper = Checkpointer(folder / name, Peers.of_group(whole.mesh["world"]), file_bytes=5000)
        for step in range(END):
            if step == SAVED:
                keeper.save(step, whole.state.pieces(), whole.state.state())
            whole.step(step)
        again = Training(recipe(), plan, mesh=whole.mesh)
        again.state.restored(keeper.load("latest", again.state.pieces()))
        for step in range(SAVED, END):
            again.step(step)
        found[name] = whole.finished(), again.finished()
    return found


@pytest.mark.parametrize("mesh", ["zero 0", "zero 2", "hybrid", "tensor and sequence", "pipeline"])
def test_the_same_plan_goes_on_bit_for_bit(ranks: Any, tmp_path: Path, mesh: str) -> None:
    plans = {codec: compressed(codec, **MESHES[mesh]) for codec in CODECS}
    found = ranks.run(plans["int8"].mesh.world_size, interrupt, plans, tmp_path)
    for name in plans:
        whole, again = agreed([one[name][0] for one in found]), agreed([one[name][1] for one in found])
        assert again.losses == whole.losses[SAVED:], name
        for one in found:
            pairs = list(zip(one[name][0].state, one[name][1].state, strict=True))
            assert [a.name for a, b in pairs if not torch.equal(a.tensor, b.tensor)] == [], name


def leg(plan: Plan, folder: Path, first: int, last: int) -> tuple[list[Piece], list[Piece]]:
    """Train steps [first, last) from what the folder holds and save: what compression held at the start and the end."""
    training = Training(recipe(), plan)
    keeper = Checkpointer(folder, Peers.of_group(training.mesh["world"]))
    if first:
        training.state.restored(keeper.load("latest", training.state.pieces()))
    begun = [replace(p, tensor=p.tensor.clone()) for p in training.state.model.stores.pieces()]
    for step in range(first, last):
        training.step(step)
    keeper.save(last, training.state.pieces(), training.state.state())
    return begun, training.state.model.stores.pieces()


def owed(pieces: list[list[Piece]]) -> dict[str, Tensor]:
    """What all ranks together owe to each parameter."""
    ranks = max((piece.addend[1] for group in pieces for piece in group if piece.addend), default=0)
    total: dict[str, Tensor] = {}
    for index in range(ranks):
        mine = [[replace(p, addend=None) for p in group if p.addend and p.addend[0] == index] for group in pieces]
        for name, tensor in assemble(mine).items():
            total[name] = total[name] + tensor if name in total else tensor.double()
    return total


CHAIN: list[dict[str, Any]] = [
    {"replicate": 4, "micro": 1},
    {"replicate": 2, "zero": 1},
    {"replicate": 2, "shard": 2, "zero": 3, "micro": 1},
    {"replicate": 3, "zero": 2, "micro": 1, "shares": (3, 3, 2)},
    {"replicate": 2, "tensor": 2, "zero": 0},
]


@pytest.mark.parametrize("codec", BIASED)
def test_other_ranks_go_on_owing_the_same_sum(ranks: Any, tmp_path: Path, codec: str) -> None:
    """Over plans with 4, 2, 2 × 2 and 3 data ranks, and two tensor ranks: what is owed to each weight never changes."""
    before: dict[str, Tensor] = {}
    for number, settings in enumerate(CHAIN):
        plan = compressed(codec, **settings)
        found = ranks.run(plan.mesh.world_size, leg, plan, tmp_path, 2 * number, 2 * number + 2)
        begun = owed([one[0] for one in found])
        if number:
            common = before.keys() & begun.keys()
            assert len(common) > 8, "the plans compress the same matrices, or nearly"
            for name in common:
                torch.testing.assert_close(begun[name], before[name], rtol=1e-5, atol=1e-9)
        assert any(bool(tensor.any()) for tensor in owed([one[1] for one in found]).values())
        before = owed([one[1] for one in found])


def test_compression_may_begin_and_end_with_a_resume(ranks: Any, tmp_path: Path) -> None:
    """Nothing is owed by a checkpoint without compression; and one with it is told to be dropped, once."""
    exact = plan_of("fp32", replicate=2)
    ranks.run(2, leg, exact, tmp_path, 0, 2)
    begun = [one[0] for one in ranks.run(2, leg, compressed("topk", replicate=2), tmp_path, 2, 4)]
    assert owed(begun)
    assert all(not bool(tensor.any()) for tensor in owed(begun).values())
    told = ranks.run(2, leg_told, exact, tmp_path)
    assert len(told[0]) == 1
    assert "what compressed gradients still owed to" in told[0][0]
    assert "it is dropped" in told[0][0]
    assert told[1] == []


def leg_told(plan: Plan, folder: Path) -> list[str]:
    """Messages of a rank that goes on without compression."""
    import logging

    told = list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, listener = logging.getLogger("weft.checkpoint"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        leg(plan, folder, 4, 5)
    finally:
        logger.removeHandler(listener)
    return told
