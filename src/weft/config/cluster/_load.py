"""Clusters as TOML."""

from __future__ import annotations

import os
from collections.abc import Iterable

from weft.config.cluster._cluster import Cluster
from weft.config.cluster._spec import parse_cluster_spec
from weft.config.document import bind, dump, lay_over, parse_document, parse_overrides, read_document
from weft.errors import ClusterError


def load_cluster(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Cluster:
    """Read a cluster file, with overrides such as `cluster.nodes.0.cores=8` laid over it.

    Raises:
        ClusterError: when the file cannot be read, or a setting is unknown, of the wrong type or impossible.
    """
    document = read_document(os.fspath(path), "cluster", ClusterError)
    return bind(Cluster, lay_over(document, parse_overrides(overrides, ("cluster",))))


def parse_cluster(text: str, *, name: str = "cluster.toml") -> Cluster:
    """Read a cluster from TOML text; `name` stands for the file in messages.  Raises as `load_cluster` does."""
    return bind(Cluster, parse_document(text, "cluster", ClusterError, name=name))


def dump_cluster(cluster: Cluster, *, header: Iterable[str] = (), everything: bool = False) -> str:
    """Write a cluster as TOML with comments, `header` first; `parse_cluster` gives an equal one back."""
    return dump(cluster, header=header, everything=everything)


def resolve_cluster(given: str | None) -> Cluster:
    """Return the cluster a command was given: nothing (this machine), a `.toml` file, or a spec such as `4x8xh100`.

    Raises:
        ClusterError: see `load_cluster` and `parse_cluster_spec`.
    """
    if given is None:
        return Cluster.detect()
    if given.endswith(".toml") or os.sep in given:
        return load_cluster(given)
    return parse_cluster_spec(given)
