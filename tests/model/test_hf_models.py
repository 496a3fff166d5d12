"""Hugging Face models in, and reference models out to Hugging Face."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import HF_FAMILIES, REFERENCES, batch_of, build_family, hf_config, real, run
from safetensors.torch import save_file

from weft.analysis.blueprint import build_blueprint
from weft.config.recipe import DecoderShape, ModelRecipe, parse_recipe
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint, logits_of
from weft.model.build import build_reference
from weft.model.families import FoundCut
from weft.model.hf import build_hf
from weft.verify.numerics import KeepFp64


def save_exported(blueprint: Blueprint, weights: dict[str, torch.Tensor], folder: Path) -> None:
    exported = blueprint.export(weights) if blueprint.export else weights
    own = {name: tensor.contiguous().clone() for name, tensor in exported.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(blueprint.export_config or {})))


@pytest.mark.parametrize("name", ["decoder", "decoder-untied", "encoder"])
def test_exported_reference_models_load_in_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    blueprint = build_reference(REFERENCES[name])
    module = real(blueprint).eval()
    save_exported(blueprint, module.state_dict(), tmp_path)
    auto = transformers.AutoModelForMaskedLM if name == "encoder" else transformers.AutoModelForCausalLM
    loaded, report = auto.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert type(loaded).__name__ == ("BertForMaskedLM" if name == "encoder" else "LlamaForCausalLM")
    assert not any(report.values()), report
    tokens = batch_of(blueprint)["tokens"]
    ours, theirs = module(tokens), loaded.eval()(tokens).logits
    # transformers takes Llama's norms in fp32 whatever the model's precision
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 if name == "encoder" else 2e-7)
    reread = real(build_hf(ModelRecipe(hf=str(tmp_path), sequence_length=12))).eval()
    torch.testing.assert_close(logits_of(reread(tokens)), ours.float().double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", HF_FAMILIES)
def test_weights_in_the_folder_are_loaded(family: str, tmp_path: Path) -> None:
    import transformers

    config = hf_config(family)
    auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    theirs = auto.from_config(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    blueprint = build_hf(ModelRecipe(hf=str(tmp_path), sequence_length=12))
    assert blueprint.notes == ()
    ours, tokens = real(blueprint, torch.float32).eval(), batch_of(blueprint)["tokens"]
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", HF_FAMILIES)
def test_export_is_what_transformers_saves(family: str, tmp_path: Path) -> None:
    import transformers

    blueprint = build_family(family, tmp_path)
    module = real(blueprint, torch.float32).eval()
    out = tmp_path / "out"
    out.mkdir()
    save_exported(blueprint, module.state_dict(), out)
    auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    loaded, report = auto.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    tokens = batch_of(blueprint)["tokens"]
    torch.testing.assert_close(loaded.eval()(tokens).logits, module(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", HF_FAMILIES)
def test_attention_dropout_is_a_module_on_the_probabilities(family: str, tmp_path: Path) -> None:
    rate = {"gpt2": "attn_pdrop", "bert": "attention_probs_dropout_prob"}.get(family, "attention_dropout")
    others = {"gpt2": {"resid_pdrop": 0, "embd_pdrop": 0}, "bert": {"hidden_dropout_prob": 0}}.get(family, {})
    blueprint = build_family(family, tmp_path, **{rate: 0.5}, **others)
    module, batch = real(blueprint).train(), batch_of(blueprint)
    seen: list[tuple[str, torch.Size]] = []
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Dropout) and child.p > 0:
            child.register_forward_hook(lambda m, args, out, name=name: seen.append((name, args[0].shape)))
            child.p = 1e-300  # drops nothing, and the model still believes in its rate
    trained = logits_of(run(module, blueprint, batch))
    assert len(seen) == 3
    assert all(shape[-1] == shape[-2] == 12 for _, shape in seen)
    torch.testing.assert_close(logits_of(run(module.eval(), blueprint, batch)), trained, rtol=1e-12, atol=1e-14)
    rules = [rule.match for rule in blueprint.split if rule.kind == "heads"]
    assert rules


def test_padding_masks_are_obeyed(tmp_path: Path) -> None:
    for family in HF_FAMILIES:
        blueprint = build_family(family, tmp_path / family)
        module = real(blueprint).eval()
        tokens, mask = torch.randint(1, 64, (1, 9)), torch.ones(1, 9, dtype=torch.int64)
        mask[:, 6:] = 0
        other = tokens.clone()
        other[:, 6:] = 5
        first, second = (module(input_ids=t, attention_mask=mask).logits[:, :6] for t in (tokens, other))
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def test_fp64_is_fp64_all_the_way_where_plans_are_compared(tmp_path: Path) -> None:
    """A change far below fp32's resolution shows in the logits, although the library's norms compute in fp32."""
    blueprint = build_family("llama", tmp_path)
    module, batch = real(blueprint).eval(), batch_of(blueprint)
    with KeepFp64() as mode:
        before = logits_of(run(module, blueprint, batch))
        with torch.no_grad():
            module.model.embed_tokens.weight.mul_(1 + 1e-11)
            module.model.layers[0].mlp.down_proj.weight.mul_(1 + 1e-11)
        change = (logits_of(run(module, blueprint, batch)) - before).norm() / before.norm()
    assert not mode.narrowed
    assert 1e-14 < change < 1e-9


def test_families_without_a_file_are_cut_where_their_forward_says(tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    transformers.Gemma2Config(**sizes, **heads, sliding_window=4).save_pretrained(tmp_path)
    blueprint = build_hf(ModelRecipe(hf=str(tmp_path)))
    assert blueprint.cut is None
    assert not blueprint.split
    text = f'[model]\nhf = "{tmp_path}"\n[batch]\nglobal_batch_size = 2\n[run]\nsteps = 1\n'
    looked_at = build_blueprint(parse_recipe(text))
    cut = looked_at.cut
    assert isinstance(cut, FoundCut)
    assert looked_at.split
    assert (cut.blocks, cut.stem) == (("model.layers.0", "model.layers.1"), ("model.embed_tokens",))
    logits = real(blueprint)(torch.randint(0, 64, (1, 8))).logits
    assert logits.shape == (1, 8, 64)


def recipe(path: Path, **settings: Any) -> ModelRecipe:
    return ModelRecipe(hf=str(path), **settings)


def test_errors_of_folders(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no file"):
        build_hf(recipe(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(RecipeError, match="transformers cannot read"):
        build_hf(recipe(tmp_path))
    hf_config("bert", architectures=["BertForNextSentencePrediction"]).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="for no task that Weft trains"):
        build_hf(recipe(tmp_path))
    hf_config("gpt2").save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="max_position_embeddings = 16"):
        build_hf(recipe(tmp_path, sequence_length=17))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(RecipeError, match="a pickle"):
        build_hf(recipe(tmp_path))
    save_file({"wte.weight": torch.zeros(64, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(RecipeError, match="the weights lack transformer.wpe.weight"):
        build_hf(recipe(tmp_path))


@pytest.mark.parametrize("kind", ["nllb-moe", "doge"])
def test_mixtures_whose_samples_change_one_another_are_refused(kind: str, tmp_path: Path) -> None:
    names = {"nllb-moe": "NllbMoeForConditionalGeneration", "doge": "DogeForCausalLM"}
    config = {"model_type": kind, "architectures": [names[kind]], "vocab_size": 32, "is_moe": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=f"routers of a {kind} let the samples of a microbatch change"):
        build_hf(recipe(tmp_path, sequence_length=16))


def test_a_balance_loss_beside_masks_of_documents_is_refused(tmp_path: Path) -> None:
    """The library's own computes with the mask that it is given, as one of padding."""
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "output_router_logits": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="takes a mask that keeps documents apart for one of padding"):
        build_hf(recipe(tmp_path, sequence_length=16), isolated_documents=True)


def test_errors_of_weights_and_documents(tmp_path: Path) -> None:
    blueprint = build_family("llama", tmp_path)
    weights = dict(real(blueprint, torch.float32).state_dict())
    save_file(weights | {"model.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "model.extra" in build_hf(recipe(tmp_path)).notes[0]
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RecipeError, match=r"model.norm.weight has shape \(3,\) in the weights but \(32,\)"):
        build_hf(recipe(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(RecipeError, match=r"gone.safetensors, which is not there"):
        build_hf(recipe(tmp_path))
    folder = tmp_path / "bert"
    hf_config("bert").save_pretrained(folder)
    with pytest.raises(RecipeError, match='data.documents = "isolated"'):
        build_hf(recipe(folder), isolated_documents=True)


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RecipeError, match=r"pip install 'weft\[hf\]'"):
        build_hf(recipe(tmp_path))


def test_grouped_heads_export(tmp_path: Path) -> None:
    shape = DecoderShape(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=1, vocabulary_size=32)
    blueprint = build_reference(shape)
    assert blueprint.export_config is not None
    assert blueprint.export_config["num_key_value_heads"] == 1
    assert blueprint.divisible["num_kv_heads"] == 1
