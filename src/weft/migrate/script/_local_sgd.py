"""Accelerate's `LocalSGD`: the context goes, and what it says becomes a session's `local_steps`."""

from __future__ import annotations

import ast

from weft.migrate.script._names import imports_of, keyword_of, resolve
from weft.migrate.script._source import Source

_CLASS = "accelerate.local_sgd.LocalSGD"
_ENABLED = "local steps are switched off by weft.session(local_steps=0)"
_COUNTED = "rounds are counted from the first step of the training, not anew in each turn of this loop"


def without_local_sgd(source: Source, name: str) -> tuple[Source, str]:
    """Return a script whose blocks `with LocalSGD(…) as local_sgd:` are lines like others, ended by the average that
    leaving them makes, and the number of steps between two averages; empty: it has none."""
    steps = ""
    while (found := _first(source)) is not None:
        block, call = found
        for statement in _steps_of(block):
            source.remove(statement)
        length, enabled = keyword_of(call, "local_sgd_steps", 2), keyword_of(call, "enabled", 3)
        is_off = isinstance(enabled, ast.Constant) and not enabled.value
        steps = "" if length is None or is_off else source.rendered(length)
        source = Source(source.result(), name)
        again = _first(source)
        if again is None:
            break  # it held nothing else
        remarks = [_ENABLED] if enabled is not None and not isinstance(enabled, ast.Constant) else []
        remarks += [_COUNTED] if steps and _is_repeated(source, again[0]) else []
        _open(source, again[0], remarks, ends=bool(steps))
        source = Source(source.result(), name)
    return source, steps


def _first(source: Source) -> tuple[ast.With, ast.Call] | None:
    imports = imports_of(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.With) and len(node.items) == 1:
            call = node.items[0].context_expr
            if isinstance(call, ast.Call) and resolve(call.func, imports) == _CLASS:
                return node, call
    return None


def _steps_of(block: ast.With) -> list[ast.stmt]:
    """Statements `local_sgd.step()`."""
    bound = block.items[0].optional_vars
    if not isinstance(bound, ast.Name):
        return []
    return [
        node
        for node in ast.walk(block)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(function := node.value.func, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and (function.value.id, function.attr) == (bound.id, "step")
    ]


def _is_repeated(source: Source, node: ast.AST) -> bool:
    """Whether a statement stands in a loop of its function."""
    while not isinstance(node, ast.FunctionDef | ast.Module):
        node = source.parents[node]
        if isinstance(node, ast.For | ast.While):
            return True
    return False


def _open(source: Source, block: ast.With, remarks: list[str], *, ends: bool) -> None:
    """Put what stands inside of the context in its place."""
    indent = source.indent_of(block)
    lines = source.block(block.body).splitlines(keepends=True)
    lines = [*(f"# weft: {remark}\n" for remark in remarks), *lines, *(["state.end_round()\n"] if ends else [])]
    text = "".join(indent + line if line.strip() else line for line in lines)
    source.replace_lines([block], text)
