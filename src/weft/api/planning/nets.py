"""The nets that look for what would be wrong without a word."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Nets:
    """Which nets are spread.  All are, but in tests that ask what another one finds."""

    left_behind: bool = True
    """State that a forward or a loss changes by itself is looked for."""
    meetings: bool = True
    """Samples of a batch that a forward or a loss lets meet are looked for."""
    edits: bool = True
    """What a loop writes into the weights between steps is looked for."""
    data: bool = True
    """Subsets and a few samples of the data are compared over the ranks."""
