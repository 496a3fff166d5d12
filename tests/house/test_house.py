"""Rules of the house that no linter knows: sizes of files and functions, no mutable module state, nothing banned."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
EVERYTHING = sorted(
    path for folder in ("src", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

BANNED_IMPORTS = {
    "pickle": "it runs code that it reads; use safetensors and JSON",
    "cloudpickle": "it runs code that it reads; use safetensors and JSON",
    "dill": "it runs code that it reads; use safetensors and JSON",
    "marshal": "it is no format for data; use safetensors and JSON",
    "shelve": "it is made of pickles; use JSON",
    "torch.distributed.rpc": "it lets any peer run code",
}
BANNED_CALLS = {
    "torch.load": "it may run code that it reads; use safetensors",
    "torch.save": "it writes pickles; use safetensors",
    "os.system": "it runs a shell; use subprocess with a list",
    "os.popen": "it runs a shell; use subprocess with a list",
    "yaml.load": "it makes objects out of text; use TOML",
    "eval": "it runs text",
    "exec": "it runs text",
}
READS_TORCH_FILES = "src/weft/run/checkpoint/foreign/_torch_files.py"
"""The one file that calls `torch.load`: for `weft checkpoint import`, in a process that has given up its rights."""
BANNED_SUFFIXES = ("_object", "_object_list")
"""Of collectives: `broadcast_object_list`, `all_gather_object`, … pickle between ranks."""
MUTABLE_BUILDERS = {"list", "dict", "set", "defaultdict", "OrderedDict", "deque", "Counter", "bytearray"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def banned(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and reason of everything that Weft never does."""
    for node in ast.walk(tree):
        for name in imported(node):
            if name in BANNED_IMPORTS:
                yield node.lineno, f"imports {name}: {BANNED_IMPORTS[name]}"
        if isinstance(node, ast.Global):
            yield node.lineno, "global: give the state to an object that somebody owns"
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in BANNED_CALLS:
                yield node.lineno, f"calls {name}: {BANNED_CALLS[name]}"
            if name.endswith(BANNED_SUFFIXES):
                yield node.lineno, f"calls {name}: it pickles between ranks; send tensors or JSON bytes"
            for keyword in node.keywords:
                if keyword.arg in {"shell", "trust_remote_code"} and getattr(keyword.value, "value", None) is True:
                    yield node.lineno, f"{keyword.arg}=True runs code that others wrote"


