"""What a user might do after `prepare` that would do nothing, or another thing than on one process: it is refused where
it happens, with the line to write, or honoured."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import CheckpointError, DataError, RecipeError
from weft.model.families import CutTable

BATCH = 8


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def samples(number: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :4].square())


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def plan_for(world: int, zero: int = 0, tensor: int = 1) -> Plan:
    data = world // tensor
    axes: dict[str, int] = {"shard": data} if zero == 3 else {"replicate": data}
    return Plan(
        mesh=MeshPlan(tensor=tensor, **axes),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=BATCH // data, per_step=1),
        compute=ComputePlan(precision="fp64"),
    )


def session_of(folder: Path | str, plan: Plan | None = None, **changes: Any) -> Any:
    given = {"plan": plan or plan_for(1), "permit": ("fp64",), "folder": folder, "quiet": True} | changes
    return weft.session(**given)


def prepared(session: Any, model: nn.Module, loader: Any = None, **changes: Any) -> Any:
    optimizer = changes.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = loader if loader is not None else DataLoader(samples(), batch_size=BATCH, shuffle=True)
    return session.prepare(model, optimizer, loader, **({"loss": loss_fn} | changes))


def _of_a_plain_loop(state: Any, batch: Any) -> dict[str, tuple[Callable[[], Any], str]]:
    """What a half-migrated loop would write → the line it is told."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def backward() -> None:
        loss_fn(state.model(batch[0]), batch)[0].backward()

    def other_optimizer() -> None:
        torch.optim.SGD(state.model.parameters(), lr=0.1).step()

    def new_group() -> None:
        state.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        try:
            state.step(batch)
        finally:
            state.optimizer.param_groups.pop()

    return {
        "backward": (backward, r"state\.step\(batch\)"),
        "step": (state.optimizer.step, r"state\.step\(batch\)"),
        "scaler": (lambda: scaler.step(state.optimizer), r"state\.step\(batch\)"),
        "closure": (lambda: state.optimizer.step(lambda: 0.0), r"state\.step\(batch\)"),
        "another optimizer": (other_optimizer, "its update would be lost"),
        "a new group": (new_group, "further parameters after session.prepare"),
        "state_dict": (state.optimizer.state_dict, r"state\.save\(\)"),
        "load_state_dict": (lambda: state.optimizer.load_state_dict({}), r"state\.load\(path\)"),
    }


def half_migrated(zero: int, folder: str, strays: bool = True) -> list[float]:
    world = torch.distributed.get_world_size()
    with session_of(folder, plan_for(world, zero)) as session:
        model = build()
        scheduler_of = torch.optim.Adam(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(scheduler_of, 0.9)
        state = prepared(session, model, optimizer=scheduler_of)
        losses: list[float] = []
        for batch in state.batches(3):
            for act, match in _of_a_plain_loop(state, batch).values() if strays else ():
                with pytest.raises(RecipeError, match=match):
                    act()
            state.optimizer.zero_grad()
            losses.append(state.step(batch).loss)
            scheduler.step()
    return losses


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_half_migrated_loop_hears_what_to_write_and_trains_as_if_it_had_not(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    alone = ranks.run(1, half_migrated, 0, str(tmp_path / "a"), strays=False)[0]
    for losses in ranks.run(2, half_migrated, zero, str(tmp_path / "b")):
        assert losses == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_and_those_of_an_earlier_session_are_not(tmp_path: Path, kind: str) -> None:
    model = build()
    handle = getattr(model[2].weight, kind)(lambda _: None)
    with session_of(tmp_path) as session, pytest.raises(RecipeError, match=rf"2\.weight has a hook \({kind}\)"):
        prepared(session, model)
    handle.remove()
    for _ in range(2):
        with contextlib.suppress(ValueError), session_of(tmp_path) as session:
            state = prepared(session, model)
            state.step(next(state.batches()))
            raise ValueError("of the loop")


def moved(folder: str) -> str:
    model = build()
    held = list(model.parameters())
    copied = copy.deepcopy(model)
    with session_of(folder, plan_for(2, 3)) as session:
        state = prepared(session, model)
        state.step(next(state.batches()))
        for parameter in held:
            with pytest.raises(RecipeError, match=r"take parameters .* from state\.model\.parameters\(\)|Take param"):
                parameter.mul_(0.5)
        assert all(p.numel() for p in copied.parameters())
    return repr(held[0])


def test_parameters_that_the_model_has_left_say_so(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, moved, str(tmp_path))[0] == "MovedParameter()"


# ── what is written ───────────────────────────────────────────────────────────────────────────────────────────────────


def exported(folder: str, zero: int, tensor: int, pipeline: int = 1) -> None:
    world = torch.distributed.get_world_size()
    model = build()
    plan = plan_for(world, zero, tensor)
    if pipeline > 1:
        plan = Plan(
            mesh=MeshPlan(pipeline=2),
            microbatch=MicrobatchPlan(size=BATCH // 2, per_step=2),
            compute=ComputePlan(precision="fp64"),
        )
    with session_of(folder, plan) as session:
        split = {"0": "column", "2": "row"} if tensor > 1 else {}
        cut = CutTable(entry="0", blocks=("1", "2")) if pipeline > 1 else None
        state = prepared(session, model, split=split, cut=cut)
        for batch in state.batches(2):
            state.step(batch)
        if zero == 3 or tensor > 1:
            with pytest.raises(RecipeError, match=r"state\.export\(folder\)"):
                model.state_dict()
        assert state.export(Path(folder) / "out") == Path(folder) / "out"
        with pytest.raises(CheckpointError, match="is not empty"):
            state.export(Path(folder) / "out")


@pytest.mark.parametrize(("zero", "tensor", "pipeline"), [(0, 1, 1), (3, 1, 1), (0, 2, 1), (0, 1, 2)])
def test_an_export_is_the_whole_model_under_any_plan(
    ranks: RankPool, tmp_path: Path, zero: int, tensor: int, pipeline: int
) -> None:
    ranks.run(1, exported, str(tmp_path / "a"), 0, 1)
    ranks.run(2, exported, str(tmp_path / "b"), zero, tensor, pipeline)
    alone, together = (load_file(tmp_path / name / "out" / "model.safetensors") for name in "ab")
    assert alone.keys() == dict(build().named_parameters()).keys() == together.keys()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-10, atol=1e-12)
    build().load_state_dict(together)


def test_the_config_of_a_model_goes_with_its_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    model = transformers.GPT2LMHeadModel(config)
    loader = DataLoader([{"input_ids": torch.arange(8)}] * 8, batch_size=4)  # type: ignore[arg-type]
    plan = Plan(microbatch=MicrobatchPlan(size=4, per_step=1))
    with session_of(tmp_path, plan, permit=("fp32",)) as session:
        state = session.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader,
            loss=lambda out, batch: (out.logits.square().sum(), len(out.logits)),
        )
        state.step(next(state.batches()))
        state.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again.transformer.wte.weight, model.transformer.wte.weight)


