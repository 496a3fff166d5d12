"""`tests/findings.toml` and `tests/silence.toml` say which test holds what was wrong, and it is there."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
TABLES: dict[str, list[dict[str, Any]]] = {
    name: tomllib.loads((TESTS / f"{name}.toml").read_text())["finding"] for name in ("findings", "silence")
}
FINDINGS, SILENCE = TABLES["findings"], TABLES["silence"]
KINDS = {
    *("left behind by a forward", "samples that meet", "two calls of one module", "second derivatives"),
    *("weights seen by a loss", "edits by the loop", "saving changes things", "resume is not the whole", "dtypes"),
    *("parameters of a loss", "adapters", "freezing", "control flow by data", "blocks that come and go"),
    *("shapes of data", "refused for nothing", "ranks differ", "two at one folder", "idioms", "words"),
}
"""Of input that was wrong without a word, or failed."""


def test_every_statement_has_a_test_that_is_there() -> None:
    """As pytest collects it.  A case may be named by the first of its parts."""
    named = {finding["test"] for table in TABLES.values() for finding in table}
    functions = sorted({name.partition("[")[0] for name in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *functions]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = done.stdout.splitlines()
    missing = [name for name in named if not any(is_of(case, name) for case in cases)]
    assert not missing


def is_of(case: str, name: str) -> bool:
    is_whole = "[" not in name and case.startswith(f"{name}[")
    return case == name or is_whole or case.startswith(name.removesuffix("]") + "-")


def test_every_finding_is_there_with_what_happened_before() -> None:
    assert {finding["number"] for finding in FINDINGS} == set(range(1, 10))
    assert len({finding["says"] for finding in FINDINGS}) == len(FINDINGS)
    for finding in FINDINGS:
        assert set(finding) == {"number", "says", "test", "fails_at", "was"}
        assert finding["was"]
        assert finding["fails_at"] in {"ad1e106", "106a4f7"}


def test_every_kind_of_silence_is_held_with_what_happened_before() -> None:
    assert {finding["row"] for finding in SILENCE} == KINDS
    for key in ("says", "test"):
        assert len({finding[key] for finding in SILENCE}) == len(SILENCE)
    for finding in SILENCE:
        assert set(finding) == {"row", "says", "test", "was"}
        assert finding["says"]
        assert finding["was"]


def test_the_table_of_silence_says_how_many_fail_on_the_older_tree() -> None:
    """A line that is added is played there first, and counted."""
    comment = " ".join(
        line.removeprefix("# ") for line in (TESTS / "silence.toml").read_text().splitlines() if line.startswith("#")
    )
    assert f"all {len(SILENCE)} entries" in comment
