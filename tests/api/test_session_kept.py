"""What an optimizer keeps (states, counters, every entry of every group) is saved without calling it, and a resume
under any plan goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from safetensors.torch import load_file
from test_session_traps import BATCH, build, loss_fn, plan_for, prepared, samples, session_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from weft.errors import CheckpointError, RecipeError
from weft.run.checkpoint import StoredCheckpoint

STEPS, SAVED_AFTER = 8, 5


class Counting(torch.optim.Optimizer):
    """Keeps what optimizers keep: counts in a group, under a key of its own, in an attribute and by parameter, an
    average of the weights, a statistic by row, and lists."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "d": torch.tensor(1.0, dtype=torch.float64)})
        self.calls = 0
        self.state["global"] = {"sizes": [], "pair": (0, None)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        del closure
        self.calls += 1
        own = self.state["global"]
        own["sizes"].append(self.calls)
        own["pair"] = (own["pair"][0] + 2, None)
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = group["d"] * 1.1
            group.setdefault("rates", {"early": [], "late": (0.5, 0.25)})["early"].append(1.0 / group["k"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(z=p.clone(), count=0, rows=torch.zeros(p.shape[0], dtype=torch.float64), past=[])
                state["count"] += 1
                state["rows"] += p.grad.square().flatten(1).sum(1) if p.ndim > 1 else p.grad.square()
                state["past"] = [*state["past"][-1:], p.grad.clone()]
                scale = sum(group["rates"]["early"]) + own["pair"][0] + len(own["sizes"]) + state["count"]
                rows = (1 + state["rows"]).view(-1, *[1] * (p.ndim - 1))
                update = sum(state["past"]) * group["d"] * scale / rows
                state["z"].sub_(update, alpha=group["lr"])
                p.lerp_(state["z"], 1 / (group["k"] + self.calls))


class InGroup(torch.optim.Optimizer):
    """Counts its steps in a group, as optimizers without a schedule do, and keeps nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        del closure
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"] ** 0.5)


def _adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "counting": lambda params: Counting(params, 1e-3),
    "in group": InGroup,
    "AdamW": _adamw,
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, dampening=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


def cycle(optimizer: Any) -> Any:
    kind = type(optimizer).__name__
    if kind not in ("AdamW", "SGD"):
        return None
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS, pct_start=0.4)


def in_order() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=BATCH)


def plain(which: str) -> list[Tensor]:
    model = build()
    optimizer = OPTIMIZERS[which](model.parameters())
    scheduler, batches = cycle(optimizer), [*in_order()] * 2
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        total, count = loss_fn(model(batch[0]), batch)
        (total / count).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [each.detach().clone() for each in model.parameters()]


class InOrder:
    """A loader that Weft does not shuffle."""

    def __iter__(self) -> Any:
        return iter(in_order())


def train(which: str, folder: str, zero: int, *, steps: int, tensor: int = 1, loads: str | None = None) -> list[Tensor]:
    world = torch.distributed.get_world_size()
    with session_of(folder, plan_for(world, zero, tensor)) as session:
        model = build()
        optimizer = OPTIMIZERS[which](model.parameters())
        scheduler = cycle(optimizer)
        split = {"0": "column", "2": "row"} if tensor > 1 else ()
        state = prepared(session, model, InOrder(), optimizer=optimizer, batch_size=BATCH, split=split)
        if scheduler is not None:
            state.attach(scheduler=scheduler)
        if loads is not None:
            state.load(Path(loads))
        while state.steps < steps:
            for batch in state.batches(1):
                state.step(batch)
                if scheduler is not None:
                    scheduler.step()
                if loads is None and state.steps in (2, SAVED_AFTER):
                    state.save()
        return whole_weights(state, folder, build())


def whole_weights(state: Any, folder: str, like: nn.Module) -> list[Tensor]:
    found = state.export(Path(folder) / f"export-{state.steps}")
    weights: dict[str, Tensor] = {}
    for file in sorted(found.glob("*.safetensors")):
        weights |= load_file(file)
    return [weights[name] for name, _ in like.named_parameters()]


def check_equal(found: list[Tensor], right: list[Tensor]) -> None:
    for mine, other in zip(found, right, strict=True):
        assert float((mine - other).norm()) <= 1e-10 * float(other.norm())


@pytest.mark.parametrize("which", sorted(OPTIMIZERS))
def test_a_save_changes_nothing_and_a_resume_is_the_whole(ranks: RankPool, tmp_path: Path, which: str) -> None:
    right = plain(which)
    for world, zero in ((1, 0), (2, 0)):
        first = tmp_path / f"{world}"
        check_equal(ranks.run(world, train, which, str(first), zero, steps=STEPS)[0], right)
        saved = next(first.glob(f"**/step-{SAVED_AFTER:06d}"))
        for again, other in ((1, 0), (2, 0)):
            went = ranks.run(
                again, train, which, str(tmp_path / f"{world}-{again}"), other, steps=STEPS, loads=str(saved)
            )
            for mine in went:
                check_equal(mine, right)


@pytest.mark.parametrize("which", ["AdamW", "SGD"])
@pytest.mark.parametrize(("zero", "tensor"), [(1, 1), (3, 1), (0, 2)])
def test_a_save_is_resumed_under_another_plan(
    ranks: RankPool, tmp_path: Path, which: str, zero: int, tensor: int
) -> None:
    right = plain(which)
    check_equal(ranks.run(2, train, which, str(tmp_path / "cut"), zero, steps=STEPS, tensor=tensor)[0], right)
    saved = str(next((tmp_path / "cut").glob(f"**/step-{SAVED_AFTER:06d}")))
    check_equal(ranks.run(1, train, which, str(tmp_path / "one"), 0, steps=STEPS, loads=saved)[0], right)
    ranks.run(1, train, which, str(tmp_path / "whole"), 0, steps=STEPS)
    saved = str(next((tmp_path / "whole").glob(f"**/step-{SAVED_AFTER:06d}")))
    again = ranks.run(2, train, which, str(tmp_path / "two"), zero, steps=STEPS, tensor=tensor, loads=saved)
    check_equal(again[0], right)


def test_states_by_row_are_whole_under_zero_1(ranks: RankPool, tmp_path: Path) -> None:
    right = plain("Adafactor")
    check_equal(ranks.run(2, train, "Adafactor", str(tmp_path / "cut"), 1, steps=STEPS)[0], right)
    saved = str(next((tmp_path / "cut").glob(f"**/step-{SAVED_AFTER:06d}")))
    check_equal(ranks.run(2, train, "Adafactor", str(tmp_path / "again"), 1, steps=STEPS, loads=saved)[1], right)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.left = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_what_took_no_step_has_no_state_afterwards_either(tmp_path: Path) -> None:
    kept: list[int] = []
    for loads in (False, True):
        with session_of(tmp_path) as session:
            state = prepared(session, Half().double())
            if loads:
                state.load()
            else:
                state.step(next(iter(state.batches(1))))
                state.save()
            kept.append(len(state.optimizer.state))
    assert kept == [2, 2]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda o: o.param_groups[0].update(rule=print), r"Adam's rule \(group 0\) is a builtin_function_or_method"),
        (lambda o: setattr(o, "log", object()), "Adam's attribute log is a object, which a checkpoint cannot hold"),
        (lambda o: o.state.update(own={"file": object()}), r"Adam's state own\.file is a object"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_at_the_save(
    tmp_path: Path, change: Callable[[Any], None], match: str
) -> None:
    with session_of(tmp_path) as session:
        state = prepared(session, build())
        state.step(next(iter(state.batches(1))))
        change(state.optimizer)
        with pytest.raises(CheckpointError, match=match):
            state.save()


def test_an_optimizer_that_holds_parameters_beside_its_groups_is_refused(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.all = list(model.parameters())  # type: ignore[attr-defined]
    with session_of(tmp_path) as session, pytest.raises(RecipeError, match="keeps parameters in its attribute all"):
        prepared(session, model, optimizer=optimizer)


def test_another_kind_of_optimizer_is_not_given_these_states(tmp_path: Path) -> None:
    for kind in (torch.optim.Adam, torch.optim.SGD):
        with session_of(tmp_path) as session:
            model = build()
            state = prepared(session, model, optimizer=kind(model.parameters(), lr=0.1))
            if kind is torch.optim.Adam:
                state.step(next(iter(state.batches(1))))
                state.save()
            else:
                with pytest.raises(CheckpointError, match="a setting of the SGD's group"):
                    state.load()


def test_a_save_of_before_is_loaded(tmp_path: Path) -> None:
    """Such a one has numbers, switches and texts of groups alone, and says nothing of what else is kept."""
    losses: list[list[float]] = []
    for older in (False, True):
        with session_of(tmp_path / str(older)) as session:
            state = prepared(session, build())
            for batch in state.batches(2):
                state.step(batch)
            manifest = state.save() / "manifest.json"
            if older:
                _as_before(manifest)
            state.load()
            losses.append([state.step(batch).loss for batch in state.batches(2)])
    assert losses[0] == losses[1]


def _as_before(manifest: Path) -> None:
    page = StoredCheckpoint(manifest.parent).manifest
    state = {name: value for name, value in page.state.items() if name != "optimizer_keeps"}
    state["optimizer"] = [
        {name: value for name, value in group.items() if isinstance(value, int | float | str)}
        for group in state["optimizer"]  # type: ignore[union-attr]
    ]
    manifest.write_text(replace(page, state=state).to_text())
    assert "betas" not in StoredCheckpoint(manifest.parent).manifest.state["optimizer"][0]  # type: ignore[index,operator]
