"""Settings of expert parallelism, and from which axes experts borrow their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.config.settings import setting

EXPERT_LENDERS: tuple[Literal["shard", "context"], ...] = ("shard", "context")
"""Axes whose ranks share out experts: the one place that says so."""


ExpertExchange = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """The section `expert_parallel`."""

    exchange: ExpertExchange = setting(
        "all_to_all", layout="expert_exchange", space="expert_exchanges", asked=("expert_exchange",), axis="expert"
    )
    """`all_to_all`: a copy of a token goes to each expert that it has chosen; `all_gather`: all tokens go to all ranks
    once, which sends less where a token chooses more experts than there are ranks."""
