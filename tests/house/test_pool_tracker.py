"""The pool survives the end of Python's resource tracker."""

from __future__ import annotations

import os
import signal
from multiprocessing import resource_tracker

import pool
import torch.distributed as dist


def _world() -> int:
    return dist.get_world_size()


def test_ranks_start_after_the_tracker_has_died() -> None:
    made = pool.RankPool(3)
    try:
        assert made.run(1, _world) == [1]
        tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # no public name
        assert tracker is not None
        os.kill(tracker, signal.SIGKILL)
        os.waitid(os.P_PID, tracker, os.WEXITED | os.WNOWAIT)
        assert made.run(3, _world) == [3, 3, 3]
    finally:
        made.close()
