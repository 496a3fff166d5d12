"""`weft export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def export(
    checkpoint: Path,
    folder: Path,
    /,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    average: bool | None = None,
) -> None:
    """Write a checkpoint's weights as `transformers` loads them, whatever plan saved it.

    Parameters
    ----------
    checkpoint
        Folder of a run, then its newest checkpoint; or a checkpoint in it, such as runs/mine/checkpoints/step-000120.
    folder
        New folder. It appears complete or not at all.
    dtype
        Of floating-point weights; by default that in which they are saved.
    average
        The moving average of the weights; by default where the run keeps one.
    """
    from weft.api import export as write

    written = write(checkpoint, folder, dtype=dtype, average=average)
    size = sum(path.stat().st_size for path in written.iterdir())
    files = ", ".join(sorted(path.name for path in written.iterdir()))
    print(f"exported  {size / 1e6:,.1f} MB   {written}/  ({files})")
