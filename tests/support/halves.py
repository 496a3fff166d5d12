"""The two halves of the suite: tests that share a pool of ranks, and all others.  The half that is done first helps.

Both processes know all tests.  Files are claimed by whoever comes first: each half goes through its own from the front,
and then through the other's from the back, until they meet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest


def is_pooled(item: pytest.Item) -> bool:
    """Whether a test uses what is started once for the whole suite."""
    if not isinstance(item, pytest.Function):
        return False
    cases = item.callspec.params if hasattr(item, "callspec") else {}  # a case of this name is no fixture
    return any(name in item.fixturenames and name not in cases for name in ("ranks", "fork_server"))


def run(session: pytest.Session, claims: Path, *, pooled: bool) -> None:
    """Run this half's tests and those that it claims in the folder `claims`.  Raises as pytest's own loop does."""
    own = claimed(session.items, claims, pooled=pooled)
    others = claimed(session.items, claims, pooled=not pooled, backwards=True)
    # Between its own tests and those in which it helps, a half ends its pool: `None` tears down everything.
    for item, following in pairwise(chain(own, [None], others, [None])):
        if item is None:
            continue
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def claimed(items: list[pytest.Item], claims: Path, *, pooled: bool, backwards: bool = False) -> Iterator[pytest.Item]:
    """The tests of one kind of one claimed file after another; a file is claimed when the test before its first is
    about to run."""
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_pooled(item) is pooled:
            files[item.path].append(item)
    numbered = list(enumerate(files.values()))
    for number, tests in reversed(numbered) if backwards else numbered:
        try:
            (claims / f"{'pooled' if pooled else 'alone'}-{number}").touch(exist_ok=False)
        except FileExistsError:  # from here on the other half has done all
            return
        yield from tests
