"""Weights that do not know the plan."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from model_kit import CPU, HF_FAMILIES, REFERENCES, build_family, layout_by_hand, real, split_by_hand, stage_by_hand
from torch import nn

from weft.model.blueprint import Blueprint
from weft.model.build import build_reference
from weft.techniques.core import ModelLayout, materialise


@pytest.fixture(params=(*REFERENCES, *HF_FAMILIES))
def blueprint(request: pytest.FixtureRequest, tmp_path: Path) -> Blueprint:
    return build_family(request.param, tmp_path)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_join_to_the_whole(blueprint: Blueprint, parts: int) -> None:
    whole = dict(real(blueprint, torch.float32).named_parameters(remove_duplicate=False))
    locals_ = [
        dict(real(blueprint, torch.float32, parts=parts, index=index).named_parameters(remove_duplicate=False))
        for index in range(parts)
    ]
    cut = 0
    for name, parameter in whole.items():
        split = split_by_hand(blueprint, name, parts, 0)
        if split is None:
            assert all(torch.equal(local[name], parameter) for local in locals_), name
        else:
            cut += 1
            assert torch.equal(split.join([local[name].detach() for local in locals_]), parameter), name
    assert cut > 0 or not blueprint.split


def test_weights_agree_over_seeds_precisions_and_repetitions(blueprint: Blueprint) -> None:
    state = torch.get_rng_state()
    first, again, other = (real(blueprint, seed=seed).state_dict() for seed in (7, 7, 8))
    narrow = real(blueprint, torch.float32).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(torch.equal(first[name].to(narrow[name].dtype), narrow[name]) for name in first)
    assert all(torch.isfinite(tensor).all() for tensor in first.values())


def test_a_last_stage_draws_a_tied_head_under_its_first_name() -> None:
    blueprint = build_reference(REFERENCES["decoder"])
    stage = stage_by_hand(blueprint.module, blueprint, 2, 3, torch.zeros(1))
    assert "embedding.weight" not in dict(stage.named_parameters(remove_duplicate=False))
    layout = layout_by_hand(blueprint)
    assert layout["head.weight"].name == "embedding.weight"
    materialise(stage, blueprint, layout, 7, CPU, torch.float32)
    whole = real(blueprint, torch.float32)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


def test_ties_and_frozen_parameters_stay(tmp_path: Path) -> None:
    for family in ("decoder", "qwen2", "gpt2", "bert"):
        blueprint = build_family(family, tmp_path / family)
        names = list(dict(blueprint.module.named_parameters()))
        blueprint.module.get_parameter(names[1]).requires_grad_(False)
        module = real(blueprint)
        assert list(dict(module.named_parameters())) == names
        assert [name for name, p in module.named_parameters() if not p.requires_grad] == [names[1]]


def test_residual_outputs_start_narrower(tmp_path: Path) -> None:
    blueprint = build_family("gpt2", tmp_path, n_embd=128)
    module = real(blueprint, torch.float32)
    assert module.transformer.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert module.transformer.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)
    decoder = real(build_reference(dataclasses.replace(REFERENCES["decoder"], hidden_size=128)), torch.float32)
    assert decoder.blocks[0].ffn.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert decoder.blocks[0].ffn.down.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)


def test_buffers_are_filled_and_tables_keep_their_precision(tmp_path: Path) -> None:
    llama = real(build_family("llama", tmp_path), torch.bfloat16)
    assert llama.model.rotary_emb.inv_freq.dtype == torch.float32
    assert llama.model.rotary_emb.inv_freq[0] == 1
    assert llama.lm_head.weight.dtype == torch.bfloat16
    convnet = real(build_reference(REFERENCES["convnet"]))
    assert convnet.head.norm.running_var.eq(1).all()
    assert convnet.head.norm.num_batches_tracked.dtype == torch.int64


def test_a_constructed_model_is_cut_moved_and_cast() -> None:
    blueprint = build_reference(REFERENCES["mlp"])
    blueprint.module, blueprint.initialise = real(blueprint, torch.float32), None
    part = copy.deepcopy(blueprint.module)
    materialise(part, blueprint, layout_by_hand(blueprint, 2, 1), 0, CPU, torch.float64)
    up, whole = part.get_parameter("blocks.0.up.weight"), blueprint.module.get_parameter("blocks.0.up.weight")
    assert torch.equal(up, whole[32:].double())
    assert torch.equal(part.get_parameter("head.weight"), blueprint.module.get_parameter("head.weight").double())


def test_a_parameter_without_layout_is_a_mistake() -> None:
    blueprint = build_reference(REFERENCES["mlp"])
    with pytest.raises(AssertionError, match="has no layout"):
        materialise(copy.deepcopy(blueprint.module), blueprint, ModelLayout(), 0, CPU, torch.float32)


def test_only_one_module_is_whole_at_a_time() -> None:
    blueprint = build_reference(REFERENCES["decoder"])
    inner, seen = blueprint.initialise, list[tuple[str, int]]()
    assert inner is not None

    def watched(name: str, module: nn.Module) -> None:
        real_bytes = sum(p.numel() for p in module.parameters() if not p.is_meta)
        own = sum(p.numel() for p in module.parameters(recurse=False))
        seen.append((name, real_bytes - own))
        inner(name, module)

    blueprint.initialise = watched
    real(blueprint)
    assert len({name for name, _ in seen}) == len(seen) == 3 * 9 + 2
    assert all(others == 0 for _, others in seen)
