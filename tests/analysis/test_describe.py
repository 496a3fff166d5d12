"""Profiles found on the meta device, against torch's counter, a real run, and profiles made from numbers."""

from __future__ import annotations

from pathlib import Path

import own_models
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from weft.analysis.describe import describe, examine
from weft.analysis.tensor_split.propose import propose_split
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.build import build_reference
from weft.model.description import profile_of
from weft.model.hf import build_hf
from weft.model.losses import class_loss
from weft.model.profile import Block, Operator, Profile

SHAPES = {
    "decoder": DecoderShape(
        num_layers=3, hidden_size=32, num_heads=8, num_kv_heads=4, vocabulary_size=64, sequence_length=12
    ),
    "decoder-dropout": DecoderShape(
        num_layers=2, hidden_size=32, num_heads=4, dropout=0.1, vocabulary_size=64, sequence_length=12
    ),
    "encoder": EncoderShape(
        num_layers=2, hidden_size=32, num_heads=4, vocabulary_size=64, sequence_length=12, dropout=0.0
    ),
    "mlp": MlpShape(num_layers=3, input_size=20, hidden_size=16, num_classes=5),
    "convnet": ConvNetShape(num_layers=3, channels=8),
}
OWN = [name for name in own_models.NAMES if name != "mixture"]


def recipe_of(name: str) -> Recipe:
    return Recipe(model=ModelRecipe(shape=SHAPES[name]), batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))


def blueprint_of(name: str) -> Blueprint:
    return build_reference(SHAPES[name]) if name in SHAPES else own_models.build(name)


def parts_of(profile: Profile) -> tuple[Block, ...]:
    return (profile.stem, *profile.blocks, profile.tail)


def flops_of(operator: Operator, length: int) -> float:
    """By the counter's conventions: attention without the causal half."""
    match operator.kind:
        case "matmul":
            return 2 * operator.rows_per_token * operator.n * operator.k
        case "convolution":
            return 2 * operator.rows_per_token * operator.n * operator.k * operator.groups
        case "attention":
            features = operator.head_size + operator.value_head_size
            return 2 * operator.rows_per_token * operator.heads * min(operator.window or length, length) * features
        case _:
            return 0.0


def forward_flops(profile: Profile) -> float:
    length = profile.sequence_length
    return length * sum(flops_of(operator, length) for part in parts_of(profile) for operator in part.operators)


def counted_flops(blueprint: Blueprint, samples: int = 2) -> float:
    assert blueprint.example is not None
    module, fields = blueprint.module.to("meta"), blueprint.example(samples)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module(**{keyword: fields[name] for keyword, name in blueprint.inputs.items() if name in fields})
    return counter.get_total_flops() / samples


@pytest.mark.parametrize("name", [*SHAPES, *OWN])
def test_flops_are_those_of_torchs_counter_and_parameters_those_of_the_model(name: str) -> None:
    blueprint = blueprint_of(name)
    profile = describe(blueprint)
    assert profile.num_parameters == sum(parameter.numel() for parameter in blueprint.module.parameters())
    assert forward_flops(profile) == pytest.approx(counted_flops(blueprint), rel=1e-12)


@pytest.mark.parametrize("name", list(SHAPES))
def test_profile_of_numbers_says_the_same(name: str) -> None:
    """Parameters exactly; operations within 1 %; what is kept within 2 % and, per block, one statistic per row."""
    recipe = recipe_of(name)
    wanted, found = profile_of(recipe), describe(blueprint_of(name))
    assert wanted is not None
    assert found.num_parameters == wanted.num_parameters
    assert len(found.blocks) == len(wanted.blocks)
    assert (found.hidden_size, found.tied) == (wanted.hidden_size, wanted.tied)
    assert dict(found.divisible) == dict(wanted.divisible)
    assert forward_flops(found) == pytest.approx(forward_flops(wanted), rel=0.01)
    for mine, theirs in zip(parts_of(found), parts_of(wanted), strict=True):
        assert mine.parameters == theirs.parameters
        assert kept_bytes(mine) == pytest.approx(kept_bytes(theirs), rel=0.02, abs=64)
        assert batch_statistics(mine) == batch_statistics(theirs)
    assert any(map(batch_statistics, parts_of(found))) == (name == "convnet")


