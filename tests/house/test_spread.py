"""A setting of the plan has one home: few rooms speak of it, and a technique says all of itself in one place.

A room is a package inside of a wing (the ways in, `api`, are one), and below `techniques` a technique.  It speaks of
what is an identifier, an attribute, a keyword, or (the last word of) a whole string there; docstrings and comments do
not count.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

from pages import ROOT

from weft.config.plan import plan_settings
from weft.techniques.contract import Technique
from weft.techniques.registry import TECHNIQUES

SOURCE = ROOT / "src" / "weft"
COUNTED = [
    "bucket_bytes",
    "first_bucket_bytes",
    "compression",
    "powersgd_rank",
    "topk_share",
    "randomk_share",
    "onebit_warmup_steps",
    "reduce_precision",
    "local_steps",
    "outer_learning_rate",
    "outer_momentum",
    "chunks_per_rank",
    "schedule",
    "recompute",
    "offload",
    "fused_loss",
    "threads_per_rank",
    "collective_timeout_seconds",
    "per_step",
    "zero",
]
"""Settings whose spread is watched; words that mean other things too, such as `precision` and `size`, are not."""
MEDIAN_ROOMS, MOST_ROOMS = 3, 7
"""Compression, the most: its folder, those of ZeRO and of data ranks, which compress; the check of plans, the recipe
that permits it, the search, and sessions."""


def words(tree: ast.AST) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=str() as name):
                yield name
            case ast.Constant(value=str() as text) if id(node) not in docs:
                yield text.rsplit(".", 1)[-1]
            case _:
                pass


def rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: set() for name in COUNTED}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        room = "api" if parts[0] == "api" else "/".join(parts[:-1][:2])
        for name in set(words(ast.parse(path.read_text(encoding="utf-8")))) & found.keys():
            found[name].add(room)
    return found


def test_a_setting_is_spoken_of_in_few_rooms() -> None:
    counts = {name: len(found) for name, found in rooms().items()}
    assert statistics.median(counts.values()) <= MEDIAN_ROOMS, counts
    assert max(counts.values()) <= MOST_ROOMS, counts


def test_every_folder_of_techniques_has_settings_and_a_contract() -> None:
    shared = {"core", "cost_terms", "randomness", "send_trace", "__pycache__"}
    folders = [path for path in (SOURCE / "techniques").iterdir() if path.is_dir() and path.name not in shared]
    assert len(folders) >= 12
    for folder in folders:
        assert (folder / "settings.py").is_file(), folder.name
        assert (folder / "contract.py").is_file(), folder.name
        assert (folder / "__init__.py").read_text().startswith('"""'), folder.name


def test_every_technique_is_asked() -> None:
    """A contract that is not in the registry would be obeyed by nobody."""
    known = {type(technique) for technique in TECHNIQUES}
    assert known == set(Technique.__subclasses__())
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)


def test_settings_are_declared_once() -> None:
    """A value of a space, a name of a question and a field of a layout belong to one setting each."""
    settings = plan_settings()
    for of in ("space", "layout"):
        named = [getattr(setting.knob, of) for setting in settings if getattr(setting.knob, of)]
        assert len(named) == len(set(named)), of
    asked = [name for setting in settings for name in setting.knob.asked]
    assert len(asked) == len(set(asked))
    for setting in settings:
        assert not (setting.knob.space and (setting.knob.free or setting.knob.follows)), setting.key
