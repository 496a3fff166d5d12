"""`weft export`: what any plan saved, as `transformers` or the user's own module loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.cli import run
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import CheckpointError, LaunchError

RECIPE = """
[model]
reference = "decoder"
num_layers = 2
hidden_size = 32
num_heads = 4
sequence_length = 16
vocabulary_size = 64
[data]
train = [{ source = "synthetic" }]
[batch]
global_batch_size = 4
[optimizer]
average_decay = 0.5
[run]
steps = 2
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "recipe.toml").write_text(RECIPE)
    plan = Plan(mesh=MeshPlan(shard=2), data_parallel=DataParallelPlan(zero=3), microbatch=MicrobatchPlan(size=2))
    return weft.train(folder / "recipe.toml", plan, folder=folder / "run", quiet=True).folder


def test_a_run_is_exported_again(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files as at its end; from a checkpoint's folder, in another dtype, with and without the average."""
    weft.export(trained, tmp_path / "again")
    for file in (trained / "export").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    (step,) = (trained / "checkpoints").glob("step-*2")
    monkeypatch.chdir(trained)
    assert run(["export", f"checkpoints/{step.name}", str(tmp_path / "plain"), "--no-average", "--dtype", "bf16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    average, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "plain"))
    assert average.keys() == plain.keys()
    assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["dtype"] == "bfloat16"
    assert any(not torch.equal(average[name].bfloat16(), plain[name]) for name in plain)
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert sum(parameter.numel() for parameter in loaded.parameters()) > 0


def saved(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    rows = torch.randn(16, 4)
    loader = DataLoader(TensorDataset(rows, rows[:, :2]), batch_size=8)
    plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=4))
    with weft.session(plan, folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = session.prepare(
            model, optimizer, loader, loss=lambda outputs, batch: ((outputs - batch[1]).square().sum(), len(outputs))
        )
        state.attach(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
        for batch in state.batches():
            state.step(batch)
        state.save()
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_what_a_session_saved_has_the_names_of_its_module(ranks: RankPool, tmp_path: Path) -> None:
    expected, _ = ranks.run(2, saved, str(tmp_path / "run"))
    found = load_file(weft.export(tmp_path / "run", tmp_path / "out") / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_what_cannot_be_exported_says_why(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist\. Give the folder of a run"):
        weft.export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint"):
        weft.export(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is not empty. Export into a new folder"):
        weft.export(trained, trained)
    with pytest.raises(LaunchError, match=r"dtype = fp8 is none of fp32, bf16, fp16"):
        weft.export(trained, tmp_path / "out", dtype="fp8")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
