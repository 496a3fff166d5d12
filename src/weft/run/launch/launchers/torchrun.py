"""torchrun, and whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

from collections.abc import Mapping

from weft.run.launch._rank_info import RankInfo
from weft.run.launch.launchers._variables import FAILURE_PIPE_VARIABLE, standard_rank_info


def rank_info(environment: Mapping[str, str]) -> RankInfo | None:
    """See `weft.run.launch.launchers`."""
    if FAILURE_PIPE_VARIABLE in environment:
        return None  # `weft launch` sets the same variables, and this one
    return standard_rank_info(environment)
