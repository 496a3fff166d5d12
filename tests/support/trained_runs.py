"""Short trainings on real ranks, in each of which one thing may be wrong, and what `weft doctor RUN` says of them."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.cli import build_app
from weft.errors import LaunchError
from weft.run.launch.launcher import ForkServer
from weft.watch.store import TelemetryReader

DECODER = """
reference = "decoder"
num_layers = {layers}
hidden_size = {hidden}
num_heads = 4
vocabulary_size = {vocabulary}
sequence_length = {tokens}
"""
EXPERTS = f"""{DECODER}num_experts = {{experts}}
top_k = {{choices}}
"""
SLOW = """
factory = "slow_models:slow"
arguments = {{ seconds = {pause}, leak_bytes = {leak}, leaking_rank = {leaks} }}
sequence_length = 16
loss = "tokens"
propose_split = false
"""
DIGITS = """
reference = "mlp"
num_layers = 2
input_size = 64
hidden_size = {hidden}
num_classes = 10
"""
_RECIPE = """
[model]
{model}
[data]
train = [{{ source = "{source}" }}]
validation_fraction = 0.0
cache = "{cache}"
[batch]
global_batch_size = {batch}
[optimizer]
name = "{optimizer}"
learning_rate = {rate}
[run]
steps = {steps}
seed = {seed}
{saves}
[permit]
precision = [{precisions}]
"""
_PLAN = """
[mesh]
{mesh}
[data_parallel]
zero = {zero}
{more}
[microbatch]
size = {size}
per_step = {per_step}
[compute]
threads_per_rank = {threads}
"""


@dataclass(kw_only=True)
class TrainedRun:
    """A run of some seconds: a recipe, a plan, and what is drawn for both."""

    folder: Path
    """Of the run; recipe and plan lie beside it."""
    model: str = DECODER
    layers: int = 2
    hidden: int = 32
    tokens: int = 32
    vocabulary: int = 300
    experts: int = 0
    choices: int = 1
    pause: float = 0.0
    leak: int = 0
    leaks: int = 0
    source: str = "synthetic"
    batch: int = 8
    optimizer: str = "adamw"
    rate: float = 1e-3
    steps: int = 30
    seed: int = 1
    save_every: int | None = None
    precisions: str = '"fp32"'
    mesh: dict[str, int] = field(default_factory=lambda: {"replicate": 2})
    zero: int = 1
    more: str = ""
    size: int = 4
    per_step: int = 1
    threads: int = 1

    def write(self) -> tuple[Path, Path]:
        """Write the recipe and the plan, and return their paths."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["model"] = self.model.format(**values)
        values["saves"] = "" if self.save_every is None else f"save_every = {self.save_every}"
        values["cache"] = self.folder.parent / "cache"
        values["mesh"] = "\n".join(f"{axis} = {size}" for axis, size in self.mesh.items())
        recipe, plan = (self.folder.with_name(f"{self.folder.name}-{what}.toml") for what in ("recipe", "plan"))
        recipe.write_text(_RECIPE.format(**values))
        plan.write_text(_PLAN.format(**values))
        return recipe, plan

    def train(self, fork_server: ForkServer) -> Path:
        """Train, and return the run's folder."""
        recipe, plan = self.write()
        weft.train(recipe, plan, folder=self.folder, prove="never", quiet=True, fork_server=fork_server)
        return self.folder


def said_of(run: Path, *words: str) -> list[dict[str, Any]]:
    """What `weft doctor RUN` finds, as it prints it for programs."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        build_app()(["doctor", str(run), "--json", *words], exit_on_error=False, result_action="return_value")
    return json.loads(printed.getvalue())


@contextmanager
def stopped_in_part(run: Path, rank: int, share: float, period: float = 0.02) -> Generator[None]:
    """Let a rank of a run that begins have its processor for a part of the time only."""
    is_over = threading.Event()

    def throttle() -> None:
        pid = None
        while not is_over.wait(0.05 if pid is None else (1 - share) * period):
            if pid is None:
                pid = _pid_of(run, rank)
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(share * period)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


@contextmanager
def slow_disk(folder: Path, bytes_per_second: float) -> Generator[Path]:
    """A disk of its own, in a file, to which the kernel writes so slowly.  Skips the test where it cannot."""
    if not _THROTTLE.is_file() or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("slow disks need loop devices, ext4, and a kernel that throttles by blkio")
    image, mounted = folder / "disk.image", folder / "disk"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    mounted.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    device = mounted.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        _THROTTLE.write_text(f"{number} {round(bytes_per_second)}")
        yield mounted
    finally:
        _THROTTLE.write_text(f"{number} 0")
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def _pid_of(run: Path, rank: int) -> int | None:
    with suppress(LaunchError):
        reader = TelemetryReader(run)
        try:
            return reader.live().get(rank, {}).get("pid")
        finally:
            reader.close()
    return None
