"""Draw mutants of Weft's own source: the tool proposes, a seed chooses, nobody's hand does.

The tool is universalmutator (Groce et al. 2018, ICSE, https://agroce.github.io/icse18t.pdf), whose rules drop
statements and arguments, negate conditions, exchange operators and numbers, and return nothing.  What cannot change
what a program computes is left out before anything is drawn: text that does not compile, and changes to comments,
docstrings, type hints and the messages of errors.
"""

from __future__ import annotations

import ast
import contextlib
import io
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

RULES = ("universal.rules", "python.rules")
TECHNIQUES = [
    "core",
    "data",
    "zero",
    "buckets",
    "randomness",
    "tensor",
    "pipeline",
    "recompute",
    "fused_loss",
    "compute",
]
ROOMS = (
    *(f"src/weft/techniques/{name}" for name in TECHNIQUES),
    "src/weft/comm/reduce.py",
    "src/weft/comm/collectives.py",
    "src/weft/run/engine/_step.py",
)
"""Where a mistake changes what a plan computes: the techniques as they run, the reductions, and the step that sums."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One line of one file, changed."""

    file: str
    """Relative to the checkout."""
    line: int
    statement: int
    """First line of the statement around it."""
    before: str
    after: str
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before.strip()}  →  {self.after.strip()}"

    def apply(self, root: Path) -> str:
        """Write the mutant into a copy of the checkout, and return the text that was there."""
        path = root / self.file
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        assert lines[self.line - 1] == self.before, f"{self.file} has changed since the draw"
        lines[self.line - 1] = self.after
        path.write_text("".join(lines))
        return original


def sources(root: Path) -> list[Path]:
    """Files that are mutated, in the order of their names."""
    found: list[Path] = []
    for room in ROOMS:
        path = root / room
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [path for path in found if path.name not in ("contract.py", "settings.py")]


def mutants_of(root: Path, path: Path, statement: int) -> list[Mutant]:
    """Every mutant of a statement (by its first line) that could change what the file computes."""
    from universalmutator import mutator

    text = path.read_text()
    lines = text.splitlines(keepends=True)
    meaning = _meaning(text)
    wanted = _spans(text)[statement]
    # The tool reads line by line: others are blank, so that it proposes for this statement alone.
    seen = [line if number in wanted else "\n" for number, line in enumerate(lines, 1)]
    with contextlib.redirect_stdout(io.StringIO()):
        proposed = mutator.mutants_regexp(seen, ruleFiles=list(RULES), ignorePatterns=[])
    found: list[Mutant] = []
    for line, after, _, (pattern, replacement) in proposed:
        changed = _meaning("".join([*lines[: line - 1], after, *lines[line:]]))
        if changed is None or changed == meaning:
            continue
        found.append(
            Mutant(
                file=str(path.relative_to(root)),
                line=line,
                statement=statement,
                before=lines[line - 1],
                after=after,
                rule=f"{pattern.pattern} ==> {replacement}",
            )
        )
    return found


def draw(root: Path, executed: Mapping[str, Iterable[int]], count: int, seed: int) -> list[Mutant]:
    """Draw `count` statements among those executed (file → lines), and one mutant of each that has any."""
    pool: list[tuple[Path, int]] = []
    for path in sources(root):
        lines = set(executed.get(str(path.relative_to(root)), ()))
        pool += [(path, first) for first, span in sorted(_spans(path.read_text()).items()) if lines & set(span)]
    chooser = random.Random(seed)
    chooser.shuffle(pool)
    drawn: list[Mutant] = []
    for path, statement in pool:
        mutants = mutants_of(root, path, statement)
        if mutants:
            drawn.append(chooser.choice(mutants))
        if len(drawn) == count:
            break
    return drawn


# ── what a text means ─────────────────────────────────────────────────────────────────────────────────────────────────


def _spans(text: str) -> dict[int, range]:
    """First line → lines of every statement inside a function; of `if`, `for`, `with` the head only."""
    spans: dict[int, range] = {}
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or node is function or isinstance(node, ast.FunctionDef):
                continue
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno or node.lineno
            spans[node.lineno] = range(node.lineno, max(end, node.lineno) + 1)
    return spans


class _Bare(ast.NodeTransformer):
    """Takes out what does not compute: docstrings, annotations, messages of errors."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise()

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        node.msg = None
        return node


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def _meaning(text: str) -> str | None:
    """What a text computes, as a tree written out; None when it does not compile."""
    try:
        compile(text, "mutant", "exec", dont_inherit=True)  # also finds a `break` outside of any loop
        return ast.dump(_Bare().visit(ast.parse(text)))
    except (SyntaxError, ValueError):
        return None
