"""Count the lines of Weft by kind: code, docstrings, comments, imports and blanks, for each wing.

    python docs/count_lines.py [FOLDER]

A line counts once: a docstring's lines as docstring, an import's as import (the whole statement), a line with code and
a comment as code.  What `wc -l` counts is the sum.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KINDS = ("code", "docstring", "comment", "import", "blank")
SOURCE = Path(__file__).parents[1] / "src" / "weft"


def _docstrings(tree: ast.AST) -> Iterator[range]:
    """Yield the lines of every string that stands as a statement: docstrings, those of attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _imports(tree: ast.AST) -> Iterator[range]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)


def count(text: str) -> Counter[str]:
    """Return how many lines of a file are of each kind."""
    tree, lines = ast.parse(text), text.splitlines()
    kind = {number: "code" if line.strip() else "blank" for number, line in enumerate(lines, 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            kind[token.start[0]] = "comment"
    kind |= {number: "import" for span in _imports(tree) for number in span}
    kind |= {number: "docstring" for span in _docstrings(tree) for number in span}
    return Counter(kind.values())


def table(folder: Path) -> list[str]:
    """Return the counts of a folder's packages, and of all, as lines of text."""
    rows: dict[str, Counter[str]] = {}
    files: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).parts[0].removesuffix(".py")
        rows.setdefault(name, Counter()).update(count(path.read_text(encoding="utf-8")))
        files[name] += 1
    total = sum(rows.values(), Counter[str]())
    heads = ["package", "files", "lines", *KINDS]
    lines = [f"{heads[0]:14}" + "".join(f"{head:>11}" for head in heads[1:])]
    for name, row in [*sorted(rows.items(), key=lambda item: -item[1].total()), ("all", total)]:
        of_files = files.total() if name == "all" else files[name]
        numbers = [of_files, row.total(), *(row[kind] for kind in KINDS)]
        lines.append(f"{name:14}" + "".join(f"{number:11,}" for number in numbers))
    comments = 100 * total["comment"] / max(1, total["code"] + total["comment"])
    return [*lines, f"{comments:.1f} comment lines per 100 lines of code and comments"]


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)))
