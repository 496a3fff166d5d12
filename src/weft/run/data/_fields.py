"""Fields of a batch as numpy arrays, before they become tensors."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError

Fields = dict[str, NDArray[Any]]
"""Fields by name, samples along dim 0."""

Split = Literal["all", "train", "validation"]

SYNTHETIC_KEY = 0x5EED
"""Key of everything that is made up."""
IGNORED = -100
"""Label of a position that no loss counts."""


def check_finite(name: str, values: NDArray[Any], ids: NDArray[np.int64]) -> None:
    """Refuse NaN and infinity.

    Raises:
        DataError: Names the first sample that has one.
    """
    finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1) if len(values) else np.ones(0, np.bool_)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        value = values[row][~np.isfinite(values[row])].ravel()[0]
        raise DataError(
            f"Sample {int(ids[row])} has {value} in its field {name} ({int((~finite).sum())} of {len(values)} samples "
            f"read are not finite): one such value spoils every weight. Remove the sample, or replace the value."
        )
