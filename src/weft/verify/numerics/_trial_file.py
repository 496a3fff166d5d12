"""A rank's trial as a file: trials of other processes come back this way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.techniques.core import CheckpointShard, NestedSplit
from weft.verify.numerics._trial import Trial

_LISTS = ("initial", "gradients", "state")


def write_trial(path: Path, trial: Trial) -> None:
    """Write a trial as safetensors; what is no tensor stands in the header as JSON."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {
        "losses": trial.losses,
        "gradient_norms": trial.gradient_norms,
        "validation": trial.validation,
        "launched": [[[*kind, count] for kind, count in counts.items()] for counts in trial.launched],
        "rows": trial.rows,
        "unused": trial.unused,
        "narrowed": dict(trial.narrowed),
    }
    for kind in _LISTS:
        shards: Sequence[CheckpointShard] = getattr(trial, kind)
        header[kind] = [_description(shard) for shard in shards]
        tensors |= {f"{kind}.{index}": shard.tensor.contiguous() for index, shard in enumerate(shards)}
    tensors["empty"] = torch.zeros(0)  # the format wants one tensor at least
    save_file(tensors, path, metadata={"trial": json.dumps(header)})


def read_trial(path: Path) -> Trial:
    """Read what `write_trial` wrote."""
    with safe_open(path, framework="pt") as file:
        header: dict[str, Any] = json.loads(file.metadata()["trial"])
        shards = {
            kind: [
                _shard(description, file.get_tensor(f"{kind}.{index}"))
                for index, description in enumerate(header[kind])
            ]
            for kind in _LISTS
        }
    return Trial(
        initial=shards["initial"],
        gradients=shards["gradients"],
        state=shards["state"],
        losses=header["losses"],
        gradient_norms=header["gradient_norms"],
        validation=header["validation"],
        launched=[Counter({(a, o, size): count for a, o, size, count in counts}) for counts in header["launched"]],
        rows=[tuple((what, number, rows) for what, number, rows in step) for step in header["rows"]],
        unused=header["unused"],
        narrowed=header["narrowed"],
    )


def _description(shard: CheckpointShard) -> dict[str, Any]:
    return {
        "name": shard.name,
        "shape": list(shard.shape),
        "split": shard.split.numbers,
        "start": shard.start,
        "counts": shard.counts,
    }


def _shard(description: dict[str, Any], tensor: Tensor) -> CheckpointShard:
    return CheckpointShard(
        name=description["name"],
        shape=torch.Size(description["shape"]),
        tensor=tensor,
        split=NestedSplit.of_numbers(description["split"]),
        start=description["start"],
        counts=description["counts"],
    )
