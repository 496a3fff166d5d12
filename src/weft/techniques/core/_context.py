"""What the modules of a model part must know of the microbatch in hand: keys of randomness, and sequence length."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from weft.techniques.core._call_numbers import CallNumbers

if TYPE_CHECKING:
    from weft.techniques.core.activation_store import ActivationStore
    from weft.techniques.core.local_tokens import LocalTokens, SequenceShard


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchState:
    """Frozen, so that recomputation in backward can put back the state its forward saw."""

    seed: int
    step: int
    sample_ids: Tensor
    """int64, (samples,); randomness is keyed by (seed, step, sample, layer), never by rank."""
    sequence_length: int | None
    """Length of dim 1 that the tensor ranks have together, for sequence parallelism."""
    tokens: LocalTokens | None = None
    """What this rank has of samples that several ranks share; None: whole samples."""
    moment: Tensor = field(init=False)
    """Seed and step, int64 on the CPU: compiled code takes a tensor as it comes, and is compiled anew for an int."""
    calls: CallNumbers = field(init=False)
    """How often the forward has called each module that draws."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "moment", torch.tensor((self.seed, self.step), device="cpu"))
        object.__setattr__(self, "calls", CallNumbers())


class BlockPath(Protocol):
    """The way of a forward through the blocks (`weft.techniques.core.block_paths.ForwardPath`)."""

    def come_to(self, name: str) -> None:
        """Go on to a block."""
        ...

    def close(self) -> None:
        """No forwards follow."""
        ...


class DrawNotes(Protocol):
    """What takes note of draws (`weft.techniques.randomness.quiet.DrawLedger`)."""

    def note(self, key: str, context: StepContext) -> None:
        """Note a draw by its key."""
        ...


@dataclass(slots=True)
class StepContext:
    """Shared by all hooks and keyed modules of one rank; the runner sets `current` around every forward."""

    current: MicrobatchState | None = field(default=None)
    cut_length: int | None = None
    """Whole length of the activation last cut along the sequence, for forwards outside a step (generation)."""

    is_alone: bool = False
    """Whether one process takes the whole batch at once, so that every draw is right as it comes."""
    draws: bool = False
    """Whether any module of the model draws under keys."""
    unseen: str = ""
    """Why no trace shows all that the model draws; empty: it does."""
    sequence_shard: SequenceShard | None = None
    """How ranks share out the tokens of a batch; None: each has whole samples."""
    gathers: str = ""
    """The block whose weights the forward in hand gathered last, under ZeRO-3."""
    block_path: BlockPath | None = None
    """The ways of forwards through blocks, where data ranks must all take the same; None: they need not."""
    activation_store: ActivationStore | None = None
    """Where what blocks keep for backward waits; None: it stays on the device."""

    ledger: DrawNotes | None = None
    """Takes note of draws, which are left out meanwhile; None: they are made."""

    @contextmanager
    def entered(self, state: MicrobatchState | None) -> Generator[None]:
        previous, self.current = self.current, state
        try:
            yield
        finally:
            self.current = previous

    def require(self) -> MicrobatchState:
        assert self.current is not None, "a keyed module ran outside a step"
        return self.current

    def whole_length(self) -> int:
        """Unsharded length of dim 1 of the forward in hand, for sequence parallelism."""
        length = self.cut_length if self.current is None else self.current.sequence_length
        assert length is not None, "a sequence-parallel layer ran before the sequence was cut"
        return length
