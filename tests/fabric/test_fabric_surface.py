"""What Fabric has and this face answers otherwise, or not: the kept list, Fabric itself, the face and the guide."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from weft.errors import RecipeError
from weft.fabric import Fabric

KEPT: dict[str, Any] = tomllib.loads(Path(__file__).with_name("surface.toml").read_text())
GUIDE = ROOT / "docs" / "guides" / "coming-from-fabric.md"
ASKED = """
import inspect, json
from lightning_fabric import Fabric
names = ["__init__", *(name for name in dir(Fabric) if not name.startswith("_"))]
takes = lambda each: [name for name in inspect.signature(each).parameters if name != "self"]
print(json.dumps({name: takes(getattr(Fabric, name)) if callable(getattr(Fabric, name)) else None for name in names}))
"""


def takes(name: str) -> list[str] | None:
    found = getattr(Fabric, name)
    return [each for each in inspect.signature(found).parameters if each != "self"] if callable(found) else None


def test_the_list_is_what_fabric_has() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ASKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: kept.get("takes") for name, kept in KEPT["Fabric"].items()}


def test_the_face_has_all_of_the_list() -> None:
    """Arguments by their names, or by `**options`, in the same order."""
    for name, kept in KEPT["Fabric"].items():
        own = takes(name)
        assert (own is None) == ("takes" not in kept), name
        wanted = [each for each in kept.get("takes", ()) if own is None or each in own or "options" not in own]
        assert own is None or [each for each in own if each in wanted] == wanted, name


@pytest.mark.parametrize("module", KEPT["modules"])
def test_every_name_can_be_imported_and_says_so_when_it_is_not_had(module: str) -> None:
    found = importlib.import_module(f"weft.fabric.{module}")
    for name in KEPT["modules"][module]:
        had = getattr(found, name)
        if name not in vars(found):
            with pytest.raises(RecipeError, match=f"{name} is not had in weft.fabric"):
                had()
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from weft.fabric.{module} import nothing")


def test_the_guide_says_what_is_different() -> None:
    rows = [
        f"| `{'Fabric(…)' if name == '__init__' else name}` | {kept['said']} |"
        for name, kept in KEPT["Fabric"].items()
        if "said" in kept
    ]
    table = "\n".join(["| of `Fabric` | here |", "|---|---|", *rows])
    assert table in GUIDE.read_text(), f"put this into {GUIDE.name}:\n{table}"
