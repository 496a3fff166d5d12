"""A rank that tries whether a step fits into memory."""

from __future__ import annotations

from typing import Any

import torch

from weft.analysis.blueprint import build_blueprint
from weft.comm.device import device_for_rank
from weft.config.document import plain
from weft.config.plan import parse_plan
from weft.config.recipe import parse_recipe
from weft.run.launch import RankInfo
from weft.verify.dry_run import measure_peak_memory


def run_rank(
    rank_info: RankInfo, *, recipe: str, plan: str, rank: int | None, local_rank: int | None
) -> dict[str, Any]:
    """Measure the peak of one rank of a plan: `rank` and `local_rank`, where this process stands in for one of another
    job."""
    what, how = parse_recipe(recipe), parse_plan(plan)
    torch.set_num_threads(how.compute.num_threads)
    device = device_for_rank(how.compute.device, rank_info.local_rank if local_rank is None else local_rank)
    number = rank_info.rank if rank is None else rank
    return plain(measure_peak_memory(what, how, lambda: build_blueprint(what, how), number, device))
