"""What a loop writes into the weights between steps trains on as in plain PyTorch, or is refused in a sentence."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from test_session_kept import InOrder, check_equal, in_order, whole_weights
from test_session_traps import BATCH, build, loss_fn, prepared, session_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import RecipeError
from weft.model.families import CutTable

STEPS = 4


@torch.no_grad()
def _clipped(model: Any) -> None:
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)


def _clipped_data(model: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def _zeroed(model: Any) -> None:
    model[2].bias.data.zero_()


def _initialised(model: Any) -> None:
    nn.init.zeros_(model[0].weight)


def _rebound(model: Any) -> None:
    model[0].bias.data = model[0].bias.data * 0.5


@torch.no_grad()
def _scaled(model: Any) -> None:
    model[0].weight.mul_(0.9)


def _detached(model: Any) -> None:
    model[0].weight.detach().view(-1)[3:9] *= 0.5


@torch.no_grad()
def _renormed(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector / vector.norm() * 3, model.parameters())


def _renormed_data(model: Any) -> None:
    for p in model.parameters():
        p.data.div_(p.data.norm())


@torch.no_grad()
def _by_another(model: Any) -> None:
    model[2].bias.mul_(model[0].weight.norm())


def _by_all(model: Any) -> None:
    norm = sum(float(p.detach().square().sum()) for p in model.parameters())
    model[2].bias.data *= norm


def _renormed_numpy(model: Any) -> None:
    for p in model.parameters():
        held = p.detach().numpy()
        held /= (held**2).sum() ** 0.5


def _read(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.norm().item() > 0
    assert all(float(p.data.abs().max()) >= 0 and p.grad is not p for p in model.parameters())
    assert all(p.tolist() is not None and bool(p.isfinite().all()) for p in copy.deepcopy([*model.parameters()]))


@torch.no_grad()
def _buffer_by_all(model: Any) -> None:
    norm = sum(p.square().sum() for p in model.parameters())
    for module in model.modules():
        if hasattr(module, "gain"):
            module.gain.copy_(norm)


def _read_before(model: Any) -> None:
    """A value of one step is written by in a later one."""
    if not hasattr(model, "seen"):
        model.seen = model[0].weight.norm().item()
    else:
        nn.init.constant_(model[2].bias, model.seen)


EDITS: dict[str, Callable[[Any], None]] = {
    "as one vector": _renormed,
    "clamp_": _clipped,
    "data.clamp_": _clipped_data,
    "data.zero_": _zeroed,
    "init.zeros_": _initialised,
    "data =": _rebound,
    "mul_": _scaled,
    "detach": _detached,
}


OF_PARTS = EDITS | {
    "data by its norm": _renormed_data,
    "numpy by its norm": _renormed_numpy,
    "by another": _by_another,
    "by all": _by_all,
    "buffer by all": _buffer_by_all,
    "read": _read,
    "read before": _read_before,
}
"""What is refused, or allowed, where ranks have parts of the model."""


def plan_of(kind: str, world: int) -> Plan:
    axes: dict[str, int] = {"shard" if "3" in kind else "replicate": world}
    if kind == "tensor":
        axes = {"tensor": world}
    zero: Any = next((int(digit) for digit in "123" if digit in kind), 0)
    data = 1 if kind == "tensor" else world
    return Plan(
        mesh=MeshPlan(**axes),
        data_parallel=DataParallelPlan(zero=zero),
        microbatch=MicrobatchPlan(size=BATCH // data, per_step=1),
        compute=ComputePlan(precision="bf16" if "bf16" in kind else "fp64"),
    )


def plain(edit: str) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in [*in_order()][:STEPS]:
        optimizer.zero_grad()
        (loss_fn(model(batch[0]), batch)[0] / len(batch[0])).backward()
        optimizer.step()
        OF_PARTS[edit](model)
    return [each.detach().clone() for each in model.parameters()]


def train(kind: str, folder: str, edit: str, *, evaluates: bool = False) -> list[Tensor]:
    warnings.filterwarnings("ignore", message="the loop has computed a value of")  # test_session_part_reads.py
    plan = plan_of(kind, torch.distributed.get_world_size())
    split = {"0": "column", "2": "row"} if kind == "tensor" else ()
    with session_of(folder, plan, permit=(plan.compute.precision,)) as session:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = prepared(session, model, InOrder(), optimizer=optimizer, batch_size=BATCH, split=split)
        for batch in state.batches(STEPS):
            state.step(batch)
            if evaluates:
                state.evaluate(InOrder())
                with torch.no_grad():
                    state.model(batch[0].to(next(state.model.parameters()).dtype))
            OF_PARTS[edit](state.model)
        return whole_weights(state, folder, build())


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_edits_train_on_as_in_plain_torch(ranks: RankPool, tmp_path: Path, edit: str) -> None:
    right = plain(edit)
    for number, (world, kind) in enumerate(((1, "data"), (2, "data"), (2, "zero 1"), (2, "zero 3"))):
        if kind == "zero 3" and edit in ("as one vector", "data =", "detach"):
            continue  # of a DTensor these are shares, or refused: the next test
        evaluates = kind == "zero 3"
        for found in ranks.run(world, train, kind, str(tmp_path / f"{number}"), edit, evaluates=evaluates):
            check_equal(found, right)


def test_another_tensor_in_place_of_a_share_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"given 0\.bias another tensor .*parameter\.copy_\(new\)"):
        ranks.run(2, train, "zero 3", str(tmp_path), "data =")


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_edits_reach_the_masters_of_bf16(ranks: RankPool, tmp_path: Path, edit: str) -> None:
    model = build()
    model.load_state_dict(dict(zip(model.state_dict(), plain(edit), strict=True)))
    for number, (world, kind) in enumerate(((1, "bf16"), (2, "bf16"), (2, "bf16 zero 1"))):
        for found in ranks.run(world, train, kind, str(tmp_path / f"{number}"), edit):
            for mine, other in zip(found, model.parameters(), strict=True):
                assert float((mine.double() - other.detach()).abs().max()) < 0.02, edit
            if edit in ("clamp_", "data.clamp_"):
                assert max(float(mine.abs().max()) for mine in found) <= 0.2002


@pytest.mark.parametrize(
    "edit", ["clamp_", "mul_", "as one vector", "data by its norm", "numpy by its norm", "init.zeros_", "detach"]
)
def test_edits_of_what_tensor_ranks_share_are_refused(ranks: RankPool, tmp_path: Path, edit: str) -> None:
    with pytest.raises(RecipeError, match=r"the loop has changed 0\.weight since the last step, of which this rank"):
        ranks.run(2, train, "tensor", str(tmp_path), edit)


@pytest.mark.parametrize("edit", ["by another", "by all", "read before"])
def test_edits_by_what_tensor_ranks_share_are_refused(ranks: RankPool, tmp_path: Path, edit: str) -> None:
    told = r"changed 2\.bias since the last step, and has read 0\.weight, of which this rank has a part \(mesh\.tensor"
    with pytest.raises(RecipeError, match=told):
        ranks.run(2, train, "tensor", str(tmp_path), edit)


@pytest.mark.parametrize("edit", ["data.zero_", "read"])
def test_beside_parts_what_is_whole_may_be_edited_and_all_be_read(ranks: RankPool, tmp_path: Path, edit: str) -> None:
    right = plain(edit)
    for found in ranks.run(2, train, "tensor", str(tmp_path), edit):
        check_equal(found, right)


def test_a_number_of_a_share_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Torch gives each rank the norm of its own rows."""
    with pytest.raises(RecipeError, match=r"has made a number .* of what it computed of a weight.*`\.full_tensor\(\)`"):
        ranks.run(2, train, "zero 3", str(tmp_path), "by all")


