"""Activations and gradients between the ranks of a pipeline: asynchronous, in channel order, without pickled metadata.

Shapes: the first activation of a kind of batch is preceded by a small int64 header with its dtype and shape; both ends
remember it by the shapes of the batch's fields, which both know, and a gradient has the shape of its activation.  So
odd sequence shards, other evaluation batches and smaller last microbatches need no setting and no negotiation.

Groups: Gloo keeps the two directions of a pair apart, so the pipeline's own group serves.  NCCL runs everything of one
communicator in one line, where a receive posted early would block a send behind it; there every channel has a group of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.device import runs_on_gloo
from weft.comm.mesh import Mesh
from weft.config.plan import axis_coordinates
from weft.errors import CollectiveError
from weft.model.blueprint import Batch
from weft.techniques.pipeline.routes import HEADER_WORDS, Routes, StageMessage

ShapeFor = Callable[[int, int], tuple[int, ...]]
"""Border between stages, counted from 1, and samples → shape of what crosses."""
Signature = tuple[tuple[str, tuple[int, ...]], ...]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Arriving:
    buffer: Tensor
    work: dist.Work


class StageTransport:
    """The channels of one rank.  Create on every rank alike; `ranks` is the pipeline rank of each stage."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int], *, timeout_seconds: float | None = None) -> None:
        self._view = mesh["pipeline"]
        self._device = mesh.device
        self._ranks = tuple(ranks)
        self._timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        self._shapes: dict[tuple[int, Signature], tuple[tuple[int, ...], torch.dtype]] = {}
        self._routes = Routes()
        self._signatures: Sequence[Signature] = ()
        self._posted: dict[int, int] = {}
        self._arriving: dict[StageMessage, _Arriving] = {}
        self._leaving: dict[StageMessage, list[tuple[dist.Work, Tensor]]] = {}
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._assumed: tuple[tuple[int, ...], torch.dtype] | None = None
        self._shape_for: ShapeFor | None = None
        self._believes_headers = True
        self._transport_device = self._device
        """The device of tensors while they travel: Gloo cannot send from an accelerator's memory."""
        assert self._view.group is not None
        if self._device.type != "cpu":
            if runs_on_gloo(self._device, self._view.group):
                self._transport_device = torch.device("cpu")
            else:
                self._groups = _create_channel_groups(mesh, self._ranks)
                self._open_channels()

    @property
    def activation(self) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of an activation that has passed, whichever was first; None before one has."""
        return next(iter(self._shapes.values()), None)

    def assume(self, activation: tuple[tuple[int, ...], torch.dtype] | None, shape_for: ShapeFor | None = None) -> None:
        """Take activations to have this shape and dtype, whatever their header says: for a dry run, where none arrives.

        None: those of the first that this rank sends.  `shape_for` knows the shape at each border better.
        """
        self._believes_headers = False
        self._assumed, self._shape_for = activation, shape_for

    def begin(self, routes: Routes, signatures: Sequence[Signature]) -> None:
        """Start a step whose microbatches have these signatures."""
        assert not self._arriving, "the last step left messages behind"
        self._routes, self._signatures = routes, signatures
        self._posted = dict.fromkeys(routes.incoming, 0)

    def is_local(self, message: StageMessage) -> bool:
        """Whether both ends are this rank."""
        return self._source(message) == self._ranks[message.stage]

    def send(self, message: StageMessage, tensor: Tensor) -> None:
        """Start to send; the tensor must not change until a later message of the peer proves that it has arrived."""
        target = self._ranks[message.stage]
        tensor = tensor.detach().to(self._transport_device).contiguous()
        works = self._leaving.setdefault(message, [])
        key = (message.boundary, self._signatures[message.microbatch])
        # The first activation of a shape is announced by a header; the receiver must know the shape before it can post
        # a buffer.  A gradient has the shape of the activation that went the other way.
        if message.kind == "activation" and key not in self._shapes:
            self._shapes[key] = (tuple(tensor.shape), tensor.dtype)
            works.append(self._start(message, "send", _header(tensor).to(self._transport_device), target))
        works.append(self._start(message, "send", tensor, target))

    def prefetch(self, message: StageMessage | None) -> None:
        """Post the receive of a message and of those before it in its channel, as far as their shapes are known."""
        if message is not None and not self.is_local(message):
            self._post(message, may_wait=False)

    def receive(self, message: StageMessage) -> Tensor:
        """Wait for a message from another rank.

        Raises:
            CollectiveError: the peer is gone, or did not answer in time.
        """
        self._post(message, may_wait=True)
        arriving = self._arriving.pop(message)
        self._wait(message, arriving.work)
        # A gradient proves that the peer had the activation, so the sent tensor is freed without a wait of its own.
        for arrived in self._routes.proves[message]:
            self._let_go(arrived)
        return arriving.buffer.to(self._device)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for message in list(self._leaving):
            self._let_go(message)

    def _let_go(self, message: StageMessage) -> None:
        for work, _ in self._leaving.pop(message, ()):
            self._wait(message, work)

    def _post(self, message: StageMessage, *, may_wait: bool) -> None:
        source = self._source(message)
        channel = self._routes.incoming[source]
        while message not in self._arriving and self._posted[source] < len(channel):
            following = channel[self._posted[source]]
            key = (following.boundary, self._signatures[following.microbatch])
            if key not in self._shapes:
                # A prefetch must not wait for a header: its sender may in turn wait for this rank.
                if not may_wait:
                    return
                self._shapes[key] = self._receive_header(following, source)
            shape, dtype = self._shapes[key]
            buffer = torch.empty(shape, dtype=dtype, device=self._transport_device)
            self._arriving[following] = _Arriving(buffer, self._start(following, "receive", buffer, source)[0])
            self._posted[source] += 1

    def _receive_header(self, message: StageMessage, source: int) -> tuple[tuple[int, ...], torch.dtype]:
        header = torch.empty(HEADER_WORDS, dtype=torch.int64, device=self._transport_device)
        self._wait(message, self._start(message, "receive", header, source)[0])
        if not self._believes_headers:
            assumed = self._assumed or self.activation
            assert assumed is not None, "nothing says what earlier stages send"
            if self._shape_for is None:
                return assumed
            samples = self._signatures[message.microbatch][0][1][0]
            return self._shape_for(message.boundary, samples), assumed[1]
        dtype, num_dims, *sizes = (int(word) for word in header.tolist())
        return tuple(sizes[:num_dims]), _DTYPES[dtype]

    def _start(self, message: StageMessage, what: str, tensor: Tensor, peer: int) -> tuple[dist.Work, Tensor]:
        me = self._view.index
        group = self._groups.get((me, peer) if what == "send" else (peer, me), self._view.group)
        try:
            if what == "send":
                work = dist.isend(tensor, self._view.ranks[peer], group=group)
            else:
                work = dist.irecv(tensor, self._view.ranks[peer], group=group)
        except (RuntimeError, CollectiveError) as problem:
            raise self._broken(message, problem) from problem
        assert work is not None
        return work, tensor

    def _wait(self, message: StageMessage, work: dist.Work) -> None:
        try:
            # On an accelerator this only makes the stream wait; the backend's own watchdog limits the time there.
            work.wait() if self._timeout is None or self._groups else work.wait(self._timeout)
        except (RuntimeError, CollectiveError) as problem:
            raise self._broken(message, problem) from problem

    def _source(self, message: StageMessage) -> int:
        return self._ranks[message.stage - 1 if message.kind == "activation" else message.stage + 1]

    def _broken(self, message: StageMessage, problem: Exception) -> CollectiveError:
        source, target = (self._view.ranks[rank] for rank in (self._source(message), self._ranks[message.stage]))
        first_line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        return CollectiveError(
            f"The {message.kind} of microbatch {message.microbatch} did not get from rank {source} to stage "
            f"{message.stage} on rank {target}: {first_line} "
            f"One of the two ranks has stopped or is stuck; look at the end of its log first."
        )

    def _open_channels(self) -> None:
        """Use every channel once, in an order that all ranks share.

        The first use of an NCCL communicator blocks until both ends use it, so an unlucky first step could lock up.
        """
        me = self._view.index
        token = torch.zeros(1, device=self._device)
        for source, target in sorted(self._groups):
            if me == source:
                dist.send(token, self._view.ranks[target], group=self._groups[source, target])
            elif me == target:
                dist.recv(token, self._view.ranks[source], group=self._groups[source, target])


def signature_of(batch: Batch, inputs: Mapping[str, str]) -> Signature:
    """Return the shapes of the fields that the model reads, which decide the shapes of its activations."""
    return tuple((name, tuple(batch[name].shape)) for name in sorted(set(inputs.values())) if name in batch)


def _header(tensor: Tensor) -> Tensor:
    assert tensor.dtype in _DTYPES, f"a stage's output is {tensor.dtype}: it must be a floating-point tensor"
    assert tensor.ndim <= HEADER_WORDS - 2, f"a stage's output has {tensor.ndim} dims"
    words = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(words + [0] * (HEADER_WORDS - len(words)), dtype=torch.int64)


def _create_channel_groups(mesh: Mesh, ranks: Sequence[int]) -> dict[tuple[int, int], dist.ProcessGroup]:
    """One group for each directed pair of pipeline ranks between which a stage boundary lies."""
    pairs = {(a, b) for a, b in zip(ranks, ranks[1:], strict=False) if a != b}
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for pair in sorted(pairs | {(b, a) for a, b in pairs}):
        view = mesh.create_group(pipeline_partition(mesh, pair), "pipeline")
        if mesh.index("pipeline") in pair:
            assert view.group is not None
            groups[pair] = view.group
    return groups


def pipeline_partition(mesh: Mesh, members: Sequence[int]) -> list[list[int]]:
    """Global ranks of the given pipeline ranks, for every pipeline of the mesh (for `Mesh.create_group`)."""
    partition: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(mesh.plan.world_size):
        place = dict(axis_coordinates(mesh.plan, rank))
        if place.pop("pipeline") in members:
            partition.setdefault(tuple(sorted(place.items())), []).append(rank)
    return [partition[key] for key in sorted(partition)]