# ── resuming ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_save_is_resumed_with_its_own_batch_data_and_seed_only(tmp_path: Path) -> None:
    with session_of(tmp_path) as session:
        state = prepared(session, build())
        for batch in state.batches(3):
            state.step(batch)
        state.save()
    four = Plan(microbatch=MicrobatchPlan(size=4, per_step=1), compute=ComputePlan(precision="fp64"))
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"plan": four}, DataLoader(samples(), batch_size=4, shuffle=True), "Give the loader batch_size=8"),
        (
            {},
            DataLoader(samples(48), batch_size=BATCH, shuffle=True),
            "40 samples in the loader, and this session has 48",
        ),
        ({"seed": 7}, None, r"weft\.session\(seed=1234\)"),
        ({}, None, ""),
    ]
    for changes, loader, match in cases:
        with session_of(tmp_path, **changes) as session:
            state = prepared(session, build(), loader)
            if not match:
                assert state.load() == 3
                continue
            with pytest.raises(CheckpointError, match=match):
                state.load()
            assert state.steps == 0


# ── loaders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [40, 43, 45, 5])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_as_many_steps_as_the_loader_has_batches(
    tmp_path: Path, number: int, drop: bool, shuffle: bool
) -> None:
    loader = DataLoader(samples(number), batch_size=BATCH, shuffle=shuffle, drop_last=drop)
    with session_of(tmp_path) as session:
        if not len(loader):
            with pytest.raises(DataError, match="drop_last=True leaves none of|yields no batch"):
                prepared(session, build(), loader)
            return
        state = prepared(session, build(), loader)
        epochs: list[list[Tensor]] = []
        for _ in range(3):
            epochs.append([])
            for batch in state.batches():
                epochs[-1].append(batch[0])
                state.step(batch)
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 3
    if drop:
        whole = {tuple(row.tolist()) for row in samples(number).tensors[0]}
        for epoch in epochs:
            seen = [tuple(row.tolist()) for row in torch.cat(epoch)]
            assert len(seen) == len(set(seen)) == len(loader) * BATCH
            assert set(seen) <= whole


def test_what_a_loader_says_is_done_or_refused(tmp_path: Path) -> None:
    data = samples()
    generator = torch.Generator().manual_seed(77)
    refused = {
        r"weft\.session\(seed=77\)": DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator),
        r"seed=77": DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data, generator=generator)),
        "DistributedSampler": DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, 2, 0)),
    }
    for match, loader in refused.items():
        with session_of(tmp_path) as session, pytest.raises(DataError, match=match):
            prepared(session, build(), loader)
    for sampler in (SequentialSampler(range(16)), RandomSampler(range(16))):  # type: ignore[arg-type]
        with session_of(tmp_path) as session:
            state = prepared(session, build(), DataLoader(data, batch_size=BATCH, sampler=sampler))
            seen = torch.cat([batch[0] for batch in state.batches()])
            assert sorted(seen[:, 0].tolist()) == sorted(data.tensors[0][:16, 0].tolist())


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((6,), float(index + 1), dtype=torch.float64)


