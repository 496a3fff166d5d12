"""Gradient buckets: what of their collectives nothing hides, and the size that hides most.

Backward completes S bytes of gradients evenly in the W seconds beside which communication hides.  They leave in order,
a first bucket of f bytes and others of b; one of x bytes takes T(x) = α + β·x.  A bucket starts when it is full and the
one before has ended.  The last ends after the longest of the chains "bucket i is full, then it and all that follow it
are sent"; they are linear in i, so the first, the second and the last decide.  What is waited for is

    E(b) = max( f/S·W + T(f) + n·T(b) − W,   (f + b)/S·W + n·T(b) − W,   T(b) ),      n = (S − f)/b

(the network never rests again after the first bucket; after the second; only the last is waited for).  What is gathered
for a forward that reads weights as evenly is the same, seen in a mirror: the first bucket is waited for, and the
network must be through with the last before it is read.  Where a second of hidden communication costs computation
σ − 1, a step pays (2 − σ)·E(b) + (σ − 1)·(T(f) + n·T(b)).

Every term has the form p·b + q/b + c.  So the best b is either √(q/p) of one of them, or lies where two of them meet,
the root of a quadratic, or at an end of what is allowed.  The square roots weigh starts against one thing each.  Where
the network cannot keep up, it is the wait until a bucket is full: b = √(α·S·(S − f) / W).  Where it can, it is the
tail: b = √((σ − 1)/(2 − σ)·α·(S − f) / β), the rule by which messages are cut for a pipelined broadcast.  α and β are
those of Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

SMALLEST_BUCKET = 1 << 18
"""Bytes below which what the host does for a bucket, which no price knows, is no longer small."""
LARGEST_BUCKET = 419_430_400
"""Bytes above which nothing is left to save: starts are below 1 % of any link's time."""
_EQUAL = 1e-9
_SAME = 0.02
"""Sizes that differ by less than this share are one."""
_ROUNDS = 3
"""Times that α and β are read off anew where the last bucket lay: no collective is one line at all sizes."""

BucketSeconds = Callable[[float], float]
"""Time of a bucket's collective, by the bytes of its gradients."""
Choice = tuple[float, float]
"""Seconds that a step waits for reductions, and the bytes of a bucket."""


class Sent(NamedTuple):
    """BucketSeconds of the collectives of all buckets of one stream."""

    whole: float
    first: float
    """Time of the bucket that is ready first."""
    last: float
    """Time of a full bucket."""
    first_bytes: float
    full_bytes: float


class Stream:
    """Gradients that travel in buckets of one size over one group."""

    def __init__(self, bucket: float, first: float, seconds: BucketSeconds) -> None:
        """`bucket` and `first` are bytes of gradients; `first` counts up to `bucket`."""
        self.seconds = seconds
        self._bucket, self._first = bucket, min(first, bucket)
        self._usual: tuple[float, float] | None = None

    def sent(self, size: float) -> Sent:
        """Return what `size` bytes take in all; the last bucket is taken for a full one, and of others there is a part
        if need be: where borders of parameters lie is not known."""
        first = self._first
        if size <= first:
            one = self.seconds(size) if size > 0.0 else 0.0
            return Sent(one, one, one, size, size)
        if size < self._bucket:
            early, one, full = self.seconds(first), self.seconds(size), size
        else:
            if self._usual is None:
                self._usual = self.seconds(first), self.seconds(self._bucket)
            (early, one), full = self._usual, self._bucket
        return Sent(early + (size - first) / full * one, early, one, first, full)


def together(one: Sent, other: Sent) -> Sent:
    """Return what two streams send one after the other; which is first and last is the larger one's."""
    if other.whole == 0.0:
        return one
    first = one if one.whole >= other.whole else other
    return first._replace(whole=one.whole + other.whole, last=max(one.last, other.last))


def idle_seconds(sent: Sent, size: float, window: float) -> float:
    """Return for how much of `window` the network has nothing to send, beside `size` bytes: until the first bucket is
    full, and from its end until the second is."""
    if size <= 0.0:
        return 0.0
    pace = window / size
    start = sent.first_bytes * pace
    return max(start, min(sent.first_bytes + sent.full_bytes, size) * pace - sent.first)


