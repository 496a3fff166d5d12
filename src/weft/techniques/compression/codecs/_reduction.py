"""A compression as a plan names it, and the compressed reduction of one flat storage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from weft.comm import GroupView, Wait
from weft.techniques.compression.codecs._compressor import Compressor, KeptTensor, Stages
from weft.techniques.compression.codecs._feedback import ErrorFeedback
from weft.techniques.compression.codecs._frame import Frame, WireBytes
from weft.techniques.compression.codecs.bf16 import BFloat16
from weft.techniques.compression.codecs.int8 import Int8
from weft.techniques.compression.codecs.onebit import OneBitMomentum
from weft.techniques.compression.codecs.powersgd import PowerSGD, is_worthwhile
from weft.techniques.compression.codecs.randomk import RandomK
from weft.techniques.compression.codecs.signsgd import SignSGD
from weft.techniques.compression.codecs.topk import TopK

Codec = Literal["bf16", "int8", "powersgd", "topk", "onebit", "randomk", "signsgd"]

_LEAST_VALUES = 1024
"""Parameters with fewer are neither quantised nor thinned out; they are norms and biases, which cost little and matter
much.  Int8's blocks reach over the borders of parameters: beside a matrix with gradients 254 times as large a norm's
would be rounded to zero in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Which codec, with its settings.  `feedback` is False only to show what happens without it."""

    codec: Codec
    powersgd_rank: int = 4
    topk_share: float = 0.01
    randomk_share: float = 0.1
    seed: int = 0
    """Seed of random draws; the same on every rank."""
    onebit_warmup_steps: int = 0
    onebit_decay: float = 0.9
    """Decay of the optimizer's momentum."""
    feedback: bool = True

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape (on a rank) is compressed; others travel as they are."""
        if self.codec == "powersgd":
            return is_worthwhile(shape, self.powersgd_rank)
        return self.codec == "bf16" or _LEAST_VALUES <= torch.Size(shape).numel() < 2**31

    def create(self, frame: Frame, like: Tensor) -> Compressor:
        """Return a codec for one storage; `like` has its dtype and device."""
        match self.codec:
            case "bf16":
                return BFloat16()
            case "int8":
                return Int8()
            case "topk":
                return TopK(self.topk_share)
            case "randomk":
                return RandomK(self.randomk_share, self.seed, frame)
            case "onebit":
                return OneBitMomentum(self.onebit_decay, self.onebit_warmup_steps, frame, like)
            case "signsgd":
                return SignSGD()
            case "powersgd":
                codec = PowerSGD(self.powersgd_rank)
                codec.prepare(frame, like)
                return codec


@final
class ReductionUnderWay:
    """One compressed reduction that has been started; call it to see it to its end."""

    def __init__(self, stages: Stages) -> None:
        """Start the first exchange."""
        self._stages = stages
        self._wait: Wait | None = next(stages, None)

    def advance(self) -> None:
        """Wait for the present exchange and start the next one.  Call at the same place on every rank."""
        if self._wait is not None:
            self._wait()
            self._wait = next(self._stages, None)

    def __call__(self) -> None:
        while self._wait is not None:
            self.advance()


class CompressedReduction:
    """Sums one flat storage of gradients over a group, compressed, step after step.  Create it on every member
    alike."""

    def __init__(self, compression: CodecSpec, frame: Frame, like: Tensor, view: GroupView) -> None:
        """Sum storages laid out as `frame` says, with the dtype, device and length of `like`."""
        self._frame = frame
        self._view = view
        self._codec = compression.create(frame, like)
        has_feedback = self._codec.is_biased and compression.feedback
        self._feedback = ErrorFeedback(frame, like) if has_feedback else None
        self._element_bytes = like.element_size()
        self._under_way: ReductionUnderWay | None = None

    def start(self, flat: Tensor) -> ReductionUnderWay:
        """Replace `flat` by the compressed sum; nobody may touch it until the returned reduction is at its end."""
        owed = self._feedback.add_to(flat) if self._feedback is not None else None
        self._under_way = ReductionUnderWay(self._codec.reduce(flat, self._frame, self._view, owed))
        return self._under_way

    def advance(self) -> None:
        """Start the next exchange of what was started last, if it has one: call it when the present one has had time.
        Call at the same place on every rank."""
        if self._under_way is not None:
            self._under_way.advance()

    def begin_step(self) -> None:
        """A new step: whatever the last one left is as if it had never been, unless `keep` was called."""
        self._codec.begin_step()
        if self._feedback is not None:
            self._feedback.begin_step()

    def keep(self, skipped: Collection[str] = ()) -> None:
        """The sums since `begin_step` have been applied, but for those of the parameters `skipped`."""
        self._codec.keep(skipped)
        if self._feedback is not None:
            self._feedback.keep(skipped)

    def kept(self) -> Iterator[KeptTensor]:
        """Yield what a checkpoint must hold, of this rank."""
        yield from self._codec.kept(self._frame)
        if self._feedback is not None:
            yield from self._feedback.kept()

    def wire_bytes(self) -> WireBytes:
        """Bytes that this rank hands to collectives in one reduction."""
        return self._codec.wire_bytes(self._frame, self._view.size, self._view.index, self._element_bytes)

    def state_bytes(self) -> int:
        """Bytes that compression holds on this rank between steps."""
        kept = sum(one.tensor.numel() * one.tensor.element_size() for one in self._codec.kept(self._frame))
        return kept + (2 * self._frame.num_elements * self._element_bytes if self._feedback is not None else 0)
