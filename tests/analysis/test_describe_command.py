"""`weft describe`, and recipes that let the graph say how a model splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.analysis.blueprint import build_blueprint
from weft.cli import run
from weft.config.recipe import load_recipe

RECIPE = """
[model]
factory = "own_models:Gpt"
sequence_length = 6
{more}
[batch]
global_batch_size = 8
[run]
steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(more=""))
    return path


def test_table_and_proposal(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", str(recipe)]) == 0
    text = capsys.readouterr().out
    assert "Gpt: 5,344 parameters, 2 blocks" in text
    assert "GptBlock × 2  (2,224 parameters)" in text
    assert '"blocks.*.attention.qkv"  = "column"  # blocks=3' in text
    assert "blocks.*.attention: num_heads is divided too" in text
    assert "propose_split = true" in text
    assert " of the parameters are divided; it must divide " in text


def test_a_model_that_cannot_be_followed_is_described_as_far_as_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_model.py").write_text(
        "from torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.tokens, self.head = nn.Embedding(48, 8), nn.Linear(8, 48)\n"
        "    def forward(self, tokens):\n"
        "        raise LookupError('no such luck')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "odd.toml"
    path.write_text(RECIPE.format(more='loss = "tokens"').replace("own_models:Gpt", "odd_model:Odd"))
    assert run(["describe", str(path)]) == 0
    text = capsys.readouterr().out
    for line in ("Tensor axis: nothing to split", "Operators: not understood"):
        assert line in text, text
    assert text.count("no such luck") >= 2


def test_json(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", str(recipe), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 5344
    assert [part["times"] for part in found["parts"]] == [1, 2, 1]
    assert found["proposal"]["localise"] == [{"match": "blocks.*.attention", "attribute": "num_heads"}]


def test_a_wrong_recipe_is_one_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(more="").replace("own_models:Gpt", "own_models:Gtp"))
    assert run(["describe", str(path)]) == 2
    assert "Did you mean Gpt?" in capsys.readouterr().err


def test_a_model_without_a_table_is_looked_at_unless_the_recipe_forbids_it(tmp_path: Path, recipe: Path) -> None:
    found = build_blueprint(load_recipe(recipe))
    path = tmp_path / "whole.toml"
    path.write_text(RECIPE.format(more="propose_split = false"))
    assert not build_blueprint(load_recipe(path)).split
    assert found.vocabulary_head == "head"
    assert {rule.kind for rule in found.split} == {"vocab", "column", "row", "heads", "sequence"}
    assert any("weft check" in note for note in found.notes)


def test_a_proposed_table_divides_the_profile(tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "proposed.toml"
    path.write_text(RECIPE.format(more="propose_split = true"))
    assert run(["describe", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    splits = {operator["name"]: operator["split"] for operator in found["parts"][1]["operators"]}
    assert splits["attention.qkv"] == "column"
    assert splits["attention.scores"] == "heads"
    assert splits["attention.proj"] == "row"
    assert splits["norm1"] == "sequence"
