"""Scripts for other libraries become scripts of a session that train the same, and keep what was not changed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from weft.cli import run
from weft.errors import RecipeError
from weft.migrate import migrate_script

HEAD = """
import json
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""

ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import set_seed


def main():
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for epoch in range(2):
        model.train()
        for step, (x, y) in enumerate(loader):  # one epoch
            with accelerator.accumulate(model):
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.print(f"epoch {epoch} {loss.item():.3f} of {accelerator.num_processes}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.print(json.dumps(losses))


if __name__ == "__main__":
    main()
"""

FABRIC = """
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
fabric.print(json.dumps(losses))
"""

DDP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            x, y = batch
            x, y = x.to("cpu"), y.to("cpu")
            optimizer.zero_grad()
            out = ddp(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if rank == 0:
        torch.save(ddp.module.state_dict(), "m.pt")
        print(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

DEEPSPEED = """
import deepspeed


def main():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")
    losses = []
    for epoch in range(2):
        for x, y in loader:
            out = engine(x.to(engine.device))
            loss = F.mse_loss(out, y.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.save_checkpoint("ckpt", tag=epoch)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
"""


def migrated(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return migrate_script(path).after


def losses_of(folder: Path, text: str) -> list[float]:
    """Run a script, and return the list that it prints last."""
    folder.mkdir()
    (folder / "run.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=folder, capture_output=True, text=True, timeout=240, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("body", "needs"),
    [(ACCELERATE, "accelerate"), (FABRIC, "lightning_fabric"), (DDP, "torch")],
    ids=["accelerate", "fabric", "ddp"],
)
def test_the_changed_script_trains_the_same(tmp_path: Path, body: str, needs: str) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    before = losses_of(tmp_path / "before", HEAD + body)
    after = losses_of(tmp_path / "after", migrated(tmp_path, HEAD + body))
    assert len(before) == 16
    assert after == pytest.approx(before, rel=1e-5)


def test_deepspeeds_engine_becomes_the_model(tmp_path: Path) -> None:
    text = migrated(tmp_path, HEAD + DEEPSPEED)
    assert "deepspeed" not in text
    assert "engine" not in text
    assert len(losses_of(tmp_path / "after", text)) == 16


@pytest.mark.parametrize("body", [ACCELERATE, FABRIC, DDP, DEEPSPEED], ids=["accelerate", "fabric", "ddp", "deepspeed"])
def test_nothing_of_the_peer_is_left_and_the_rest_is_as_it_was(tmp_path: Path, body: str) -> None:
    text = migrated(tmp_path, HEAD + body)
    ast.parse(text)
    for word in ("accelerator.", "fabric.", "dist.", "DDP", "DistributedSampler", "engine.", "zero_grad", "backward("):
        assert word not in text, word
    assert "import json\nimport os\n" in text  # what nobody uses, but is no peer's, is not ours to remove
    if body is ACCELERATE:
        assert "enumerate(state.batches()):  # one epoch" in text
        assert "loss:.3f} of {session.world_size}" in text
        assert "def main(session):" in text


GAN = """
from accelerate import Accelerator

accelerator = Accelerator()
g, d = nn.Linear(2, 2), nn.Linear(2, 1)
og, od = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
g, d, og, od, loader = accelerator.prepare(g, d, og, od, loader)
for (real,) in loader:
    lossd = -d(real).mean() + d(g(torch.randn(4, 2)).detach()).mean()
    accelerator.backward(lossd)
    od.step()
    lossg = -d(g(torch.randn(4, 2))).mean()
    accelerator.backward(lossg)
    og.step()
"""


def test_what_cannot_be_done_stands_as_a_comment_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "gan.py"
    path.write_text(HEAD + GAN)
    found = migrate_script(path)
    assert "this loop has several backwards" in " ".join(found.remarks)
    before_loop = found.after.split("for (real,) in loader")[0].rstrip().splitlines()[-1]
    assert before_loop.strip().startswith("# weft: ")
    assert "accelerator.backward(lossd)" in found.after  # left as it was


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("accelerator.print('a', 1)", "session.print('a', 1)"),
        ("with accelerator.main_process_first():\n    pass", "with session.first():\n    pass"),
        ("with accelerator.autocast():\n    print(1)", "print(1)"),
        ("if not accelerator.is_local_main_process:\n    pass", "if not session.rank == 0:\n    pass"),
        ("x = accelerator.gather_for_metrics((a, b))", "x = (a, b)"),
        ("accelerator.load_state('x')", "state.load()"),
        ("accelerator.register_for_checkpointing(s)", "# weft: state.attach(name=object)"),
        ("accelerator.init_trackers('x')", "# weft: trackers are told by weft.session(track=…)"),
        ("accelerator.save_model(model, 'x')", "# weft: save_model has no counterpart: state.export(folder)"),
        ("d = accelerator.device", "d = session.device"),
        ("with LocalSGD(accelerator, model, 8) as l:\n    l.step()\n    print(1)", "print(1)\nstate.end_round()"),
        ("with LocalSGD(accelerator, model, 8, enabled=False) as l:\n    print(1)\n\nprint(2)", "print(1)\n\nprint(2)"),
        (
            "while True:\n    with LocalSGD(accelerator, model, 8):\n        print(1)",
            "while True:\n    # weft: rounds are",
        ),
        (
            "with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=n, enabled=n > 1) as l:\n    print(1)",
            "# weft: local steps are switched off by weft.session(local_steps=0)\nprint(1)\nstate.end_round()",
        ),
    ],
)
def test_words_of_accelerate(tmp_path: Path, line: str, becomes: str) -> None:
    body = textwrap.indent(line, "    ")
    script = (
        "from accelerate.local_sgd import LocalSGD\n"
        f"from accelerate import Accelerator\n\n\ndef main():\n    accelerator = Accelerator()\n{body}\n\n\nmain()\n"
    )
    text = migrated(tmp_path, script)
    assert textwrap.indent(becomes, "    ") in text
    assert "LocalSGD" not in text
    said = "local_steps=n" if "local_sgd_steps=n" in line else "local_steps=8"
    assert (said in text) == (", model" in line and "LocalSGD" in line and "enabled=False" not in line)
    ast.parse(text)


def test_what_is_no_script_of_a_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="makes no Accelerator, no Fabric"):
        migrated(tmp_path, "print(1)\n")
    with pytest.raises(RecipeError, match=r"script.py:1 is not Python"):
        migrated(tmp_path, "print(\n")


def test_sums_beside_the_loss_follow_the_step_and_divisions_go(tmp_path: Path) -> None:
    text = migrated(tmp_path, HEAD + ACCUMULATED)
    assert "def loss_fn(out, batch):\n        x, y = batch\n        return F.mse_loss(out, y)\n" in text
    assert "        loss = state.step(batch).loss\n        total += loss\n" in text
    assert "accumulate=4" in text
    assert "batch_size=2 * 4" in text


ACCUMULATED = """
from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = 0.0
    for step, (x, y) in enumerate(loader):
        out = model(x)
        loss = F.mse_loss(out, y)
        total += loss.detach().float()
        loss = loss / 4
        accelerator.backward(loss)
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


main()
"""


@pytest.mark.parametrize(
    ("taken", "given", "size"),
    [
        ("x, y", "x), y", "len(x)"),
        ("batch", "batch[0]), batch[1]", "batch[0].size(0)"),
        ("step, (x, y)", "x), y", "x.shape[0]"),
    ],
    ids=["len", "size", "shape"],
)
def test_what_weighs_a_loss_counts_the_samples_of_all_ranks(tmp_path: Path, taken: str, given: str, size: str) -> None:
    """`len(batch)` is a rank's share, and a step's loss is that of all."""
    loader = "enumerate(loader)" if "step" in taken else "loader"
    text = migrated(tmp_path, HEAD + WEIGHED.format(taken=taken, given=given, size=size, loader=loader))
    done = "done" if "step" in taken else "step"
    lines = [
        f"{done} = state.step(batch)",
        f"loss = {done}.loss",
        f"total += loss * {done}.count",
        f"n += {done}.count",
    ]
    assert "".join(f"        {line}\n" for line in lines) in text
    assert size not in text


WEIGHED = """
from accelerate import Accelerator


def main():
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total, n = 0.0, 0
    for {taken} in {loader}:
        loss = F.mse_loss(model({given})
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item() * {size}
        n += {size}
    print(total / n)


main()
"""


CHOSEN = """
from accelerate import Accelerator


def main(args):
    if args.tracks:
        accelerator = Accelerator(cpu=args.cpu, log_with="all")
    else:
        accelerator = Accelerator(cpu=args.cpu)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()


main(parse())
"""


def test_one_of_two_handles_becomes_one_session(tmp_path: Path) -> None:
    text = migrated(tmp_path, CHOSEN)
    assert '    with weft.session(device="cpu" if args.cpu else "auto") as session:\n' in text
    assert "inputs={name: name for name in next(iter(loader))}" in text
    assert "return outputs.loss" in text
    assert "ccelerator" not in text


@pytest.mark.parametrize("option", [["--processes", "2"], ["--fill", "a=1"]])
def test_options_of_configurations_are_refused_for_scripts(option, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    assert run(["migrate", str(script), *option]) == 2
    assert f"{option[0]} is for configurations" in capsys.readouterr().err
