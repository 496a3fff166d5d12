"""`weft launch`, which also says when another rank has failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.run.launch._rank_info import RankInfo
from weft.run.launch.launchers._variables import FAILURE_PIPE_VARIABLE, standard_rank_info


def rank_info(environment: Mapping[str, str]) -> RankInfo | None:
    """See `weft.run.launch.launchers`."""
    pipe = environment.get(FAILURE_PIPE_VARIABLE)
    standard = None if pipe is None else standard_rank_info(environment)
    return None if standard is None else replace(standard, failure_pipe=pipe)
