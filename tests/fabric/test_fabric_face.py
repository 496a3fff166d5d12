"""Fabric's methods one by one: what they do, and what they say of what is not had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.config.plan import MeshPlan, Plan
from weft.errors import CheckpointError, DataError, LaunchError, RecipeError
from weft.fabric import Fabric, is_wrapped
from weft.fabric.loggers import CSVLogger, TensorBoardLogger
from weft.fabric.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    monkeypatch.chdir(tmp_path)
    made = Fabric(accelerator="cpu", devices=1)
    yield made
    made.close()


def data(number: int = 10) -> DataLoader[Any]:
    rows = torch.arange(4.0 * number).view(number, 4) / (4 * number)
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, 3), nn.Linear(3, 1), 2.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.encode(x)))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "accelerator": (lambda: Fabric(accelerator="tpu"), "accelerator='tpu'"),
    "devices": (lambda: Fabric(devices=[1, 3]), "CUDA_VISIBLE_DEVICES chooses which"),
    "precision": (lambda: Fabric(precision="transformer-engine"), "Use '32-true', '64-true', 'bf16-mixed'"),
    "plugins": (lambda: Fabric(plugins=[object()]), "plugins=object"),
    "strategy": (lambda: Fabric(strategy="dp"), "strategy='dp'"),
    "a word too many": (lambda: Fabric(strategy="ddp_find_unused"), "strategy='ddp_find_unused'"),
    "another offload": (lambda: Fabric(strategy="fsdp_disk"), "strategy='fsdp_disk'"),
    "a strategy's precision": (lambda: FSDPStrategy(precision="16"), r"FSDPStrategy\(precision=…\) is not had. Say it"),
    "both": (lambda: Fabric(strategy="ddp", plan=Plan()), "says twice how to split"),
    "option": (lambda: FSDPStrategy(mixed_precision=object()), r"FSDPStrategy\(mixed_precision=…\) is not had. Say it"),
    "offload": (lambda: Fabric(strategy="deepspeed_stage_3_offload"), "Weights stay on devices"),
    "sharding": (lambda: FSDPStrategy(sharding_strategy="HALF").plan(2), "sharding_strategy='HALF'"),
    "mesh": (lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(1, 3)).plan(4), "do not divide 4"),
    "sizes": (lambda: ModelParallelStrategy(tensor_parallel_size=3).plan(4), "1 × 3 ranks, and the job has 4"),
    "seed": (lambda: Fabric.seed_everything(-1), "seed = -1 is not between"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_had_is_refused_by_its_name(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises(RecipeError, match=said):
        call()


def test_strategies_are_plans() -> None:
    hybrid = FSDPStrategy(
        sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), activation_checkpointing_policy={nn.Linear}
    )
    plan = hybrid.plan(4)
    assert plan is not None
    assert plan.mesh == MeshPlan(replicate=2, shard=2)
    assert (plan.data_parallel.zero, plan.memory.recompute) == (3, "full")
    plan = DeepSpeedStrategy(stage=1, offload_optimizer=True).plan(2)
    assert plan is not None
    assert (plan.data_parallel.zero, plan.memory.offload, plan.mesh.replicate) == (1, "optimizer", 2)
    plan = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2).plan(4)
    assert plan is not None
    assert plan.mesh == MeshPlan(shard=2, tensor=2)


def test_a_model_that_was_set_up_looks_like_itself(fabric: Fabric) -> None:
    plain = Coder()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model, same = fabric.setup(plain, optimizer)
    assert same is optimizer
    assert is_wrapped(model)
    assert is_wrapped(optimizer)
    assert not is_wrapped(plain)
    assert model.module is plain
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    model.scale, model.mine = 3.0, "here"
    assert (plain.scale, plain.mine) == (3.0, "here")  # type: ignore[attr-defined]
    model.load_state_dict({name: torch.zeros_like(each) for name, each in model.state_dict().items()})
    model.eval()
    assert not plain.training
    assert model(torch.ones(2, 4)).eq(0).all()
    model.mark_forward_method("encode")
    assert model.encode(torch.ones(2, 4)).shape == (2, 3)
    with pytest.raises(RecipeError, match="'decode' is no method of Coder"):
        model.mark_forward_method("decode")
    with pytest.raises(RecipeError, match="A model is set up once, and this Coder was before"):
        fabric.setup(model)
    with pytest.raises(RecipeError, match="An optimizer is set up once"):
        fabric.setup_optimizers(optimizer)


def test_steps_say_what_they_do_not_take(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(plain := Coder(), torch.optim.SGD(plain.parameters(), 0.1))
    (rows, _), *_ = fabric.setup_dataloaders(data())
    loss = model(rows).mean()
    for given, said in ({"create_graph": True}, "create_graph"), ({"inputs": [rows]}, "inputs"):
        with pytest.raises(RecipeError, match=said):
            fabric.backward(loss, **given)
    fabric.backward(loss, model=model, retain_graph=True)
    for given, said in (({}, "one of clip_val and max_norm"), ({"max_norm": 1, "norm_type": "inf"}, "norm_type=inf")):
        with pytest.raises(RecipeError, match=said):
            fabric.clip_gradients(model, optimizer, **given)
    with pytest.raises(RecipeError, match="that was not set up"), fabric.no_backward_sync(plain):
        pass
    fabric.backward(loss * float("inf"))
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_a_step_may_have_a_closure(fabric: Fabric) -> None:
    """As a trainer of one's own writes it: forward and backward stand in the step, from the first one on."""
    weights = list[torch.Tensor]()
    for closes in (False, True):
        torch.manual_seed(0)
        model, optimizer = fabric.setup(plain := Coder(), torch.optim.AdamW(plain.parameters(), 0.1))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def loss_of(rows: torch.Tensor, sums: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = F.mse_loss(model(rows), sums)
            fabric.backward(loss)
            return loss

        for rows, sums in fabric.setup_dataloaders(data(8)):
            optimizer.zero_grad()
            if closes:
                assert optimizer.step(partial(loss_of, rows, sums)) > 0
            else:
                loss_of(rows, sums)
                optimizer.step()
            schedule.step()
        weights.append(plain.up.weight.detach().clone())
    assert torch.equal(*weights)
    several = fabric.setup_optimizers(torch.optim.LBFGS(Coder().parameters()))
    with pytest.raises(RecipeError, match="LBFGS computes the loss several times"):
        several.step(lambda: torch.zeros(()))


def test_an_optimizer_may_have_several_models(fabric: Fabric) -> None:
    weights = list[torch.Tensor]()
    for is_set_up in (False, True):
        torch.manual_seed(0)
        first, second = nn.Linear(4, 6), nn.Linear(6, 1)
        encoder, head = (fabric.setup_module(first), fabric.setup_module(second)) if is_set_up else (first, second)
        optimizer: Any = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 0.1)
        optimizer, loader = (
            (fabric.setup_optimizers(optimizer), fabric.setup_dataloaders(data(8)))
            if is_set_up
            else (optimizer, data(8))
        )
        for rows, sums in loader:
            loss = F.mse_loss(head(encoder(rows).relu()), sums)
            fabric.backward(loss) if is_set_up else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(first.weight.detach().clone())
    assert torch.equal(*weights)


