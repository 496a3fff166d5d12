"""The session around the script: where it begins, and what stands inside of it."""

from __future__ import annotations

import ast

from weft.migrate.script._names import imports_of, names_in
from weft.migrate.script._peers import PACKAGES
from weft.migrate.script._source import Source
from weft.migrate.script._words import Script


def begin_session(script: Script) -> None:
    """Write `session = weft.session(…)` where the peer's object was made, or its process group."""
    source, arguments = script.source, ", ".join(f"{name}={text}" for name, text in script.options.items())
    text = f"session = weft.session({arguments})"
    if script.created:
        made = script.created[0]
        choice = source.parents[made]
        if isinstance(choice, ast.If) and [made, *script.created[1:]] == [*choice.body, *choice.orelse]:
            source.replace_lines([choice], f"{source.indent_of(choice)}{text}\n")
            return
        source.replace(made, text)
        if len(script.created) > 1 or choice is not source.scope_of(made):
            script.say(made, "make one session, `with weft.session(…) as session:` around what follows")
        return
    setups = script.setups or [s for s in source.tree.body if not isinstance(s, ast.Import | ast.ImportFrom)]
    if not setups:
        return
    scope = source.scope_of(setups[0])
    first = next(s for s in scope.body if not _is_docstring(s) and not isinstance(s, _DEFINITIONS))
    source.insert_before(first, f"{text}\n")


_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def open_session(text: str, name: str) -> str:
    """Turn `session = weft.session(…)` into a `with` around what follows; around the call, where a function has all."""
    source = Source(text, name)
    made = next((node for node in ast.walk(source.tree) if _is_session(node)), None)
    if not isinstance(made, ast.Assign):
        return text
    scope = source.scope_of(made)
    opening = f"with {source.rendered(made.value)} as session:"
    call = _only_call(source, scope)
    local = {argument.arg for argument in scope.args.args} if isinstance(scope, ast.FunctionDef) else set[str]()
    assigned = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if isinstance(scope, ast.FunctionDef) and call is not None and not names_in(made.value) & (local | assigned):
        source.remove(made)
        _hand_over(source, scope, call, opening)
        return source.result()
    body = scope.body
    rest = body[body.index(made) + 1 :] if made in body else []
    if not rest:
        return text
    source.replace(made, opening)
    source.indent(made, rest[-1])
    return source.result()


def _is_session(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and isinstance(node.value.func.value, ast.Name)
        and (node.value.func.value.id, node.value.func.attr) == ("weft", "session")
    )


def _only_call(source: Source, scope: ast.AST) -> ast.Expr | None:
    """The one statement that calls a function."""
    if not isinstance(scope, ast.FunctionDef):
        return None
    uses = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == scope.name]
    if len(uses) != 1 or not isinstance(call := source.parents[uses[0]], ast.Call):
        return None
    statement = source.parents[call]
    return statement if isinstance(statement, ast.Expr) else None


def _hand_over(source: Source, scope: ast.FunctionDef, statement: ast.Expr, opening: str) -> None:
    """Give the function its session as the first argument."""
    start = source.text.index("(", source.span(scope)[0]) + 1
    has_arguments = bool(scope.args.args or scope.args.kwonlyargs or scope.args.vararg)
    source.replace_between(start, start, "session, " if has_arguments else "session")
    call = statement.value
    assert isinstance(call, ast.Call)
    inside = source.span(call.func)[1] + 1
    text = source.text[source.span(call)[0] : inside] + "session" + (", " if call.args or call.keywords else "")
    text += source.text[inside : source.span(call)[1]]
    source.replace(statement, f"{opening}\n{source.indent_of(statement)}    {text}")


def mend_imports(text: str, name: str) -> str:
    """Import weft, and leave out what nobody uses any more of what the peer was imported by."""
    source = Source(text, name)
    imports, used = imports_of(source.tree), names_in(source.tree)
    for node in source.tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        bound = [(alias.asname or alias.name.partition(".")[0], alias) for alias in node.names]
        foreign = [imports[local] for local, _ in bound if local in imports and _is_foreign(imports[local])]
        kept = [alias for local, alias in bound if local in used or not _is_foreign(imports.get(local, ""))]
        if not foreign or len(kept) == len(bound):
            continue
        lines: list[str] = []
        if kept:
            head = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
            names = [f"{a.name} as {a.asname}" if a.asname else a.name for a in kept]
            lines.append(f"{head}{', '.join(names)}\n")
        source.replace_lines([node], "".join(lines))
    result = source.result()
    return result if "weft" in imports else _import_weft(result)


def _is_foreign(dotted: str) -> bool:
    return (
        dotted.partition(".")[0] in PACKAGES
        or dotted.startswith(("torch.distributed", "torch.nn.parallel"))
        or (dotted.startswith("torch.utils.data") and dotted.endswith("DistributedSampler"))
    )


def _import_weft(text: str) -> str:
    """As the last of the imports at the top."""
    lines = text.splitlines(keepends=True)
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    at = (imports[-1].end_lineno or 0) if imports else 0
    return "".join([*lines[:at], "\n" if imports else "", "import weft\n", *lines[at:]])
