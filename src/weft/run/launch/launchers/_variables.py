"""The variables that torchrun has made a standard."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import LaunchError
from weft.run.launch._rank_info import RankInfo

FAILURE_PIPE_VARIABLE = "WEFT_SUPERVISOR"
"""Environment variable that `weft launch` sets beside the standard ones: the rank's `RankInfo.failure_pipe`."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def standard_rank_info(environment: Mapping[str, str]) -> RankInfo | None:
    """Read a rank from the standard variables; None where neither RANK nor WORLD_SIZE is set.

    Raises:
        LaunchError: only some of the variables are set, or one of them is no number.
    """
    set_variables = [name for name in _VARIABLES if environment.get(name)]
    if "RANK" not in set_variables and "WORLD_SIZE" not in set_variables:
        return None
    missing = [name for name in _VARIABLES if name not in set_variables and name != "LOCAL_RANK"]
    if missing:
        raise LaunchError(
            f"{' and '.join(set_variables)} {'is' if len(set_variables) == 1 else 'are'} set, but"
            f" {' and '.join(missing)} not, so the ranks cannot find each other. Start the script with"
            " `weft launch -n N` or torchrun, or unset them all."
        )
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK = {rank} is not below WORLD_SIZE = {world_size}. Ranks count from 0.")
    return RankInfo(
        rank,
        world_size,
        _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in set_variables else rank,
        _number(environment, "LOCAL_WORLD_SIZE") if environment.get("LOCAL_WORLD_SIZE") else world_size,
        address=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
        launcher_serves=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        raise LaunchError(f"{name} = {value!r} in the environment is no number. Give a whole number from 0.")
    return int(value)
