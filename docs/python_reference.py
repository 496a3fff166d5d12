"""The reference of the Python API, read from the source: signatures, docstrings, and the sentences below fields.

Nothing is imported, so the pages are made in a second and where torch is not installed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
MODULES = (
    "weft",
    "weft.config.recipe",
    "weft.config.plan",
    "weft.techniques.check",
    "weft.config.cluster",
    "weft.errors",
    "weft.model.blueprint",
    "weft.model.build",
    "weft.model.losses",
    "weft.model.reference.generate",
    "weft.model.families",
    "weft.model.description",
    "weft.model.hf",
    "weft.analysis.describe",
    "weft.analysis.tensor_split.proposal",
    "weft.analysis.tensor_split.propose",
    "weft.run.launch",
    "weft.run.launch.launcher",
    "weft.comm.algorithms",
    "weft.comm.algorithms.drawing",
    "weft.comm.messages",
    "weft.accelerate",
    "weft.fabric",
)
"""What programs that use Weft import. The other packages are for those who work on Weft."""
_LONGEST_VALUE = 200
"""Characters of a constant's value beyond which the page leaves it out."""
_WIDTH = 110
_SECTION = re.compile(r"(Args|Returns|Yields|Raises|Example|Attributes|Source):(:?)\s*(.*)")
_ITEM = re.compile(r"(\*{0,2}[\w., |]+?): (.*)")


@dataclass(frozen=True)
class Definition:
    """One public name and where it stands."""

    name: str
    node: ast.stmt
    following: ast.stmt | None
    """The statement after it: a string is what a constant means."""
    module: str = ""


def python_pages() -> dict[str, str]:
    """Return the text of every page by its file's name."""
    return {"index.md": _index(), **{f"{module}.md": _page(module) for module in MODULES}}


def _index() -> str:
    lines = ["# Python API", "", "Import these names from the module that heads their page.", ""]
    lines += ["| module | |", "|---|---|"]
    lines += [
        f"| [`{module}`]({module}.md) | {_cell(_first(_docstring(_tree(_path(module)))))} |" for module in MODULES
    ]
    return _text(lines)


def _page(module: str) -> str:
    lines = [f"# {module}", "", *_prose(_docstring(_tree(_path(module))))]
    definitions = [_find(module, name) for name in _public_names(module)]
    definitions.sort(key=lambda found: (isinstance(found.node, ast.Assign | ast.AnnAssign), found.name.lower()))
    lines += ["", "| name | |", "|---|---|"]
    anchors: list[str] = []
    for found in definitions:
        home = _home(module, found.name)
        if home == module:
            anchors.append(found.name.lower())
        again = anchors[:-1].count(found.name.lower()) if home == module else 0
        target = f"{f'{home}.md' if home != module else ''}#{found.name.lower()}{f'-{again}' if again else ''}"
        lines.append(f"| [`{found.name}`]({target}) | {_cell(_first(_meaning(found)))} |")
    for found in definitions:
        if _home(module, found.name) == module:
            lines += ["", f"## {found.name}", "", *_describe(found)]
    return _text(lines)


def _home(module: str, name: str) -> str:
    """The documented module on whose page a name stands: another one, where this one only passes it on."""
    origin = _imports(_tree(_path(module))).get(name, (module, name))[0]
    return origin if origin in MODULES else module


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _path(module: str) -> Path:
    folder = SOURCE.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Every name that a module takes from another one of Weft: name → (module, name there)."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("weft")
        for alias in node.names
    }


def _public_names(module: str) -> list[str]:
    """The names of `__all__`, else those imported as themselves, else those defined here without an underscore."""
    tree = _tree(_path(module))
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.List)
            and ast.unparse(node.targets[0]) == "__all__"
        ):
            names = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
            if len(names) == len(node.value.elts):
                return [str(name) for name in names]
    exported = [
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None and alias.asname == alias.name
    ]
    if exported:
        return exported
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _find(module: str, name: str) -> Definition:
    """Follow the imports to where a name is defined."""
    tree = _tree(_path(module))
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if name in _bound(node):
            return Definition(name, node, following, module)
    return _find(*_imports(tree)[name])


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return []


def _docstring(node: ast.AST) -> str:
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return (ast.get_docstring(node) or "") if documented else ""


def _meaning(found: Definition) -> str:
    return _docstring(found.node) or _string(found.following)


