"""Ranks that are slower than others with as much to do: found by the launcher from what each writes of its steps.

All ranks finish a step together, because the fast ones wait.  What tells them apart is the time of a step without
waiting for others.  A rank is compared step by step with the median of its peers, so that a step that was slow for all,
or once for one, says nothing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from statistics import median

from weft.events.progress import KEPT_STEPS, ProgressBoard

_COMPARED = 20
"""Steps that are compared."""
_SLOWER = 1.5
_LEAST_SLOWER = 1.25
"""Ratio that most of the steps must have."""
_MOST = 0.8
_LEAST_EXCESS_SECONDS = 1e-3
_HELD_SECONDS = 1.0
"""Time for which a rank must look slow: many short steps pass while a machine does something else."""


class StragglerWatch:
    """Watches the ranks of one job.  Call `poll` twice a second; each rank is warned of once."""

    def __init__(
        self,
        board: ProgressBoard,
        peers: Sequence[Sequence[int]],
        warn: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`peers`: groups of ranks that have equally much to do; a group of one is not judged."""
        self._clock = clock
        self._board = board
        self._peers = [group for group in peers if len(group) > 1]
        self._warn = warn
        self._since: dict[int, float] = {}
        """Rank → when it began to look slow."""
        self._told: set[int] = set()

    def poll(self) -> None:
        """Compare the ranks over their last steps, and warn."""
        steps = [self._board.position(rank) for rank in range(self._board.num_ranks)]
        # The slot behind the newest finished step may be half written.
        last = min(position.step for position in steps)
        first = last - _COMPARED + 1
        if first <= max(position.first_step for position in steps) + 1 or any(one.has_ended for one in steps):
            return
        if max(position.step for position in steps) >= first + KEPT_STEPS - 1:
            return  # a rank is too far ahead: it has written over what is compared
        times = {rank: self._board.times(rank) for group in self._peers for rank in group}
        now = self._clock()
        for group in self._peers:
            for rank in group:
                self._judge(rank, [other for other in group if other != rank], times, range(first, last + 1), now)

    def _judge(
        self, rank: int, others: Sequence[int], times: dict[int, list[int]], steps: Sequence[int], now: float
    ) -> None:
        own = [times[rank][_at(step)] / 1e9 for step in steps]
        usual = [median(times[other][_at(step)] for other in others) / 1e9 for step in steps]
        ratios = [mine / max(theirs, 1e-9) for mine, theirs in zip(own, usual, strict=True)]
        excess = median(mine - theirs for mine, theirs in zip(own, usual, strict=True))
        often = sum(ratio >= _LEAST_SLOWER for ratio in ratios) >= _MOST * len(ratios)
        if median(ratios) < _SLOWER or not often or excess < _LEAST_EXCESS_SECONDS:
            self._since.pop(rank, None)
            return
        if now - self._since.setdefault(rank, now) < _HELD_SECONDS or rank in self._told:
            return
        self._told.add(rank)
        phase = self._phase(rank, others, times, steps)
        self._warn(
            f"rank {rank} of {self._board.num_ranks} on host {socket.gethostname()} is a straggler: over {len(own)}"
            f" steps its own work took {median(own) * 1e3:.3g} ms a step, {median(ratios):.2g} times that of its peers"
            f" ({median(usual) * 1e3:.3g} ms), most of it in {phase}. The other ranks wait for it."
        )

    @staticmethod
    def _phase(rank: int, others: Sequence[int], times: dict[int, list[int]], steps: Sequence[int]) -> str:
        """The part of a step in which the rank loses most."""

        def excess(part: int) -> float:
            return median(
                times[rank][_at(step) + part] - median(times[other][_at(step) + part] for other in others)
                for step in steps
            )

        whole, data, optimizer = excess(0), excess(1), excess(2)
        parts = {"data_wait": data, "optimizer": optimizer, "forward_backward": whole - data - optimizer}
        return max(parts, key=lambda name: parts[name])


def _at(step: int) -> int:
    """Where the numbers of a step are."""
    return 3 * (step % KEPT_STEPS)
