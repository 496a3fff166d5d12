"""From recipes to blueprints: factories, overrides, and what is said when they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import REFERENCES, hf_config, real

from weft.config.recipe import BatchRecipe, DataRecipe, ModelRecipe, Recipe, RunRecipe
from weft.errors import RecipeError
from weft.model.build import build_model
from weft.model.losses import class_loss, token_loss


def recipe(model: ModelRecipe, **data: Any) -> Recipe:
    batch, run = BatchRecipe(global_batch_size=2), RunRecipe(steps=1, seed=5)
    return Recipe(model=model, data=DataRecipe(**data), batch=batch, run=run)


def decoder(**settings: Any) -> Recipe:
    return recipe(ModelRecipe(reference="decoder", shape=REFERENCES["decoder"], **settings))


def factory(name: str, **settings: Any) -> Recipe:
    return recipe(ModelRecipe(factory=f"factory_examples:{name}", **settings))


def test_a_plain_module_is_really_constructed_and_says_so() -> None:
    first, again = (build_model(factory("classifier", arguments={"width": 7})) for _ in range(2))
    assert first.initialise is None
    assert first.inputs == {"input": "images"}
    assert first.loss is class_loss
    assert "really constructed" in first.notes[0]
    assert first.module.get_parameter("1.weight").shape == (7, 6)
    for mine, theirs in zip(first.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_module_that_reads_tokens() -> None:
    blueprint = build_model(factory("LanguageModel", sequence_length=4))
    assert (blueprint.inputs, blueprint.vocabulary_size) == ({"input_ids": "tokens"}, 17)
    assert blueprint.loss is token_loss
    with pytest.raises(RecipeError, match="Set model.sequence_length"):
        build_model(factory("LanguageModel"))


def test_a_blueprint_is_taken_as_it_is() -> None:
    blueprint = build_model(factory("blueprint"))
    assert blueprint.initialise is not None
    assert blueprint.notes == ()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.models:build", "there is no module no_such_package"),
        ("weft.modles:build", "there is no module weft.modles"),
        ("factory_examples:clasifier", "has no clasifier. Did you mean classifier"),
        ("factory_examples:number", "is a int, which cannot be called"),
        ("factory_examples:text", "says that it returns a str"),
        ("factory_examples:broken", "raised OSError: disk on fire"),
        ("factory_examples:on_meta", "on the meta device"),
        ("factory_examples:Strange", r"no batch field fits \(left, right\)"),
    ],
)
def test_factory_errors(path: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_model(recipe(ModelRecipe(factory=path)))


def test_factory_argument_errors() -> None:
    with pytest.raises(RecipeError, match=r"unexpected keyword argument 'widht'. Did you mean width"):
        build_model(factory("classifier", arguments={"widht": 3}))


def test_a_module_that_fails_on_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_on_import.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "raises_on_import.py").write_text("raise ValueError('half a file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match="needs the module a_package_nobody_has"):
        build_model(recipe(ModelRecipe(factory="fails_on_import:build")))
    with pytest.raises(RecipeError, match="importing raises_on_import raised ValueError: half a file"):
        build_model(recipe(ModelRecipe(factory="raises_on_import:build")))


def test_split_overrides_win_and_must_match() -> None:
    blueprint = build_model(decoder(split={"blocks.*.ffn.*": "replicate"}))
    assert (blueprint.split[0].match, blueprint.split[0].kind) == ("blocks.*.ffn.*", "replicate")
    with pytest.raises(RecipeError, match=r"matches no module.*Did you mean blocks\.\*\.attention\.query"):
        build_model(decoder(split={"blocks.*.atention.query": "column"}))


def test_frozen_parameters() -> None:
    blueprint = build_model(decoder(freeze=("blocks.0.*", "embedding.weight")))
    frozen = [name for name, p in real(blueprint).named_parameters() if not p.requires_grad]
    assert len(frozen) == 10
    assert all(name.startswith(("blocks.0.", "embedding")) for name in frozen)
    with pytest.raises(RecipeError, match=r"matches no parameter.*Did you mean blocks\.\*\.ffn\.up\.weight"):
        build_model(decoder(freeze=("blocks.*.ffn.upp.weight",)))
    with pytest.raises(RecipeError, match="freezes every parameter"):
        build_model(decoder(freeze=("*",)))


def test_another_loss_reads_gathered_logits() -> None:
    blueprint = build_model(decoder(loss="weft.model.losses:class_loss"))
    assert blueprint.loss is class_loss
    assert blueprint.vocabulary_head is None
    assert next(rule for rule in blueprint.split if rule.match == "head").gather_output
    assert build_model(decoder(loss="tokens")).vocabulary_head == "head"


def test_isolated_documents_need_a_model_that_takes_them() -> None:
    model = ModelRecipe(reference="decoder", shape=REFERENCES["decoder"])
    assert build_model(recipe(model, documents="isolated")).inputs["document_ids"] == "document_ids"
    encoder = ModelRecipe(reference="encoder", shape=REFERENCES["encoder"])
    with pytest.raises(RecipeError, match='Use "packed", or reference = "decoder"'):
        build_model(recipe(encoder, documents="isolated"))


def test_hugging_face_by_recipe(tmp_path: Path) -> None:
    hf_config("qwen3").save_pretrained(tmp_path)
    blueprint = build_model(recipe(ModelRecipe(hf=str(tmp_path / "config.json"), sequence_length=8)))
    assert type(blueprint.module).__name__ == "Qwen3ForCausalLM"
    assert blueprint.sequence_length == 8
