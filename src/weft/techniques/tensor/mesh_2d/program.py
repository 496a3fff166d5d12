"""What ranks of a grid send around their products, norms, embedding and head.

Forward and backward are those of `square.py`, `cube.py` and `grid_norms.py`.  Of a product Y = X·W of M×K by K×N
elements each rank receives

    2d      3·(q−1)/q² · (M·K + K·N)
    2.5d    3·(q−1)/q² · (M·K/d + K·N), and once per step 2·(d−1)/d · K·N/q² where gradients of layers are summed
    3d      (q−1)/q³ · (3·M·K + 3·K·N + 2·M·N)

because what was gathered for the forward is gathered once more for the backward and not kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from weft.techniques.send_trace import ModelShare, ModuleCall, Part, RankSend
from weft.techniques.tensor.contract import Tensor
from weft.techniques.tensor.mesh_2d.shape import COLUMN, LINE_I, LINE_J, LINE_L, ROW, SWAP, GridShape

_TOKEN_BYTES = 8
"""Size of a token, int64."""


def sends(share: ModelShare, shape: GridShape) -> Iterator[RankSend]:
    """Yield what a rank sends over lines of the grid around its modules, in all microbatches of a step."""
    of_kind = _OnCube if shape.is_cube else _OnSquare
    for part in share.parts:
        yield from of_kind(share, shape, part).sends()


class _Around(ABC):
    """The modules of one part."""

    features = ROW
    """Line of the ranks that have the other features between layers."""

    def __init__(self, share: ModelShare, shape: GridShape, part: Part) -> None:
        self._share, self._shape, self._side, self._part = share, shape, shape.side, part
        self._read: int | None = None
        """Number of the tensor that column products gathered last; any other product clears it."""

    def sends(self) -> Iterator[RankSend]:
        for call in self._part.calls:
            if call.on_grid == "product":
                if call.module == self._share.outline.vocabulary_head and self._share.plan.memory.fuses_loss:
                    yield from self._fused_head(call)
                else:
                    yield from self._product(call)
            elif call.on_grid == "lookup":
                yield from self._lookup(call)
            elif call.on_grid is not None:
                yield from self._norm(call)

    @abstractmethod
    def _product(self, call: ModuleCall) -> Iterator[RankSend]: ...

    @abstractmethod
    def _fused_head(self, call: ModuleCall) -> Iterator[RankSend]: ...

    @abstractmethod
    def _lookup(self, call: ModuleCall) -> Iterator[RankSend]: ...

    def _is_first_reader(self, call: ModuleCall) -> bool:
        """Return whether a product gathers its input: of queries, keys and values only the first does."""
        is_head = call.module == self._share.outline.vocabulary_head
        is_shared = call.kind == "column" and not is_head
        is_first = not is_shared or self._read != call.source
        self._read = call.source if is_shared else None
        return is_first

    def _norm(self, call: ModuleCall) -> Iterator[RankSend]:
        tokens = math.prod(self._share.of_microbatch(call.shape)[:-1]) * self._share.master_bytes
        again = self._again(call)
        if call.on_grid == "rms_norm":
            yield self._send("all_reduce", self.features, tokens, call, "sum of squares", again)
        else:
            yield self._send("all_gather", self.features, 2 * self._side * tokens, call, "means and squares", again)
        if call.needs_gradient:
            sums = 1 if call.on_grid == "rms_norm" else 2
            yield self._send("all_reduce", self.features, sums * tokens, call, "sums of its gradient")

    def _activation(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of an activation with all features of this rank's samples."""
        return self._share.activation_bytes(shape)

    def _weight_bytes(self, call: ModuleCall) -> int:
        """Return the bytes of a module's full weight."""
        return math.prod(self._share.outline.by_name[f"{call.module}.weight"].shape) * self._share.compute_bytes

    def _is_trained(self, call: ModuleCall) -> bool:
        return self._share.outline.by_name[f"{call.module}.weight"].is_trained

    def _again(self, call: ModuleCall, *, at_exit: bool = False) -> int:
        """Return how often a microbatch runs a module's forward: 1, or 2 with recomputation.

        Recomputation stops as soon as it has every tensor that the backward needs.  So the collectives before the
        product are repeated where the product's input is needed (`is_entry_repeated`), and those behind it (`at_exit`)
        only where something later is needed too (`is_exit_repeated`).
        """
        is_repeated = call.is_exit_repeated if at_exit else call.is_entry_repeated
        return 2 if is_repeated and self._share.recomputes(call.block) else 1

    def _send(
        self, operation: str, axis: str, size_bytes: int, call: ModuleCall, what: str, times: int = 1
    ) -> RankSend:
        return RankSend(
            operation=operation,  # pyright: ignore[reportArgumentType]
            axis=axis,
            size_bytes=size_bytes,
            count=times * self._share.microbatches,
            technique=Tensor.name,
            reason=f"{what}, {call.module}",
        )