class Encoding:
    """A batch of a tokenizer's own kind."""

    device = None

    def to(self, device: torch.device) -> Encoding:
        self.device = device
        return self


def test_what_can_be_moved_is_moved(fabric: Fabric) -> None:
    encoding, model = Encoding(), Coder()
    moved = fabric.to_device({"one": [encoding, torch.ones(1)], "name": "text"})
    assert moved["one"][0].device == fabric.device
    assert moved["name"] == "text"
    assert fabric.to_device(model) is model


def test_before_anything_is_set_up_a_backward_is_plain(fabric: Fabric) -> None:
    weight = torch.ones(2, requires_grad=True)
    fabric.backward(weight * 2, torch.ones(2))
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]


class Lightning(Coder):
    """What of a LightningModule a Fabric knows it by."""

    _fabric: Any = None
    epochs = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.epochs += 1


def test_a_lightning_module_is_a_callback_and_has_steps(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(plain := Lightning(), torch.optim.SGD(plain.parameters(), 0.1))
    for batch in fabric.setup_dataloaders(data(8)):
        optimizer.zero_grad()
        fabric.backward(model.training_step(batch))
        optimizer.step()
    fabric.call("on_train_epoch_end")
    assert plain._fabric is fabric
    assert model.epochs == 1


def test_weights_are_made_as_they_are_asked_for(fabric: Fabric) -> None:
    double = Fabric(accelerator="cpu", precision="64-true")
    with double.init_module():
        assert nn.Linear(2, 2).weight.dtype is torch.float64
    with double.init_tensor():
        assert torch.ones(1).dtype is torch.float64
    double.close()
    with fabric.init_module(empty_init=True):
        state = torch.get_rng_state()
        nn.Linear(2, 2)
        assert torch.equal(torch.get_rng_state(), state)


def test_raw_weights_come_from_safetensors(fabric: Fabric, tmp_path: Path) -> None:
    model = fabric.setup_module(Coder())
    other = Coder()
    save_file(other.state_dict(), tmp_path / "coder.safetensors")
    fabric.load_raw(tmp_path / "coder.safetensors", model)
    assert torch.equal(model.state_dict()["up.weight"], other.up.weight)
    with pytest.raises(RecipeError, match="reads no pickles"):
        fabric.load_raw("coder.pt", model)


def test_a_checkpoint_has_what_its_state_had(fabric: Fabric) -> None:
    model, optimizer = fabric.setup(plain := Coder(), torch.optim.SGD(plain.parameters(), 0.1))
    fabric.save("saved", {"model": model, "optimizer": optimizer, "epoch": 3, "more": {"best": [1.5, None]}})
    state = {"model": model, "epoch": 0}
    assert fabric.load("saved", state) == {"more": {"best": [1.5, None]}}
    assert state["epoch"] == 3
    with pytest.raises(CheckpointError, match="saved has no loss"):
        fabric.load("saved", {"model": model, "loss": 0.0})
    assert fabric.load("saved", {"model": model, "loss": 0.0}, strict=False)["epoch"] == 3
    with pytest.raises(RecipeError, match="'model' was not set up"):
        fabric.save("saved", {"model": plain})
    with pytest.raises(RecipeError, match="filter=…"):
        fabric.save("saved", {"model": model}, filter={})
    with pytest.raises(RecipeError, match="would hand out whole weights"):
        fabric.load("saved")


def test_loggers_write_where_fabric_does(fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger("logs", prefix="run")
    logger.log_metrics({"loss": torch.tensor(0.5)})
    logger.save()
    logger.log_metrics({"accuracy": 1.0}, step=7)
    logger.finalize("success")
    text = (tmp_path / "logs" / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert text.split() == ["run-accuracy,run-loss,step", ",0.5,0", "1.0,,7"]
    assert CSVLogger("logs").version == 1
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(RecipeError, match="TensorBoardLogger needs tensorboard"):
        TensorBoardLogger("logs").log_metrics({"loss": 0.5})
    with pytest.raises(RecipeError, match="this Fabric has no logger"):
        _ = fabric.logger
    with pytest.raises(RecipeError, match="CSVLogger keeps no settings"):
        logger.log_hyperparams({})


def told(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    fabric = Fabric(accelerator="cpu", devices=2)
    rank, found = fabric.global_rank, dict[str, Any]()
    try:
        found["first"] = fabric.broadcast({"rank": rank, "rows": torch.full((2,), rank)}, src=1)["rank"]
        gathered = fabric.all_gather({"rows": torch.full((2,), rank), "number": rank})
        found["rows"], found["number"] = gathered["rows"].tolist(), gathered["number"].tolist()
        own = torch.tensor([float(rank), 1.0])
        assert fabric.all_reduce(own, reduce_op="sum") is own
        found["sum"], found["mean"] = own.tolist(), fabric.all_reduce(rank).item()
        found["zero"], found["size"] = fabric.is_global_zero, fabric.world_size
        with pytest.raises(DataError, match=r"\(1,\), \(2,\) by the ranks, which make no one tensor"):
            fabric.all_gather(torch.zeros(rank + 1))
        with pytest.raises(RecipeError, match="sync_grads=True"):
            fabric.all_gather(own, sync_grads=True)
        with pytest.raises(RecipeError, match="reduce_op='product'"):
            fabric.all_reduce(own, reduce_op="product")
        model, optimizer = fabric.setup(plain := Coder(), torch.optim.SGD(plain.parameters(), 0.1))
        seen = 0
        for rows, sums in fabric.setup_dataloaders(data(9)):
            loss = F.mse_loss(model(rows), sums)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += len(rows)
            fabric.all_reduce(loss.detach())
        found["seen"] = seen
    finally:
        fabric.close()
    return found


def test_ranks_tell_one_another(ranks: RankPool, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run(2, told, str(tmp_path))):
        assert found == {
            **{"first": 1, "rows": [[0, 0], [1, 1]], "number": [0, 1], "sum": [1.0, 2.0], "mean": 0.5},
            **{"zero": rank == 0, "size": 2, "seen": 5},  # of nine, with one that stands in for none
        }


SCRIPT = """
import sys
from weft.fabric import Fabric

def main(fabric, word):
    total = fabric.all_reduce(fabric.global_rank + 1, reduce_op="sum")
    fabric.print(word, sys.argv[1], fabric.world_size, int(total))

fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch(main, "heard")
"""


def test_a_script_starts_its_own_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "so"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "heard so 2 3"


def test_ranks_that_nobody_has_started_are_asked_for() -> None:
    with pytest.raises(LaunchError, match="and this is one: call fabric.launch"):
        _ = Fabric(devices=2).device
    command = [sys.executable, "-c", "from weft.fabric import Fabric; Fabric(devices=2).launch()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "and this is none. Use `weft launch -n 2 script.py`, or weft.spawn in a notebook" in done.stderr
