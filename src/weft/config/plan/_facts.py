"""Facts of a model that a plan depends on, found without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.config.recipe import DecoderShape, EncoderShape, MlpShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model.  None means that only building the model would tell; checks that need it are then left out."""

    name: str = "model"
    """Name for messages and the first lines of a run: `decoder`, `llama`, a factory's name."""
    num_blocks: int | None = None
    """Repeated blocks of the model."""
    no_stages: str = ""
    """Why nothing says where one block ends and the next begins: it then gets no pipeline stages, no recomputation and
    no shared sequence.  Empty: it may be cut between any two blocks, or only building it would tell."""
    no_pipeline: str = ""
    """Why it gets no pipeline stages although it may be cut; empty: it does, or only building it tells."""
    no_sequence: str = ""
    """Why tensor ranks cannot share the sequence although it may be cut; empty: they can, or only building it tells."""
    no_context: str = ""
    """Why ranks cannot share a sequence; empty: they can, or only building it tells."""
    num_experts: int | None = None
    """Experts of every mixture that ranks can share out, or their divisor; 0: none; None: only building it tells."""
    no_experts: str = ""
    """Why ranks cannot share out the experts that it has, where the reason is known."""
    no_grid: str = ""
    """Why tensor ranks cannot form a grid; empty: they can, or only building it tells."""
    no_cube: str = ""
    """Why no cube, of a model for which they form other grids; empty: as `no_grid`."""
    attention_heads: tuple[int, int] | None = None
    """Heads of queries and of keys in every attention; None: they differ, or only building it tells."""
    divisible: Mapping[str, int] | None = field(default=None, hash=False)
    """Named sizes that the tensor axis must divide; empty: no layer of it can be split."""
    no_tensor: str = ""
    """Why no layer can be split, where `divisible` is empty and the reason is known."""
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
    no_gathering: str = ""
    """Why data ranks cannot gather their samples for a loss that must see them all; empty: they can."""


def default_ffn_size(shape: DecoderShape | EncoderShape | MlpShape) -> int:
    """Return the feed-forward width of a reference model, computed where its shape leaves it out."""
    if isinstance(shape, DecoderShape):
        return shape.ffn_size or -(-8 * shape.hidden_size // (3 * 64)) * 64
    return shape.ffn_size or 4 * shape.hidden_size
