"""Seconds of an operator on one device by its local shape: tiles, waves, alignment, launches, memory.

A matrix product M×K by K×N takes max(FLOPs / (peak · η), bytes / bandwidth), where η is the best share of peak times
what the shape wastes: tiles that hang over the edges, a last wave of tiles that does not fill the processors, and the
pipeline of each tile that fills and empties over K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft.config.cluster import Devices
from weft.errors import ClusterError
from weft.model.profile import Operator
from weft.techniques.cost_terms._calibration import Calibration, part_of
from weft.techniques.cost_terms._corrections import ComputeCorrection
from weft.techniques.cost_terms._framework import Framework
from weft.techniques.cost_terms._layout import ELEMENT_BYTES, PricedPrecision
from weft.techniques.cost_terms._measured import Speeds

_PROCESSORS: Mapping[str, int] = {
    "v100": 80,
    "titan-rtx": 72,
    "rtx-2080": 46,
    "rtx-3090": 82,
    "a100": 108,
    "l40s": 142,
    "h100": 132,
    "h200": 132,
    "gh200": 132,
    "b200": 148,
    "b300": 148,
    "gb200": 148,
    "gb300": 148,
    "mi300x": 304,
    "mi325x": 304,
    "mi355x": 256,
    "tpu": 1,
}
"""Streaming multiprocessors or compute units, from the makers' data sheets; a TPU's product is no grid of tiles."""
_USUAL_PROCESSORS = 128

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.65))
"""Rows, columns and share of the best: smaller tiles read their operands more often."""
_SPLITS = (1, 2, 4, 8)
"""Parts of the inner size that different processors work on: fills the device when the result is small."""

_FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "fp64": ("fp64",),
    "fp32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16"),
    "mxfp8": ("mxfp8", "fp8", "bf16"),
    "fp4": ("fp4", "fp8", "bf16"),
}
"""Precision → whose peak counts, the first that the device has."""

_OPERAND_BYTES: Mapping[str, float] = {"fp8": 1, "mxfp8": 1, "fp4": 0.5625}
_CAST_BYTES = 4.0
"""Read in 16 bits, written in 8 bits twice, straight and transposed: what an element costs before an fp8 product."""

_BACKWARD_ELEMENTS = 1.5
"""Elements moved by an element-wise operator's backward over those of its forward: it reads its input again."""
_DISPATCH_KERNELS = 8.0
"""Kernels of sorting tokens by expert or bringing them back: scores, choice, counts, offsets, copies."""
_UNFUSED: Mapping[str, tuple[float, float]] = {"norm": (8.0, 6.0), "activation": (0.7, 2.0), "rotary": (3.0, 6.0)}
"""Operator → bytes moved beyond one fused kernel's, as a multiple of these, and kernels, where PyTorch runs a chain.
A root-mean-square norm casts to fp32, squares, means, multiplies, casts back and scales: 36 bytes for 4.  LayerNorm,
which has a bias, is one kernel everywhere."""
_CAUSAL_HALF_LENGTH = 400.0
_FULL_HALF_LENGTH = 150.0
"""Keys at which fused attention reaches half of its best: tiles on the diagonal, waves."""
_MASKED_KEYS = 512.0
"""Keys of a block of torch's fused attention on cores.  Without a mask it took 1.00, 1.29, 1.33 and 1.58 times as long
at 512, 768, 1,024 and 2,048 keys (EPYC, torch 2.13, 2026-11-29)."""
_SCORE_PASSES = {True: (9.0, 11.0), False: (23.0, 27.0)}
"""Bytes per score beyond the two products, forward and backward, of attention that writes its scores: softmax and
dropout in one kernel each, or scaling, masking, casting, softmax and dropout on their own."""


