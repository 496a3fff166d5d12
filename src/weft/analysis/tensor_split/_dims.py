"""Follows the dims of activations through operators that lay out, cut, join and reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.analysis.tensor_split._atoms import Atoms, Dim, Factor
from weft.analysis.trace._events import Event, Value

Dims = list[Dim]


@dataclass(slots=True)
class DimsWalker:
    """The dims of each value as far as they are known; the operators' rules are its methods."""

    atoms: Atoms = field(default_factory=Atoms, init=False)
    dims: dict[Value, Dims] = field(default_factory=dict[Value, Dims], init=False)

    def is_tracked(self, value: Value) -> bool:
        return any(self.dims.get(value, ()))

    def dims_of(self, value: Value) -> Dims:
        return self.dims.get(value) or [()] * len(value.shape)

    def _factors(self, value: Value) -> list[Factor]:
        factors: list[Factor] = []
        for size, dim in zip(value.shape, self.dims_of(value), strict=True):
            leaves = self.atoms.leaves(dim)
            # A size without an atom is not followed.
            factors += [(self.atoms.size(leaf), leaf) for leaf in leaves] if leaves else [(size, None)]
        return factors

    def keep_unsplit(self, event: Event, dim: Dim, reason: str) -> None:
        """Every rank must have all of it, because of this event."""
        self.atoms.keep_unsplit(dim, f"{place_of(event)} {reason}")

    def give_up(self, event: Event, reason: str) -> None:
        """Keep all inputs of an operator unsplit."""
        for value in event.inputs:
            for dim in self.dims.get(value, ()):
                self.keep_unsplit(event, dim, f"{reason}")

    def view(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        groups = self.atoms.regrouped(self._factors(value), output.shape)
        if groups is None:
            self.give_up(event, f"reshapes {value.shape} to {output.shape}, across its borders")
            return
        self.dims[output] = [self._dim(group) for group in groups]

    def _dim(self, group: Sequence[Factor]) -> Dim:
        """Factors that nobody follows become atoms of their own where they share a dim with others."""
        wide = [(size, atom) for size, atom in group if size > 1]
        if all(atom is None for _, atom in wide):
            return ()
        dim: list[int] = []
        for size, atom in wide:
            if atom is None:
                atom = self.atoms.new(size)
                self.atoms.keep_unsplit((atom,), "every rank has it whole")
            dim.append(atom)
        return tuple(dim)

    def rearrange(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        dims, rank = self.dims_of(value), len(value.shape)
        match event.name:
            case "t":
                dims = dims[::-1]
            case "transpose":
                first, second = (int(dim) % rank for dim in event.arguments[1:3])
                dims = list(dims)
                dims[first], dims[second] = dims[second], dims[first]
            case "permute":
                dims = [dims[int(dim) % rank] for dim in event.arguments[1]]
            case "unsqueeze":
                dims = list(dims)
                dims.insert(int(event.arguments[1]) % (rank + 1), ())
            case "squeeze":
                chosen = event.arguments[1] if len(event.arguments) > 1 else range(rank)
                gone = {int(dim) % rank for dim in ([chosen] if isinstance(chosen, int) else chosen)}
                dims = [dim for at, dim in enumerate(dims) if at not in gone or value.shape[at] != 1]
            case _:  # expand: new dims in front, and ones made larger, are the same everywhere
                dims = [()] * (len(output.shape) - rank) + dims
        self.dims[output] = list(dims)

    def take(self, event: Event) -> None:
        """Parts of a dim: equal pieces leave the inside of each piece free to be divided."""
        value = event.inputs[0]
        dims, rank = self.dims_of(value), len(value.shape)
        place, default = _DIM[event.name]
        at = int(argument(event, place, "dim", default)) % rank
        for output in event.outputs:
            piece = [*dims]
            if event.name in ("select", "unbind"):
                self.keep_unsplit(event, dims[at], "picks single entries of it")
                del piece[at]
            elif output.shape[at] != value.shape[at]:
                piece[at] = self._piece(event, dims[at], value.shape[at], output.shape[at])
            self.dims[output] = piece

    def _piece(self, event: Event, dim: Dim, size: int, part: int) -> Dim:
        equal = part > 0 and size % part == 0 and self._is_equal(event, part)
        # A dim of `size` as (pieces, part): which piece is taken must be whole, the inside of each may be divided.
        groups = self.atoms.aligned(dim, (size // part, part)) if dim and equal else None
        if groups is None:
            self.keep_unsplit(event, dim, "cuts it into unequal pieces")
            return ()
        self.keep_unsplit(event, groups[0], f"takes one of {size // part} pieces of it")
        return groups[1]

    def _is_equal(self, event: Event, part: int) -> bool:
        if event.name == "slice":
            start, step = int(argument(event, 2, "start", 0) or 0), int(argument(event, 4, "step", 1))
            return step == 1 and start % part == 0
        return len({output.shape for output in event.outputs}) == 1

    def join(self, event: Event) -> None:
        """Along the joined dim everything is whole; the others are divided alike."""
        values, output = list(event.arguments[0]), event.outputs[0]
        stacked = event.name == "stack"
        at = int(argument(event, 1, "dim", 0)) % len(output.shape)
        joined: Dims | None = None
        for value in values:
            dims = list(self.dims_of(value))
            if stacked:
                dims.insert(at, ())
            else:
                # A rank's part of a joined dim would have parts of all operands, in another order than the whole.
                self.keep_unsplit(event, dims[at], "joins it with others")
                dims[at] = ()
            joined = dims if joined is None else [self.meet(event, a, b) for a, b in zip(joined, dims, strict=True)]
        self.dims[output] = joined or []

    def meet(self, event: Event, a: Dim, b: Dim) -> Dim:
        """Two dims of one size in one operator: both divided alike, or both whole."""
        if not a and not b:
            return ()
        if a and b and self.atoms.unify_dims(a, b):
            return a
        self.keep_unsplit(event, (*a, *b), "combines it with what every rank has whole")
        return ()

    def along(self, event: Event) -> None:
        value = event.inputs[0]
        place, name = ALONG[event.name]
        chosen = argument(event, place, name, _LAST)
        dims = list(self.dims_of(value))
        listed = [chosen] if isinstance(chosen, int) else chosen
        if len(event.inputs) > 1 or not listed:
            self.give_up(event, f"computes {event.name} of it")
            return
        for dim in listed:
            self.keep_unsplit(event, dims[dim], f"runs along it ({event.name})")
            dims[dim] = dims[dim] if event.outputs[0].shape[dim] == value.shape[dim] else ()
        for output in event.outputs:
            self.dims[output] = dims

    def make(self, event: Event) -> None:
        """A new tensor, of which nothing is known."""

    def pad(self, event: Event) -> None:
        """Dims that are padded are whole."""
        value, output = event.inputs[0], event.outputs[0]
        dims = list(self.dims_of(value))
        padded = [int(amount) != 0 for amount in event.arguments[1]]
        for at, (before, after) in enumerate(zip(padded[::2], padded[1::2], strict=True)):
            if before or after:
                self.keep_unsplit(event, dims[-1 - at], "pads it")
                dims[-1 - at] = ()
        self.dims[output] = dims

    def look_up(self, event: Event) -> None:
        """Rows of a table: all of them must be there, and may be parts of rows."""
        table, indices = event.inputs[:2]
        if any(self.dims_of(indices)):
            self.give_up(event, "looks up by it")
            return
        # (rows, features)[indices] → (…, features).
        rows, features = self.dims_of(table)
        self.keep_unsplit(event, rows, "looks up rows of it")
        self.dims[event.outputs[0]] = [*[()] * len(indices.shape), features]

    def reduce(self, event: Event) -> None:
        value, output = event.inputs[0], event.outputs[0]
        rank = len(value.shape)
        chosen = argument(event, 1, "dim", None)
        listed = range(rank) if chosen is None or chosen == [] else [chosen] if isinstance(chosen, int) else chosen
        gone = {int(dim) % rank for dim in listed}
        dims = self.dims_of(value)
        for dim in gone:
            self.keep_unsplit(event, dims[dim], f"reduces over it ({event.name})")
        keeps = len(output.shape) == rank
        left = [() if at in gone else dim for at, dim in enumerate(dims) if keeps or at not in gone]
        for result in event.outputs:
            self.dims[result] = left

    def pool(self, event: Event) -> None:
        dims, slid = self.dims_of(event.inputs[0]), POOLS[event.name]
        for dim in dims[-slid:]:
            self.keep_unsplit(event, dim, "pools over it")
        for output in event.outputs:
            self.dims[output] = [*dims[:-slid], *[()] * slid]


_DIM: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("select", "unbind", "slice"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), (2, 0)),
    "glu": (1, -1),
}
"""Operator → where its dim stands among the arguments, and what it is by default."""
_LAST = -1
ALONG: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp"), (1, "dim")),
    **dict.fromkeys(("sort", "argsort", "cummax", "cummin"), (1, "dim")),
    "topk": (2, "dim"),
    "flip": (1, "dims"),
    "roll": (2, "dims"),
}
"""Operators along dims → where those stand among the arguments, and what they are called."""
POOLS: Mapping[str, int] = {
    **dict.fromkeys(("upsample_nearest1d", "upsample_linear1d", "reflection_pad1d", "replication_pad1d"), 1),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), 2),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"), 2),
    **dict.fromkeys(("reflection_pad2d", "replication_pad2d"), 2),
    **dict.fromkeys(("max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d"), 3),
    **dict.fromkeys(("upsample_nearest3d", "upsample_trilinear3d", "replication_pad3d"), 3),
}
"""Operators that mix neighbours in an image, channel by channel → along how many of the last dims."""


def argument(event: Event, at: int, name: str, default: Any) -> Any:
    """An argument given by place or by name."""
    return event.arguments[at] if len(event.arguments) > at else event.keywords.get(name, default)


def place_of(event: Event) -> str:
    return event.module or "the model's forward"
