"""What a loop computes of weights of which its rank has a part, as norms and averages, is warned of, and nothing is
written by it: not through the optimizer's parameter groups, and not into plain attributes of modules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from test_session_edits import STEPS, plan_of
from test_session_kept import InOrder, check_equal, in_order, whole_weights
from test_session_traps import BATCH, build, loss_fn, prepared, session_of
from torch import Tensor, nn

from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import RecipeError
from weft.model.families import CutTable

Edit = Callable[[Any, torch.optim.Optimizer], Any]


def held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _clipped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    norm = torch.stack([p.norm() for p in held_by(optimizer)]).norm()
    for p in held_by(optimizer):
        p.data.mul_(min(1, 1.5 / norm))


@torch.no_grad()
def _clipped_together(model: Any, optimizer: torch.optim.Optimizer) -> None:
    norm = torch.stack(torch._foreach_norm(held_by(optimizer))).norm()
    torch._foreach_mul_(held_by(optimizer), min(1.0, 1.5 / float(norm)))


@torch.no_grad()
def _as_one_vector(model: Any, optimizer: torch.optim.Optimizer) -> None:
    norm = torch.cat([p.detach().flatten() * 1.0 for p in held_by(optimizer)]).norm()
    for p in held_by(optimizer):
        p.mul_((1.5 / norm).clamp(max=1))


@torch.no_grad()
def _normalised(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for p in held_by(optimizer):
        p.copy_(F.normalize(p.flatten(), dim=0).view(p.shape))


def _through_numpy(model: Any, optimizer: torch.optim.Optimizer) -> None:
    held = [p.detach().numpy() for p in held_by(optimizer)]
    norm = sum((each**2).sum() for each in held) ** 0.5
    for each in held:
        each *= min(1, 1.5 / norm)


@torch.no_grad()
def _into_the_model(model: Any, optimizer: torch.optim.Optimizer) -> None:
    norm = sum(float(p.detach().square().sum()) for p in held_by(optimizer)) ** 0.5
    for p in model.parameters():
        p.mul_(min(1, 1.5 / norm))


def _into_data_of_the_model(model: Any, optimizer: torch.optim.Optimizer) -> None:
    norm = sum(float(p.detach().square().sum()) for p in held_by(optimizer)) ** 0.5
    for p in model.parameters():
        p.data.mul_(min(1, 1.5 / norm))


def _kept_for_later(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """By the norm of an earlier step."""
    if not hasattr(optimizer, "norm"):
        optimizer.norm = sum(float(p.detach().square().sum()) for p in held_by(optimizer)) ** 0.5  # type: ignore[attr-defined]
    else:
        for p in held_by(optimizer):
            p.data.mul_(min(1, 1.5 / optimizer.norm))


BY_A_NORM: dict[str, Edit] = {
    "data": _clipped,
    "foreach": _clipped_together,
    "one vector": _as_one_vector,
    "normalize": _normalised,
    "numpy": _through_numpy,
    "model": _into_the_model,
    "model's data": _into_data_of_the_model,
    "later": _kept_for_later,
}


def _logged(model: Any, optimizer: torch.optim.Optimizer) -> None:
    assert torch.stack([p.norm() for p in held_by(optimizer)]).norm().item() > 0


@torch.no_grad()
def _elementwise(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As optimizers that average weights go to and fro."""
    kept = [p.clone() for p in held_by(optimizer)]
    for p, other in zip(held_by(optimizer), kept, strict=True):
        p.data.clamp_(-0.3, 0.3)
        p.lerp_(end=other * 0.5, weight=0.1)
    torch._foreach_mul_(held_by(optimizer), 0.99)


def _nothing(model: Any, optimizer: torch.optim.Optimizer) -> None:
    pass


def plain(edit: Edit) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in [*in_order()][:STEPS]:
        optimizer.zero_grad()
        (loss_fn(model(batch[0]), batch)[0] / len(batch[0])).backward()
        optimizer.step()
        edit(model, optimizer)
    return [each.detach().clone() for each in model.parameters()]


def train(kind: str, folder: str, edit: Edit) -> tuple[list[Tensor], list[str]]:
    split = {"0": "column", "2": "row"} if kind == "tensor" else ()
    plan = plan_of(kind, torch.distributed.get_world_size())
    with session_of(folder, plan) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = prepared(session, model, InOrder(), optimizer=optimizer, batch_size=BATCH, split=split)
        for batch in state.batches(STEPS):
            state.step(batch)
            edit(state.model, optimizer)
        found = whole_weights(state, folder, build())
    assert {type(each) for each in held_by(optimizer)} == {Tensor}
    return found, [str(each.message) for each in caught]


