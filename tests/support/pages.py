"""What stands between code fences in the documentation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
INDEX = ROOT / "docs" / "index.md"
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->")


@dataclass(frozen=True)
class Fence:
    page: Path
    line: int
    language: str
    text: str
    note: str
    """The HTML comment on the line before the fence: `run`, `not run: why`, or nothing."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(*languages: str, page: Path | None = None) -> list[Fence]:
    """Those in these languages, or all; of one page, or of all."""
    pages = PAGES if page is None else [page]
    return [fence for each in pages for fence in _read(each) if not languages or fence.language in languages]


def without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


def links(page: Path) -> list[str]:
    """Where the links of a page lead within the repository."""
    text = re.sub(r"`[^`\n]+`", "", without_fences(page))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def code_spans(page: Path) -> list[str]:
    """What stands between backticks in its sentences and tables."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_fences(page))]


def _read(page: Path) -> Iterator[Fence]:
    lines = page.read_text().split("\n")
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        before = _COMMENT.fullmatch(lines[start - 1].strip()) if start else None
        text = "\n".join(lines[start + 1 : number])
        yield Fence(page, start + 1, lines[start][3:].strip(), text, before[1] if before else "")
        start = None
    assert start is None, f"{page}: the fence of line {start} is not closed"


def commands(fence: Fence) -> list[str]:
    """The lines after a dollar sign, those that end with a backslash joined, without comments."""
    joined = fence.text.replace("\\\n", " ")
    return [re.split(r"\s#\s", line[2:])[0].strip() for line in joined.split("\n") if line.startswith("$ ")]


def anchors(page: Path) -> set[str]:
    """The fragments that lead to the headings of a page, as GitHub and the site make them: a second `x` is `x-1`."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_fences(page), re.M):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found
