"""Facts of a model that a plan depends on, found without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from weft.config.recipe import DecoderShape, EncoderShape, MlpShape

Limit = Literal["blocks", "pipeline", "tensor", "sequence", "mesh_2d", "mesh_3d", "context", "expert", "gathered_loss"]
"""What a model may be unable to do: `blocks`: nothing says where one of its blocks ends and the next begins, which
stages, recomputation and a shared sequence need; `pipeline`, `context`, `expert`: ranks of these axes; `tensor`: any
layer split over tensor ranks; `sequence`: a sequence shared among tensor ranks; `mesh_2d`, `mesh_3d`: tensor ranks in a
square, and in a cube where they may form a square; `gathered_loss`: data ranks that gather their samples for a loss
which must see them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model.  None means that only building the model would tell; checks that need it are then left out."""

    name: str = "model"
    """Name for messages and the first lines of a run: `decoder`, `llama`, a factory's name."""
    limits: Mapping[Limit, str] = field(default_factory=dict[Limit, str], hash=False)
    """What the model cannot do → why: a sentence without its end.  What is not in it the model can do, or only building
    it would tell."""
    num_blocks: int | None = None
    """Repeated blocks of the model."""
    num_experts: int | None = None
    """Experts of every mixture that ranks can share out, or their divisor; 0: none; None: only building it tells."""
    attention_heads: tuple[int, int] | None = None
    """Heads of queries and of keys in every attention; None: they differ, or only building it tells."""
    divisible: Mapping[str, int] | None = field(default=None, hash=False)
    """Named sizes that the tensor axis must divide; empty: no layer of it can be split."""
    num_parameters: int | None = None
    """Tied ones once."""
    hidden_size: int | None = None
    vocabulary_size: int | None = None
    sequence_length: int | None = None
    """None where samples are no sequences."""
    tied: bool | None = None
    """Whether the embedding and the head share their weight."""
    has_batch_norm: bool | None = None
    """Whether some batch norm takes the statistics of a batch."""
    batch_norm: str = ""
    """Name of the first that does, where the model is built."""
    per_sample_loss: bool = True
    """Whether the loss is a sum over samples; if not, it must see all samples of a step at once."""

    def why_not(self, *limits: Limit) -> str:
        """Return why the model cannot do one of these: the first reason, a sentence without its end; empty: it can."""
        return next((self.limits[limit] for limit in limits if limit in self.limits), "")

    def limited(self, limit: Limit, reason: str) -> Self:
        """Return the same with this reason; an empty one takes the limit away."""
        others = {name: why for name, why in self.limits.items() if name != limit}
        return replace(self, limits=others | ({limit: reason} if reason else {}))


def default_ffn_size(shape: DecoderShape | EncoderShape | MlpShape) -> int:
    """Return the feed-forward width of a reference model, computed where its shape leaves it out."""
    if isinstance(shape, DecoderShape):
        return shape.ffn_size or -(-8 * shape.hidden_size // (3 * 64)) * 64
    return shape.ffn_size or 4 * shape.hidden_size
