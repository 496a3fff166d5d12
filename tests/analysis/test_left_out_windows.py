"""Windows of masks that `transformers` makes, of models that write their attention out: ranks leave such masks out."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from weft.analysis.tokens.find_sequence import SharedSequence, find_shared_sequence
from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.model.examples import token_example
from weft.model.losses import token_loss

LENGTH, WIDTH, HEADS = 12, 8, 2
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "vocab_size": 32}
SMALL |= {"num_key_value_heads": HEADS, "intermediate_size": WIDTH}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.parts(x).chunk(3, -1)
        )  # fmt: skip
        scores = query @ key.mT
        scores = scores if mask is None else scores + mask
        return x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Layers that see all, or a window: `True`.  `shared`: they are one."""

    def __init__(self, windows: tuple[bool, ...], *, shared: bool, size: int = 4) -> None:
        super().__init__()
        self.config = MistralConfig(**SMALL, sliding_window=size, attn_implementation="eager")
        self.words, self.head, self.windows = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32), windows
        self.layers = nn.ModuleList([Attention()] * len(windows) if shared else [Attention() for _ in windows])

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        given = (self.config, x, None, None, position_ids)
        masks = {False: create_causal_mask(*given), True: create_sliding_window_causal_mask(*given)}
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, masks[window])
        return self.head(x)


@pytest.fixture(autouse=True, scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Masks of transformers say what they were made from once a model of its has been built."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(SMALL | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    model = ModelRecipe(hf=str(path), sequence_length=LENGTH)
    build_model(Recipe(model=model, batch=BatchRecipe(global_batch_size=1), run=RunRecipe(steps=1)))


def found(model: nn.Module) -> SharedSequence | str:
    inputs = {"tokens": "tokens"}
    blueprint = Blueprint(
        module=model, inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=32,
        sequence_length=LENGTH, example=token_example(LENGTH, inputs.values()),
    )  # fmt: skip
    return find_shared_sequence(blueprint, (6,))


@pytest.mark.parametrize("size", [1, 4, 11, 12, 4096])
def test_a_window_is_that_of_its_layer(size: int) -> None:
    shared = found(Model((False, True), shared=False, size=size))
    assert isinstance(shared, SharedSequence), shared
    assert (shared.attention, shared.attending) == ("causal", ("layers.0", "layers.1"))
    assert shared.windows == {("layers.1", 0): size}


def test_a_layer_that_is_run_twice_sees_the_same() -> None:
    shared = found(Model((True, True), shared=True))
    assert isinstance(shared, SharedSequence), shared
    assert shared.windows == {("layers.0", 0): 4}


@pytest.mark.parametrize("windows", [(False, True), (True, False)])
def test_a_layer_that_sees_otherwise_where_it_is_run_again_is_refused(windows: tuple[bool, ...]) -> None:
    answer = found(Model(windows, shared=True))
    assert isinstance(answer, str), answer
    assert "sees through another window where it is called again" in answer


class Chosen(Model):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.windows = (True,) if self.training else (False,)
        return super().forward(tokens, position_ids)


def test_another_window_in_evaluation_is_refused() -> None:
    answer = found(Chosen((True,), shared=False))
    assert isinstance(answer, str), answer
    assert "meet otherwise in evaluation" in answer


class Narrowed(Model):
    """A mask of the library's that is made to say more."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        mask = create_sliding_window_causal_mask(self.config, x, None, None, position_ids)
        if mask is not None:
            mask[..., 3:, 0] = torch.finfo(mask.dtype).min
        return self.head(self.layers[0](x, mask))


def test_a_mask_that_was_written_into_is_refused() -> None:
    answer = found(Narrowed((True,), shared=False))
    assert isinstance(answer, str), answer
    assert "no mask which can be read" in answer
