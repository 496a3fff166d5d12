"""What a rank says of itself to the collector of its run's telemetry, once, beside its ring."""

from __future__ import annotations

import json
import platform
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.config.document import dump
from weft.files import write_whole
from weft.run.engine._setup import TrainingState
from weft.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Facts of one rank, and on rank 0 those of its generation."""

    training: TrainingState
    peak_flops: float | None
    """Measured FLOP/s of matrix products of all ranks together."""
    alone_flops: float | None
    """The same, had every rank had its processors for itself; None where an earlier generation measured the peak."""
    samples_per_step: int

    def write(self, folder: Path) -> None:
        """Write `rank-<rank>.json` into the folder of the generation's rings.  A full disk costs the facts alone."""
        rank = self.training.model.mesh.rank
        document = {"rank": self._rank()}
        if rank == 0:
            document["generation"] = self._generation()
        with suppress(OSError):
            write_whole(folder / f"rank-{rank}.json", json.dumps(document))

    def _rank(self) -> dict[str, Any]:
        model = self.training.model
        kinds = model.stores.model_state_bytes()
        coordinates = {
            axis: index for axis, index in model.mesh.coordinates.items() if getattr(model.plan.mesh, axis) > 1
        }
        return {
            "host": socket.gethostname(),
            "device": str(model.mesh.device),
            "coordinates": coordinates,
            "memory": {
                "parameters": kinds["parameters"] + kinds["masters"],
                "gradients": kinds["gradients"] + kinds["residuals"],
                "optimizer": self.training.optimizer.state_bytes(),
            },
        }

    def _generation(self) -> dict[str, Any]:
        model = self.training.model
        mesh, blueprint = model.plan.mesh, model.blueprint
        sizes = {axis: int(getattr(mesh, axis)) for axis in mesh.order}
        return {
            "world_size": mesh.world_size,
            "plan": dump(model.plan, descriptions=False),  # these are read from sources, in 0.1 s
            "plan_digest": model.plan.digest,
            "axes": {axis: size for axis, size in sizes.items() if size > 1},
            "model_flops": blueprint.flops_per_sample * self.samples_per_step,
            "peak_flops": self.peak_flops or 0.0,
            "alone_flops": self.alone_flops or 0.0,
            "samples_per_step": self.samples_per_step,
            "tokens_per_sample": blueprint.sequence_length or 0,
            "versions": {"weft": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        }
