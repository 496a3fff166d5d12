"""The two halves of the suite: tests that share the pool of ranks, and all others.  The half that is done first helps.

Both processes know all tests.  A file's tests without the pool belong to whoever claims the file first: the second half
goes through the files from the front, and the first, once its own tests are done, from the back, until they meet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest


def is_pooled(item: pytest.Item) -> bool:
    """Whether a test uses what is started once for the whole suite."""
    return isinstance(item, pytest.Function) and not {"ranks", "fork_server"}.isdisjoint(item.fixturenames)


def run(session: pytest.Session, claims: Path, *, pooled: bool) -> None:
    """Run this half's tests and those that it claims in the folder `claims`.  Raises as pytest's own loop does."""
    found = claimed(session.items, claims, backwards=pooled)
    # Between its own tests and those in which it helps, the first half ends the pool: `None` tears down everything.
    own = [*filter(is_pooled, session.items), None] if pooled else []
    for item, following in pairwise(chain(own, found, [None])):
        if item is None:
            continue
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def claimed(items: list[pytest.Item], claims: Path, *, backwards: bool) -> Iterator[pytest.Item]:
    """The tests of one claimed file after another; a file is claimed when the test before its first is about to run."""
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not is_pooled(item):
            files[item.path].append(item)
    numbered = list(enumerate(files.values()))
    for number, tests in reversed(numbered) if backwards else numbered:
        try:
            (claims / str(number)).touch(exist_ok=False)
        except FileExistsError:  # from here on the other half has done all
            return
        yield from tests