def module_containers(tree: ast.Module) -> dict[str, tuple[int, bool]]:
    """Name → (line, whether it is annotated as immutable) of every mutable object bound at module level."""
    found: dict[str, tuple[int, bool]] = {}
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        built = isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] in MUTABLE_BUILDERS
        literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        if not (built or literal):
            continue
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        frozen = isinstance(node, ast.AnnAssign) and any(
            word in ast.unparse(node.annotation) for word in ("Mapping", "Sequence", "Collection", "Set[", "Final")
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id != "__all__":
                found[target.id] = (node.lineno, frozen and "Mutable" not in ast.unparse(node.annotation))
    return found


def mutations(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Lines at which one of `names` is changed in place."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and dotted(target.value) in names:
                yield node.lineno, dotted(target.value)
        if isinstance(node, ast.AugAssign) and dotted(node.target) in names:
            yield node.lineno, dotted(node.target)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATORS
            and dotted(node.func.value) in names
        ):
            yield node.lineno, dotted(node.func.value)


def test_no_file_is_over_500_lines() -> None:
    long = {relative(path): n for path in EVERYTHING if (n := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert not long, f"files over {MAX_FILE_LINES} lines: {long}"


def test_no_function_is_over_60_lines() -> None:
    long: list[str] = []
    for path in EVERYTHING:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = node.body[0]
                documented = ast.get_docstring(node) is not None and len(node.body) > 1
                first = node.body[1].lineno if documented else start.lineno
                lines = (node.end_lineno or first) - first + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{relative(path)}:{node.lineno} {node.name} has {lines}")
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines: {long}"


def test_nothing_banned() -> None:
    found = [
        f"{relative(path)}:{line} {why}"
        for path in SOURCES
        for line, why in banned(tree_of(path))
        if not (relative(path) == READS_TORCH_FILES and "torch.load" in why)
    ]
    assert not found, "\n".join(found)


def test_the_one_call_of_torch_load_reads_tensors_alone() -> None:
    calls = [node for node in ast.walk(tree_of(ROOT / READS_TORCH_FILES)) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if dotted(node.func) == "torch.load"]
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    assert isinstance(values["weights_only"], ast.Constant)
    assert values["weights_only"].value is True
    users = [relative(path) for path in SOURCES if "_torch_files" in path.read_text()]
    assert users == ["src/weft/run/checkpoint/foreign/_sources.py"], "nothing else may use it"


def test_no_mutable_module_state() -> None:
    """A table at module level is a constant: annotated as Mapping or Sequence, or at least never changed."""
    found: list[str] = []
    for path in SOURCES:
        tree = tree_of(path)
        names = module_containers(tree)
        found += [f"{relative(path)}:{line} changes {name}" for line, name in mutations(tree, set(names))]
        found += [
            f"{relative(path)}:{line} {name} is mutable and empty: state, not a constant"
            for name, (line, frozen) in names.items()
            if not frozen and _is_empty(tree, line)
        ]
        found += [
            f"{relative(path)}:{node.lineno} {node.name} keeps what it computed for ever; give the cache to an object"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            if dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).endswith("lru_cache")
        ]
    assert not found, "\n".join(found)


def _is_empty(tree: ast.Module, line: int) -> bool:
    for node in tree.body:
        if node.lineno == line and isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            return not (value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", True))
    return False


def exported() -> set[str]:
    """Names that some room re-exports as its own: `from weft.x._y import Name as Name`."""
    return {
        alias.asname
        for path in SOURCES
        if path.name == "__init__.py"
        for node in tree_of(path).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }


def test_every_exported_name_is_documented() -> None:
    names, found = exported(), list[str]()
    for path in SOURCES:
        for node in tree_of(path).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
            if public and ast.get_docstring(node) is None and not _explains_itself(node):
                found.append(f"{relative(path)}:{node.lineno} {node.name}")
    assert not found, "public names without a docstring:\n" + "\n".join(found)


def _explains_itself(node: ast.stmt) -> bool:
    """A one-line function or a plain record of fields says by its name what it is."""
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return len(node.body) == 1 or (
        isinstance(node, ast.ClassDef) and all(isinstance(part, ast.AnnAssign | ast.Expr) for part in node.body)
    )


def test_no_pages_name_machines_or_paths_outside() -> None:
    outside = re.compile(r"(?<![.\w])/(?:home|mnt|opt|root|srv|tmp|work)/[a-z]\S*")
    pages = [path for path in ROOT.rglob("*.md") if ".venv" not in path.parts]
    found = [
        f"{relative(path)}: {match[0]}"
        for path in [*EVERYTHING, *pages]
        for match in outside.finditer(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import pickle", "imports pickle"),
        ("import torch\nx = torch.load('a')", "torch.load"),
        ("import torch.distributed as dist\ndist.broadcast_object_list([])", "pickles between ranks"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell=True"),
        ("def f():\n    global x\n    x = 1", "global"),
    ],
)
def test_the_check_itself_sees(code: str, reason: str) -> None:
    assert any(reason in why for _, why in banned(ast.parse(code)))


def test_the_check_of_state_itself_sees() -> None:
    tree = ast.parse("_cache = {}\ndef f(x):\n    _cache[x] = 1\n    _cache.update(a=1)")
    assert [line for line, _ in mutations(tree, set(module_containers(tree)))] == [3, 4]