# ── the best size ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The collectives of all buckets beside one pass of a rank: reductions in backward, or gathers in forward."""

    size: float
    """S: bytes of gradients of all buckets."""
    window: float
    """W: seconds of the pass beside which communication hides."""
    seconds: BucketSeconds
    """T: of one bucket, by its bytes of gradients."""
    tail: float = 0.0
    """Bytes that the pass completes only at its end, however small the buckets: a large embedding."""
    slowdown: float = 1.0
    """σ: a second of communication that hides costs the computation beside it σ − 1."""
    times: int = 1
    """Number of such passes in a step; only the last one has nothing to hide its last bucket behind."""

    def exposed(self, bucket: float, first: float) -> float:
        """Return E(b): seconds that are waited for."""
        sent = Stream(bucket, first, self.seconds).sent(self.size)
        idle = idle_seconds(sent, self.size, self.window)
        tail = self.seconds(self.tail) if self.tail > 0.0 else 0.0
        return max(idle + sent.whole - self.window, sent.last, tail)

    def cost(self, bucket: float, first: float) -> float:
        """Return what a step pays: what is waited for, and what the rest slows down."""
        sent = Stream(bucket, first, self.seconds).sent(self.size)
        beside = self.exposed(bucket, first) - sent.last
        slowed = (self.slowdown - 1.0) * max(0.0, sent.whole - sent.last - beside)
        return sent.last + self.times * (beside + slowed)


class _Curve(NamedTuple):
    """p·b + q/b + c."""

    p: float
    q: float
    c: float

    def __sub__(self, other: _Curve) -> _Curve:
        return _Curve(self.p - other.p, self.q - other.q, self.c - other.c)

    def scaled(self, by: float, more: _Curve, more_by: float) -> _Curve:
        p, q, c = (by * one + more_by * two for one, two in zip(self, more, strict=True))
        return _Curve(p, q, c)

    def roots(self) -> tuple[float, ...]:
        """Return the bucket sizes at which the curve is 0: p·b² + c·b + q = 0."""
        if self.p == 0.0:
            return (-self.q / self.c,) if self.c else ()
        inside = self.c * self.c - 4.0 * self.p * self.q
        if inside < 0.0:
            return ()
        # The root without cancellation, and the other by Viète.
        large = -(self.c + math.copysign(math.sqrt(inside), self.c)) / 2.0
        return (large / self.p, self.q / large) if large else (0.0,)


class _Line(NamedTuple):
    """α + β·x."""

    start: float
    per_byte: float

    @classmethod
    def near(cls, seconds: BucketSeconds, size: float) -> _Line:
        """The line of a collective around a size."""
        low, middle, high = seconds(size / 2), seconds(size), seconds(size * 2)
        slope = max(0.0, (high - low) / (1.5 * size))
        return cls(max(0.0, middle - slope * size), slope)


class _Range(NamedTuple):
    """Sizes for which the cases of E are the same."""

    low: float
    high: float
    first: float | None
    """Bytes of the first bucket; None: all buckets are equal."""
    rests: bool
    """Whether there is a second bucket, which the network may have to wait for."""


def _ranges(low: float, high: float, first: float, size: float) -> list[_Range]:
    two = max(first, size - first)
    ranges = [
        _Range(low, min(first, high), None, True),
        _Range(max(low, first), min(two, high), first, True),
        _Range(max(low, two), high, first, False),
    ]
    return [span for span in ranges if span.low <= span.high]


