"""The smallest part of a cluster that meets a deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from weft.config.cluster import Cluster, LinkTier, Node
from weft.errors import PlanError
from weft.planning.search._result import SearchResult

Search = Callable[[Cluster], SearchResult]


class SmallestCluster(NamedTuple):
    """A part of a cluster with the best plans for it."""

    nodes: int
    result: SearchResult
    tried: int
    """Cluster sizes that were searched."""


def part_of_cluster(cluster: Cluster, nodes: int) -> Cluster:
    """Return the first `nodes` nodes of a cluster, with the links that join them."""
    kept: list[Node] = []
    left = nodes
    for node in cluster.nodes:
        if left > 0:
            kept.append(replace(node, count=min(node.count, left)))
            left -= node.count
    devices = sum(node.count * node.devices.count for node in kept)
    links: list[LinkTier] = []
    for tier in cluster.links:
        if devices > 1 and (not links or links[-1].devices < devices):
            links.append(tier if tier.devices <= devices else replace(tier, devices=max(2, devices)))
    return replace(cluster, nodes=tuple(kept), links=tuple(links))


def smallest_cluster(cluster: Cluster, search: Search, *, deadline_seconds: float) -> SmallestCluster:
    """Return the fewest nodes on which the best plan trains the objective's tokens in time, by bisection: plans may
    leave devices idle, so more nodes take no longer.

    Args:
        search: searches a part of the cluster for the same model, batch and objective (which must have `tokens`).

    Raises:
        PlanError: not even the whole cluster meets the deadline, or nothing fits into it.
    """
    low, high = 1, cluster.num_nodes
    best = search(cluster)
    tried = 1
    if not best.best:
        raise PlanError(f"no plan of {best.profile.name} fits into the {cluster.num_devices:,} devices at all.")
    seconds = _seconds(best)
    if seconds > deadline_seconds:
        raise PlanError(
            f"the whole cluster of {cluster.num_devices:,} devices takes {seconds / 86400:.1f} days, more than the "
            f"{deadline_seconds / 86400:.1f} days of the deadline. Allow {seconds / 86400:.1f} days, or about "
            f"{int(cluster.num_devices * seconds / deadline_seconds) + 1:,} devices."
        )
    while low < high:
        # Fewer nodes never train faster, so the times are monotone and a bisection finds the fewest.
        middle = (low + high) // 2
        result = search(part_of_cluster(cluster, middle))
        tried += 1
        if result.best and _seconds(result) <= deadline_seconds:
            high, best = middle, result
        else:
            low = middle + 1
    return SmallestCluster(high, best, tried)


def _seconds(result: SearchResult) -> float:
    """Return the seconds of the whole training, at the pessimistic step time."""
    seconds = result.best[0].training_seconds
    if seconds is None:
        raise PlanError("a deadline needs the tokens to train on. Give --tokens, such as --tokens 2T.")
    return seconds
