"""Pages lead somewhere, and what they quote exists: links, commands, options, settings, imports, files."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from types import ModuleType
from typing import Any, get_type_hints

from cyclopts import App
from pages import INDEX, PAGES, ROOT, Fence, anchors, code_spans, commands, fences, links

from weft.cli import build_app, mark_script
from weft.config.cluster import parse_cluster
from weft.config.document import dump, format_value
from weft.config.plan import Plan, parse_plan
from weft.config.pool import parse_pool
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    Recipe,
    RunRecipe,
    parse_recipe,
)
from weft.errors import WeftError

SHELL = {"git", "cd", "cp", "pip", "ls"}
"""Programs of which the pages say nothing that could go stale."""
LAUNCHERS = {"python", "torchrun"}
LAB_NOTES = ROOT / "docs" / "lab-notes"
RECORDS = {ROOT / "CHANGELOG.md", *LAB_NOTES.glob("*.md")}
"""They say what was, and may name what has gone since."""
SECTIONS = {"start", "guides", "concepts", "reference", "notebook", "lab-notes", "pictures"}
LANGUAGES = {"", "console", "json", "py", "python", "text", "toml"}


def test_links_lead_somewhere() -> None:
    wrong: list[str] = []
    for page in PAGES:
        for target in links(page):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            if not found.exists() or (anchor and anchor not in anchors(found)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_the_documentation_has_its_order() -> None:
    folders = {path.name for path in (ROOT / "docs").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == SECTIONS
    headings = re.findall(r"^## (\w+)$", INDEX.read_text(), re.M)
    assert [name.lower() for name in headings] == ["start", "guides", "concepts", "reference", "notebook"]


def test_the_tours_name_every_package_in_its_place() -> None:
    """The table of CONTRIBUTING.md follows the contract of imports (of architecture.md `test_floors.py` knows)."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["id"] == "wings")
    layers = [name for floor in floors for name in floor.split(" | ")]
    tour = (ROOT / "CONTRIBUTING.md").read_text().split("| package |")[1].split("\n## ")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", tour, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(layers)
    places = [layers.index(row) for row in re.findall(r"^\| `(\w+)` \|", tour, re.M)]
    assert places == sorted(places), "the table is not in the order of imports"


def test_the_extras_are_those_that_pip_knows() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) | {"all"} == extras


def test_every_page_is_in_the_index() -> None:
    """Who reads from the index on comes to every page; the site's table of contents is made of it."""
    tables = (INDEX, ROOT / "docs" / "reference" / "python" / "index.md", LAB_NOTES / "index.md")
    listed = {(page.parent / target.partition("#")[0]).resolve() for page in tables for target in links(page)}
    missing = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in listed | {INDEX}]
    assert not missing, f"add a line to docs/index.md: {missing}"


def test_fences_say_what_they_are() -> None:
    """An unknown or misspelt language would leave a fence unchecked; a command stands behind a dollar sign."""
    for fence in fences():
        assert fence.language in LANGUAGES, fence
        if fence.language == "":
            found = [line for line in fence.text.split("\n") if re.match(r"\$ |weft \w|torchrun ", line)]
            assert not found, f"{fence}: a command in a fence without `console`: {found[0]}"


def test_commands_are_valid() -> None:
    app = build_app()
    for fence in fences("console"):
        assert commands(fence), f"{fence}: a console fence without a command"
        for command in commands(fence):
            try:
                check_command(app, shlex.split(command))
            except Exception as error:
                raise AssertionError(f"{fence}: {command}: {error}") from error


def check_command(app: App, words: list[str]) -> None:
    program, *arguments = words
    if program == "weft":
        builtin = {"--help", "--version"} & set(arguments)
        assert builtin or app.parse_args(mark_script(arguments), exit_on_error=False, print_error=False)
    elif program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(arguments) <= set(targets), "no such target"
    else:
        assert program in SHELL | LAUNCHERS, f"what is {program}?"
    if program in LAUNCHERS and "weft" in arguments:
        check_command(app, arguments[arguments.index("weft") :])
    for word in words:
        if word.startswith(("examples/", "docs/")):
            assert (ROOT / word).exists(), word


def test_commands_in_sentences_exist() -> None:
    """`weft plan --why-not` in the middle of a sentence names a command and options that are there."""
    app = build_app()
    for page, span in current_spans():
        if span.startswith("weft ") and "COMMAND" not in span:
            wrong = unknown_in(app, shlex.split(span.removeprefix("weft ")))
            assert not wrong, f"{page}: `{span}`: there is no {wrong}"