def batch_statistics(block: Block) -> int:
    return sum(operator.batch_statistics for operator in block.operators)


def kept_bytes(block: Block, element_bytes: int = 2) -> float:
    return sum(o.kept_elements_per_token * element_bytes + o.kept_bytes_per_token for o in block.operators)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hugging_face_models_agree_with_their_config(family: str, tmp_path: Path) -> None:
    import transformers

    if family == "llama":
        config: object = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=16,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    recipe = Recipe(
        model=ModelRecipe(hf=str(tmp_path), sequence_length=12),
        batch=BatchRecipe(global_batch_size=4),
        run=RunRecipe(steps=1),
    )
    blueprint = build_hf(recipe.model)
    wanted, found = profile_of(recipe), describe(blueprint)
    assert wanted is not None
    assert found.num_parameters == wanted.num_parameters
    assert forward_flops(found) == pytest.approx(forward_flops(wanted), rel=0.01)
    assert forward_flops(found) == pytest.approx(counted_flops(blueprint), rel=1e-12)
    for mine, theirs in zip(found.blocks, wanted.blocks, strict=True):
        assert kept_bytes(mine) == pytest.approx(kept_bytes(theirs), rel=0.02)


class Measured:
    """Bytes of the distinct storages that autograd holds after a real forward and loss."""

    def __init__(self, blueprint: Blueprint, samples: int) -> None:
        assert blueprint.example is not None
        module = blueprint.module
        fields = {name: self._real(name, like) for name, like in blueprint.example(samples).items()}
        own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        self._held: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            self._held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = module(**{keyword: fields[name] for keyword, name in blueprint.inputs.items()})
            blueprint.loss(outputs, fields)
        sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in self._held.items() if key not in own}
        self.bytes = sum(sizes.values())

    @staticmethod
    def _real(name: str, like: Tensor) -> Tensor:
        if like.is_floating_point():
            return torch.randn(like.shape)
        return torch.randint(0, 2, like.shape)


@pytest.mark.parametrize(
    "name", ["gpt", "gated-gpt", "width-from-input", "vision", "torch-encoder", "perceptron", "recommender"]
)
def test_kept_bytes_are_those_of_a_real_run(name: str) -> None:
    """Per added sample, in fp32, without dropout (whose masks Weft keeps in bytes and torch on the CPU in floats)."""
    blueprint = own_models.build(name)
    for module in blueprint.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    measured = (Measured(blueprint, 6).bytes - Measured(blueprint, 2).bytes) / 4
    assert examine(blueprint, dtype=torch.float32).kept_bytes_per_sample == pytest.approx(measured, rel=0.01)


def test_experts_see_balanced_routing_and_say_so() -> None:
    found = examine(own_models.build("mixture"))
    products = [o for o in found.profile.blocks[0].operators if o.split == "expert" and o.kind == "matmul"]
    assert found.profile.num_experts == 4
    assert [o.groups for o in products] == [4, 4]
    assert [o.rows_per_token for o in products] == [2.0, 2.0]  # top 2: every choice is served
    assert any("random" in note for note in found.notes)
    assert found.profile.num_parameters == sum(p.numel() for p in own_models.build("mixture").module.parameters())


def test_blocks_are_found_without_a_table() -> None:
    found = examine(own_models.build("vision"))
    assert found.block_names == ("blocks.0", "blocks.1")
    assert found.profile.sequence_length == 5  # four patches and the class token
    assert found.profile.blocks[0] is found.profile.blocks[1]


class Between(nn.Module):
    """What runs between two blocks belongs to a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.bridges = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8)]) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        for block, bridge in zip(self.blocks, self.bridges, strict=True):
            rows = bridge[0](block(rows)).relu()
        return rows


class Masked(nn.Module):
    """Makes its mask by a vectorised function of positions, as many models of today do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, rows: Tensor) -> Tensor:
        def allowed(query: Tensor, key: Tensor) -> Tensor:
            return query.new_zeros((), dtype=torch.bool) | (query >= key)

        places = torch.arange(8, device=rows.device)
        mask = torch.vmap(torch.vmap(allowed, in_dims=(None, 0)), in_dims=(0, None))(places, places)
        return self.down(self.up(rows).relu()) @ mask.to(rows.dtype)


