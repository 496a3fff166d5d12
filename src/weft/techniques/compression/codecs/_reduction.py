"""The codec that a plan names, and the compressed reduction of one flat storage."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import final

from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import Wait
from weft.techniques.compression.codecs._compressor import Compressor, KeptTensor, Stages
from weft.techniques.compression.codecs._feedback import ErrorFeedback
from weft.techniques.compression.codecs.bf16 import BFloat16
from weft.techniques.compression.codecs.int8 import Int8
from weft.techniques.compression.codecs.onebit import OneBitMomentum
from weft.techniques.compression.codecs.powersgd import PowerSGD
from weft.techniques.compression.codecs.randomk import RandomK
from weft.techniques.compression.codecs.signsgd import SignSGD
from weft.techniques.compression.codecs.topk import TopK
from weft.techniques.compression.wire import CodecSpec, Frame, WireBytes, collectives_of


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
        self._spec = compression
        self._codec = create_codec(compression, frame, like)
        has_feedback = self._codec.is_biased and compression.feedback
        self._feedback = ErrorFeedback(frame, like) if has_feedback else None
        self._element_bytes = like.element_size()
        self._under_way: ReductionUnderWay | None = None

    def start(self, flat: Tensor) -> ReductionUnderWay:
        """Start to replace `flat` by the compressed sum; nobody may touch it until the returned reduction has ended."""
        # The residual is added before compression, so that what earlier steps left out competes for a place again.
        owed = self._feedback.add_to(flat) if self._feedback is not None else None
        self._under_way = ReductionUnderWay(self._codec.reduce(flat, self._frame, self._view, owed))
        return self._under_way

    def advance(self) -> None:
        """Start the next exchange of the last reduction, if it has one.  Call at the same place on every rank."""
        if self._under_way is not None:
            self._under_way.advance()

    def begin_step(self) -> None:
        """Begin a step, and forget the state of the last one unless `keep` was called for it."""
        self._codec.begin_step()
        if self._feedback is not None:
            self._feedback.begin_step()

    def keep(self, skipped: Collection[str] = ()) -> None:
        """Keep the state of the sums since `begin_step`, which were applied except for the parameters `skipped`."""
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
        exact = isinstance(self._codec, OneBitMomentum) and not self._codec.is_warm()
        sent = collectives_of(self._spec, self._frame, self._view.size, self._element_bytes, warms_up=exact)
        return sum((one.wire_bytes(self._view.index) for one in sent), WireBytes())

    def state_bytes(self) -> int:
        """Bytes that compression holds on this rank between steps."""
        kept = sum(one.tensor.numel() * one.tensor.element_size() for one in self._codec.kept(self._frame))
        return kept + (2 * self._frame.num_elements * self._element_bytes if self._feedback is not None else 0)


def create_codec(spec: CodecSpec, frame: Frame, like: Tensor) -> Compressor:
    """Return a codec for one storage; `like` has its dtype and device."""
    match spec.codec:
        case "bf16":
            return BFloat16()
        case "int8":
            return Int8()
        case "topk":
            return TopK(spec.topk_share)
        case "randomk":
            return RandomK(spec.randomk_share, spec.seed, frame)
        case "onebit":
            return OneBitMomentum(spec.onebit_decay, spec.onebit_warmup_steps, frame, like)
        case "signsgd":
            return SignSGD()
        case "powersgd":
            codec = PowerSGD(spec.powersgd_rank)
            codec.prepare(frame, like)
            return codec