def unknown_in(app: App, words: list[str]) -> str:
    """The first word that is no command, or the options that the command has not got."""
    while words and not words[0].startswith("-") and words[0] in app:
        app = app[words.pop(0)]
    if app.default_command is None:
        return "" if not words or words[0] in ("--help", "--version") else words[0]
    known = {name for argument in app.assemble_argument_collection() for name in argument.names}
    options = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return " ".join(sorted(options - known - {"--help"}))


def test_files_in_sentences_exist() -> None:
    for page, span in current_spans():
        if re.fullmatch(r"(src|tests|docs|benchmarks|examples)/[\w./*-]+", span):
            pattern = re.sub(r"\b[A-Z]{3,}(?=\.)", "*", span)  # SYSTEM.json stands for each of them
            assert list(ROOT.glob(pattern)), f"{page}: {span} is no file of the repository"


def test_settings_in_sentences_exist() -> None:
    """`plan.mesh.tensor = 3` and `--set recipe.run.steps=20` name settings that are there."""
    for page, span in current_spans():
        for root, section, name in re.findall(r"\b(plan|recipe)\.([a-z]\w+)\.([a-z]\w+)", span):
            known = settings(Plan if root == "plan" else Recipe).get(section)
            assert known is not None, f"{page}: {span}: no section {section}"
            assert name in known, f"{page}: {span}: no setting {name}"


def test_modules_and_names_in_sentences_exist() -> None:
    """`weft.config.plan.Plan` in a sentence is a module, or a name in one."""
    for page, span in current_spans():
        for name in re.findall(r"(?<![\w.])weft(?:\.\w+)+", span):
            assert exists(name), f"{page}: there is no {name}"


def exists(name: str) -> bool:
    found: Any = importlib.import_module("weft")
    path = "weft"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, ModuleType) and importlib.util.find_spec(path) is not None:
            found = importlib.import_module(path)
        else:
            return False
    return True


def settings(root: type[Plan | Recipe]) -> dict[str, set[str]]:
    """Names by section.  A model's sizes stand in [model] beside its own settings."""
    sections = {
        name: set(kind.__dataclass_fields__) for name, kind in get_type_hints(root).items() if name != "origins"
    }
    if root is Recipe:
        shapes = (DecoderShape, EncoderShape, MlpShape, ConvNetShape)
        sections["model"] |= {name for shape in shapes for name in shape.__dataclass_fields__}
    return sections


def current_spans() -> list[tuple[str, str]]:
    """Page and text of all code in sentences, but for pages that say what was."""
    pages = [page for page in PAGES if page not in RECORDS]
    return [(page.name, span) for page in pages for span in code_spans(page)]


def test_python_compiles_and_its_imports_resolve() -> None:
    for fence in fences("python", "py"):
        for node in ast.walk(ast.parse(fence.text, str(fence))):
            if fence.note.startswith("not run: it is for"):
                continue  # another library, which need not be installed
            if isinstance(node, ast.Import):
                assert all(importlib.util.find_spec(alias.name) for alias in node.names), (
                    f"{fence}: {ast.unparse(node)}"
                )
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "weft":
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{fence}: {node.module} has no {missing}"


def test_toml_is_read_as_what_it_says() -> None:
    for fence in fences("toml"):
        try:
            read_toml(fence)
        except WeftError as error:
            raise AssertionError(f"{fence}: {error}") from error


def read_toml(fence: Fence) -> None:
    """A fence says by a comment in its first line which file it is, or is part of."""
    kind, _, _ = fence.text.partition("\n")
    document = tomllib.loads(fence.text)
    if kind.startswith("# recipe.toml"):
        base = Recipe(
            model=ModelRecipe(shape=DecoderShape(num_layers=2, hidden_size=64, num_heads=4)),
            batch=BatchRecipe(global_batch_size=8),
            run=RunRecipe(steps=1000),
        )
        parse_recipe(completed(base, document))
    elif kind.startswith("# cluster.toml"):
        parse_cluster(fence.text)
    elif kind.startswith("# pool.toml"):
        parse_pool(fence.text)
    else:
        kinds = "`# recipe.toml`, `# plan.toml`, `# cluster.toml` or `# pool.toml`"
        assert kind.startswith("# plan.toml"), f"{fence}: say {kinds} first"
        parse_plan(completed(Plan(), document))


def completed(base: Recipe | Plan, part: dict[str, Any]) -> str:
    """TOML with the sections of `base` that `part` leaves out."""
    whole = {**tomllib.loads(dump(base, descriptions=False)), **part}
    return "\n".join(spelled(section, values) for section, values in whole.items())


def spelled(section: str, values: dict[str, Any]) -> str:
    return f"[{section}]\n" + "\n".join(f"{name} = {format_value(value)}" for name, value in values.items())
