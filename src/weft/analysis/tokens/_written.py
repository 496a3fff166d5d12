"""How a look at a forward reads attention that the model writes out (`weft.model.attention.written`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from weft.errors import RecipeError
from weft.model.attention.place_biases import BiasesOfPlaces, Place
from weft.model.attention.written import AttentionReader


@dataclass(slots=True)
class Reading:
    """What several forwards of one model have in common, and what they showed."""

    squares: dict[str, Tensor]
    """Values of buffers that may say who sees whom."""
    causal: bool = False
    """Whether masks that are left out are causal ones."""
    windows: Mapping[Place, int] = field(default_factory=dict[Place, int])
    """Windows of masks that are left out."""
    seen: Mapping[Place, int] = field(default_factory=dict[Place, int])
    """Windows that the latest forward has shown."""
    has_begun: bool = False
    """Whether a forward had a product of queries and keys."""
    refused: str = ""
    """What was done to scores that is not understood: a sentence without its end."""
    readers: list[AttentionReader] = field(default_factory=list[AttentionReader])

    @classmethod
    def of(cls, module: nn.Module) -> Reading:
        """Return a reading of a model, of transformers or another."""
        from weft.model.hf import square_buffers  # models of one's own may need nothing of transformers

        return cls(square_buffers(module))

    def install(self, module: nn.Module, tokens: int, *, without_masks: bool) -> None:
        """Let a copy of the model be read in a forward of so many tokens."""
        causal, biases = without_masks and self.causal, BiasesOfPlaces()
        windows = self.windows if without_masks else {}
        reader = AttentionReader(tokens, causal=causal, windows=windows, refused=self._refused, biases=biases)
        reader.watch(module)
        self.readers.append(reader)

    def ended(self) -> None:
        """Say that a forward has run, or failed."""
        self.has_begun |= any(reader.has_begun for reader in self.readers)
        self.seen = {at: each for reader in self.readers for at, each in reader.seen.items() if each is not None}
        self.readers.clear()

    def _refused(self, place: str, what: str) -> RecipeError:
        self.refused = f"{place or 'its forward'} writes its attention out, and {what}"
        return RecipeError(self.refused)
