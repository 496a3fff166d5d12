"""`tests/findings.toml` says which test holds what users found: it names tests that are there, for every finding."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
FINDINGS: list[dict[str, Any]] = tomllib.loads((TESTS / "findings.toml").read_text())["finding"]


def test_every_statement_has_a_test_that_is_there() -> None:
    missing: list[str] = []
    for finding in FINDINGS:
        file, _, case = finding["test"].partition("::")
        name, _, parameters = case.partition("[")
        text = (TESTS.parent / file).read_text()
        if not re.search(rf"^def {name}\(", text, re.MULTILINE):
            missing.append(finding["test"])
        value = parameters.removesuffix("]")
        if value and not re.fullmatch(r"[\d-]+", value) and f'"{value}"' not in text:
            missing.append(finding["test"])
    assert not missing


def test_every_finding_is_there_with_what_happened_before() -> None:
    assert {finding["number"] for finding in FINDINGS} == set(range(1, 10))
    assert len({finding["says"] for finding in FINDINGS}) == len(FINDINGS)
    for finding in FINDINGS:
        assert set(finding) == {"number", "says", "test", "fails_at", "was"}
        assert finding["was"]
        assert finding["fails_at"] in {"ad1e106", "106a4f7"}
