"""What the cost formulas of all algorithms share.

`members` ranks work on `size_bytes`: the whole tensor on one rank (what an all-gather returns, what reduce-scatter and
all-to-all take).  A message takes `latency` seconds (α), and `per_byte` seconds (β) for each byte that one rank sends.
What sums cost is counted elsewhere, for all algorithms alike.
"""

from __future__ import annotations

ISSUE_SHARE = 0.25
"""Share of the latency that a rank needs to issue one more message while others are on their way."""
TREE_SHARE = 0.92
"""Share of a link's bandwidth that pipelined trees reach in NCCL's tuning table."""


def log_steps(members: int) -> int:
    """⌈log₂n⌉."""
    return (members - 1).bit_length()


def is_power(members: int) -> bool:
    """Whether n is a power of two."""
    return members & (members - 1) == 0


def power_below(members: int) -> int:
    """Largest power of two that is at most n."""
    return 1 << (members.bit_length() - 1)


def issue_seconds(members: int, latency: float) -> float:
    """Seconds of issuing messages to the second and all further peers."""
    return max(0, members - 2) * ISSUE_SHARE * latency
