"""Descriptions as text, and kept: the same again, without torch, and never of another model or other code."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft.model.description._store
from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.api import describe_recipe
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    Recipe,
    RunRecipe,
)
from weft.model.description import (
    Description,
    description_of_shape,
    description_of_sizes,
    of_json,
    store,
    stored,
    to_json,
)
from weft.model.families import Crossing, FoundCut, Tables
from weft.model.profile.known import KNOWN_MODELS

OLMO2 = {
    "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
"""Of a family that has no file: only the built model tells."""
MLP = MlpShape(num_layers=2, input_size=4, hidden_size=8, num_classes=3)


def recipe_of(folder: Path, **changes: object) -> Recipe:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(OLMO2 | changes))
    model = ModelRecipe(hf=str(folder), sequence_length=16)
    return Recipe(model=model, batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weft" / "descriptions"


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(KNOWN_MODELS)))
def test_known_models_as_text(name: str) -> None:
    sizes = KNOWN_MODELS[name].sizes
    description = description_of_sizes(sizes)
    again = of_json(to_json(description))
    assert again == description
    kinds = [len(profile.count_blocks()) for profile in (again.profile, description.profile)]
    assert kinds[0] == kinds[1], "alike blocks are one object, so that they are priced once"


@pytest.mark.parametrize(
    "shape",
    [DecoderShape(num_layers=2, hidden_size=32, num_heads=4), MLP],
)
def test_reference_models_as_text(shape: DecoderShape | MlpShape) -> None:
    description = description_of_shape(shape)
    assert of_json(to_json(description)) == description


def test_a_cut_that_was_found_as_text() -> None:
    """With all that it may say, such as modules into whose results the forward writes."""
    crossing = Crossing(module="stem", leaf=1, shape=(2, 3), is_per_sample=False, also=(("late", 0),))
    cut = FoundCut(
        stem=("stem",), blocks=("a", "b"), between={"late": 1}, tail=(), crossings=((crossing,),), written=("stem",)
    )
    description = replace(description_of_shape(MLP), tables=Tables(cut=cut))
    assert of_json(to_json(description)) == description


def test_what_is_no_description_is_refused() -> None:
    good = to_json(description_of_shape(EncoderShape(num_layers=2, hidden_size=32, num_heads=4)))
    written = json.loads(good)
    written["description"]["profile"]["hidden_size"] = "32"
    for text in ("", "{", "[]", "{}", good.replace('"order": [0, 0]', '"order": [0, 7]'), json.dumps(written)):
        with pytest.raises(ValueError, match=r"this is no description|Expecting|delimiter"):
            of_json(text)


def test_a_built_model_is_described_once(cache: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "model")
    assert stored(recipe) is None
    description = describe_recipe(recipe)
    assert stored(recipe) == description
    assert of_json(to_json(description)) == description
    built = facts_of_blueprint(build_blueprint(recipe), recipe)
    fields = ("name", "num_blocks", "limits", "divisible", "num_parameters", "sequence_length", "vocabulary_size")
    fields += ("has_batch_norm", "per_sample_loss")
    for name in fields:
        assert getattr(description.facts, name) == getattr(built, name), name
    (file,) = cache.glob("*.json")
    file.write_text("{ broken")
    assert stored(recipe) is None
    assert describe_recipe(recipe) == description


def test_another_model_or_other_code_is_described_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path / "model")
    marked = Description(profile=describe_recipe(recipe).profile, tables=Tables(notes=("marked",)))
    store(recipe, marked)
    assert stored(recipe) == marked
    assert stored(recipe_of(tmp_path / "copy")) == marked, "the folder's name is no part of the model"
    longer = replace(recipe, model=replace(recipe.model, sequence_length=32))
    split = replace(recipe, model=replace(recipe.model, split={"model.norm": "sequence"}))
    isolated = replace(recipe, data=DataRecipe(documents="isolated"))
    for other in (longer, split, isolated, recipe_of(tmp_path / "other", num_hidden_layers=2)):
        assert stored(other) is None
    monkeypatch.setattr(weft.model.description._store, "version", "another {}".format)
    assert stored(recipe) is None


def test_a_kept_split_brings_no_notes_of_another_time(cache: Path, tmp_path: Path) -> None:
    """What was said of a folder's weights then need not be so now."""
    recipe = recipe_of(tmp_path / "model")
    fresh = build_blueprint(recipe).notes
    description = describe_recipe(recipe)
    store(recipe, replace(description, tables=replace(description.tables, notes=("3 tensors belong to no part",))))
    assert stored(recipe) is not None
    assert build_blueprint(recipe).notes == fresh


def test_own_code_is_never_kept(cache: Path) -> None:
    recipe = Recipe(model=ModelRecipe(factory="a.b:c"), batch=BatchRecipe(global_batch_size=1), run=RunRecipe(steps=1))
    store(recipe, description_of_shape(MLP))
    assert stored(recipe) is None
    assert not cache.exists()


def test_only_so_many_are_kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.model.description._store, "_MOST_KEPT", 2)
    description = description_of_shape(MLP)
    for layers in range(1, 5):
        store(recipe_of(tmp_path / "model", num_hidden_layers=layers), description)
    assert len(list(cache.iterdir())) == 2


def test_what_was_kept_plans_without_torch(cache: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "model")
    describe_recipe(recipe)
    text = f'[model]\nhf = "{recipe.model.hf}"\nsequence_length = 16\n'
    text += "[batch]\nglobal_batch_size = 4\n[run]\nsteps = 1\n"
    (tmp_path / "recipe.toml").write_text(text)
    code = (
        "import sys; from weft.cli._read import describe_recipe; from weft.config.recipe import load_recipe\n"
        f"description = describe_recipe(load_recipe({str(tmp_path / 'recipe.toml')!r}))\n"
        "print(description.profile.num_parameters, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(describe_recipe(recipe).profile.num_parameters), "False", "False"]


def test_what_is_said_of_a_model_is_kept_too(cache: Path, tmp_path: Path) -> None:
    """The second `weft describe` says the same without torch, and another model's is another."""
    recipe_of(tmp_path / "model")
    file = tmp_path / "recipe.toml"
    text = f'[model]\nhf = "{tmp_path / "model"}"\nsequence_length = 16\n'
    text += "[batch]\nglobal_batch_size = 4\n[run]\nsteps = 1\n"
    code = (
        "import sys; from weft.cli._describe import describe\n"
        f"describe({str(file)!r}, overrides=sys.argv[1:])\n"
        "print('torch' in sys.modules)"
    )

    def said(*overrides: str) -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", code, *overrides], capture_output=True, text=True, check=True)
        page, _, had_torch = done.stdout.rstrip().rpartition("\n")
        return page, had_torch

    file.write_text(text)
    first, again = said(), said()
    assert first[0] == again[0]
    assert (first[1], again[1]) == ("True", "False")
    longer = said("recipe.model.sequence_length=32")
    assert longer[1] == "True"
    assert "sample of 32 tokens" in longer[0]
