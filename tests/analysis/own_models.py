"""Models as users write them, without tables."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.blueprint import Batch, Blueprint
from weft.model.losses import token_loss

VOCABULARY, LENGTH, WIDTH, HEADS = 48, 6, 16, 4


class FusedAttention(nn.Module):
    """One matrix for queries, keys and values; the number of heads is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        scores = query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = self.drop(scores.masked_fill(~mask, -1e9).softmax(-1))
        return self.proj((weights @ value).transpose(1, 2).reshape(batch, length, -1))


class WidthFromInput(FusedAttention):
    """Takes the width of its heads from its input, which every rank has whole: nothing tells it that it has a part."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class GptBlock(nn.Module):
    def __init__(self, attention: type[nn.Module], gated: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.mlp = Gated() if gated else nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gated(nn.Module):
    """Gate and value in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Gpt(nn.Module):
    def __init__(self, attention: type[nn.Module] = FusedAttention, *, gated: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(GptBlock(attention, gated) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3)
        )


class GatedPerceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(10, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gated = Gated()
        self.classes = nn.Linear(WIDTH, 3)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.enter(rows)
        return self.classes(x + self.gated(self.norm(x)))


class SharedGate(nn.Module):
    """A gate of one number, computed from the whole, scales every feature: its gradient would come in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(10, 24), nn.Linear(10, 1), nn.Linear(24, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(F.relu(self.up(rows)) * self.gate(rows).sigmoid())


class VisionBlock(nn.Module):
    """Queries and keys are normalised per head, as in ViT-22B."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.query_norm = nn.LayerNorm(WIDTH // HEADS)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            linear(y).unflatten(-1, (-1, WIDTH // HEADS)) for linear in (self.query, self.key, self.value)
        )
        query = self.query_norm(query)
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)))
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.1)
        self.blocks = nn.Sequential(VisionBlock(), VisionBlock())
        self.norm = nn.LayerNorm(WIDTH)
        self.classes = nn.Linear(WIDTH, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        return self.classes(self.norm(self.blocks(x))[:, 0])


class TorchEncoder(nn.Module):
    """torch's own encoder, whose attention computes in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(tokens)))


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 8) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        vectors = [self.bottom(dense), *(table(ids[:, at]) for at, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.triu_indices(4, 4, offset=1)
        return self.top(torch.cat((vectors[0], products[:, rows, columns]), 1))


class Mixture(nn.Module):
    """Experts of a list, each on the tokens that chose it."""

    def __init__(self, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.GELU(), nn.Linear(32, WIDTH, bias=False))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top_k, -1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return result.view_as(x)


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x))


class MixtureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(MixtureBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LatentAttention(nn.Module):
    """Keys and values through a narrow waist, positions in a key that all heads share (DeepSeek-V2)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * 6, bias=False)
        self.down = nn.Linear(WIDTH, 8 + 2, bias=False)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, HEADS * 9, bias=False)
        self.output = nn.Linear(HEADS * 5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, HEADS, 6).transpose(1, 2)
        latent, place = self.down(x).split((8, 2), -1)
        key, value = self.up(self.norm(latent)).view(batch, length, HEADS, 9).transpose(1, 2).split((4, 5), -1)
        key = torch.cat((key, place[:, None].expand(-1, HEADS, -1, -1)), -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class MadeWeight(nn.Module):
    """Multiplies with a matrix that the forward makes: what enters would get its gradient in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(10, 10), nn.Linear(10, 16), nn.Linear(16, 3)
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 5))

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.tanh(self.first(rows))
        return self.down(torch.tanh(self.up(x) + F.linear(x, torch.kron(self.left, self.right))))


def squares(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return (outputs - batch["targets"]).square().sum(), outputs.new_tensor(float(outputs.shape[0]))


def _language(module: nn.Module) -> Blueprint:
    def example(count: int) -> dict[str, Tensor]:
        fields = {name: torch.zeros(count, LENGTH, dtype=torch.int64, device="meta") for name in ("tokens", "labels")}
        return {**fields, "sample_ids": torch.zeros(count, dtype=torch.int64, device="meta")}

    return Blueprint(
        module=module,
        inputs={"tokens": "tokens"},
        loss=token_loss,
        initialise=None,
        task="causal_lm",
        vocabulary_size=VOCABULARY,
        example=example,
        sequence_length=LENGTH,
    )


def _regression(module: nn.Module, **inputs: tuple[int, ...]) -> Blueprint:
    def example(count: int) -> dict[str, Tensor]:
        fields: dict[str, Tensor] = {"targets": torch.zeros(count, 3, device="meta")}
        for name, shape in inputs.items():
            kind = torch.int64 if name == "ids" else torch.float32
            fields[name] = torch.zeros(count, *shape, dtype=kind, device="meta")
        return {**fields, "sample_ids": torch.zeros(count, dtype=torch.int64, device="meta")}

    return Blueprint(
        module=module,
        inputs={("input" if isinstance(module, nn.Sequential) else name): name for name in inputs},
        loss=squares,
        initialise=None,
        vocabulary_size=64 if "ids" in inputs else None,
        example=example,
    )


def build(name: str) -> Blueprint:
    """Really constructed, the same every time."""
    torch.manual_seed(5)
    makers: dict[str, Any] = {
        "gpt": lambda: _language(Gpt()),
        "gated-gpt": lambda: _language(Gpt(gated=True)),
        "width-from-input": lambda: _language(Gpt(WidthFromInput)),
        "latent": lambda: _language(Gpt(LatentAttention)),
        "mixture": lambda: _language(MixtureModel()),
        "torch-encoder": lambda: _language(TorchEncoder()),
        "perceptron": lambda: _regression(Perceptron(), rows=(10,)),
        "gated-perceptron": lambda: _regression(GatedPerceptron(), rows=(10,)),
        "shared-gate": lambda: _regression(SharedGate(), rows=(10,)),
        "made-weight": lambda: _regression(MadeWeight(), rows=(10,)),
        "vision": lambda: _regression(Vision(), images=(3, 8, 8)),
        "recommender": lambda: _regression(Recommender(), dense=(5,), ids=(3,)),
    }
    return makers[name]()


NAMES = (
    "gpt",
    "gated-gpt",
    "width-from-input",
    "latent",
    "mixture",
    "torch-encoder",
    "perceptron",
    "gated-perceptron",
    "shared-gate",
    "vision",
    "recommender",
)
