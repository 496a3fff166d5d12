"""Which names of a script mean what."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.migrate.script._peers import RENAMED


def imports_of(tree: ast.AST) -> dict[str, str]:
    """Return name in the script → dotted name of what it imports."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                found[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def resolve(node: ast.AST, imports: dict[str, str]) -> str:
    """Return the dotted name of what an expression names, by the script's imports; empty where it names nothing."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    dotted = ".".join([imports.get(node.id, node.id), *reversed(parts)])
    dotted = dotted.replace("lightning.pytorch.", "lightning.")
    return RENAMED.get(dotted, dotted)


def called(node: ast.AST) -> str:
    """Return the last word of what a call calls."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names_in(node: ast.AST | list[ast.stmt]) -> set[str]:
    """Return the names that are read in it."""
    nodes = node if isinstance(node, list) else [node]
    return {
        part.id
        for each in nodes
        for part in ast.walk(each)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }


def targets_of(statement: ast.AST) -> Iterator[str]:
    """Yield the names that an assignment sets."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    yield node.id


def keyword_of(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by its name or its position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position is not None and position < len(call.args) else None
