"""Starts the process that reads a stranger's file, and takes up what it wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from weft.config.document import JsonObject, read_plain_file
from weft.errors import CheckpointError

_REPORT = "report.json"
_PASSED_ON = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "LANG", "VIRTUAL_ENV")
"""Environment of the process: no secret of the user's."""
_SPARE_BYTES = 1 << 30
_TIMES_SIZE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Weights that lie as safetensors in a folder of ours now."""

    weights: ForeignWeights
    key: str
    """Key below which they lay in the file; empty where that held nothing else."""
    left_out: tuple[str, ...]
    """What else was there, with its kind."""
    is_confined: bool
    """Whether the system could refuse the process connections and the start of programs."""


class ForeignWeights(Mapping[str, Tensor]):
    """Names and tensors of safetensors files, each read when it is asked for."""

    def __init__(self, files: list[Path], renamed: Mapping[str, str] | None = None) -> None:
        """`renamed` has those to show: the name to show it by, and its name in the files."""
        self._files = files
        places = {name: path for path in files for name in _names(path)}
        self._places = {new: (places[old], old) for new, old in (renamed or {name: name for name in places}).items()}

    def renamed(self, names: Mapping[str, str]) -> ForeignWeights:
        """Return the weights of which `names` says how they are called, by the name that they have now."""
        return ForeignWeights(self._files, {new: self._places[old][1] for new, old in names.items()})

    def __getitem__(self, name: str) -> Tensor:
        path, key = self._places[name]
        with _opened(path) as file:
            return file.get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> torch.Size:
        path, key = self._places[name]
        with _opened(path) as file:
            return torch.Size(file.get_slice(key).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype


def convert(source: Path, folder: Path, *, key: str = "", memory_bytes: int | None = None) -> Converted:
    """Convert a file or folder that others wrote into safetensors in `folder`, by a process of its own.

    The process reads tensors and plain values only, opens no connection, starts no program, and takes no more memory
    than it was given.

    Args:
        source: a `.pt`, `.pth`, `.bin` or `.safetensors` file, or a folder of them, or of a distributed checkpoint.
        folder: an empty folder, which the weights may lie in afterwards.
        key: dotted keys below which the weights lie; by default found.
        memory_bytes: what the process may take; by default three times the size of the source and 1 GiB.

    Raises:
        CheckpointError: it is damaged, of another kind, or holds what only running code could make.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist.")
    size = source.stat().st_size if source.is_file() else sum(path.stat().st_size for path in source.iterdir())
    limit = memory_bytes if memory_bytes is not None else _TIMES_SIZE * size + _SPARE_BYTES
    command = [sys.executable, "-m", "weft.run.checkpoint.foreign._child"]
    command += [str(source.absolute()), str(folder.absolute()), key, str(limit)]
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    report = folder / _REPORT
    if done.returncode != 0 or not report.is_file():
        raise CheckpointError(f"{source} was not imported: {_death(done, limit)}")
    fields = JsonObject.parse(report, read_plain_file(report, CheckpointError, ""), CheckpointError, "")
    report.unlink()
    if "problem" in fields.values:
        raise CheckpointError(fields.text("problem"))
    return Converted(
        weights=ForeignWeights(sorted(folder.glob("*.safetensors"))),
        key=fields.text("key"),
        left_out=tuple(fields.texts("left_out")),
        is_confined=bool(fields.values["is_confined"]),
    )


def _death(done: subprocess.CompletedProcess[bytes], limit: int) -> str:
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"the process that read it was ended by {name}. It may take {limit / 1e9:.1f} GB of memory."
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"it ended with status {done.returncode}"
    return f"the process that read it failed ({last:.300}). It may take {limit / 1e9:.1f} GB of memory."


def _opened(path: Path) -> Any:
    opened: Callable[..., Any] = safe_open  # it has no types
    return opened(path, framework="pt")


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())
