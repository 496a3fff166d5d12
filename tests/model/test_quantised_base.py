"""Frozen weights beside adapters in 8 and 4 bits: their codes, their products, and what is trained beside them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_folders import logits_of, small_model, tokens
from test_adapters import EVERY, plan, recipe
from torch import nn

import weft
from weft.analysis.blueprint import build_blueprint
from weft.api import load_module
from weft.config.recipe import BaseKind
from weft.errors import PlanError, RecipeError
from weft.model.build import build_model
from weft.model.quantised import QuantisedLinear

peft: Any = pytest.importorskip("peft", reason="the package peft is not installed: `make setup` does")


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs)
    return nn.Linear(inputs, outputs, bias=bias)


def quantised(layer: nn.Linear, kind: BaseKind) -> QuantisedLinear:
    made = QuantisedLinear(layer, kind)
    made.fill(layer.weight)
    return made


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.5 / 127), ("nf4", 0.153)])
@pytest.mark.parametrize(("inputs", "outputs"), [(512, 24), (48, 7), (6, 3)])
def test_codes_stand_for_what_is_near(kind: BaseKind, worst: float, inputs: int, outputs: int) -> None:
    """As near as half the widest step between two levels, times the largest weight that shares a scale."""
    layer = linear(inputs, outputs)
    made = quantised(layer, kind)
    size = made.codes.numel() * made.codes.element_size()
    assert size == inputs * outputs // (1 if kind == "int8" else 2)
    blocks = made.scale_bits.shape[1]
    largest = layer.weight.unflatten(1, (blocks, -1)).abs().amax(2).repeat_interleave(inputs // blocks, 1)
    assert ((made.weight - layer.weight).abs() <= worst * largest * (1 + 1e-5)).all()
    again = quantised(layer, kind)
    assert torch.equal(made.codes, again.codes)
    made.fill(made.weight)  # what codes stand for has those codes
    assert torch.equal(made.codes, again.codes)
    zero = linear(inputs, outputs)
    nn.init.zeros_(zero.weight)
    assert not quantised(zero, kind).weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_products_and_gradients_are_those_of_the_weights(kind: BaseKind, dtype: torch.dtype) -> None:
    made = quantised(linear(64, 10), kind).to(dtype)
    assert made.scale_bits.dtype == torch.int32
    x = torch.randn(5, 64, dtype=dtype, requires_grad=True)
    weight = made.weight.to(dtype)
    result = made(x)
    assert torch.equal(result, x @ weight.T + made.bias)
    result.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones_like(result) @ weight)
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_nf4_is_that_of_bitsandbytes() -> None:
    """Codes in the same order, scales of the same blocks: numbers half-way between two levels may go either way."""
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    layer = linear(1024, 96)
    made = quantised(layer, "nf4")
    codes, state = functional.quantize_4bit(layer.weight.detach(), quant_type="nf4", blocksize=64)
    assert (codes.view(96, 512) == made.codes).double().mean() > 0.9999
    assert torch.equal(state.absmax.view(96, 16), made.scale_bits.view(torch.float32))
    theirs = functional.dequantize_4bit(made.codes.data.view(-1, 1), state)
    assert torch.equal(theirs, made.weight)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    import transformers

    small_model(transformers.AutoModelForCausalLM, "llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def drawn_plans() -> Iterator[tuple[str, str, str, int]]:
    """Bases under plans that nobody chose, of families with and without biases, separate and fused projections."""
    draw = random.Random(48)
    targets = {"llama": EVERY, "opt": '"q_proj", "out_proj", "fc1", "fc2"', "gpt_neox": '"query_key_value", "dense"'}
    plans = [("tensor = 2", 4), ("tensor = 2\nshard = 2", 2), ("tensor = 2\npipeline = 2", 4), ("pipeline = 2", 4)]
    for kind, (mesh, batches) in zip(("int8", "nf4", "nf4"), draw.sample(plans, 3), strict=True):
        family = draw.choice(list(targets))
        more = draw.choice(["", "dropout = 0.2\n", "settings = { use_dora = true }\n"])
        yield family, f'base = "{kind}"\n{more}targets = [{targets[family]}]', mesh, batches


@pytest.mark.parametrize(
    ("family", "adapter", "mesh", "batches"),
    [("llama", f'base = "int8"\ntargets = [{EVERY}]', "shard = 2", 2), *drawn_plans()],
)
def test_plans_compute_what_one_process_does(
    family: str, adapter: str, mesh: str, batches: int, tmp_path: Path
) -> None:
    import transformers

    small_model(transformers.AutoModelForCausalLM, family).save_pretrained(tmp_path)
    report = weft.check(recipe(tmp_path, adapter), plan(mesh, batches), explain=False)
    assert report.is_equal, report


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_what_is_trained_beside_codes_is_loaded_as_ever(base: Path, kind: BaseKind, tmp_path: Path) -> None:
    """Weights become the codes of the folder's, stay as they are and are saved; adapters are exported alone."""
    import transformers

    made = recipe(base, f'base = "{kind}"\nrank = 4\ntargets = [{EVERY}]', precision="bf16")
    how = plan("tensor = 2", 4, 'precision = "bf16"\n')
    result = weft.train(made, how, folder=tmp_path / "run", quiet=True)
    assert result.export is not None
    ours = load_module(tmp_path / "run", build_blueprint(made))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    for name, layer in ours.named_modules():
        if isinstance(layer, QuantisedLinear):
            plain: Any = theirs.get_submodule(name.removesuffix(".base_layer"))
            assert torch.equal(layer.codes, quantised(plain, kind).codes), name
    assert not isinstance(ours.get_submodule("lm_head"), QuantisedLinear)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.data = tensor.bfloat16().float()  # a run in bf16 holds the others so
    for name, layer in ours.named_modules():
        if isinstance(layer, QuantisedLinear):
            plain = theirs.get_submodule(name.removesuffix(".base_layer"))
            plain.weight.data.copy_(layer.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what peft reads of transformers
        adapted = peft.PeftModel.from_pretrained(theirs, result.export).eval()
    ids = tokens()
    torch.testing.assert_close(logits_of(adapted, ids), logits_of(ours, ids), rtol=0, atol=1e-4)


def test_a_base_in_4_bits_is_that_of_transformers(tmp_path: Path) -> None:
    """What the library makes of the folder in nf4, with the exported adapters, computes what has been trained."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    made = recipe(tmp_path / "base", f'base = "nf4"\nrank = 4\ntargets = [{EVERY}]')
    result = weft.train(made, plan("shard = 2"), folder=tmp_path / "run", quiet=True)
    assert result.export is not None
    given = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the libraries read of one another
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=given, dtype=torch.float32
        )
        peft.PeftModel.from_pretrained(theirs, result.export).eval()  # it puts the adapters into it
    # Where nobody asks for gradients bitsandbytes multiplies by another kernel on CPUs, which rounds scales to bf16.
    embedded = theirs.get_input_embeddings()(tokens()).detach().requires_grad_()
    ours = load_module(tmp_path / "run", build_blueprint(made))
    torch.testing.assert_close(
        theirs(inputs_embeds=embedded).logits, ours(input_ids=tokens()).logits, rtol=0, atol=1e-5
    )


def test_what_cannot_be_held_in_codes_is_refused(base: Path, tmp_path: Path) -> None:
    import transformers

    with pytest.raises(PlanError, match=r"(?s)zero.*model\.adapter\.base holds as nf4.*Use zero = 1 or 2"):
        weft.check(recipe(base, 'base = "nf4"'), plan("shard = 2", 2, "[data_parallel]\nzero = 3\n"))
    with pytest.raises(RecipeError, match=r"base"):
        recipe(base, 'base = "int3"')
    small_model(transformers.AutoModelForCausalLM, "gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(RecipeError, match=r"no plain linear layers besides its head.*plain"):
        build_model(recipe(tmp_path / "gpt2", 'base = "int8"'))
