"""The global batch of a model that is planned by its name alone."""

from __future__ import annotations

from typing import NamedTuple

from weft.config.cluster import Cluster
from weft.model.profile import Profile
from weft.planning.price import model_flops

_TOKENS_PER_DEVICE = 1024
_LEAST_TOKENS = 1 << 20
_STEP_SECONDS = 30.0
"""Time of a step on cores, at most: a run of an hour then has a hundred of them."""
_REACHED = 0.5
"""Share of their peak that cores reach."""


class DefaultBatch(NamedTuple):
    """Samples per step, and the rule that says why so many."""

    samples: int
    reason: str


def default_batch(profile: Profile, cluster: Cluster) -> DefaultBatch:
    """Return the global batch where none was asked for: a power of two.

    Accelerators get 1,024 tokens each and a million at least, as models are trained.  Cores would take hours for that:
    they get what they compute in half a minute, or one sample.
    """
    wanted = max(_LEAST_TOKENS, _TOKENS_PER_DEVICE * cluster.num_devices) / profile.sequence_length
    usual = 1 << max(0, round(wanted) - 1).bit_length()
    if cluster.has_accelerators:
        return DefaultBatch(usual, f"{_TOKENS_PER_DEVICE:,} tokens per device, {_LEAST_TOKENS:,} at least")
    peak = sum(
        node.count * node.devices.count * max(node.devices.peak_flops.values(), default=0.0) for node in cluster.nodes
    )
    most = _STEP_SECONDS * _REACHED * peak / model_flops(profile)
    samples = min(usual, 1 << max(0, int(most).bit_length() - 1))
    return DefaultBatch(
        samples, f"what cores compute in {_STEP_SECONDS:g} s at {_REACHED:.0%} of their peak, one sample at least"
    )
