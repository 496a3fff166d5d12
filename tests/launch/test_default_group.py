"""A default process group of the user's own."""

from __future__ import annotations

import pytest
import torch

from pool import RankPool
from weft.errors import LaunchError
from weft.launch import initialise_distributed
from weft.launch._distributed import _check_backends


def _joined() -> tuple[int, int]:
    with initialise_distributed("cpu") as distributed:
        return distributed.rank, distributed.world_size


def test_a_group_that_exists_is_used_and_left_alone(ranks: RankPool) -> None:
    assert ranks.run(2, _joined) == [(0, 2), (1, 2)]


def _refused() -> None:
    with pytest.raises(LaunchError, match=r"carries tensors of cpu.* only, .* sends tensors of xpu\. Make"):
        _check_backends(torch.device("xpu"))


def test_a_group_without_a_backend_for_the_device_is_refused(ranks: RankPool) -> None:
    ranks.run(1, _refused)
