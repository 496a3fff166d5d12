"""How Sphinx makes a site of these pages: `make docs`.

The pages are plain Markdown that reads the same on a code host. The root of the sources is the repository, so that
links to the README, to results and to examples lead to the same files. The tables of contents are the lists of
index.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

project = "Weft"
author = "the authors of Weft"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "runs", "src", "tests"]
suppress_warnings = ["toc.not_included"]  # tests/house asks for every page of docs in index.md
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Weft"
html_static_path: list[str] = []
html_show_sourcelink = False
pygments_style = "friendly"
nitpicky = True

_LINK = re.compile(r"\]\(([^)#]+\.md)\)")


def contents(index: str) -> str:
    """Return the tables of contents that the lists of index.md stand for, one per section."""
    tables: list[str] = []
    for section in index.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        pages = "\n".join(_LINK.findall(body))
        tables.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n")
    return "\n".join(tables)


def add_contents(_: Any, name: str, source: list[str]) -> None:
    """Tell Sphinx the order of the pages; the Python API and the lab notes have an index of their own."""
    if name == root_doc:
        source[0] += "\n" + contents(source[0])
    if name in ("docs/reference/python/index", "docs/lab-notes/index"):
        pages = [page for page in _LINK.findall(source[0]) if not page.startswith("..")]
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def write_door(app: Any, exception: Exception | None) -> None:
    """Let the site's root lead to its first page."""
    if exception is None:
        door = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>Weft</title>\n'
        Path(app.outdir, "index.html").write_text(door)


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_door)
