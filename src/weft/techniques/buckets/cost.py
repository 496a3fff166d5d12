"""What the reductions and gathers of a step cost, bucket by bucket, beside its last backward and its first forward."""

from __future__ import annotations

from weft.config.cluster import Collective
from weft.techniques.buckets.settings import BucketSettings
from weft.techniques.buckets.sizes import BucketSeconds, Flow, Stream, best_bucket, idle_seconds, together
from weft.techniques.cost_terms import AxisGroup, Device, Framework, Groups, Layout, RankLoad, Seconds
from weft.techniques.zero.cost import gathers_weights, reduces_once
from weft.vectorized import Column, larger, smaller

_USUAL_BUCKET_BYTES = BucketSettings().bucket_limits[1]
_FIRST_READ = 0.05
"""Share of the weights that a forward needs before it can begin, at least: an embedding."""


class Reductions:
    """What the collectives of a layout's update take, bucket by bucket."""

    def __init__(self, layout: Layout, device: Device, groups: Groups, seconds: Seconds) -> None:
        self._layout, self._device, self._seconds = layout, device, seconds
        self._bucket = bytes_together(layout, device.framework)
        whole = not layout.gathers_after_step or layout.sends_whole
        self._kind: Collective = "all_reduce" if whole else "reduce_scatter"
        # Under local steps the ranks of a replica are all that meet in a step, for experts as for the rest.
        dense, experts = groups.data, groups.expert_data
        if layout.replicas_step_alone:
            dense = experts = groups.shard
        self._parts, self._expert_parts = 1, 1
        if gathers_weights(layout):
            # ZeRO-3 scatters block by block; buckets hold only the sum over copies that is left.
            dense = experts = groups.replicate
            self._parts, self._expert_parts = groups.shard.size, groups.expert_shard.size
        often = layout.shards_gradients_alone and not reduces_once(layout, device.framework)
        self._times = layout.microbatches if often else 1
        self._silent = layout.replicas_step_alone and self._parts > 1 or dense.size * experts.size == 1
        self.first = first_bytes(layout, device.framework)
        self.dense, self.experts = (self._stream(self._reduced(group)) for group in (dense, experts))
        self.gathered_dense, self.gathered_experts = (self._stream(self._gathered(group)) for group in (dense, experts))
        self._average = self._average_seconds(groups, seconds) if layout.replicas_step_alone else 0.0

    def _stream(self, seconds: BucketSeconds) -> Stream:
        return Stream(self._bucket, self.first, seconds)

    def _reduced(self, group: AxisGroup) -> BucketSeconds:
        """Return the function bytes of gradients → seconds of their reduction over a group."""
        layout, kind, priced = self._layout, self._kind, self._seconds
        share, by = layout.wire_share(layout.gradient_bytes, group.size), layout.reduced_by
        squeeze = layout.wire_passes / self._device.memory_bytes_per_second
        return lambda size: priced(kind, size * share, group, by) + squeeze * size

    def _gathered(self, group: AxisGroup) -> BucketSeconds:
        """Return the function bytes of gradients → seconds of gathering their weights."""
        layout, priced, by = self._layout, self._seconds, self._layout.reduced_by
        share = layout.element_bytes / layout.gradient_bytes
        return lambda size: priced("all_gather", size * share, group, by)

    def _average_seconds(self, groups: Groups, seconds: Seconds) -> float:
        """Return the seconds per element and step of averaging replicas at the end of a round, which nothing hides."""
        layout, wire = self._layout, seconds("all_reduce", self._bucket, groups.replicate) / self._bucket
        shards = groups.shard.size if layout.shards_states else 1
        per_byte = layout.average_seconds(layout.wide_bytes, wire, self._device.memory_bytes_per_second)
        return per_byte / shards

    def sizes(self, load: RankLoad) -> tuple[float, float]:
        """Return the bytes of gradients that a rank has in buckets: dense ones, and those of experts."""
        element = self._layout.gradient_bytes
        if self._silent:
            return 0.0, 0.0
        return load.dense * element / self._parts, load.experts * element / self._expert_parts

    def average(self, load: RankLoad) -> float:
        """Return the exposed seconds of averaging replicas, per step in the mean over a round."""
        return (load.dense + load.experts) * self._average

    def reduce(self, load: RankLoad) -> float:
        """Return the exposed seconds of all reductions of a step."""
        layout, calibration, framework = self._layout, self._device.calibration, self._device.framework
        sizes = self.sizes(load)
        sent = together(self.dense.sent(sizes[0]), self.experts.sent(sizes[1]))
        if sent.whole == 0.0:
            return 0.0
        times = self._times
        if not framework.overlap_gradients:
            return sent.whole * times
        # The last bucket is full only when backward ends, so nothing hides it, in any framework.
        last = min(sent.last, sent.whole / layout.chunks)
        window = calibration.overlap_share * load.backward
        idle = idle_seconds(sent, sum(sizes), window)
        exposed, hidden = beside(layout, sent.whole - last, window - idle)
        # Hidden communication takes memory bandwidth and multiprocessors from the computation beside it.
        slowed = (calibration.overlap_slowdown - 1.0) * hidden
        return times * (exposed + slowed) + last

    def gather_seconds(self, load: RankLoad) -> float:
        """Return the exposed seconds of gathering the updated weights."""
        layout, calibration = self._layout, self._device.calibration
        if not layout.gathers_after_step:
            return 0.0
        sizes = self.sizes(load)
        sent = together(self.gathered_dense.sent(sizes[0]), self.gathered_experts.sent(sizes[1]))
        if not self._device.framework.overlap_parameters:
            return sent.whole
        first = min(max(_FIRST_READ * sent.whole, sent.last), sent.whole) / layout.chunks
        window = calibration.overlap_share * load.forward
        idle = idle_seconds(sent, sum(sizes), window)
        exposed, hidden = beside(layout, sent.whole - first, window - idle)
        return first + exposed + (calibration.overlap_slowdown - 1.0) * hidden

    def flows(self, load: RankLoad) -> list[Flow]:
        """Return the streams whose time depends on the bucket's size: reductions, and gathers if there are any.

        Chunks of a pipeline are taken for one.
        """
        calibration, framework = self._device.calibration, self._device.framework
        # Experts that nobody shares travel nowhere, however many they are: buckets are for what does.
        every = ((self.dense, self.gathered_dense), (self.experts, self.gathered_experts))
        sizes = self.sizes(load)
        sent = [max(stream.sent(size).whole for stream in both) for both, size in zip(every, sizes, strict=True)]
        streams = every[sent[1] > sent[0]]
        size = sum(size for size, seconds in zip(sizes, sent, strict=True) if seconds > 0.0)
        windows = (load.backward * framework.overlap_gradients, load.forward * framework.overlap_parameters)
        often = self._times
        return [
            Flow(
                size=size,
                window=calibration.overlap_share * window,
                seconds=stream.seconds,
                slowdown=calibration.overlap_slowdown,
                times=times,
            )
            for stream, window, times in zip(streams, windows, (often, 1), strict=True)
        ][: 2 if self._layout.gathers_after_step else 1]