class Work(NamedTuple):
    """Seconds of kernels by cause."""

    ideal: float = 0.0
    shapes: float = 0.0
    memory: float = 0.0
    kernels: float = 0.0
    """Number of such operators."""

    @property
    def seconds(self) -> float:
        return self.ideal + self.shapes + self.memory

    def times(self, factor: float) -> Work:
        """Return the same kernels, slower by `factor`."""
        return Work(self.ideal * factor, self.shapes * factor, self.memory * factor, self.kernels)

    def plus(self, other: Work) -> Work:
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def corrected(self, correction: ComputeCorrection, kind: str) -> Work:
        """Return the same kernels of a kind of operator, as recorded runs say that they take."""
        if self.seconds <= 0.0:
            return self
        factor = correction.convolutions if kind == "convolution" else correction.products
        busy = (self.ideal + self.shapes) * factor
        ideal = min(self.ideal, busy)
        memory = self.memory * correction.plain + correction.operator_seconds
        return Work(ideal, busy - ideal, memory, self.kernels)


class OperatorWork(NamedTuple):
    """The three passes of an operator on one rank and microbatch."""

    forward: Work
    input: Work
    """Gradient of its input."""
    weight: Work
    """Gradient of its weight."""

    def corrected(self, correction: ComputeCorrection | None, kind: str) -> OperatorWork:
        """Return the passes as recorded runs say that they take; None: nothing was recorded."""
        return self if correction is None else OperatorWork(*(work.corrected(correction, kind) for work in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank has of the model's work in one microbatch."""

    samples: int
    sequence: int
    """Tokens per sample, of all context ranks together."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Parts of each expert over the tensor ranks; 1: these have whole experts and share out the tokens."""
    sequence_parallel: bool = False
    grid: tuple[int, int, int] | None = None
    """Number of parts of M, N and K of a product under multi-dimensional tensor splits."""
    precision: PricedPrecision = "bf16"
    wide: bool = False
    """Whether products run in 16 bits although the precision is narrower: embedding and head."""
    gradient_bytes: int = 4

    @property
    def tokens(self) -> float:
        return self.samples * self.sequence / self.context

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES.get(self.precision, 2)

    @property
    def matmul_precision(self) -> PricedPrecision:
        return "bf16" if self.wide and self.precision in _OPERAND_BYTES else self.precision


class Device:
    """The speeds of one rank's device."""

    def __init__(self, devices: Devices, calibration: Calibration, framework: Framework, threads: float = 1.0) -> None:
        """`threads` counts cores of one rank; below 1 when ranks share a core.  Accelerators ignore it."""
        if not devices.peak_flops:
            raise ClusterError(
                f"nothing is known of the speed of {devices.kind}: peak_flops is empty. Describe it in a cluster file "
                "(nodes.devices.peak_flops), or run weft probe."
            )
        self.kind, self.is_accelerator = devices.kind, devices.kind != "cpu"
        self.calibration, self.framework = calibration, framework
        self._scale = 1.0 if self.is_accelerator else threads
        self.speeds = None if self.is_accelerator else Speeds.of(devices, threads)
        self._peaks = devices.peak_flops
        bandwidth = devices.memory_bandwidth_bytes_per_second or calibration.cpu_memory_bytes_per_second
        self.memory_bytes_per_second = bandwidth * calibration.memory_share * self._scale
        self._processors = _PROCESSORS.get(part_of(devices.kind, _PROCESSORS), _USUAL_PROCESSORS)
        self._attention = calibration.attention_share(devices.kind)
        self._cores = threads

    def peak(self, precision: str) -> float:
        """Return the dense FLOP/s of a precision, or of the one that stands in for it."""
        for stand_in in _FALLBACKS[precision]:
            if stand_in in self._peaks:
                return self._peaks[stand_in] * self._scale
        return max(self._peaks.values()) * self._scale

    def correction(self, precision: str) -> ComputeCorrection | None:
        """Return what recorded runs say of operators in a precision on such ranks; None: there were none."""
        return self.calibration.corrections.compute_of(precision, self._cores)

    @property
    def launch_seconds(self) -> float:
        return self.calibration.launch_seconds if self.is_accelerator else self.calibration.cpu_operator_seconds

    @property
    def host_seconds(self) -> float:
        """Seconds in which the host issues one kernel, beside the computation."""
        if not self.is_accelerator:
            return 0.0
        calibration = self.calibration
        usual = calibration.eager_host_seconds if self.framework.eager else calibration.host_seconds
        return self.framework.host_seconds or usual

    def moved(self, size_bytes: float, kernels: float = 1.0) -> Work:
        """Return the work of operators that only read and write memory."""
        known = self.speeds.moved_seconds(size_bytes / kernels) if self.speeds and kernels else None
        if known is not None:
            return Work(memory=known * kernels, kernels=kernels)
        seconds = size_bytes / self.memory_bytes_per_second + kernels * self.launch_seconds
        return Work(memory=seconds, kernels=kernels)

    def matmul(
        self, m: float, n: float, k: float, groups: float, precision: str, out_bytes: float, *, transposed: bool = False
    ) -> Work:
        """`groups` products side by side, of M×K by K×N each; `transposed`: see `shape_share`."""
        if min(m, n, k, groups) <= 0:
            return Work()
        ideal = 2.0 * m * n * k * groups / self.peak(precision)
        known = self.speeds.product_seconds(m, n, k, precision) if self.speeds else None
        if known is not None:
            ideal = min(ideal, groups * known)
            return Work(ideal=ideal, shapes=groups * known - ideal, kernels=1.0)
        share = self.calibration.matmul_share(self.kind, precision) * self.shape_share(
            m, n, k, groups, transposed=transposed
        )
        if groups > 1:
            share *= self.calibration.grouped_share
        operand = _OPERAND_BYTES.get(precision, ELEMENT_BYTES.get(precision, 2))
        moved = groups * ((m * k + k * n) * operand + m * n * out_bytes)
        # A roofline: a thin product is bound by reading its operands (Williams et al., CACM 2009).
        busy = max(ideal / share, moved / self.memory_bytes_per_second) + self.launch_seconds
        return Work(ideal=ideal, shapes=busy - ideal, kernels=1.0)

    def shape_share(self, m: float, n: float, k: float, groups: float = 1.0, *, transposed: bool = False) -> float:
        """Share of its best that the device reaches on this shape, from 0 to 1.

        `transposed`: both operands lie along M and N, as for the gradients of weights, whose inner size is tokens: any
        number of these is loaded in whole rows.
        """
        if not self.is_accelerator:
            half = self.calibration.cpu_inner_size_half
            return k / (k + half) * m / (m + half) * n / (n + half)
        half = self.calibration.inner_size_half
        # A kernel covers the M×N result with tiles.  Tiles at the edge are partly empty, the last wave of tiles leaves
        # processors idle, and a short K does not fill the pipeline of loads; the best of a few tilings counts.
        aligned = _alignment(n) * _alignment(m if transposed else k)
        if self._processors == 1:
            return aligned * k / (k + half) * m / _up(m, 8) * n / _up(n, 128)
        best = 0.0
        for rows, columns, quality in _TILES:
            tiles = math.ceil(m / rows) * math.ceil(n / columns) * groups
            filled = quality * m * n * groups / (tiles * rows * columns)
            if filled <= best:
                continue
            # Splitting K makes more tiles where one wave is not full, at the price of shorter sums.
            for split in _SPLITS:
                waves = tiles * split / self._processors
                share = filled * waves / math.ceil(waves) * k / (k + half * split)
                best = max(best, share)
        return best * aligned

    def attention(self, operator: Operator, share: Share) -> tuple[Work, Work]:
        """Return forward and backward of scores, softmax and weighted sum."""
        heads = max(1.0, operator.heads / share.tensor)
        keys = min(share.sequence, operator.window or share.sequence)
        scores = share.tokens * heads * keys
        # Half of a causal table of scores is masked; whether the kernel skips it depends on the framework.
        half = 0.5 if operator.causal and operator.window is None else 1.0
        flops = 2.0 * scores * (operator.head_size + operator.value_head_size)
        ideal = flops * half / self.peak("bf16" if share.precision in _OPERAND_BYTES else share.precision)
        done = ideal / half if not self.framework.counts_causal_half else ideal
        if not self.is_accelerator:
            known = self._measured_attention(operator, share, heads, keys, ideal)
            return known or self._plain(operator, share, scores, heads, keys, ideal, done)
        if not self.framework.flash_attention:
            return self._plain(operator, share, scores, heads, keys, ideal, ideal / half)
        saturation = keys / (keys + (_CAUSAL_HALF_LENGTH if operator.causal else _FULL_HALF_LENGTH))
        width = 0.6 + 0.4 * min(1.0, (operator.head_size + operator.value_head_size) / 256)
        passes: list[Work] = []
        width *= self.framework.attention_speed
        for speed, times, kernels in zip(self._attention, (1.0, 2.0), (1.0, 3.0), strict=True):
            # The backward of fused attention computes the scores again: 5 products for 4.
            again = 1.0 if times == 1.0 else 1.25
            busy = done * times * again / (speed * saturation * width) + kernels * self.launch_seconds
            passes.append(Work(ideal=ideal * times, shapes=busy - ideal * times, kernels=kernels))
        return passes[0], passes[1]

    def parts_seconds(self, operator: Operator, share: Share) -> tuple[float, float]:
        """Return the extra seconds, forward and backward, of attention that writes its scores as keys come in parts.

        Cores have a kernel for parts.
        """
        if self.framework.fused_parts or not self.is_accelerator:
            return 0.0, 0.0
        heads, half = max(1.0, operator.heads / share.tensor), 0.5 if operator.causal else 1.0
        scores = share.tokens * heads * min(share.sequence, operator.window or share.sequence) * half
        pass_seconds = scores * share.element_bytes / 2 / self.memory_bytes_per_second
        sizes = _SCORE_PASSES[False]
        return pass_seconds * (sizes[0] + 4.0), pass_seconds * (sizes[1] + 8.0)

    def _measured_attention(
        self, operator: Operator, share: Share, heads: float, keys: float, ideal: float
    ) -> tuple[Work, Work] | None:
        """Return fused attention from measurements, which were causal: without a mask there is more work."""
        if self.speeds is None or operator.head_size < 1:
            return None
        # A kernel on cores leaves out blocks of keys that are masked whole: of n blocks a query needs (n + 1) / 2.
        blocks = max(1.0, keys / _MASKED_KEYS)
        samples = share.tokens / keys * (1.0 if operator.causal else 2.0 * blocks / (blocks + 1.0))
        passes: list[Work] = []
        for times, backward in ((1.0, False), (2.0, True)):
            busy = self.speeds.attention_seconds(
                samples, heads, keys, operator.head_size, share.precision, backward=backward
            )
            if busy is None:
                return None
            passes.append(Work(ideal=min(ideal * times, busy), shapes=max(0.0, busy - ideal * times), kernels=times))
        return passes[0], passes[1]

    def _plain(
        self, operator: Operator, share: Share, scores: float, heads: float, keys: float, ideal: float, done: float
    ) -> tuple[Work, Work]:
        """Attention that writes its scores to memory."""
        width, queries = operator.head_size or 1, share.sequence / share.context
        speed = self.calibration.matmul_share(self.kind, share.precision)
        speed *= self.shape_share(queries, keys, width, share.samples * heads)
        scale = share.element_bytes / 2
        passes: list[Work] = []
        for size, times, kernels in zip(
            _SCORE_PASSES[self.framework.fused_elementwise], (1.0, 2.0), (4.0, 8.0), strict=True
        ):
            moved = scores * (size + 4.0 * times) * scale / self.memory_bytes_per_second
            busy = done * times / speed
            passes.append(
                Work(
                    ideal=ideal * times,
                    shapes=busy - ideal * times + kernels * self.launch_seconds,
                    memory=moved,
                    kernels=kernels,
                )
            )
        return passes[0], passes[1]


def operator_work(device: Device, operator: Operator, share: Share, imbalance: float) -> OperatorWork:
    """Return the passes of one operator on one rank.  `imbalance` is the busiest expert rank's load over the mean."""
    if operator.kind == "attention":
        forward, backward = device.attention(operator, share)
        return OperatorWork(forward, backward, Work())
    if operator.kind in ("matmul", "convolution"):
        return _products(device, operator, share, imbalance)
    split = operator.split in ("column", "row", "heads", "vocab")
    if operator.split == "expert" and share.expert_tensor > 1:
        split = not operator.moves_experts_rows
    elif operator.split in ("sequence", "expert"):
        split = share.sequence_parallel
    tokens = share.tokens * operator.rows_per_token / (share.tensor if split else 1)
    size = tokens * operator.elements_moved_per_token / max(operator.rows_per_token, 1e-9) * share.element_bytes
    factor, kernels = _chain(device, operator)
    if operator.moves_experts_rows:
        kernels = _DISPATCH_KERNELS
    backward = _BACKWARD_ELEMENTS if operator.kind == "elementwise" else 2.0
    return OperatorWork(
        device.moved(size * factor, kernels), device.moved(size * factor * backward, kernels + 1.0), Work()
    )


def _chain(device: Device, operator: Operator) -> tuple[float, float]:
    """Return bytes moved over one fused kernel's, and kernels, of an element-wise operator as the framework runs it."""
    framework = device.framework
    _, _, part = operator.name.rpartition(".")
    fused = {"norm": framework.memory.fused_norms, "activation": framework.memory.fused_activations}.get(part)
    has_bias = operator.parameters >= operator.elements_moved_per_token > 0
    if framework.fused_elementwise if fused is None else fused:
        return 1.0, 1.0
    if part == "norm" and has_bias:
        return 1.0, 1.0
    more, kernels = _UNFUSED.get(part, (0.0, 2.0))
    return 1.0 + more * device.calibration.unfused_factor, kernels


def _products(device: Device, operator: Operator, share: Share, imbalance: float) -> OperatorWork:
    """The forward product, the one for the input's gradient and the one for the weight's."""
    m, n, k, groups = local_shape(operator, share, imbalance)
    precision, element = share.matmul_precision, share.element_bytes
    forward = device.matmul(m, n, k, groups, precision, element)
    inputs = device.matmul(m, k, n, groups, precision, element)
    # Gradients of weights are added to those of earlier microbatches: read and written.
    has_weight = operator.parameters > 0 or operator.split == "vocab"  # a tied head owns none, and has a gradient
    weights = Work()
    if has_weight:
        weights = device.matmul(k, n, m, groups, precision, 2.0 * share.gradient_bytes, transposed=True)
    if precision in _OPERAND_BYTES:
        cast = groups * m * _CAST_BYTES
        forward = forward.plus(device.moved(cast * k))
        inputs = inputs.plus(device.moved(cast * n))
    return OperatorWork(forward, inputs, weights)


def local_shape(operator: Operator, share: Share, imbalance: float = 1.0) -> tuple[float, float, float, float]:
    """M, N, K of one rank's products, and how many lie side by side."""
    m, n, k, groups = share.tokens * operator.rows_per_token, float(operator.n), float(operator.k), operator.groups
    if operator.split == "expert":
        # An expert rank has its share of the experts and gets their tokens from the whole expert group.
        local = max(1.0, groups / share.expert)
        parts = share.expert_tensor
        return m * imbalance / local / (share.tensor / parts), n / parts, k, local
    if operator.split == "sequence":
        m /= share.tensor if share.sequence_parallel else 1
    elif operator.split != "replicate":
        if share.grid is not None:
            rows, columns, inner = share.grid
            return m / rows, n / columns, k / inner, groups
        if operator.split == "row":
            k /= share.tensor
        elif operator.kind == "convolution" and groups > 1:
            groups = max(1, groups // share.tensor)
        else:
            n /= share.tensor
    return (m / groups if groups > 1 and operator.kind == "matmul" else m), n, k, groups


def _alignment(size: float) -> float:
    """Share of the best for an inner or column size: loads of 16 bytes need multiples of 8 elements."""
    if size % 64 == 0:
        return 1.0
    return 0.97 if size % 8 == 0 else 0.65


def _up(size: float, multiple: int) -> float:
    return math.ceil(size / multiple) * multiple
