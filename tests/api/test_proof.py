"""The proof at the start: it finds what a plan computes otherwise than plain PyTorch, and leaves no trace where nothing
is wrong."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankPool
from proof_cases import BATCH, CUT, SILENT, SPLIT, Case, NarrowNorm, Net, loader, loss_of, plan_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.errors import PlanError, RecipeError

ALONE = ("one", "accumulation", "recompute")
FOUND = {
    "codebook": ("accumulation", "data", "zero3"),
    "max_norm": ("data", "zero3"),
    "spectral_norm": ("accumulation",),
    "hand-written batch norm": ("accumulation", "data"),
    "contrastive": ("accumulation", "data", "pipeline"),
}
"""Kind → plans under which it is wrong without a word where nothing looks for it."""


def world_of(plan: str) -> int:
    return 1 if plan in ALONE else 2


def prepare(session: Any, case: Case, plan: str, dtype: torch.dtype = torch.float32) -> Any:
    net = case.make()
    net = net.to(dtype) if dtype == torch.float64 else net
    tables: dict[str, Any] = {"tensor": {"split": SPLIT}, "pipeline": {"cut": CUT}}.get(plan, {})
    return session.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader(dtype), loss=case.loss(net), **tables
    )


def proven(name: str, plan: str, folder: str) -> str:
    """Prove with all nets down; return what the proof says."""
    with weft.session(plan_of(plan), prove="always", folder=folder, quiet=True) as session:
        session._nets = dataclasses.replace(session._nets, **dict.fromkeys(dataclasses.asdict(session._nets), False))
        with pytest.raises(PlanError) as caught:
            prepare(session, SILENT[name], plan)
        return str(caught.value)


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name, plans in FOUND.items() for plan in plans])
def test_what_no_net_has_caught_is_found(ranks: RankPool, tmp_path, name: str, plan: str) -> None:
    for said in ranks.run(world_of(plan), proven, name, plan, str(tmp_path)):
        assert re.match(r"two steps under this plan are not those of plain PyTorch: |plain PyTorch takes two", said)
        assert said.endswith('prove = "never".')


def proves(name: str, plan: str, folder: str) -> None:
    with weft.session(plan_of(plan), prove="always", folder=folder, quiet=True) as session:
        prepare(session, SILENT[name], plan)


@pytest.mark.parametrize(
    "name", ["two views", "gradient penalty", "fp64 buffer", "parameters of the loss", "complex parameter"]
)
@pytest.mark.parametrize("plan", ["one", "accumulation", "data", "zero3"])
def test_what_is_mended_is_proven(ranks: RankPool, tmp_path, name: str, plan: str) -> None:
    ranks.run(world_of(plan), proves, name, plan, str(tmp_path))


def rounds_inside(plan: str, folder: str) -> None:
    with weft.session(plan_of(plan, "fp64"), permit=("fp64",), prove="always", folder=folder, quiet=True) as session:
        prepare(session, Case(NarrowNorm), plan, torch.float64)


@pytest.mark.parametrize("plan", ["accumulation", "data", "tensor"])
def test_what_a_model_rounds_by_itself_is_no_difference(ranks: RankPool, tmp_path, plan: str) -> None:
    ranks.run(world_of(plan), rounds_inside, plan, str(tmp_path))


def trained(plan: str, prove: Any, precision: Any, folder: str) -> list[float]:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    session_of = weft.session(plan_of(plan, precision), permit=(precision,), prove=prove, folder=folder, quiet=True)
    with session_of as session:
        state = prepare(session, Case(lambda: Net(0.2)), plan, dtype)
        losses = [state.step(batch).loss for batch in state.batches(4)]
        return [*losses, state.evaluate(DataLoader(loader(dtype).dataset, batch_size=BATCH))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", ["one", "recompute", "zero1", "zero3", "tensor", "pipeline"])
def test_a_proof_leaves_no_trace(ranks: RankPool, tmp_path, plan: str, precision: str) -> None:
    seen = [
        ranks.run(world_of(plan), trained, plan, prove, precision, str(tmp_path / prove))
        for prove in ("always", "never")
    ]
    assert seen[0] == seen[1], "to the bit"


class Keeping(Net):
    """Keeps things as one writes them: a list, a counter, a tensor that is bound anew, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.calls = 0
        self.last = torch.zeros(1)
        self.total: Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.calls += 1
        self.last = x.detach()
        self.total += 1.0
        return super().forward(x)


def kept_by(prove: Any, folder: Any) -> list[Any]:
    """All that a model, a loss and generators keep, after prepare."""
    model, memory, told = Keeping(), {"losses": []}, 0
    last = model.last

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        nonlocal told
        told += 1
        found, count = loss_of(outputs, batch)
        memory["losses"].append(float(found.detach()))
        return found, count

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    with weft.session(plan_of("one"), prove=prove, folder=folder, quiet=True) as session:
        state = session.prepare(model, optimizer, loader(), loss=loss)
        weights = [value.tolist() for value in state.model.state_dict().values()]
        generators = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        kept = [model.seen, model.calls, memory, told, model.last is last, dict(optimizer.state)]
        return [*kept, optimizer.param_groups[0]["lr"], rates.get_last_lr(), generators, weights]


def test_what_model_loss_and_generators_keep_is_put_back(tmp_path) -> None:
    kept_by("never", tmp_path / "first")  # some library draws from Python's generator as it is imported
    with_proof, without = kept_by("always", tmp_path / "always"), kept_by("never", tmp_path / "never")
    assert with_proof == without


