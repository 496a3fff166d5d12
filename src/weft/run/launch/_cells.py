"""The source of a function, and of all of the notebook or script that it needs, as files that ranks run.

A function of a notebook's cell lives in no file that a rank could import, and nothing is pickled.  So its source is
taken from its cell, and with it that of what it names: functions and classes of other cells, imports, and numbers and
texts.  Line numbers stay those of the cells.
"""

from __future__ import annotations

import ast
import cmath
import inspect
import json
import linecache
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any, cast

from weft.errors import LaunchError
from weft.run.launch._job import LaunchJob

_MAIN = "__main__"


@dataclass(frozen=True, slots=True)
class CellSource:
    """A definition, at the place where it stands."""

    file: str
    """Name of the cell, such as `cell_3.py`, or of the script."""
    line: int
    """Its first line there, from 1."""
    source: str


def collect_sources(function: Callable[..., Any]) -> list[CellSource]:
    """Return the source of `function` and of what it needs, in an order in which it can be run.

    Raises:
        LaunchError: it needs an object that has no source, such as a model that another cell has made.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise LaunchError(f"{function!r} is no function with a name. Give one that is written by `def` in a cell.")
    if function.__closure__ or "<locals>" in function.__qualname__:
        raise LaunchError(
            f"{function.__name__} is written inside another function, whose variables no rank would have. Write it at"
            " the left margin of a cell, and hand over what it needs by arguments=."
        )
    collected = _SourceCollector(function.__globals__)
    collected.define(function.__name__, function)
    return collected.sources


@dataclass
class _SourceCollector:
    """Collects definitions among the names of a notebook or a script."""

    names: Mapping[str, Any]
    sources: list[CellSource] = field(default_factory=list[CellSource])
    _known: set[str] = field(default_factory=set[str])

    def define(self, name: str, value: Any, user: str = "") -> None:
        """Take up what makes `name` mean `value`; `user` is the definition that says it."""
        if name in self._known:
            return
        self._known.add(name)
        if isinstance(value, ModuleType):
            self._add(f"import {value.__name__} as {name}")
            return
        if isinstance(value, type | FunctionType) and value.__module__ == _MAIN:
            source = _source_of(value)
            for needed in _names_in(source.source):
                if needed in self.names and needed != name:
                    self.define(needed, self.names[needed], value.__name__)
            self.sources.append(source)
            if value.__name__ != name:
                self._add(f"{name} = {value.__name__}")
            return
        self._add(_import_line(name, value) or _assignment_line(name, value, user))

    def _add(self, line: str) -> None:
        self.sources.append(CellSource("names", len(self.sources) + 1, line))


def _import_line(name: str, value: Any) -> str:
    """The line that imports an object from where it was defined; empty where there is none."""
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module == "typing" and own is None:
        own = getattr(value, "_name", None)
    if not isinstance(module, str) or not isinstance(own, str) or module == _MAIN:
        return ""
    # What functions are said to be of may be another module than the one that shows them.
    shown = getattr(sys.modules.get(module), own, None)
    return f"from {module} import {own} as {name}" if shown is value else ""


def _assignment_line(name: str, value: Any, user: str) -> str:
    """The line that gives a name a plain value."""
    if isinstance(value, PurePath):
        return f"import pathlib; {name} = pathlib.Path({str(value)!r})"
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        text = str(value) if type(value).__name__ == "dtype" else f"torch.device({str(value)!r})"
        return f"import torch; {name} = {text}"
    if _is_plain(value):
        return f"{name} = {value!r}"
    raise LaunchError(
        f"{user or name} uses {name}, a {type(value).__name__} that lives in this process alone: ranks are processes of"
        f" their own, and objects are not sent to them. Make {name} inside {user or name}, or in a function that it"
        " calls; numbers and texts may come by arguments=."
    )


def _is_plain(value: Any) -> bool:
    # Exactly these: what is written for their relatives (a Counter, an infinite number) names what a rank has not.
    if type(value) is dict:
        return all(_is_plain(item) for pair in cast(dict[Any, Any], value).items() for item in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, cast(Sequence[Any], value)))
    if type(value) in (float, complex):
        return cmath.isfinite(value)
    return value is None or type(value) in (bool, int, str, bytes)


def _source_of(value: type | FunctionType) -> CellSource:
    """Return the source of a function or class, with its place."""
    for file, lines in _candidate_texts(value):
        definition = _definition(value.__name__, "".join(lines))
        if definition is not None:
            first = min((definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)))
            return CellSource(file, first, "".join(lines[first - 1 : definition.end_lineno]))
    raise LaunchError(
        f"the source of {value.__name__} is not known, so no rank can have it. Write it in a cell, or import it from a"
        " file."
    )


def _candidate_texts(value: type | FunctionType) -> Iterator[tuple[str, list[str]]]:
    """Texts in which a definition may stand, the likeliest first."""
    functions = [value] if isinstance(value, FunctionType) else [*vars(value).values()]
    for member in functions:
        code = getattr(member, "__code__", None)
        if code is not None and (lines := linecache.getlines(code.co_filename)):
            yield _name_of_cell(code.co_filename, lines), lines
    cells = _cells()
    for number in reversed(range(len(cells))):
        yield f"cell_{number}.py", cells[number].splitlines(keepends=True)
    file = getattr(sys.modules[_MAIN], "__file__", None)
    if isinstance(file, str):
        yield file, linecache.getlines(file)


def _cells() -> list[str]:
    """Return the cells that a notebook has run so far, by the numbers that stand beside them."""
    cells = getattr(sys.modules[_MAIN], "In", None)
    return [str(cell) for cell in cast(list[Any], cells)] if isinstance(cells, list) else []


def _name_of_cell(filename: str, lines: Sequence[str]) -> str:
    cells, text = _cells(), "".join(lines).strip()
    number = next((n for n in reversed(range(len(cells))) if cells[n].strip() == text), None)
    return filename if number is None else f"cell_{number}.py"


def _definition(name: str, text: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """The last definition of that name at the left margin."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a cell that was refused
        return None
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
    return None


