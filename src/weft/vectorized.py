"""Arithmetic that reads the same for one candidate and for a table of them.

A `Column` is a number, or a NumPy array with one number per candidate.  Sums, products, comparisons, `&` and `|` work
on both as they are; the functions here are for what does not.  NumPy is only loaded where an array comes in, so that
prices of single plans work, and import, without it.
"""

from __future__ import annotations

from typing import Any

Column = Any
"""A number, or an array of as many candidates."""
Flags = Any
"""A bool, or an array of them."""

_ONE = (float, int)


def larger(one: Column, other: Column) -> Column:
    """Return the larger of two, candidate by candidate."""
    if isinstance(one, _ONE) and isinstance(other, _ONE):
        return one if one >= other else other
    import numpy as np

    return np.maximum(one, other)


def smaller(one: Column, other: Column) -> Column:
    """Return the smaller of two, candidate by candidate."""
    if isinstance(one, _ONE) and isinstance(other, _ONE):
        return one if one <= other else other
    import numpy as np

    return np.minimum(one, other)


def chosen(condition: Flags, one: Column, other: Column) -> Column:
    """Return `one` where the condition holds and `other` elsewhere.  Both are computed in any case."""
    if isinstance(condition, bool):
        return one if condition else other
    import numpy as np

    return np.where(condition, one, other)