def _string(node: ast.stmt | None) -> str:
    """The text of a string that stands alone as a statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return textwrap.dedent(node.value.value).strip()
    return ""


def _describe(found: Definition) -> Iterator[str]:
    if isinstance(found.node, ast.ClassDef):
        yield from _describe_class(
            found.node, _ancestors(found.module, found.node), _inner_bases(found.module, found.node)
        )
    elif isinstance(found.node, ast.FunctionDef):
        yield from (*_code(_signature(found.node)), "", *_prose(_docstring(found.node)))
    else:
        assert isinstance(found.node, ast.Assign | ast.AnnAssign)
        value = _value(found.name, found.node)
        if len(value) <= _LONGEST_VALUE:
            yield from (*_code(_wrapped(f"{found.name} = ", value)), "")
        yield from _prose(_string(found.following))


def _value(name: str, node: ast.Assign | ast.AnnAssign) -> str:
    """What a constant is; of `a, b = 1, 2` the part that is meant."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        names = [ast.unparse(part) for part in target.elts]
        return ast.unparse(node.value.elts[names.index(name)])
    return ast.unparse(node.value) if node.value is not None else "..."


def _ancestors(module: str, node: ast.ClassDef) -> list[ast.ClassDef]:
    """The dataclasses of Weft that a dataclass takes fields from, in the order of their fields."""
    found: list[ast.ClassDef] = []
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return found
    for base in reversed(node.bases):
        name = ast.unparse(base)
        home, original = _imports(_tree(_path(module))).get(name, (module, name))
        try:
            parent = _find(home, original)
        except KeyError:
            continue  # of another library
        if isinstance(parent.node, ast.ClassDef):
            found += [*_ancestors(parent.module, parent.node), parent.node]
    return found


def _inner_bases(module: str, node: ast.ClassDef) -> list[ast.ClassDef]:
    """The bases of Weft whose methods no page shows, because their package does not hand them out."""
    package = ".".join(module.split(".")[:2])
    shown = _imports(_tree(_path(package)))
    found: list[ast.ClassDef] = []
    for base in node.bases:
        home, original = _imports(_tree(_path(module))).get(ast.unparse(base), ("", ""))
        is_inside = home.startswith(f"{package}._") or (home.startswith(f"{package}.") and home.count(".") > 2)
        if not is_inside or original in shown:
            continue
        parent = _find(home, original).node
        found += [parent] if isinstance(parent, ast.ClassDef) else []
    return found


def _describe_class(node: ast.ClassDef, ancestors: list[ast.ClassDef], inner: list[ast.ClassDef]) -> Iterator[str]:
    bases = ", ".join(
        ast.unparse(base) for base in node.bases if ast.unparse(base) not in {each.name for each in inner}
    )
    inherited = [part for each in (*ancestors, *inner) for part in each.body if isinstance(part, ast.FunctionDef)]
    own = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    methods = [part for part in inherited if ast.get_docstring(part) and part.name not in {each.name for each in own}]
    methods += [part for part in own if not any(ast.unparse(each) == "overload" for each in part.decorator_list)]
    constructors = [part for part in methods if part.name == "__init__" and ast.get_docstring(part)]
    head = f"class {node.name}({bases}): ..." if bases else f"class {node.name}: ..."
    yield from (*_code(head), "", *_prose(_docstring(node)))
    for constructor in constructors:
        yield from ("", *_code(_signature(constructor)), "", *_prose(_docstring(constructor)))
    yield from _fields(*ancestors, node)
    for method in methods:
        if not method.name.startswith("_"):
            yield from ("", f"### {node.name}.{method.name}", "", *_code(_signature(method)), "")
            yield from _prose(_docstring(method))


def _fields(*nodes: ast.ClassDef) -> Iterator[str]:
    rows: dict[str, str] = {}
    for node in nodes:
        for part, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
                default = f"`{_cell(_default(part.value))}`" if part.value is not None else "**required**"
                kind, name = _cell(ast.unparse(part.annotation)), ast.unparse(part.target)
                rows[name] = f"| `{name}` | `{kind}` | {default} | {_cell(_string(following))} |"
    if rows:
        yield from ("", "| field | type | default | meaning |", "|---|---|---|---|", *rows.values())