def _curves(flow: Flow, line: _Line, first: float | None, rests: bool) -> list[_Curve]:
    """What a step pays in each of the cases of E."""
    (a, beta), s, pace = line, flow.size, flow.window / flow.size
    f = first or 0.0
    rest = s - f
    whole = _Curve(0.0, a * rest, beta * s + (a if first else 0.0))
    cases = [_Curve(beta, 0.0, a)]
    if flow.tail > 0.0:
        cases.append(_Curve(0.0, 0.0, a + beta * flow.tail))
    if first:
        cases.append(_Curve(0.0, a * rest, a + beta * s + f * pace - flow.window))
        if rests:
            cases.append(_Curve(pace, a * rest, beta * rest + f * pace - flow.window))
    else:
        cases.append(_Curve(pace, a * s, beta * s - flow.window))
    often, last = flow.times, cases[0]
    shared = whole.scaled(often * (flow.slowdown - 1.0), last, 1.0 - often)
    return [case.scaled(often * (2.0 - flow.slowdown), shared, 1.0) for case in cases]


def _best_on_lines(flows: Sequence[Flow], lines: Sequence[_Line], sizes: _Range) -> Choice:
    """Return the best size in a range, were every collective its line; of equals the largest."""
    low, high, first, rests = sizes
    curves_of_flows = [_curves(flow, line, first, rests) for flow, line in zip(flows, lines, strict=True)]
    roots = [root for curves in curves_of_flows for one, two in combinations(curves, 2) for root in (one - two).roots()]
    for chosen in product(*curves_of_flows):
        p, q = sum(curve.p for curve in chosen), sum(curve.q for curve in chosen)
        if p > 0.0 and q > 0.0:
            roots.append(math.sqrt(q / p))
    known = [low, high, *(size for size in roots if low < size < high)]
    costs = [sum(max(p * b + q / b + c for p, q, c in curves) for curves in curves_of_flows) for b in known]
    least = min(costs)
    limit = least + _EQUAL * abs(least)
    return least, max(size for size, cost in zip(known, costs, strict=True) if cost <= limit)


def best_bucket(
    flows: Sequence[Flow], *, first: float, low: float = SMALLEST_BUCKET, high: float = LARGEST_BUCKET
) -> int:
    """Return the bytes of a bucket for which the flows together cost least.

    Exact where a collective takes α + β·x; else α and β are those near the size that was best before.

    Args:
        flows: of equal sizes; those without any count as nothing.
        first: bytes of the first bucket; where buckets are smaller, it is like the others.
        low: no bucket is smaller.
        high: none is larger; nor than all gradients together, which is one bucket.
    """
    flows = [flow for flow in flows if flow.size > 0.0]
    if not flows:
        return int(low)
    high = max(low, min(high, max(flow.size for flow in flows)))

    def cost(size: float) -> float:
        return sum(flow.cost(size, first) for flow in flows)

    # E(b) is a maximum of curves p·b + q/b + c with other constants on each range: below the first bucket's size, above
    # it, and where all gradients are one bucket.
    ranges = _ranges(low, high, first, max(flow.size for flow in flows))
    tried: dict[float, float] = {}
    at = min(max(low, high / 16.0), high)
    for _ in range(_ROUNDS):
        # No collective is one line at all sizes: α and β are the tangent's at the last best size, until it stays.
        lines = [_Line.near(flow.seconds, at) for flow in flows]
        at = min(_best_on_lines(flows, lines, span) for span in ranges)[1]
        near = next((size for size in tried if abs(size - at) < _SAME * at), None)
        if near is not None:
            break
        tried[at] = cost(at)
    best = rounded_bucket(min(tried, key=lambda size: tried[size]), low=low)
    around = {max(math.ceil(low), next_bucket(best, steps)) for steps in (-1, 0, 1)}
    return min(sorted(around, reverse=True), key=cost)


def rounded_bucket(size: float, *, low: float = 1.0) -> int:
    """Return the nearest number with three binary digits: 4, 5, 6 or 7 times a power of two, and at least `low`."""
    unit = 2.0 ** (math.floor(math.log2(max(size, 4.0))) - 2)
    return max(math.ceil(low), int(round(size / unit) * unit))


def next_bucket(size: int, steps: int) -> int:
    """Return the size that lies `steps` of the numbers of `rounded_bucket` away; four of them double or halve it."""
    exponent = math.floor(math.log2(max(size, 4)))
    place = 4 * exponent + round(size / 2.0 ** (exponent - 2)) - 4 + steps
    return max(1, int((4 + place % 4) * 2.0 ** (place // 4 - 2)))