def _names_in(source: str) -> list[str]:
    """Names that a definition looks up outside itself, in its decorators and bases, too."""
    names: dict[str, None] = {}

    def look(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            if symbol.is_global() or (table.get_type() == "module" and symbol.is_referenced()):
                names[symbol.get_name()] = None
        for child in table.get_children():
            look(child)

    look(symtable.symtable(source, "cell", "exec"))
    return list(names)


def run_sources(job: LaunchJob, folder: Path) -> Any:
    """Make a module of the sources and call a function of it.  Runs in a rank.

    Every definition keeps its line number, so that tracebacks name the user's own lines.
    """
    assert isinstance(job.arguments, dict)
    function, sources, sys.argv = job.target, job.arguments["sources"], [job.target]
    module = ModuleType("weft_cells")
    sys.modules[module.__name__] = module
    for number, (file, line, source) in enumerate(sources):
        path = folder / str(number) / Path(str(file)).name
        path.parent.mkdir(parents=True)
        path.write_text("\n" * (int(line) - 1) + str(source), encoding="utf-8")
        SourceFileLoader(module.__name__, str(path)).exec_module(module)
    value = getattr(module, function)(**job.arguments["arguments"])
    try:
        json.dumps(value)
    except (TypeError, ValueError) as problem:
        raise LaunchError(
            f"{function} returned what cannot be sent back ({problem}). Return numbers, texts, lists and dictionaries"
            " (value.tolist() of a tensor), and save what is larger by state.save() or state.export()."
        ) from None
    return value


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the function does not take, or that cannot be sent.

    Raises:
        LaunchError: names the function and what is wrong.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as problem:
        raise LaunchError(f"arguments= do not fit {function.__name__}: {problem}.") from None
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise LaunchError(
                f"arguments= has {name}, a {type(value).__name__}, which is not sent to ranks: they are processes of"
                f" their own. Give numbers, texts, lists and dictionaries, and make the rest inside"
                f" {function.__name__}."
            ) from None