@pytest.mark.parametrize("edit", ["data", "foreach", "later"])
def test_by_whole_weights_it_is_plain_pytorch(ranks: RankPool, tmp_path: Path, edit: str) -> None:
    right = plain(BY_A_NORM[edit])
    for found, said in ranks.run(2, train, "data", str(tmp_path), BY_A_NORM[edit]):
        check_equal(found, right)
        assert not said


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        *((edit, "zero 3") for edit in sorted(BY_A_NORM)),
        *((edit, kind) for edit in ("data", "foreach", "model's data") for kind in ("zero 1", "tensor")),
    ],
)
def test_a_norm_of_parts_changes_no_weights(ranks: RankPool, tmp_path: Path, edit: str, kind: str) -> None:
    told = r"has changed .* and has read what the optimizer holds of 0\..*, of which this rank has a part \("
    if kind == "zero 1" and "model" not in edit:
        told = "the optimizer has changed weights outside of a step|" + told
    if kind == "tensor" and "model" in edit:
        told = r"has changed 0\.weight since the last step, of which this rank has a part \(mesh\.tensor = 2\)"
    with pytest.raises(RecipeError, match=told):
        ranks.run(2, train, kind, str(tmp_path), BY_A_NORM[edit])


@pytest.mark.parametrize("kind", ["zero 1", "zero 3", "tensor"])
def test_to_log_it_is_warned_of_once_and_changes_nothing(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    right = plain(_nothing)
    for found, said in ranks.run(2, train, kind, str(tmp_path), _logged):
        check_equal(found, right)
        assert len(said) == 1
        assert "has computed a value of what the optimizer holds of 0." in said[0]


@pytest.mark.parametrize("kind", ["data", "zero 3", "tensor"])
def test_elementwise_edits_through_the_optimizer_train_on(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    right = plain(_elementwise)
    for found, said in ranks.run(2, train, kind, str(tmp_path), _elementwise):
        check_equal(found, right)
        assert not said


def test_another_tensor_in_an_optimizers_group_is_refused(tmp_path: Path) -> None:
    with session_of(str(tmp_path), plan_of("data", 1)) as session:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = prepared(session, model, InOrder(), optimizer=optimizer, batch_size=BATCH)
        first, second = state.batches(2)
        state.step(first)
        for p in held_by(optimizer):
            p.data = p.data * 0.5
        with pytest.raises(RecipeError, match=r"hold of 0\.weight another tensor .*`with torch\.no_grad\(\): p\.copy_"):
            state.step(second)


class Scaled(nn.Module):
    """Has a number that its forward multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([nn.Tanh(), nn.Linear(8, 8)])
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def scaled(axis: str, folder: str, by: str) -> list[str]:
    plan = Plan(
        mesh=MeshPlan(**{axis: 2}),
        microbatch=MicrobatchPlan(size=BATCH // 2, per_step=2),
        compute=ComputePlan(precision="fp64"),
    )
    given: dict[str, Any] = {"split": {"first": "column", "blocks.1": "row"}}
    if axis == "pipeline":
        given = {"cut": CutTable(entry="first", blocks=("blocks.0", "blocks.1"), tail=("last",))}
    with session_of(folder, plan) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = prepared(session, Scaled().double(), **given)
        for number, batch in enumerate(state.batches(3)):
            state.step(batch)
            norm = float(torch.stack([p.detach().norm() for p in state.model.parameters()]).norm())
            if by == "a norm":
                state.model.scale = 1 / norm  # type: ignore[assignment]
            elif by == "a schedule":
                state.model.scale = 1 / (number + 2)  # type: ignore[assignment]
            elif by == "a tensor":
                state.model.scale = torch.tensor(norm, dtype=torch.float64)
            else:
                assert by == "nothing"
                copy.deepcopy([*state.model.parameters()])
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@pytest.mark.parametrize("by", ["a norm", "a tensor"])
def test_an_attribute_by_a_norm_of_parts_is_refused(ranks: RankPool, tmp_path: Path, axis: str, by: str) -> None:
    with pytest.raises(RecipeError, match=r"has set scale of the model by what it has read of weights .* on rank 0"):
        ranks.run(2, scaled, axis, str(tmp_path), by)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
@pytest.mark.parametrize("by", ["a schedule", "nothing"])
def test_one_by_a_schedule_is_not(ranks: RankPool, tmp_path: Path, axis: str, by: str) -> None:
    for said in ranks.run(2, scaled, axis, str(tmp_path), by):
        assert len(said) == 1
        assert "has computed a value of" in said[0]
