"""Models of a user's own: frozen, unused and conditionally used parameters, buffers, and what goes wrong in them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.blueprint import look_for_blocks
from weft.config.recipe import DecoderShape
from weft.model.blueprint import Batch, Blueprint
from weft.model.examples import token_example
from weft.model.families import CutTable, FoundCut, Localise, SplitRule
from weft.model.losses import token_loss
from weft.model.reference.decoder import build_decoder

NUM_BLOCKS = 4
RARE_ABOVE = 1.4
"""A sample takes the rare layer when its first feature is larger: one sample in twelve, and in some steps none."""


class Stem(nn.Module):
    """A layer for every sample, and one that only some samples take."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 16)
        self.rare = nn.Linear(6, 16)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.always(features)
        chosen = (features[:, 0] > RARE_ABOVE).nonzero()[:, 0]
        return hidden.index_add(0, chosen, self.rare(features[chosen])) if chosen.numel() else hidden


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))) * self.scale)


class Own(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem = Stem()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(16, 3)
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        x = self.stem(features)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ScaledOutside(Own):
    """Computes outside the modules of its cut table: every stage of a pipeline would do it again."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) * 0.5


class GlobalHeads(nn.Module):
    """Attention written with the number of heads of the whole model: split and not told so, it mixes other features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.value = nn.Linear(16, 16)
        self.output = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, rows: Tensor) -> Tensor:
        query, key, value = (
            linear(rows).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.head((rows + self.output(mixed)).mean(1))


class Looked(nn.Module):
    """No table says where it may be cut: two stacks, of which the second reads what the first made; sums, a gain and
    draws outside of blocks; a layer that runs twice; a head that is tied to a layer of the stem."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 16, bias=False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.twice = nn.Linear(16, 16)
        self.first = nn.ModuleList(Block(dropout) for _ in range(2))
        self.second = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS - 2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(6, 16, bias=False)
        self.head.weight = self.entry.weight
        self.dropout = dropout

    def forward(self, features: Tensor) -> Tensor:
        made = F.dropout(self.entry(features) * self.gain, self.dropout, self.training)
        for block in self.first:
            made = block(made)
        hidden = self.twice(self.entry(features.flip(1)))
        for block in self.second:
            hidden = hidden + block(hidden + 0.1 * made)
        return F.linear(self.norm(self.twice(hidden) + made), self.head.weight.t())[:, :3]


def squares(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A loss of the user's own: squared errors, a mean over samples."""
    return (outputs - batch["targets"]).square().sum(), outputs.new_tensor(float(outputs.shape[0]))


def _blueprint(module: nn.Module) -> Blueprint:
    return Blueprint(
        module=module,
        inputs={"features": "features"},
        loss=squares,
        initialise=None,
        split=(
            SplitRule(match="blocks.*.up", kind="column"),
            SplitRule(match="blocks.*.down", kind="row"),
        ),
        divisible={"hidden_size": 24},
        cut=CutTable(entry="stem", blocks=tuple(f"blocks.{i}" for i in range(NUM_BLOCKS)), tail=("head",)),
        example=lambda n: {
            "features": torch.empty(n, 6, device="meta"),
            "targets": torch.empty(n, 3, device="meta"),
        },
    )


def build_own(dropout: float = 0.1) -> Blueprint:
    return _blueprint(Own(dropout))


def build_looked(dropout: float = 0.1) -> Blueprint:
    """Cut where one forward shows that it may be; split by rules."""
    blueprint = replace(_blueprint(Looked(dropout)), cut=None)
    blueprint.split = tuple(
        SplitRule(match=f"{stack}.*.{name}", kind=kind)
        for stack in ("first", "second")
        for name, kind in (("up", "column"), ("down", "row"))
    )
    look_for_blocks(blueprint)
    assert isinstance(blueprint.cut, FoundCut), blueprint.why_not("blocks")
    return blueprint


class Mixing(nn.Module):
    """Lets its tokens see one another otherwise than by torch's attention function: by a convolution along the
    sequence, or by attention that is written out."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.mix = mix
        self.attention = WrittenOut()
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = self.mix(self.embedding(tokens).mT).mT
        return self.head(self.attention(hidden))


class WrittenOut(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden @ hidden.mT).softmax(-1) @ hidden


def build_mixing(convolves: bool) -> Blueprint:
    return Blueprint(
        module=Mixing(nn.Conv1d(8, 8, 3, padding=1) if convolves else nn.Identity()),
        inputs={"tokens": "tokens"},
        position_input="positions",
        attention="full",
        loss=token_loss,
        initialise=None,
        vocabulary_size=16,
        example=token_example(11),
        sequence_length=11,
    )


class TorchEncoder(nn.Module):
    """An encoder of torch's own layers, which attend by `nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=bool(i)) for i in range(2)
        )
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden = self.embedding(tokens) + self.places(positions)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def build_torch_encoder() -> Blueprint:
    return replace(build_mixing(convolves=False), module=TorchEncoder())


def build_own_decoder() -> Blueprint:
    """A factory's model with every table that a grid would read: nothing but its forward is unknown."""
    shape = DecoderShape(
        num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=4, ffn_size=48, vocabulary_size=64, sequence_length=11
    )  # fmt: skip
    return build_decoder(shape)


def build_scaled_outside() -> Blueprint:
    return _blueprint(ScaledOutside())


def build_global_heads() -> Blueprint:
    return Blueprint(
        module=GlobalHeads(),
        inputs={"rows": "rows"},
        loss=squares,
        initialise=None,
        split=(
            *(SplitRule(match=name, kind="column") for name in ("query", "key", "value")),
            SplitRule(match="output", kind="row"),
        ),
        localise=(Localise(match="", attribute="num_heads"),),
        divisible={"num_heads": 4},
        example=lambda n: {
            "rows": torch.empty(n, 5, 16, device="meta"),
            "targets": torch.empty(n, 3, device="meta"),
        },
    )
