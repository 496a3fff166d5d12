"""The state of the current microbatch that a part's modules read: keys of randomness, and sequence length."""

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
    """Full length of dim 1, of all tensor ranks together, for sequence parallelism."""
    tokens: LocalTokens | None = None
    """This rank's tokens of samples that context ranks share; None: whole samples."""
    moment: Tensor = field(init=False)
    """Seed and step, (2,) int64 on the CPU.  A tensor, because compiled code is compiled anew for another int."""
    calls: CallNumbers = field(init=False)
    """Numbers of the forward's calls of each module that draws."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "moment", torch.tensor((self.seed, self.step), device="cpu"))
        object.__setattr__(self, "calls", CallNumbers())


class BlockPath(Protocol):
    """The sequence of blocks that a forward runs (`weft.techniques.core.block_paths.ForwardPath`)."""

    def come_to(self, name: str) -> None:
        """Go on to a block."""
        ...

    def close(self) -> None:
        """No forwards follow."""
        ...


class DrawNotes(Protocol):
    """A record of draws (`weft.techniques.randomness.quiet.DrawLedger`)."""

    def note(self, key: str, context: StepContext) -> None:
        """Note a draw by its key."""
        ...


@dataclass(slots=True)
class StepContext:
    """Shared by all hooks and keyed modules of one rank; the runner sets `current` around every forward."""

    current: MicrobatchState | None = field(default=None)
    cut_length: int | None = None
    """Full length of the activation last cut along the sequence, for forwards outside a step (generation)."""

    is_alone: bool = False
    """Whether one process takes the whole batch at once, so that every draw is right as it comes."""
    draws: bool = False
    """Whether any module of the model draws under keys."""
    unseen: str = ""
    """Why the traces do not show every draw of the model; empty: they do."""
    sequence_shard: SequenceShard | None = None
    """Cuts a batch to this rank's tokens or samples; None: each rank has whole samples."""
    gathers: str = ""
    """Name of the block whose weights the current forward gathered last, under ZeRO-3."""
    block_path: BlockPath | None = None
    """Compares the block paths of data ranks, which must be the same; None: they need not be."""
    activation_store: ActivationStore | None = None
    """Takes activations that blocks keep for backward; None: they stay on the device."""

    ledger: DrawNotes | None = None
    """Records draws, which are left out meanwhile; None: draws are made."""

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
