"""Settings of context parallelism: how ranks that share a sequence exchange keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config.settings import setting

ContextScheme = Literal["ring", "all_gather", "ulysses", "usp"]


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """The section `context_parallel`."""

    scheme: ContextScheme = setting(
        "ring", layout="context_scheme", space="context_schemes", asked=("context_scheme",), axis="context"
    )
    """`ring`: keys and values go round; `all_gather`: all are gathered at once; `ulysses`: heads are exchanged for
    positions; `usp`: heads among neighbours, and keys go round between groups of these."""
    ulysses: int = setting(0, layout="context_ulysses")
    """Neighbours that exchange heads under `usp`: a divisor of `mesh.context`.  0: as many as the model's heads allow,
    but not all."""
