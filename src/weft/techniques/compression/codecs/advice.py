"""Whether compression would pay: bytes counted exactly, codecs timed here, links as measured or given.

A step's exchange of gradients takes

    wire    bytes that leave a rank / bandwidth + messages one after another · latency
    codec   what this machine needs to pack, sum and unpack, timed by doing it

and of the wire's time backward hides what its other buckets leave room for.  The codec's own time is never hidden: it
runs on the processor that backward needs.  Nothing here chooses; it lays the figures side by side.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from weft.comm.device import synchronize
from weft.comm.mesh import GroupView
from weft.techniques.compression.codecs._reduction import CompressedReduction
from weft.techniques.compression.settings import CompressionSettings
from weft.techniques.compression.wire import Codec, CodecSpec, Frame, ParameterSpan, WireBytes, part_bounds

_BACKWARD_SHARE = 2 / 3
"""Share of a step's computation that is backward."""
_LEAST_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest link that gradients pass."""

    latency_seconds: float
    bandwidth_bytes_per_second: float
    """One way, of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What is summed in every step: fp32 gradients of these shapes, over so many data ranks."""

    shapes: tuple[torch.Size, ...]
    members: int
    is_sharded: bool = False
    """ZeRO-1 and 2: gradients are reduce-scattered, and the weights gathered afterwards, which nothing compresses."""
    frame_bytes: int = 26_214_400
    """Gradients that are exchanged together, about."""

    @property
    def num_elements(self) -> int:
        return sum(shape.numel() for shape in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One way to exchange gradients, for one step."""

    name: str
    bytes_sent: float
    """Bytes that leave one rank."""
    wire_seconds: float
    codec_seconds: float
    step_seconds: float | None
    """Computation, codec and what of the wire is not hidden; None where no computation was given."""

    @property
    def exchange_seconds(self) -> float:
        return self.wire_seconds + self.codec_seconds


def advise(
    exchange: Exchange,
    link: Link,
    compute_seconds: float | None,
    device: torch.device,
    *,
    powersgd_rank: int,
    topk_share: float,
    randomk_share: float,
) -> list[tuple[Estimate, str]]:
    """Estimate the exchange of gradients as they are, and by every codec with what it is worth.

    Raises:
        PlanError: a setting out of its range.
    """
    own: dict[Codec, dict[str, float]] = {
        "powersgd": {"powersgd_rank": powersgd_rank},
        "topk": {"topk_share": topk_share},
        "randomk": {"randomk_share": randomk_share},
    }
    for codec, settings in own.items():
        CompressionSettings(compression=codec, **settings).check_settings()  # pyright: ignore[reportArgumentType]
    plain = uncompressed(exchange, link, compute_seconds)
    rows: list[tuple[Estimate, str]] = [(plain, "")]
    for codec in get_args(Codec):
        one = CodecSpec(codec=codec, **own.get(codec, {}))  # pyright: ignore[reportArgumentType]
        estimate = compressed(one, exchange, link, compute_seconds, device)
        rows.append((estimate, verdict(estimate, plain)))
    return rows


def uncompressed(exchange: Exchange, link: Link, compute_seconds: float | None) -> Estimate:
    """Estimate the exchange of gradients as they are."""
    buckets = _buckets(exchange, None)
    traffic = [_plain_traffic(frame, exchange) for frame in buckets]
    rounds = _rounds(None, exchange) * len(traffic)
    return _estimate("none", traffic, rounds, 0.0, exchange, link, compute_seconds)


def compressed(
    compression: CodecSpec, exchange: Exchange, link: Link, compute_seconds: float | None, device: torch.device
) -> Estimate:
    """Estimate a compressed exchange.  It runs the codec on this device for a fraction of a second."""
    taken = _buckets(exchange, compression)
    left = _buckets(exchange, compression, compressed=False)
    view = GroupView(tuple(range(exchange.members)), 0, None)
    traffic = [_plain_traffic(frame, exchange) for frame in left]
    seconds = 0.0
    timed: dict[tuple[Sequence[int], ...], float] = {}
    for frame in taken:
        like = torch.empty(frame.num_elements, dtype=torch.float32, device=device)
        reduction = CompressedReduction(compression, frame, like, view)
        alike = tuple(span.shape for span in frame.spans)
        if alike not in timed:
            timed[alike] = _codec_seconds(reduction, like)
        seconds += timed[alike]
        traffic.append(reduction.wire_bytes())
    rounds = _rounds(None, exchange) * len(left) + _rounds(compression, exchange) * len(taken)
    return _estimate(name_of(compression), traffic, rounds, seconds, exchange, link, compute_seconds)


def name_of(compression: CodecSpec) -> str:
    """`powersgd rank 4`, `topk 1 %`, `randomk 10 %`, `int8`."""
    match compression.codec:
        case "powersgd":
            return f"powersgd rank {compression.powersgd_rank}"
        case "topk":
            return f"topk {100 * compression.topk_share:g} %"
        case "randomk":
            return f"randomk {100 * compression.randomk_share:g} %"
        case codec:
            return codec