def bucket_of(layout: Layout, load: RankLoad, device: Device, groups: Groups, seconds: Seconds, low: int) -> int:
    """Return the bytes of a bucket for which a rank waits least, at least `low` (`weft.techniques.buckets.sizes`)."""
    rates = Reductions(layout, device, groups, seconds)
    return best_bucket(rates.flows(load), first=rates.first, low=low)


def first_bytes(layout: Layout, framework: Framework) -> float:
    """Return the bytes of the bucket that is ready first; it is one like the others where a framework fixes their
    size, and where every block is reduced by itself."""
    if layout.shards_weights or framework.bucket_elements:
        return bytes_together(layout, framework)
    return float(layout.bucket_limits[0])


def bytes_together(layout: Layout, framework: Framework) -> float:
    """Return the bytes of gradients that are reduced together; what ZeRO-3 sums over its copies comes block by block,
    of which the usual bucket stands."""
    if layout.shards_weights and not layout.compresses:
        return float(_USUAL_BUCKET_BYTES)
    elements = max(framework.bucket_elements, framework.bucket_elements_per_rank * layout.data * layout.context)
    return float(max(layout.bucket_limits[1], elements * layout.gradient_bytes))


def beside(layout: Layout, whole: Column, window: Column) -> tuple[Column, Column]:
    """Return the exposed and the hidden part of a step's communication; `window` is a microbatch's computation.

    With chunks, what belongs to one stage of a rank also has all the time that its other stages need for a round of
    microbatches; only the last stage's share must hide in its own.
    """
    chunks = layout.chunks
    round_size = smaller(layout.pipeline, layout.microbatches)
    wide = window * (1.0 + (round_size - 1) * (chunks - 1) / chunks)
    exposed = larger(0.0, larger(whole - wide, (whole - window) / chunks))
    return exposed, whole - exposed
