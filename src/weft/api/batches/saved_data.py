"""Whether the data of a session are those of the save that it loads."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.document import Json
from weft.errors import CheckpointError


def refuse_other_data(state: Mapping[str, Json], *, batch_size: int, num_samples: int | None, seed: int) -> None:
    """Steps, samples and schedules count in the saved run's batches: with others they would mean something else.

    Raises:
        CheckpointError: the save has another global batch, another number of samples or another seed.
    """
    now: dict[str, tuple[Json, str, str]] = {
        "batch_size": (batch_size, "a global batch of {}", "Give the loader batch_size={}"),
        "num_samples": (num_samples, "{} samples in the loader", "Give it the same data"),
        "seed": (seed, "the seed {}", "Write weft.session(seed={})"),
    }
    for name, (mine, what, fix) in now.items():
        saved = state.get(name, mine)
        if saved != mine:
            raise CheckpointError(
                f"the run was saved with {what.format(saved)}, and this session has {what.format(mine)}: samples"
                f" would be repeated and skipped. {fix.format(saved)}, or begin a new run from the weights alone"
                " (state.export, and load them before prepare)."
            )
