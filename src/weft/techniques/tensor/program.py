"""What tensor ranks send: sums around the layers that they share, or with a split sequence the halves of those sums.

Forward and backward are those of `weft.techniques.core.tensor` and `weft.techniques.core.sequence`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from weft.techniques.send_trace import ModelShare, ModuleCall, Part, RankSend
from weft.techniques.tensor.contract import Tensor


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield what a rank sends over the tensor axis around its modules, in all microbatches of a step."""
    if share.plan.mesh.tensor == 1:
        return
    if share.grid is not None:
        from weft.techniques.tensor.mesh_2d import program as grid_program  # loaded where ranks form a grid

        yield from grid_program.sends(share, share.grid)
        return
    for part in share.parts:
        yield from _Around(share, part).sends()
        if share.runs_ahead:
            ahead = (replace(call, **_WITHOUT_BACKWARD) for call in part.calls)
            yield from _Around(share, replace(part, calls=tuple(ahead)), is_ahead=True).sends()


_WITHOUT_BACKWARD = dict.fromkeys(
    ("needs_gradient", "gives_gradient", "is_entry_repeated", "is_exit_repeated", "is_exit_needed"), False
)


class _Around:
    """The modules of one part."""

    def __init__(self, share: ModelShare, part: Part, *, is_ahead: bool = False) -> None:
        self._share, self._part, self._is_ahead = share, part, is_ahead
        self._ranks = share.plan.mesh.tensor
        self._sequence = share.plan.tensor_parallel.sequence
        self._gathered: int | None = None
        """Number of the tensor that columns gathered or copied last; the next row clears it."""

    def sends(self) -> Iterator[RankSend]:
        for call in self._part.calls:
            inside = self._sequence and call.in_region
            match call.kind:
                case "column" | "channel_out":
                    yield from self._column(call, inside)
                case "row" | "channel_in":
                    yield from self._row(call, inside)
                case "expert":
                    self._gathered = None
                    yield from self._reads(call, inside and not call.is_inside_whole)
                    yield from self._row(call, inside and not call.is_inside_whole)
                case "vocab":
                    yield self._send("all_reduce", self._bytes(call.output), call, "sum of embeddings")
                case "gathered_input" if inside:
                    yield from self._reads(call, inside)
                case "gather":
                    yield from self._gathers(call)
                case "replicate" if inside:
                    yield from self._replicated(call)
                case "enter" if call.needs_gradient:
                    size = self._share.activation_bytes(call.shape, self._share.read_bytes(call))
                    yield self._send("all_reduce", size, call, "gradient of its input")
                case "sum":
                    again = self._exit_again(call)
                    yield self._send("all_reduce", self._bytes(call.output), call, "sum of its output", again)
                case "norms":
                    size = math.prod(call.output) * self._share.compute_bytes
                    yield self._send("all_reduce", size, call, "norms of weights", self._exit_again(call))
                case _:
                    pass
        if self._sequence:
            yield from self._borders()

    def _column(self, call: ModuleCall, inside: bool) -> Iterator[RankSend]:
        if not (self._sequence and call.is_inside_whole):
            yield from self._reads(call, inside)
        if call.gathers_output and call.module != self._share.outline.vocabulary_head:
            again = self._exit_again(call)
            yield self._send("all_gather", self._bytes(call.output), call, "whole output", again)

    def _reads(self, call: ModuleCall, inside: bool) -> Iterator[RankSend]:
        """Yield the sends for the input of columns, once for queries, keys and values together."""
        # As `layers._SharedInput`: one collective for all columns that read one tensor, and none shared with the head.
        is_head = call.gathers_output or call.module == self._share.outline.vocabulary_head
        if not is_head:
            if self._gathered == call.source:
                return
            self._gathered = call.source
        if inside:
            again = self._again(call, call.is_entry_repeated)
            yield self._send("all_gather", self._padded(call.shape), call, "whole sequence", again)
        if call.needs_gradient:
            if inside:
                yield self._send("reduce_scatter", self._padded(call.shape), call, "gradient of its input")
            else:
                yield self._send("all_reduce", self._bytes(call.shape), call, "gradient of its input")

    def _row(self, call: ModuleCall, inside: bool) -> Iterator[RankSend]:
        self._gathered = None
        again = self._exit_again(call)
        if not inside:
            yield self._send("all_reduce", self._bytes(call.output), call, "sum of its output", again)
            return
        yield self._send("reduce_scatter", self._padded(call.output), call, "sum of its output", again)
        if call.gives_gradient:
            yield self._send("all_gather", self._padded(call.output), call, "gradient of its output")

    def _gathers(self, call: ModuleCall) -> Iterator[RankSend]:
        again = self._again(call, call.is_entry_repeated)
        yield self._send("all_gather", self._bytes(call.shape), call, "whole input", again)
        if call.needs_gradient:
            yield self._send("all_reduce", self._bytes(call.shape), call, "gradient of its input")

    def _replicated(self, call: ModuleCall) -> Iterator[RankSend]:
        again = self._again(call, call.is_entry_repeated)
        yield self._send("all_gather", self._padded(call.shape), call, "whole sequence", again)
        if call.gives_gradient:
            yield self._send("all_gather", self._padded(call.output), call, "gradient of its output")

    def _borders(self) -> Iterator[RankSend]:
        """Yield the sends at the borders of the region in which the sequence is sharded."""
        outline = self._share.outline
        first = outline.entries[0]
        if self._part.is_first and first.needs_gradient and not self._is_ahead:
            yield self._border(first.shape, f"gradient of what enters {first.name}")
        if self._part.is_last:
            assert outline.joined is not None, "an outline with blocks knows where they end"
            yield self._border(outline.joined, f"whole sequence behind {outline.joins_after}")

    def _border(self, shape: tuple[int, ...], reason: str) -> RankSend:
        return RankSend(
            operation="all_gather",
            axis="tensor",
            size_bytes=self._padded(shape),
            count=self._share.microbatches,
            technique=Tensor.name,
            reason=reason,
        )

    def _again(self, call: ModuleCall, is_repeated: bool) -> int:
        return 2 if is_repeated and self._share.recomputes(call.block) else 1

    def _exit_again(self, call: ModuleCall) -> int:
        """Return how often the collective behind a module runs per microbatch: 1, or 2 with recomputation.

        Recomputation repeats everything before the last kept tensor; a compiler repeats only what a kept tensor needs.
        """
        is_compiled = self._share.plan.compute.compile
        return self._again(call, call.is_exit_needed if is_compiled else call.is_exit_repeated)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return self._share.activation_bytes(shape)

    def _padded(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of all shards along dim 1, each padded to the longest."""
        samples, length, *features = self._share.of_microbatch(self._share.of_tokens(shape))
        longest = -(-length // self._ranks)
        return samples * longest * self._ranks * math.prod(features) * self._share.compute_bytes

    def _send(self, operation: str, size_bytes: int, call: ModuleCall, what: str, times: int = 1) -> RankSend:
        return RankSend(
            operation=operation,  # pyright: ignore[reportArgumentType]
            axis="tensor",
            size_bytes=size_bytes,
            count=times * self._share.microbatches,
            technique=Tensor.name,
            reason=f"{what}, {call.module}",
        )