def whole_by_shares(folder: str) -> None:
    with session_of(folder, plan_of("zero 3", 2)) as session:
        model = build()
        model.register_buffer("gain", torch.ones((), dtype=torch.float64))
        _buffer_by_all(prepared(session, model, InOrder(), batch_size=BATCH).model)


def test_a_whole_tensor_beside_shares_is_refused_in_a_sentence(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"together with a tensor that is whole.*value\.full_tensor\(\)"):
        ranks.run(2, whole_by_shares, str(tmp_path))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_weight_that_is_turned_trains_on(tmp_path: Path, precision: Any) -> None:
    """Its address and its shape stay the same."""

    def model_of() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()

    right = model_of()
    optimizer = torch.optim.AdamW(right.parameters(), lr=1e-2)
    for batch in [*in_order()][:STEPS]:
        optimizer.zero_grad()
        (loss_fn(right(batch[0]), batch)[0] / len(batch[0])).backward()
        optimizer.step()
        right[0].weight.data = right[0].weight.data.t()
    plan = plan_of("bf16" if precision == "bf16" else "data", 1)
    with session_of(tmp_path, plan, permit=(precision,)) as session:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = prepared(session, model, InOrder(), optimizer=optimizer, batch_size=BATCH)
        for batch in state.batches(STEPS):
            state.step(batch)
            state.model[0].weight.data = state.model[0].weight.data.t()
        found = whole_weights(state, str(tmp_path), model_of())
    for mine, other in zip(found, right.parameters(), strict=True):
        assert float((mine.double() - other.detach()).abs().max()) < (0.02 if precision == "bf16" else 1e-10)


