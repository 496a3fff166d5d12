"""A script with exact places: what is not changed keeps its comments and its form."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft.errors import RecipeError


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


class Source:
    """The text of a script, its tree, and the edits that are to be made."""

    def __init__(self, text: str, name: str) -> None:
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
            raise RecipeError(f"{name}{line} is not Python: {error}. Migrate a script that runs.") from None
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[_Edit] = []
        self._removed: set[ast.stmt] = set()
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    # ── places ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _offset(self, line: int, column: int) -> int:
        """Columns of a tree count bytes."""
        before = self._lines[line - 1].encode()[:column].decode() if line <= len(self._lines) else ""
        return self._starts[line - 1] + len(before)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        within = self._text_around(node)
        if within is not None:
            return self._span_within(node, within)
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text_around(self, node: ast.AST) -> ast.JoinedStr | None:
        """The f-string in which an expression stands."""
        outer: ast.JoinedStr | None = None
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
            outer = node if isinstance(node, ast.JoinedStr) else outer
        return outer

    def _span_within(self, node: ast.AST, outer: ast.JoinedStr) -> tuple[int, int]:
        """Before Python 3.12 places inside of an f-string are not to be relied on, so that the text is looked for."""
        start, end = self.span(outer)
        written = ast.unparse(node)
        at = self.text.find(written, start, end)
        return (start, start) if at < 0 else (at, at + len(written))

    def lines_of(self, statement: ast.stmt) -> tuple[int, int]:
        """Where the lines of a statement begin and end, with its decorators and the last line's end."""
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        assert statement.end_lineno is not None
        return self._starts[first - 1], self._starts[statement.end_lineno]

    def indent_of(self, statement: ast.stmt) -> str:
        return self._lines[statement.lineno - 1][: statement.col_offset]

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement in which an expression stands."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def scope_of(self, node: ast.AST) -> ast.FunctionDef | ast.Module:
        """The function that a statement stands in, or the script."""
        while not isinstance(node, ast.FunctionDef | ast.Module):
            node = self.parents[node]
        return node

    # ── edits ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self.span(node)
        if end > start:
            self._edits.append(_Edit(start, end, text))

    def replace_between(self, start: int, end: int, text: str) -> None:
        self._edits.append(_Edit(start, end, text))

    def replace_lines(self, statements: Sequence[ast.stmt], text: str) -> None:
        """Put lines in place of those of statements that follow one another."""
        start, _ = self.lines_of(statements[0])
        _, end = self.lines_of(statements[-1])
        self._edits.append(_Edit(start, end, text))

    def remove(self, statement: ast.stmt) -> None:
        self._removed.add(statement)

    def is_removed(self, statement: ast.stmt) -> bool:
        return statement in self._removed

    def insert_before(self, statement: ast.stmt, text: str) -> None:
        """Put lines before a statement, indented as it is."""
        start, _ = self.lines_of(statement)
        self._edits.append(_Edit(start, start, textwrap.indent(text, self.indent_of(statement))))

    def comment(self, node: ast.AST, text: str) -> None:
        """Say at a line what could not be done, or what to know."""
        words = textwrap.wrap(text, 100, initial_indent="# weft: ", subsequent_indent="# weft: ")
        self.insert_before(self.statement_of(node), "\n".join(words) + "\n")

    def indent(self, after: ast.stmt, end: ast.stmt) -> None:
        """Move what stands behind a statement, up to the end of another, one level in; inner lines of texts stay."""
        assert after.end_lineno is not None
        first, last = after.end_lineno + 1, end.end_lineno
        assert last is not None
        inner = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None
            for line in range(node.lineno + 1, node.end_lineno + 1)
        }
        for line in range(first, last + 1):
            if line not in inner and self._lines[line - 1].strip():
                self._edits.append(_Edit(self._starts[line - 1], self._starts[line - 1], "    "))

    def rendered(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node with the edits inside of it."""
        start, end = self.span(node)
        return self._apply(start, end, [edit for edit in self._edits if start <= edit.start < end and edit.end <= end])

    def block(self, statements: Iterable[ast.stmt]) -> str:
        """Statements with their edits, at the left edge, with the comments at their ends."""
        texts = []
        for statement in statements:
            start, end = self.lines_of(statement)
            inside = [edit for edit in self._edits if start < edit.start < end and edit.end <= end]
            texts.append(textwrap.dedent(self._apply(start, end, inside)))
        return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)

    def result(self) -> str:
        """The script with all edits."""
        self._close_empty_blocks()
        for statement in self._removed:
            start, end = self.lines_of(statement)
            self._edits.append(_Edit(start, end, ""))
        return self._apply(0, len(self.text), self._edits)

    def _apply(self, start: int, end: int, edits: Iterable[_Edit]) -> str:
        """Of edits within one another the outer one stands; what is put before it stays."""
        parts: list[str] = []
        at = start
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end > edit.start, -edit.end)):
            if edit.start >= at:
                parts += [self.text[at : edit.start], edit.text]
                at = max(edit.end, at)
        return "".join([*parts, self.text[at:end]])

    def _close_empty_blocks(self) -> None:
        """A block that has lost all its statements goes, too, or keeps a `pass`."""
        changed = True
        while changed:
            changed = False
            for node, block in list(_blocks(self.tree)):
                if not all(statement in self._removed for statement in block) or node in self._removed:
                    continue
                if isinstance(node, ast.If | ast.With | ast.For) and not getattr(node, "orelse", []):
                    self._removed.add(node)
                else:
                    self._removed.discard(block[-1])
                    self.replace(block[-1], "pass")
                changed = True


def _blocks(tree: ast.AST) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(node, ast.stmt) and isinstance(block, list) and block:
                yield node, block
