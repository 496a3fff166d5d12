"""Pools as files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

from weft.config.document import bind, parse_document, read_document
from weft.config.pool._pool import PlaceName, Pool, unknown_pool
from weft.errors import ClusterError


def find_pool(given: str) -> Pool:
    """Return the pool that `--on` names: a name, a place, or `PLACE:FILE.toml`.

    Pools that have a name lie in `$XDG_CONFIG_HOME/weft/pools` (`~/.config/weft/pools`), as `NAME.toml`.

    Raises:
        ClusterError: there is none, or its file is wrong.
    """
    place, colon, file = given.partition(":")
    if given.endswith(".toml") and not colon:
        return load_pool(Path(given))
    if colon:
        if place not in get_args(PlaceName):
            raise unknown_pool(given, _names())
        pool = load_pool(Path(file))
        if pool.place != place:
            raise ClusterError(f'--on {given}: {file} has place = "{pool.place}". Give --on {pool.place}:{file}.')
        return pool
    path = _folder() / f"{given}.toml"
    if os.sep not in given and path.is_file():
        return load_pool(path)
    for name in get_args(PlaceName):
        if name == given:
            return Pool.of_place(name)
    raise unknown_pool(given, _names())


def all_pools() -> dict[str, Pool | ClusterError]:
    """Return the pools that have a name, and why those that cannot be read cannot."""
    found: dict[str, Pool | ClusterError] = {}
    for name in _names():
        try:
            found[name] = load_pool(_folder() / f"{name}.toml")
        except ClusterError as error:
            found[name] = error
    return found


def parse_pool(text: str, *, name: str = "pool.toml") -> Pool:
    """Read a pool from TOML text; `name` stands for the file in messages.

    Raises:
        ClusterError: a setting is unknown, of the wrong type or impossible.
    """
    return bind(Pool, parse_document(text, "pool", ClusterError, name=name))


def load_pool(path: Path) -> Pool:
    """Read a pool's file, after which the pool is named.

    Raises:
        ClusterError: there is none, or it is wrong.
    """
    pool = bind(Pool, read_document(path, "pool", ClusterError))
    if pool.cluster is not None and (pool.cluster.endswith(".toml") or os.sep in pool.cluster):
        pool = replace(pool, cluster=str(path.absolute().parent / pool.cluster))
    return replace(pool, name=path.stem)


def _names() -> list[str]:
    return sorted(path.stem for path in _folder().glob("*.toml"))


def _folder() -> Path:
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".config") / "weft" / "pools"