def said_twice(capsys: pytest.CaptureFixture[str], folder: Any, **changes: Any) -> list[str]:
    """The lines of two starts, the second with changes."""
    lines: list[str] = []
    for given in ({}, changes):
        torch.manual_seed(0)
        model = given.get("model", Net)()
        optimizer = torch.optim.SGD(model.parameters(), lr=given.get("rate", 0.1))
        with weft.session(given.get("plan", plan_of("one")), folder=folder) as session:
            session.prepare(model, optimizer, loader(), loss=given.get("loss", loss_of))
        printed = capsys.readouterr().out.splitlines()
        lines += [line for line in printed if line.startswith("proof")]
    return lines


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("nothing_kept")
def test_a_second_start_finds_its_proof(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = said_twice(capsys, tmp_path)
    assert re.fullmatch(
        r"proof     two steps equal plain PyTorch: largest relative difference \S+ over 24 tensors"
        r"  \(\d+\.\d s, kept for the next start\)",
        first,
    )
    assert second.startswith("proof     kept from 20")


def other_loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    found, count = loss_of(outputs, batch)
    return 2 * found, count


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize(
    "changes",
    [
        {"loss": other_loss},
        {"plan": plan_of("accumulation")},
        {"rate": 0.2},
        {"model": lambda: Net(0.5)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_loss_plan_optimizer_or_model_is_proven_anew(
    tmp_path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    _, second = said_twice(capsys, tmp_path, **changes)
    assert second.startswith("proof     two steps equal plain PyTorch")


def said_by(capsys: pytest.CaptureFixture[str], plan: Any, folder: Any, loss: Any = loss_of, **session: Any) -> str:
    model = Net()
    with weft.session(plan, folder=folder, **session) as opened:
        opened.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), loss=loss)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("proof")]
    return line


@pytest.mark.usefixtures("nothing_kept")
def test_what_is_not_proven_says_why(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(outputs: Tensor, batch: Any) -> Any:
        raise ZeroDivisionError("mine")

    plan = plan_of("one")
    assert (
        said_by(capsys, plan, tmp_path, fails) == "proof     not proven: plain PyTorch raises ZeroDivisionError: mine"
    )
    half = dataclasses.replace(plan, compute=dataclasses.replace(plan.compute, precision="fp16"))
    assert "not proven: the first steps in fp16 may be skipped" in said_by(capsys, half, tmp_path, permit=("fp16",))
    with pytest.raises(RecipeError, match=r"prove = 'sometimes' is not a way to prove"):
        said_by(capsys, plan, tmp_path, prove="sometimes")


def among_ranks(folder: str) -> str:
    import contextlib
    import io

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        torch.distributed.all_reduce(torch.ones(1))
        return loss_of(outputs, batch)

    model, printed = Net(), io.StringIO()
    with contextlib.redirect_stdout(printed), weft.session(plan_of("data"), folder=folder, prove="always") as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), loss=loss)
    return printed.getvalue()


def test_a_loss_that_talks_to_other_ranks_keeps_none_waiting(ranks: RankPool, tmp_path) -> None:
    said = ranks.run(2, among_ranks, str(tmp_path))[0]
    assert "proof     not proven: the model or its loss calls collectives by itself" in said


def other_data(folder: str) -> None:
    """Every rank has another split, as by an unseeded permutation."""
    rank = torch.distributed.get_rank()
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(rank))
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=BATCH)
    model = Net()
    with weft.session(plan_of("data"), prove="always", folder=folder, quiet=True) as session:
        session._nets = dataclasses.replace(session._nets, **dict.fromkeys(dataclasses.asdict(session._nets), False))
        with pytest.raises(PlanError, match="not those of plain PyTorch"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=loss_of)


def test_ranks_with_other_data_are_found(ranks: RankPool, tmp_path) -> None:
    ranks.run(2, other_data, str(tmp_path))


class Slow(nn.Module):
    """A model whose every forward takes 1.8 s."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        import time

        time.sleep(1.8)
        return self.net(x)


@pytest.mark.usefixtures("nothing_kept")
def test_what_takes_too_long_is_left_out(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Slow()
    with weft.session(plan_of("one"), folder=tmp_path) as session:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), loss=loss_of)
    said = capsys.readouterr().out
    assert re.search(r"not proven: a step by plain PyTorch takes more than 1\.\d s, and the proof may take 10 s", said)


SEEN: list[int] = []
COUNTS = {"forwards": 0}


class Telling(Net):
    """Writes into its class and into variables of its file."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(x))
        COUNTS["forwards"] += 1
        Telling.forwards += 1
        return super().forward(x)


@pytest.mark.parametrize("prove", ["always", "never"])
def test_variables_of_a_file_and_a_class_are_as_before(tmp_path, prove: Any) -> None:
    model = Telling()
    with weft.session(plan_of("accumulation"), prove=prove, folder=tmp_path, quiet=True) as session:
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), loss=loss_of)
        assert (SEEN, COUNTS, Telling.forwards) == ([], {"forwards": 0}, 0)
        state.step(next(iter(state.batches(1))))
        assert (SEEN, COUNTS, Telling.forwards) == ([4, 4], {"forwards": 2}, 2)
    SEEN.clear()
    COUNTS["forwards"] = Telling.forwards = 0
