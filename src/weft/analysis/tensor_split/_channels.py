"""Follows channels through convolutions and through what works channel by channel.

Where a convolution's output channels are divided, a batch norm of them has its part of weights and statistics, a group
norm or a convolution in groups its part of the groups, and the next convolution takes its input channels in parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from weft.analysis.tensor_split._atoms import Dim
from weft.analysis.tensor_split._dims import Dims, DimsWalker
from weft.analysis.trace._events import Event, Trace, Value
from weft.analysis.trace._graph import Graph
from weft.model.channels import computes_plainly

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FORWARDS = frozenset({*(cls.forward for cls in _CONVOLUTIONS), _BatchNorm.forward, nn.GroupNorm.forward})
"""Forwards whose whole meaning is known."""
SHARED_WEIGHT = "meets all of it with one weight, of whose gradient each rank would have a part"


@dataclass(slots=True, kw_only=True)
class LinearLayer:
    """A linear layer or convolution that ran as a module, with plain weights."""

    name: str
    kind: str
    """`linear` or `convolution`."""
    made: int
    """Atom of its output features."""
    entering: Dim
    """Atoms of its input features."""
    index: int
    """Position of its first event."""
    parameters: int


@dataclass(slots=True)
class ChannelWalker(DimsWalker):
    """The layers of a forward, and the rules of operators on channels."""

    trace: Trace
    root: nn.Module
    graph: Graph = field(init=False)
    layers: dict[str, LinearLayer] = field(default_factory=dict[str, LinearLayer], init=False)
    channelwise: dict[str, Dim] = field(default_factory=dict[str, Dim], init=False)
    parameters: dict[str, Dims] = field(default_factory=dict[str, Dims], init=False)

    def layer(self, name: str, kind: str, features: int, entering: Dim, event: Event) -> LinearLayer:
        """Note a layer that runs for the first time."""
        size = sum(p.numel() for p in self.root.get_submodule(name).parameters(recurse=False))
        self.layers[name] = LinearLayer(
            name=name, kind=kind, made=self.atoms.new(features), entering=entering, index=event.index, parameters=size
        )
        return self.layers[name]

    def convolution(self, event: Event) -> None:
        """A layer, or where its groups are divided, what works group by group."""
        value, output, weights = event.inputs[0], event.outputs[0], event.inputs[1:]
        dims = self.dims_of(value)
        for dim in dims[2:]:
            self.keep_unsplit(event, dim, "slides over it")
        self.keep_unsplit(event, dims[0], SHARED_WEIGHT)
        groups, problem = int(event.arguments[8]), self._problem(event, weights)
        if problem is None and event.arguments[6]:
            problem = "is a transposed convolution"
        if problem is not None:
            for dim in (dims[1], *(dim for weight in weights for dim in self.dims_of(weight))):
                self.keep_unsplit(event, dim, problem)
            made: Dim = ()
        elif groups > 1:
            made = self._in_groups(event, dims[1], groups)
        else:
            made = self._layer_of(event, dims[1])
        self.dims[output] = [dims[0], made, *[()] * (len(output.shape) - 2)]

    def _layer_of(self, event: Event, entering: Dim) -> Dim:
        for weight in event.inputs[1:]:
            for dim in self.dims_of(weight):
                self.keep_unsplit(event, dim, "is part of a convolution")
        known = self.layers.get(event.module)
        if known is None:
            known = self.layer(event.module, "convolution", event.outputs[0].shape[1], entering, event)
        else:
            known.entering = self.meet(event, known.entering, entering)
        return (known.made,)

    def _in_groups(self, event: Event, entering: Dim, groups: int) -> Dim:
        """Each group of input channels makes a group of output channels."""
        # (groups, channels per group) → (groups, `each`): groups may be divided, the inside of one not.
        each = event.outputs[0].shape[1] // groups
        pieces = self.atoms.aligned(entering, (groups, event.inputs[0].shape[1] // groups)) if entering else None
        made: Dim = ()
        if pieces is None:
            self.keep_unsplit(event, entering, "is a convolution in groups that lie across its parts")
        else:
            self.keep_unsplit(event, pieces[1], "mixes it in each group of a convolution")
            made = pieces[0]
            if made and each > 1:
                inside = (self.atoms.new(each),)
                self.keep_unsplit(event, inside, "makes it from a whole group")
                made = (*made, *inside)
        return self._along_channels(event, made, event.inputs[1:])

    def batch_norm(self, event: Event) -> None:
        """Statistics of single channels, which may be divided with the norm's own parameters."""
        dims = list(self.dims_of(event.inputs[0]))
        weights = self._weights(event)
        # Channels (dim 1) may be divided; statistics run over samples and places.
        for dim in (dims[0], *dims[2:]):
            self.keep_unsplit(event, dim, "takes statistics over it")
        problem = self._problem(event, weights)
        if problem is not None:
            self.keep_unsplit(event, dims[1], problem)
        dims[1] = self._along_channels(event, dims[1], weights)
        self.dims[event.outputs[0]] = dims
        for statistic in event.outputs[1:]:
            if statistic.shape == (event.inputs[0].shape[1],):
                self.dims[statistic] = [dims[1]]

    def group_norm(self, event: Event) -> None:
        """Statistics of groups of channels, which may be divided between the groups."""
        value, groups = event.inputs[0], int(event.arguments[6])
        dims = list(self.dims_of(value))
        weights = self._weights(event)
        problem = self._problem(event, weights)
        pieces = self.atoms.aligned(dims[1], (groups, value.shape[1] // groups)) if dims[1] else None
        for dim in dims[2:]:
            self.keep_unsplit(event, dim, "normalises over it")
        if weights:
            self.keep_unsplit(event, dims[0], SHARED_WEIGHT)
        if problem is not None or pieces is None:
            self.keep_unsplit(event, dims[1], problem or "normalises groups that lie across its parts")
        else:
            self.keep_unsplit(
                event, pieces[1], f"normalises over {'all of it' if groups == 1 else 'each of its groups'}"
            )
        dims[1] = self._along_channels(event, dims[1], weights)
        self.dims[event.outputs[0]] = dims
        for statistic in event.outputs[1:]:
            self.dims[statistic] = [dims[0], () if pieces is None else pieces[0]]

    def _weights(self, event: Event) -> list[Value]:
        """Parameters of a norm; running statistics are buffers."""
        return [value for value in event.inputs[1:] if value.storage in self.graph.derived]

    def _along_channels(self, event: Event, dim: Dim, weights: Iterable[Value]) -> Dim:
        """Divide the parameters of a channelwise layer as its channels are, along their first dim."""
        for weight in weights:
            first, *others = self.dims_of(weight)
            for other in others:
                self.keep_unsplit(event, other, "is part of a layer that works in groups")
            # A weight of one element serves all channels.
            if weight.shape[0] > 1:
                dim = self.meet(event, dim, first)
        known = self.channelwise.get(event.module)
        if known is not None:  # it ran before: its running statistics, which no operator takes, are cut one way
            dim = self.meet(event, known, dim)
        if dim:
            self.channelwise[event.module] = dim
        return dim

    def _problem(self, event: Event, weights: Iterable[Value]) -> str | None:
        """Why a convolution or norm is none that ran as a plain module with its own parameters."""
        module = self.root.get_submodule(event.module) if event.module else self.root
        what = "convolution" if event.name == "convolution" else "norm"
        if type(module).forward not in _FORWARDS or not computes_plainly(module):
            return f"computes a {what} inside a {type(module).__name__} of its own"
        for weight in weights:
            names = self.trace.parameters.get(weight.storage, ())
            if event.module not in {name.rpartition(".")[0] for name in names}:
                return f"computes a {what} with weights that it makes or borrows"
        return None