def _default(value: ast.expr) -> str:
    """The default of a field; of `field(default_factory=list)` the call that makes it."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "setting":
        return ast.unparse(value.args[0])
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        for keyword in value.keywords:
            if keyword.arg == "default":
                return ast.unparse(keyword.value)
            if keyword.arg == "default_factory":
                made = ast.unparse(keyword.value)
                return made.removeprefix("lambda: ") if made.startswith("lambda") else f"{made}()"
    return ast.unparse(value)


def _signature(node: ast.FunctionDef) -> str:
    """The definition without its body, one parameter a line where it is long."""
    decorators = [f"@{ast.unparse(each)}\n" for each in node.decorator_list if ast.unparse(each) in _SHOWN_DECORATORS]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    parameters = _parameters(node.args)
    line = f"def {node.name}({', '.join(parameters)}){returns}: ..."
    if len(line) > _WIDTH:
        line = f"def {node.name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){returns}: ..."
    return "".join(decorators) + line


_SHOWN_DECORATORS = ("property", "classmethod", "staticmethod", "contextmanager", "cached_property")


def _parameters(args: ast.arguments) -> list[str]:
    def shown(arg: ast.arg, default: ast.expr | None) -> str:
        annotation = f": {ast.unparse(arg.annotation)}" if arg.annotation is not None else ""
        equals = " = " if annotation else "="
        return arg.arg + annotation + (f"{equals}{ast.unparse(default)}" if default is not None else "")

    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parts = [shown(arg, default) for arg, default in zip(positional, defaults, strict=True)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if args.vararg is not None:
        parts.append(f"*{shown(args.vararg, None)}")
    elif args.kwonlyargs:
        parts.append("*")
    parts += [shown(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg is not None:
        parts.append(f"**{shown(args.kwarg, None)}")
    return parts


def _wrapped(head: str, value: str) -> str:
    if len(head) + len(value) <= _WIDTH:
        return head + value
    tree = ast.parse(value, mode="eval").body
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Tuple):
        inner = "".join(f"    {ast.unparse(item)},\n" for item in tree.slice.elts)
        return f"{head}{ast.unparse(tree.value)}[\n{inner}]"
    return "\n".join(textwrap.wrap(head + value, _WIDTH, subsequent_indent="    ", break_long_words=False))


def _code(text: str) -> list[str]:
    return ["```py", *text.splitlines(), "```"]


def _prose(docstring: str) -> list[str]:
    """A docstring as Markdown: paragraphs on, sections with their items as lists, examples between fences."""
    lines: list[str] = []
    for block in re.split(r"\n(?=(?:Args|Returns|Yields|Raises|Example|Attributes|Source):)", docstring.strip()):
        match = _SECTION.fullmatch(block.partition("\n")[0].strip())
        if match is None:
            lines += _paragraphs(block)
            continue
        inside, after = _indented(block.partition("\n")[2])
        if match[2] == ":":
            lines += ["", "**Example**", "", *_code(inside)]
        else:
            lines += ["", f"**{match[1]}**", "", *_items("\n".join(filter(None, (match[3], inside))))]
        lines += _paragraphs(after)
    return lines[1:]


def _indented(body: str) -> tuple[str, str]:
    """The part of a section that is indented, without its indent, and the text that follows it."""
    lines = body.splitlines()
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end])).strip("\n"), "\n".join(lines[end:])


def _paragraphs(text: str) -> Iterator[str]:
    """Text as it stands; what is indented and follows a line that ends with two colons is code."""
    for paragraph in filter(str.strip, re.split(r"\n\s*\n", text)):
        if all(line.startswith("    ") for line in paragraph.splitlines()):
            yield from ("", "```text", *textwrap.dedent(paragraph).splitlines(), "```")
        else:
            yield from ("", *(line.rstrip() for line in re.sub(r"::$", ":", paragraph).splitlines()))


def _items(body: str) -> list[str]:
    """`name: what it is`, further lines indented, as a list; anything else as a paragraph."""
    items: list[str] = []
    for line in body.splitlines():
        if line and not line.startswith(" ") and (match := _ITEM.fullmatch(line)):
            items.append(f"- `{match[1]}`: {match[2]}")
        elif items and line.startswith(" "):
            items.append(f"  {line.strip()}")
        else:
            items.append(line)
    return items


def _first(text: str) -> str:
    """The first sentence."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)`])\. ", paragraph)[0].rstrip(".:")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(lines: list[str]) -> str:
    note = "<!-- Written by docs/make_reference.py from the source. Do not edit. -->"
    return re.sub(r"\n{3,}", "\n\n", "\n".join([note, "", *lines])).strip() + "\n"
