"""Which tests `make test` leaves to `make slow`: `slow.toml` names them, and what stands for them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "slow.toml"


@dataclass(frozen=True)
class Family:
    """A test, or all cases of a parametrised one."""

    test: str
    """Node id, without a case."""
    kept: tuple[str, ...]
    """Cases that `make test` runs, as globs."""
    stands: str
    """The test that `make test` runs instead, where no case is kept."""

    def is_slow(self, case: str) -> bool:
        return not any(fnmatchcase(case, glob) for glob in self.kept)


def read_families(path: Path = TABLE) -> dict[str, Family]:
    """Read the table.  An entry without either is a mistake: nothing would stand for what is left out."""
    families: dict[str, Family] = {}
    for test, entry in tomllib.loads(path.read_text()).items():
        kept, stands = tuple(entry.pop("kept", ())), entry.pop("stands", "")
        if entry or bool(kept) == bool(stands):
            raise pytest.UsageError(f"{path.name}: {test}: give kept, or stands, and nothing else")
        families[test] = Family(test, kept, stands)
    return families


def mark_slow(items: Iterable[pytest.Item], families: dict[str, Family]) -> None:
    """Mark what the table leaves out."""
    for item in items:
        test, case = split(item.nodeid)
        family = families.get(test)
        if family is not None and family.is_slow(case):
            item.add_marker(pytest.mark.slow)


def split(node: str) -> tuple[str, str]:
    """Return a node id without its case, and the case."""
    test, _, case = node.partition("[")
    return test, case.removesuffix("]")


def mistakes(nodes: Sequence[str], families: dict[str, Family]) -> list[str]:
    """Return what in the table is not so, where `nodes` are all tests of the suite."""
    cases: dict[str, set[str]] = {}
    for node in nodes:
        test, case = split(node)
        cases.setdefault(test, set()).add(case)
    found: list[str] = []
    for test, family in families.items():
        if test not in cases:
            found.append(f"{test} is no test")
        found += [f"{test} has no case {glob}" for glob in family.kept if not _matches(glob, cases.get(test, {glob}))]
        if family.stands and family.stands not in cases:
            found.append(f"{family.stands}, which stands for {test}, is no test")
        if family.stands in families and not families[family.stands].kept:
            found.append(f"{family.stands}, which stands for {test}, is slow itself")
    return found


def _matches(glob: str, cases: Iterable[str]) -> bool:
    return any(fnmatchcase(case, glob) for case in cases)