def test_a_mask_that_is_made_by_vmap_is_followed() -> None:
    blueprint = Blueprint(
        module=Masked(), inputs={"rows": "rows"}, loss=class_loss, initialise=None, example=_rows_and_labels
    )
    assert describe(blueprint).num_parameters == 8 * 16 + 16 + 16 * 8 + 8
    assert propose_split(blueprint).splits


def _rows_and_labels(number: int) -> dict[str, Tensor]:
    labels = torch.empty(number, dtype=torch.int64, device="meta")
    return {"rows": torch.empty(number, 8, device="meta"), "labels": labels}


def test_what_runs_between_blocks_is_counted_and_has_its_own_name() -> None:
    blueprint = Blueprint(
        module=Between(),
        inputs={"rows": "rows"},
        loss=class_loss,
        initialise=None,
        example=_rows_and_labels,
    )
    profile = describe(blueprint)
    assert profile.num_parameters == 6 * (8 * 8 + 8)
    assert sum(block.parameters for block in (profile.stem, *profile.blocks, profile.tail)) == profile.num_parameters
    assert profile.flops_per_sample >= 6 * 2 * 8 * 8


def test_a_model_is_described_without_memory() -> None:
    shape = DecoderShape(
        num_layers=4, hidden_size=16_384, num_heads=128, num_kv_heads=8, ffn_size=53_248, vocabulary_size=128_256,
        sequence_length=8192, tie_embeddings=False,
    )  # fmt: skip
    profile = describe(build_reference(shape))
    assert len({id(block) for block in profile.blocks}) == 1
    assert profile.blocks[0].parameters == 3_187_703_808  # of Llama 3.1 405B, whose block this is
    assert not any(tensor.numel() > 1 << 24 for tensor in _real_tensors())


def _real_tensors() -> list[Tensor]:
    import gc

    return [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter) and item.device.type == "cpu"]


def test_the_model_is_left_as_it_was() -> None:
    blueprint = own_models.build("gpt")
    before = {name: id(parameter) for name, parameter in blueprint.module.named_parameters()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in blueprint.module.modules()]
    describe(blueprint)
    assert before == {name: id(parameter) for name, parameter in blueprint.module.named_parameters()}
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in blueprint.module.modules()]


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.linear(rows)
        return hidden * 2 if hidden.sum() > 0 else hidden[hidden[:, 0] > 0].sum() + hidden


def test_what_depends_on_values_is_assumed_aloud() -> None:
    blueprint = own_models.build("perceptron")
    blueprint.module, blueprint.inputs = Reads(), {"rows": "rows"}
    notes = examine(blueprint).notes
    assert any("False is assumed" in note for note in notes)
    assert any("half of the positions" in note for note in notes)


def test_a_model_without_an_example_says_so() -> None:
    blueprint = own_models.build("perceptron")
    blueprint.example = None
    with pytest.raises(RecipeError, match="no example batch"):
        describe(blueprint)


def test_a_forward_that_fails_says_why() -> None:
    blueprint = own_models.build("perceptron")
    blueprint.module = nn.Sequential(nn.Linear(11, 3))
    with pytest.raises(RecipeError, match="its forward or its loss raised RuntimeError"):
        describe(blueprint)


def test_a_recommender_is_counted_as_by_hand() -> None:
    """Tables, a perceptron over numbers, products between all pairs, and a perceptron over those.

    Source: Naumov et al. 2019, https://arxiv.org/abs/1906.00091.
    """
    profile = describe(own_models.build("recommender"))
    tables, width, bottom = 3, 8, (5, 16, 8)
    top = (width + tables * (tables + 1) // 2, 24, 3)
    layers = [*zip(bottom, bottom[1:], strict=False), *zip(top, top[1:], strict=False)]
    assert profile.num_parameters == tables * 64 * width + sum(k * n + n for k, n in layers)
    pairs = (tables + 1) ** 2 * width
    assert forward_flops(profile) == 2 * (pairs + sum(k * n for k, n in layers))
