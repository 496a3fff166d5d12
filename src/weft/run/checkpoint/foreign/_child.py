"""The process that reads a stranger's file: `python -m weft.run.checkpoint.foreign._child SOURCE FOLDER KEY BYTES`.

It imports first, then gives up its rights, and only then opens the file.  It writes safetensors and a report into the
folder, and says nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weft.errors import CheckpointError, did_you_mean
from weft.run.checkpoint._files import TensorEntry, grouped, write_tensors
from weft.run.checkpoint._format import DTYPE_NAMES
from weft.run.checkpoint.foreign._confine import confine_calls, confine_memory
from weft.run.checkpoint.foreign._sources import LazyTensor, Tree, read_source

REPORT = "report.json"
_USUAL = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "weights", "params")
"""Keys under which programs keep a model's weights beside other things."""
_DEEPEST = 3
_FILE_BYTES = 4 << 30
_SECONDS = 3600


def main() -> int:
    """Give up rights, convert, and write the report; return the exit status."""
    source, folder, key, num_bytes = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    is_confined = confine_calls()
    confine_memory(num_bytes, _SECONDS)
    try:
        report = _converted(source, folder, key)
    except CheckpointError as problem:
        report = {"problem": str(problem)}
    except MemoryError:
        report = {"problem": f"{source} needs more than the {num_bytes / 1e9:.1f} GB of memory that it may take."}
    except OSError as problem:
        report = {"problem": f"{problem.filename or source} cannot be read or written: {problem.strerror}."}
    (folder / REPORT).write_text(json.dumps({**_printable(report), "is_confined": is_confined}))
    return 0


def _printable(report: dict[str, Any]) -> dict[str, Any]:
    """Names come from the file, and a terminal would obey what stands in them."""

    def clean(text: str) -> str:
        return "".join(character if character.isprintable() else "?" for character in text)[:2000]

    return {
        key: clean(value)
        if isinstance(value, str)
        else [clean(one) for one in value]
        if isinstance(value, list)
        else value
        for key, value in report.items()
    }


def _converted(source: Path, folder: Path, key: str) -> dict[str, Any]:
    tree = read_source(source)
    name, group = _chosen(tree, key, str(source))
    tensors = {key: leaf for key, leaf in group.items() if isinstance(leaf, LazyTensor)}
    for tensor_name, leaf in tensors.items():
        if leaf.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{source}: {tensor_name:.80} has the dtype {leaf.dtype}, which cannot be imported.")
    entries = [TensorEntry(key, leaf.shape, leaf.dtype, leaf.fetch) for key, leaf in tensors.items()]
    for number, part in enumerate(grouped(entries, lambda entry: entry.size_bytes, _FILE_BYTES)):
        write_tensors(folder / f"weights-{number:05d}.safetensors", part, {"format": "pt"})
    left_out = [f"{key} ({_what(leaf)})" for key, leaf in group.items() if key not in tensors]
    if name:
        left_out += [f"{key} ({_what(leaf)})" for key, leaf in tree.items() if key != name.split(".")[0]]
    return {"key": name, "left_out": left_out, "num_tensors": len(tensors)}


def _chosen(tree: Tree, key: str, where: str) -> tuple[str, Tree]:
    """The weights among what a file holds: those below `key`, else the only ones, or those with a usual name."""
    groups = dict(_groups(tree))
    if not groups:
        raise CheckpointError(f"{where} holds no tensors.")
    listed = ", ".join(f"{name or 'the file itself'} ({len(group)})" for name, group in list(groups.items())[:8])
    if key:
        if key not in groups:
            hint = did_you_mean(key, groups) or f" It holds tensors below {listed}."
            raise CheckpointError(f"{where} holds no tensors below {key:.80}.{hint}")
        return key, groups[key]
    if len(groups) == 1 or "" in groups:
        return next(iter(groups.items())) if len(groups) == 1 else ("", groups[""])
    usual = [name for name in _USUAL if name in groups]
    if not usual:
        raise CheckpointError(f"{where} holds tensors below several keys: {listed}. Choose one by --key.")
    return usual[0], groups[usual[0]]


def _groups(tree: Tree, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tree]]:
    """Yield the mappings that have tensors in themselves."""
    if any(isinstance(leaf, LazyTensor) for leaf in tree.values()):
        yield prefix, tree
        return
    for name, leaf in tree.items():
        if isinstance(leaf, dict) and depth < _DEEPEST:
            yield from _groups(leaf, f"{prefix}.{name}" if prefix else name, depth + 1)


def _what(leaf: Any) -> str:
    if isinstance(leaf, dict):
        return f"{len(leaf):,} entries"
    return "no tensor" if leaf is None else type(leaf).__name__


if __name__ == "__main__":
    sys.exit(main())