def differing(folder: str) -> None:
    with session_of(folder, plan_of("data", 2)) as session:
        model = build()
        state = prepared(session, model, InOrder(), batch_size=BATCH)
        for batch in state.batches(2):
            state.step(batch)
            with torch.no_grad():
                model[0].weight.add_(0.1 * (session.rank + 1))


def test_edits_that_differ_between_ranks_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="what the loop has written into the weights differs between the ranks"):
        ranks.run(2, differing, str(tmp_path))


def test_another_dtype_is_refused_by_the_next_step(tmp_path: Path) -> None:
    with session_of(tmp_path) as session:
        state = prepared(session, build())
        batches = iter(state.batches(2))
        state.step(next(batches))
        state.model.half()
        with pytest.raises(RecipeError, match=r"0\.weight was given \(16, 6\) float16 on cpu in place of"):
            state.step(next(batches))
        state.model.float()


def test_copies_and_files_have_nothing_of_weft(tmp_path: Path) -> None:
    with session_of(tmp_path) as session:
        model = build()
        prepared(session, model)
        assert type(copy.deepcopy(model[0].weight)) is nn.Parameter
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert set(torch.load(file, weights_only=True)) == set(model.state_dict())
    assert {type(each) for each in model.parameters()} == {nn.Parameter}


def _exchanged(model: Any) -> None:
    model[0].bias = nn.Parameter(torch.zeros_like(model[0].bias))


def _taken_out(model: Any) -> None:
    model[0] = nn.Identity()


def _set_to_none(model: Any) -> None:
    model[0].bias = None


def _deleted(model: Any) -> None:
    del model[2]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_exchanged, r"put another parameter in the place of 0\.bias"),
        (_taken_out, r"taken 0\.weight out"),
        (_set_to_none, r"taken 0\.bias out"),
        (_deleted, r"taken 2\.weight out"),
    ],
)
def test_parameters_that_come_and_go_are_refused(
    tmp_path: Path, edit: Callable[[Any], None], told: str, steps: int
) -> None:
    with session_of(str(tmp_path), plan_of("zero 0", 1)) as session:
        state = prepared(session, build())
        for batch in state.batches(steps):
            state.step(batch)
        edit(state.model)
        with pytest.raises(RecipeError, match=told):
            state.save()


def test_a_parametrization_after_prepare_is_refused(tmp_path: Path) -> None:
    with session_of(str(tmp_path), plan_of("zero 0", 1)) as session:
        state = prepared(session, build())
        nn.utils.parametrizations.weight_norm(state.model[2])
        with pytest.raises(RecipeError, match=r"has taken 2\.weight out since session\.prepare"):
            state.step(next(iter(state.batches(1))))


def test_what_a_loop_adds_is_its_own(tmp_path: Path) -> None:
    with session_of(str(tmp_path), plan_of("zero 0", 1)) as session:
        state = prepared(session, build())
        state.model[0].teacher = nn.Linear(3, 3)
        assert [state.step(batch).loss for batch in state.batches(2)]


