"""transformers' Trainer without a changed line: the peer's losses, on any number of ranks and under ZeRO-3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(__file__).with_name("trainer.py"))
WEFT = str(Path(sys.executable).with_name("weft"))
STEPS = {"max_steps": 14}  # an epoch has 12
RESUMED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}


def trained(folder: Path, kind: str, given: dict[str, Any], *command: str) -> list[float]:
    """The losses that the program prints, run in a folder."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run([*command, SCRIPT, kind, json.dumps(given)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def on(ranks: int) -> tuple[str, ...]:
    return WEFT, "launch", "-n", str(ranks), "--accelerate"


@pytest.mark.parametrize(
    ("kind", "ranks", "more"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),
        ("llama", 2, {"fsdp": "full_shard"}),
        ("llama", 2, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ("bert", 2, {}),
        ("bert", 4, {}),
        ("bert", 2, {"fsdp": "full_shard"}),
    ],
    ids=["llama 2", "llama 4", "llama zero-3", "llama accumulating", "bert 2", "bert 4", "bert zero-3"],
)
def test_losses_are_the_peers_on_any_number_of_ranks(
    kind: str, ranks: int, more: dict[str, Any], tmp_path: Path
) -> None:
    alone = {name: value for name, value in more.items() if name != "fsdp"}
    if "per_device_train_batch_size" in alone:
        alone["per_device_train_batch_size"] *= ranks
    peer = trained(tmp_path / "peer", kind, STEPS | alone, sys.executable)
    if ranks == 4:  # once for each model: a process takes 5 s to import transformers
        own = trained(tmp_path / "alone", kind, STEPS | alone, sys.executable, "-m", "weft.accelerate")
        assert own == pytest.approx(peer, rel=2e-6)
    found = trained(tmp_path / "ranks", kind, STEPS | more, *on(ranks))
    assert found[:-1] == pytest.approx(peer[:-1], rel=2e-6)
    # The Trainer weighs an evaluation's batches by their rows, of which each process has others: not by their tokens.
    assert found[-1] == pytest.approx(peer[-1], rel=2e-6 if kind == "bert" else 2e-2)


@pytest.mark.parametrize("more", [{}, {"fsdp": "full_shard"}], ids=["replicas", "zero-3"])
def test_a_run_that_was_left_goes_on(more: dict[str, Any], tmp_path: Path) -> None:
    whole = trained(tmp_path, "llama", RESUMED | more, *on(2))
    given = RESUMED | more | {"resume": "saved/checkpoint-3"}
    assert trained(tmp_path, "llama", given, *on(2)) == pytest.approx(whole, rel=2e-6)