class _OnSquare(_Around):
    """See `square.py`."""

    def _product(self, call: ModuleCall) -> Iterator[RankSend]:
        again, weight, is_trained = self._again(call), self._weight_bytes(call) // self._side, self._is_trained(call)
        if self._is_first_reader(call):
            x = self._activation(call.shape)
            # Once more for the gradient of the weight, which reads the gathered input (`summa.Gathered`).
            yield self._send("all_gather", ROW, x, call, "all features of its input", again + is_trained)
            if call.needs_gradient:
                yield self._send("reduce_scatter", ROW, x, call, "gradient of its input")
        times = again + call.needs_gradient
        yield self._send("all_gather", COLUMN, weight, call, "all inputs of its weight", times)
        if is_trained:
            yield self._send("reduce_scatter", COLUMN, weight, call, "gradient of its weight")

    def _fused_head(self, call: ModuleCall) -> Iterator[RankSend]:
        """Gradients are computed in the forward, so nothing is gathered a second time."""
        self._read = None
        x, weight = self._activation(call.shape), self._weight_bytes(call) // self._side
        yield self._send("all_gather", ROW, x, call, "all features of its input")
        yield self._send("all_gather", COLUMN, weight, call, "all inputs of its weight")
        if call.needs_gradient:
            yield self._send("reduce_scatter", ROW, x, call, "gradient of its input")
        if self._is_trained(call):
            yield self._send("reduce_scatter", COLUMN, weight, call, "gradient of its weight")

    def _lookup(self, call: ModuleCall) -> Iterator[RankSend]:
        made, weight = self._activation(call.output), self._weight_bytes(call) // self._side
        yield self._send("all_gather", COLUMN, weight, call, "all features of its rows")
        yield self._send("reduce_scatter", ROW, made, call, "sum of embeddings")
        if self._is_trained(call):
            yield self._send("all_gather", ROW, made, call, "all features of its gradient")
            yield self._send("reduce_scatter", COLUMN, weight, call, "gradient of its rows")


class _OnCube(_Around):
    """See `cube.py`."""

    features = LINE_L

    def _product(self, call: ModuleCall) -> Iterator[RankSend]:
        again, is_trained = self._again(call), self._is_trained(call)
        weight = self._weight_bytes(call) // self._side**2
        samples, sums = (LINE_L, LINE_J) if call.kind == "row" else (LINE_J, LINE_L)
        if self._is_first_reader(call):
            x = self._activation(call.shape)
            yield self._send("all_gather", samples, x, call, "more samples of its input", again + is_trained)
            if call.needs_gradient:
                yield self._send("reduce_scatter", samples, x, call, "gradient of its input")
        times = again + call.needs_gradient
        yield self._send("all_gather", LINE_I, weight, call, "inputs of its weight", times)
        if is_trained:
            yield self._send("reduce_scatter", LINE_I, weight, call, "gradient of its weight")
        made, after = self._activation(call.output), self._again(call, at_exit=True)
        yield self._send("reduce_scatter", sums, made, call, "sum over its inputs", after)
        if call.gives_gradient:
            yield self._send("all_gather", sums, made, call, "gradient of its sum")
        if call.kind not in ("column", "row") and self._is_off_diagonal:
            times = after + call.gives_gradient
            yield self._send("all_gather", SWAP, 2 * made // self._side, call, "its place between layers", times)

    def _lookup(self, call: ModuleCall) -> Iterator[RankSend]:
        made, weight = self._activation(call.output), self._weight_bytes(call) // self._side**2
        tokens = math.prod(self._share.of_microbatch(call.shape)) * self._side * _TOKEN_BYTES
        yield self._send("all_gather", LINE_J, tokens, call, "more tokens")
        yield self._send("all_gather", LINE_I, weight, call, "features of its rows")
        yield self._send("reduce_scatter", LINE_J, made, call, "sum of embeddings")
        if self._is_trained(call):
            yield self._send("all_gather", LINE_J, made, call, "more samples of its gradient")
            yield self._send("reduce_scatter", LINE_I, weight, call, "gradient of its rows")

    def _fused_head(self, call: ModuleCall) -> Iterator[RankSend]:
        return self._product(call)  # plans that fuse head and loss are refused

    @property
    def _is_off_diagonal(self) -> bool:
        layer, row, _ = self._shape.place(self._share.coordinates["tensor"])
        return layer != row