def beside_stages(folder: str, edit: str) -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
            self.blocks = nn.ModuleList([nn.Tanh(), nn.Linear(8, 8)])
            self.register_buffer("gain", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * self.gain
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    plan = Plan(
        mesh=MeshPlan(pipeline=2),
        microbatch=MicrobatchPlan(size=BATCH // 2, per_step=2),
        compute=ComputePlan(precision="fp64"),
    )
    warnings.filterwarnings("ignore", message="the loop has computed a value of")
    with session_of(folder, plan) as session:
        cut = CutTable(entry="first", blocks=("blocks.0", "blocks.1"), tail=("last",))
        state = prepared(session, Passes().double(), cut=cut)
        for batch in state.batches(2):
            state.step(batch)
            if edit == "other's":
                nn.init.zeros_(state.model.last.weight)
            elif edit in OF_PARTS:
                OF_PARTS[edit](state.model)
            elif edit == "copied":
                assert all(type(each) is nn.Parameter for each in copy.deepcopy(state.model).parameters())
            elif edit == "one by all":
                norm = nn.utils.parameters_to_vector(state.model.parameters()).norm().item()
                nn.init.constant_(next(state.model.parameters()), norm)
            else:
                assert edit == "one"
                nn.init.zeros_(next(state.model.parameters()))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            "other's",
            r"the loop has used last of the model .*'Passed' object has no attribute 'weight'\. Take the modules",
        ),
        ("clamp_", r"has changed [a-z.0-9]+ and [123] more weights .*mesh\.pipeline = 1"),
        ("data.clamp_", r"has changed [a-z.0-9]+ and [123] more weights .*mesh\.pipeline = 1"),
        ("buffer by all", r"changed gain since the last step and has read [a-z.0-9]+, and other .*mesh\.pipeline = 1"),
        ("as one vector", r"has changed [a-z.0-9]+ and [123] more weights .*mesh\.pipeline = 1"),
        (
            "one by all",
            r"changed [a-z.0-9]+ since the last step and has read [a-z.0-9]+, and other .*mesh\.pipeline = 1",
        ),
    ],
)
def test_edits_beside_other_stages_are_refused(ranks: RankPool, tmp_path: Path, edit: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        ranks.run(2, beside_stages, str(tmp_path), edit)


@pytest.mark.parametrize("edit", ["one", "read", "copied"])
def test_but_not_of_one_module(ranks: RankPool, tmp_path: Path, edit: str) -> None:
    ranks.run(2, beside_stages, str(tmp_path), edit)


def averaged(kind: str, folder: str) -> None:
    plan = plan_of(kind, torch.distributed.get_world_size())
    split = {"0": "column", "2": "row"} if kind == "tensor" else ()
    model = build().float() if "bf16" in kind else build()
    average = AveragedModel(model)
    with session_of(folder, plan, permit=(plan.compute.precision,)) as session:
        state = prepared(session, model, InOrder(), batch_size=BATCH, split=split)
        for batch in state.batches(3):
            state.step(batch)
            average.update_parameters(state.model)


@pytest.mark.parametrize("kind", ["zero 3", "tensor"])
def test_an_average_of_before_prepare_is_refused_in_a_sentence(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        RecipeError, match=r"update_parameters was given parameters of the model after session\.prepare"
    ):
        ranks.run(2, averaged, kind, str(tmp_path))


def copied(folder: str) -> None:
    with session_of(folder, plan_of("zero 3", 2)) as session:
        AveragedModel(prepared(session, build(), InOrder(), batch_size=BATCH).model)


def test_a_copy_of_shares_is_refused_with_what_to_average(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"AveragedModel calls, too.*state\.model\.parameters\(\)\]"):
        ranks.run(2, copied, str(tmp_path))


def test_an_average_of_before_prepare_is_kept_or_refused_in_bf16(ranks: RankPool, tmp_path: Path) -> None:
    try:
        ranks.run(1, averaged, "bf16", str(tmp_path))
    except RecipeError as error:
        assert "which this plan holds in bf16" in str(error)  # noqa: PT017