def verdict(estimate: Estimate, plain: Estimate) -> str:
    """Say whether an estimate is better than none at all, and by how much, or why not."""
    share = estimate.bytes_sent / plain.bytes_sent
    if share >= 1:
        return f"saves nothing: it sends {share:.2f} × the bytes of no compression"
    if estimate.exchange_seconds >= plain.exchange_seconds:
        return f"does not pay: the codec takes longer than the {1 - share:.0%} fewer bytes save"
    gain = f"exchange {plain.exchange_seconds / estimate.exchange_seconds:.2f} × faster"
    if estimate.step_seconds is None or plain.step_seconds is None:
        return f"pays: {gain}"
    if estimate.step_seconds >= plain.step_seconds:
        return f"does not pay: {gain}, but backward hides the exchange as it is"
    return f"pays: step {plain.step_seconds / estimate.step_seconds:.2f} × faster, {gain}"


def shapes_of_model(num_parameters: int) -> tuple[torch.Size, ...]:
    """At least four square matrices that stand for a model of which only the size is known, and a rest."""
    width = max(1, min(1024, math.isqrt(num_parameters // 4)))
    matrices, rest = divmod(num_parameters, width * width)
    tail = (torch.Size((rest,)),) if rest else ()
    return (torch.Size((width, width)),) * matrices + tail


def _buckets(exchange: Exchange, compression: CodecSpec | None, *, compressed: bool = True) -> list[Frame]:
    """Frames of about `frame_bytes` over the parameters that are compressed, or over those that are not."""
    shapes = [s for s in exchange.shapes if compression is None or compression.takes(s) == compressed]
    groups: list[list[torch.Size]] = []
    size = exchange.frame_bytes
    for shape in shapes:
        if not groups or size >= exchange.frame_bytes:
            groups.append([])
            size = 0
        groups[-1].append(shape)
        size += 4 * shape.numel()
    return [_frame(group, exchange) for group in groups]


def _frame(shapes: Sequence[torch.Size], exchange: Exchange) -> Frame:
    spans: list[ParameterSpan] = []
    stop = 0
    for index, shape in enumerate(shapes):
        spans.append(ParameterSpan(name=f"parameter {index}", offset=stop, shape=shape))
        stop += shape.numel()
    regions = tuple(part_bounds(stop, exchange.members, 16)) if exchange.is_sharded else None
    return Frame(spans=tuple(spans), num_elements=stop, regions=regions)


def _plain_traffic(frame: Frame, exchange: Exchange) -> WireBytes:
    size = 4 * frame.num_elements
    if exchange.is_sharded:
        return WireBytes(sent=size * (exchange.members - 1) // exchange.members)
    return WireBytes(reduced=size)


def _estimate(
    name: str,
    traffic: Sequence[WireBytes],
    rounds: int,
    codec: float,
    exchange: Exchange,
    link: Link,
    compute: float | None,
) -> Estimate:
    n = exchange.members
    leaving = [one.leaving(n) for one in traffic]
    gradients = sum(leaving)
    reducing = gradients / link.bandwidth_bytes_per_second + rounds * link.latency_seconds
    # Under ZeRO the weights come back whole, whatever the gradients did, and after the optimizer: nothing hides them.
    weights = 4.0 * exchange.num_elements * (n - 1) / n if exchange.is_sharded else 0.0
    gathering = weights / link.bandwidth_bytes_per_second + exchange.is_sharded * len(traffic) * link.latency_seconds
    step = None
    if compute is not None:
        last = max(leaving, default=0.0) / gradients if gradients else 1.0  # the bucket that backward ends with
        hidden = min(reducing * (1 - last), _BACKWARD_SHARE * compute)
        step = compute + codec + reducing - hidden + gathering
    return Estimate(
        name=name,
        bytes_sent=gradients + weights,
        wire_seconds=reducing + gathering,
        codec_seconds=codec,
        step_seconds=step,
    )


def _rounds(compression: CodecSpec | None, exchange: Exchange) -> int:
    """Messages of one bucket that wait for one another; an all-reduce is a ring's."""
    ring = 2 * (exchange.members - 1)
    if compression is None:
        return 1 if exchange.is_sharded else ring
    return {"powersgd": 2 * ring, "topk": 1, "randomk": ring, "onebit": 2}.get(
        compression.codec, 1 if exchange.is_sharded else 2
    )


def _codec_seconds(reduction: CompressedReduction, like: Tensor) -> float:
    """Mean seconds of one reduction's work on this rank; its view has members but no group, so nothing is sent.

    On the CPU in processor time, so that what else the machine does counts little; the copy that renews the gradients
    counts, too.
    """
    flat, work = torch.randn_like(like), torch.empty_like(like)
    clock = time.process_time if like.device.type == "cpu" else time.perf_counter

    def once() -> None:
        reduction.begin_step()
        reduction.start(work.copy_(flat))()
        synchronize(like.device)

    once()  # pays for the first touches of memory
    began, count = clock(), 0
    while count == 0 or clock() - began < _LEAST_SECONDS:
        once()
        count += 1
    return (clock() - began) / count
