"""Adapters: what peft would make of the model, trained alone under every plan, and loaded by peft again."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_folders import logits_of, small_model, tokens

import weft
from weft.analysis.blueprint import build_blueprint
from weft.api import load_module
from weft.config.plan import parse_plan
from weft.config.recipe import AdapterRecipe, Recipe, parse_recipe
from weft.errors import PlanError, RecipeError
from weft.model.build import build_model
from weft.verify.dry_run import dry_run_world

peft: Any = pytest.importorskip("peft", reason="the package peft is not installed: `make setup` does")

EVERY = '"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"'


@pytest.fixture
def base(tmp_path: Path) -> Path:
    import transformers

    model = small_model(transformers.AutoModelForCausalLM, "llama")
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def recipe(folder: Path, adapter: str, *, precision: str = "fp32") -> Recipe:
    return parse_recipe(
        f"""
        [model]
        hf = "{folder}"
        sequence_length = 16
        [model.adapter]
        {adapter}
        [data]
        train = [{{ source = "synthetic" }}]
        [batch]
        global_batch_size = 4
        [optimizer]
        learning_rate = 0.02
        [run]
        steps = 3
        [permit]
        precision = ["{precision}"]
        """
    )


def drawn_methods() -> Iterator[tuple[str, str, str, int, str]]:
    """Methods of peft that nobody chose, beside layers that nobody chose, of families that differ in what they fuse."""
    draw = random.Random(13)
    for method in draw.sample(["beft", "deft", "delora", "glora", "gralora", "hira", "hra", "lokr", "oft"], 3):
        family, ends = draw.choice([("llama", EVERY), ("gpt_neox", '"query_key_value", "dense", "dense_4h_to_h"')])
        chosen = ", ".join(draw.sample(ends.split(", "), 2))
        yield family, f'method = "{method}"\ntargets = [{chosen}]', "tensor = 2", 4, ""


def plan(mesh: str, batches: int = 2, more: str = "") -> Any:
    return parse_plan(
        f'[mesh]\n{mesh}\n[microbatch]\nper_step = {batches}\n[compute]\ndevice = "cpu"\nthreads_per_rank = 1\n{more}'
    )


def loaded(base: Path, adapters: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what peft reads of transformers
        return peft.PeftModel.from_pretrained(model, adapters).eval()


@pytest.mark.parametrize(
    ("adapter", "mesh", "batches", "precision"),
    [
        (f"rank = 4\nalpha = 16.0\ntargets = [{EVERY}]", "shard = 2", 2, "fp32"),
        (f"rank = 4\ntargets = [{EVERY}]", "tensor = 2", 4, "bf16"),
        ('targets = ["q_proj", "down_proj"]\nsettings = { use_dora = true }', "shard = 2", 2, "fp32"),
        ('method = "ia3"', "shard = 2", 2, "fp32"),
    ],
)
def test_peft_loads_what_was_trained(
    base: Path, adapter: str, mesh: str, batches: int, precision: str, tmp_path: Path
) -> None:
    """On two ranks: the frozen weights stay as they are, the adapters are written alone, and peft computes the same."""
    made = recipe(base, adapter, precision=precision)
    how = plan(mesh, batches, f'precision = "{precision}"\n')
    result = weft.train(made, how, folder=tmp_path / "run", quiet=True)
    assert result.export is not None
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in result.export.iterdir()}
    assert not (result.export / "model.safetensors").exists()
    ours, theirs, ids = (
        load_module(tmp_path / "run", build_blueprint(made)).eval(),
        loaded(base, result.export),
        tokens(),
    )
    import transformers

    before = logits_of(transformers.AutoModelForCausalLM.from_pretrained(base).eval(), ids)
    after = logits_of(ours, ids)
    assert (after - before).abs().max() > 1e-4
    # Of bf16 weights peft reads the file's fp32, and Weft has trained beside what bf16 keeps of them.
    near = 1e-6 if precision == "fp32" else 2e-2
    torch.testing.assert_close(logits_of(theirs, ids), after, rtol=0, atol=near)
    torch.testing.assert_close(logits_of(theirs.merge_and_unload(), ids), after, rtol=0, atol=max(1e-5, near))
    state = load_module(tmp_path / "run", build_blueprint(made)).state_dict()
    whole = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    kept = state["model.layers.0.self_attn.q_proj.base_layer.weight" if "ia3" not in adapter else "model.norm.weight"]
    name = "model.layers.0.self_attn.q_proj.weight" if "ia3" not in adapter else "model.norm.weight"
    expected = whole[name] if precision == "fp32" else whole[name].bfloat16().float()
    assert torch.equal(kept, expected)


@pytest.mark.parametrize(
    ("family", "adapter", "mesh", "batches", "more"),
    [
        ("llama", f"rank = 4\ndropout = 0.2\ntargets = [{EVERY}]", "tensor = 2", 4, ""),
        ("llama", 'targets = ["all-linear"]', "shard = 2", 2, "[data_parallel]\nzero = 3\n"),
        ("llama", 'rank = 2\ntargets = ["q_proj", "lm_head"]', "tensor = 2", 4, ""),
        ("gpt2", "", "tensor = 2", 4, ""),
        (
            "llama",
            'targets = ["q_proj"]\nsettings = { use_dora = true }',
            "shard = 2",
            2,
            "[data_parallel]\nzero = 3\n",
        ),
        ("llama", 'method = "loha"\ntargets = ["v_proj"]', "shard = 2", 2, "[data_parallel]\nzero = 2\n"),
        ("llama", 'targets = ["all-linear"]\nsettings = { use_dora = true }', "tensor = 2", 4, ""),
        ("gpt2", "dropout = 0.2\nsettings = { use_dora = true }", "tensor = 2\nshard = 2", 2, ""),
        ("llama", 'method = "loha"\ntargets = ["q_proj", "down_proj"]', "tensor = 2", 4, ""),
        ("llama", 'method = "ia3"', "tensor = 2\nshard = 2", 2, ""),
        *drawn_methods(),
    ],
)
def test_plans_compute_what_one_process_does(
    family: str, adapter: str, mesh: str, batches: int, more: str, tmp_path: Path
) -> None:
    import transformers

    small_model(transformers.AutoModelForCausalLM, family).save_pretrained(tmp_path)
    report = weft.check(recipe(tmp_path, adapter), plan(mesh, batches, more), explain=False)
    assert report.is_equal, report


@pytest.mark.parametrize(
    ("settings", "more"),
    [("", ""), ("settings = { use_dora = true }", ""), ("settings = { use_dora = true }", "dropout = 0.2")],
)
def test_a_dry_run_sends_what_is_predicted(base: Path, settings: str, more: str) -> None:
    """Of adapters beside columns and rows; what is sent again where blocks are computed again."""
    made = recipe(base, f"targets = [{EVERY}]\n{more}\n{settings}")
    for memory in ("", '[memory]\nrecompute = "full"\n'):
        how = plan("tensor = 2\nshard = 2", 2, memory)
        report = dry_run_world(made, how, lambda: build_blueprint(made), (3,))
        assert report.problems == ()
        for rank in report.asked:
            assert rank.issued
            assert rank.unpredicted == ()
            assert rank.unlike_predicted == (), f"rank {rank.rank}"


def test_what_an_adapter_keeps_whole_is_said(base: Path) -> None:
    """Its layer and those that are split with it; the rest of the model splits."""
    blueprint = build_blueprint(recipe(base, 'method = "loha"\ntargets = ["down_proj"]'))
    assert blueprint.kind_of("model.layers.0.mlp.gate_proj") is None
    assert blueprint.kind_of("model.layers.1.mlp.down_proj.base_layer") is None
    assert blueprint.kind_of("model.layers.1.self_attn.q_proj") == "column"
    assert blueprint.kind_of("model.layers.0.self_attn.o_proj") == "row"
    said = [note for note in blueprint.notes if "stay whole on the tensor ranks" in note]
    assert len(said) == 1
    assert said[0].startswith("2 of 2 layers with adapters (down_proj)")
    both = build_blueprint(recipe(base, f"targets = [{EVERY}]\nsettings = {{ use_dora = true }}"))
    assert not any("stay whole" in note for note in both.notes)


def test_adapters_start_as_peft_starts_them(base: Path) -> None:
    """One matrix of a pair is drawn, the other is zero, so that the model computes what it did before."""
    import transformers
    from model_kit import real

    blueprint = build_model(recipe(base, f"rank = 4\ntargets = [{EVERY}]"))
    ours, ids = real(blueprint, torch.float32).eval(), tokens()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    torch.testing.assert_close(logits_of(ours, ids), logits_of(theirs, ids), rtol=0, atol=1e-6)
    first = ours.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    assert 0.05 < first.std() < 0.25  # kaiming's uniform of width 1/sqrt(32), as nn.Linear's
    assert not torch.equal(first, ours.get_parameter("model.layers.1.self_attn.q_proj.lora_A.default.weight"))
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == {
        name for name, _ in ours.named_parameters() if "lora_" in name
    }
    magnitudes = build_model(recipe(base, 'targets = ["q_proj"]\nsettings = { use_dora = true }'))
    found = real(magnitudes, torch.float32)
    magnitude = found.get_parameter("model.layers.1.self_attn.q_proj.lora_magnitude_vector.default.weight")
    weight = theirs.get_parameter("model.layers.1.self_attn.q_proj.weight")
    torch.testing.assert_close(magnitude, weight.norm(dim=1))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ('method = "lorra"', r'"lorra" is none that peft .* has.*Did you mean lora'),
        ('method = "prompt_tuning"', r"adds prompts or models .*adapters into single modules"),
        ('method = "vera"', r"shares weights between layers"),
        ('method = "lily"\ntargets = ["q_proj"]', r"shares weights between layers .*layers\.0.*layers\.1"),
        ('method = "fourierft"\ntargets = ["q_proj"]', r"keeps indices of .*q_proj as no parameter or buffer"),
        ('method = "osf"', r"replaces the frozen weights"),
        ("settings = { use_dorra = true }", r"use_dorra is no setting.*Did you mean use_dora"),
        ("settings = { r = 4 }", r"write model\.adapter\.rank"),
        ('settings = { init_lora_weights = "pissa" }', r"changes frozen weights"),
        ('settings = { bias = "all" }', r"biases of the model itself"),
        ('targets = ["nowhere"]', r"peft cannot put lora into .*nowhere"),
        ('method = "ia3"\nrank = 4', r"model\.adapter\.rank is nothing"),
    ],
)
def test_what_cannot_be_had_is_refused(base: Path, adapter: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_model(recipe(base, adapter))


def test_plans_that_adapters_refuse_say_what_works(base: Path) -> None:
    own = recipe(base, 'method = "loha"\ntargets = ["up_proj"]')
    own = replace(own, model=replace(own.model, split={"model.layers.*.mlp.up_proj": "column"}))
    with pytest.raises(
        RecipeError, match=r'"column" divides model\.layers\.0\.mlp\.up_proj.*"loha".*Leave the rule out'
    ):
        build_model(own)
    with pytest.raises(PlanError, match=r"(?s)sequence.*model\.adapter.*Use false"):
        weft.check(recipe(base, ""), plan("tensor = 2", 4, "[tensor_parallel]\nsequence = true\n"))


def test_the_recipe_alone_refuses_what_makes_no_sense() -> None:
    with pytest.raises(RecipeError, match=r"rank"):
        AdapterRecipe(rank=0)
    with pytest.raises(RecipeError, match=r"all-linear"):
        AdapterRecipe(targets=("all-linear", "q_proj"))
    with pytest.raises(RecipeError, match=r"no name of a method"):
        AdapterRecipe(method="Lo RA")
    assert AdapterRecipe().divides
    assert not AdapterRecipe(method="loha").divides
    assert AdapterRecipe(settings={"use_dora": True}).has_magnitudes
    assert not AdapterRecipe(method="loha").has_magnitudes
    assert json.loads(json.dumps({"rank": AdapterRecipe(rank=3).rank})) == {"rank": 3}