def centred(rows: list[Tensor]) -> list[Tensor]:
    x = default_collate(rows)
    return [x - x.mean(0), x[:, :4]]


def noisy(rows: list[Tensor]) -> list[Tensor]:
    x = default_collate(rows)
    return [x + torch.randn(x.shape, dtype=x.dtype), x[:, :4]]


def backwards(rows: list[Tensor]) -> list[Tensor]:
    x = default_collate(rows).flip(0)
    return [x, x[:, :4]]


def collated(collate: Any, folder: str) -> list[float]:
    world = torch.distributed.get_world_size()
    with session_of(folder, plan_for(world)) as session:
        state = prepared(session, build(), DataLoader(Rows(), batch_size=BATCH, shuffle=True, collate_fn=collate))
        return [state.step(batch).loss for batch in state.batches(4)]


@pytest.mark.parametrize("collate", [centred, noisy, backwards])
def test_a_collate_function_may_look_at_the_whole_batch(ranks: RankPool, tmp_path: Path, collate: Any) -> None:
    alone = ranks.run(1, collated, collate, str(tmp_path / "a"))[0]
    for losses in ranks.run(2, collated, collate, str(tmp_path / "b")):
        assert losses == pytest.approx(alone, rel=1e-10)


def over_all_samples(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs @ batch[1].t()).logsumexp(1).sum(), len(outputs)


over_all_samples.per_sample = False  # type: ignore[attr-defined]


def trained_over_all_samples(folder: str, plan: Plan) -> list[float]:
    with session_of(folder, plan) as session:
        state = prepared(session, build(), DataLoader(samples(), batch_size=BATCH), loss=over_all_samples)
        return [state.step(batch).loss for batch in state.batches(3)]


def test_a_loss_over_all_samples_is_gathered(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(1, trained_over_all_samples, str(tmp_path / "a"), plan_for(1))[0]
    for losses in ranks.run(2, trained_over_all_samples, str(tmp_path / "b"), plan_for(2)):
        assert losses == pytest.approx(alone, rel=1e-10)


class MadeUnderInference(Dataset[Any]):
    """As features that another model makes, without gradients."""

    def __init__(self) -> None:
        self._rows = samples()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


def collate_under_inference(rows: list[Any]) -> Any:
    with torch.inference_mode():
        return [value * 1.0 for value in default_collate(rows)]


def inference_loop(folder: str, where: str) -> list[float]:
    plan = plan_for(torch.distributed.get_world_size())
    with session_of(folder, plan) as session:
        collate = collate_under_inference if where == "loader" else None
        loader = DataLoader(MadeUnderInference(), batch_size=BATCH, shuffle=True, collate_fn=collate)
        state = prepared(session, build(), loader)
        losses: list[float] = []
        for batch in state.batches(3):
            if where == "loop":
                with torch.inference_mode():
                    batch = [value * 1.0 for value in batch]
            losses.append(state.step(batch).loss)
    return losses


@pytest.mark.parametrize("where", ["loader", "loop"])
def test_batches_made_under_inference_mode_train(ranks: RankPool, tmp_path: Path, where: str) -> None:
    wanted = ranks.run(1, inference_loop, str(tmp_path / "w"), "nowhere")[0]
    for world in (1, 2):
        for losses in ranks.run(world, inference_loop, str(tmp_path / str(world)), where):
            assert losses == pytest.approx(wanted, rel=1e-10)


def clipping_loop(zero: int, folder: str, how: str) -> list[float]:
    with session_of(folder, plan_for(torch.distributed.get_world_size(), zero)) as session:
        model = build()
        state = prepared(session, model)
        losses: list[float] = []
        for batch in state.batches(3):
            losses.append(state.step(batch).loss)
            if how == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif how == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            elif how == "read":
                nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            else:
                model.zero_grad(set_to_none=how == "none")
    return losses


@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipping_after_the_step_is_refused(ranks: RankPool, tmp_path: Path, how: str) -> None:
    for world in (1, 2):
        with pytest.raises(RecipeError, match=r"changed after state\.step\(\).*max_grad_norm=1\.0"):
            ranks.run(world, clipping_loop, 0, str(tmp_path / str(world)), how)


@pytest.mark.parametrize("how", ["read", "zero", "none"])
def test_reading_and_zeroing_gradients_after_the_step_is_not(ranks: RankPool, tmp_path: Path, how: str) -> None:
    alone = ranks.run(1, clipping_loop, 0, str(tmp_path / "1"), how)[0]
    assert ranks.run(2, clipping_loop, 0, str(tmp_path / "2"), how)[0] == pytest.approx(alone, rel=1e-10)
