"""`torch.distributed`'s view of the shared-memory engine: the process group of the backend `weft`.

Gloo, of which it is made (see `WatchedGroup`), carries what is left: sparse tensors.
"""

# torch's stubs overload these methods by what Python may pass; what arrives here is always options.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm._process import Process
from weft.comm.shared_memory._call import DTYPES, OPS, Call, GroupFailed, Kind, Region
from weft.comm.shared_memory._failure import explain, undefined
from weft.comm.shared_memory._mailbox import Mailbox
from weft.comm.shared_memory._profiler import is_profiling, launching
from weft.comm.shared_memory._tensors import CopyBack, check_memory, contiguous, is_as_stored, region
from weft.comm.shared_memory._work import CallsUnderWay, Completer, SharedMemoryWork
from weft.comm.shared_memory.engine import Engine
from weft.comm.trace_event import TraceEvent
from weft.comm.untraced import untraced
from weft.comm.watched_group import METHODS, GroupMethod, WatchedGroup
from weft.errors import CollectiveError

_SUM, _AVG = OPS.index("sum"), OPS.index("avg")
_ABOUT: Mapping[str, GroupMethod] = {
    **METHODS,
    "reduce_scatter_regions": GroupMethod("reduce_scatter", 0, "reduce_scatter", 0),
    "all_gather_regions": GroupMethod("all_gather", 1, "all_gather", 0),
}
_MANY = 32
"""Works under way before it is looked which of them are done."""


_Prepared = tuple[Call, list[Tensor], CopyBack]
"""A call, the tensors that it works on, and the contiguous copies among them whose content goes back at its end."""


def _shown(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Let a method of the group be seen by a profiler where one runs."""
    about = _ABOUT[method.__name__]

    @wraps(method)
    def launch(self: Any, *args: Any, **options: Any) -> dist.Work:
        if not is_profiling():
            return method(self, *args, **options)
        with launching(about.title, None if about.given is None else args[about.given]):
            work = method(self, *args, **options)
        if isinstance(work, SharedMemoryWork):
            work.title = about.title
        return work

    return launch


@untraced
class SharedMemoryGroup(WatchedGroup):
    """The ranks of one host as a process group.  Reductions are summed in the order of the ranks: the result is the
    same on all, and at 2 ranks Gloo's to the last bit; bf16 and fp16 are summed in fp32 and rounded once.

    `served` counts, by method, the calls that took the shared memory and not Gloo.  `processes` are those of the other
    ranks, by global rank: by them a later group's ranks are watched while it is formed.
    """

    shares_memory = True

    def __init__(
        self,
        engine: Engine,
        gloo: dist.ProcessGroupGloo,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        processes: Mapping[int, Process],
    ) -> None:
        super().__init__(gloo, rank=rank, num_ranks=len(ranks))
        self.engine = engine
        self.seconds = timeout.total_seconds()
        self.ranks = tuple(ranks)
        self.processes = processes
        self.served: Counter[str] = Counter()
        self._place = rank
        self._has_warned = False
        self._held: deque[tuple[int, Any]] = deque()
        self._letting_go = threading.Lock()
        self.completer = Completer()
        self._mailbox = Mailbox(engine, self.ranks, self.seconds)
        self._done = SharedMemoryWork([], None, None)

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor in shared memory, which collectives of this group reduce where it lies.

        No collective; but the staging is only spared where all ranks give such a tensor.  The tensor may outlive its
        group, and keeps the group's memory then.  What an all-reduce that failed was given must not be used again: a
        rank that was only late may still write its part of the result.

        Raises:
            CollectiveError: the arena of this rank is full, or the machine has no more memory for it, or the group has
                been left.
        """
        try:
            tensor = self._allocated(torch.Size(shape), dtype)
        except GroupFailed as failed:
            raise explain(failed.failure, None, self.ranks, self.seconds) from None
        if tensor is None:
            raise CollectiveError(
                f"{torch.Size(shape).numel() * dtype.itemsize:,} bytes do not fit any more into this rank's arena in"
                f" the shared memory. Free tensors that `allocate` gave, or make this one with torch.empty: it is then"
                f" staged."
            )
        return tensor

    def allocate_if_possible(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Allocate flat as `allocate`; None: there is no such memory, of which the group's first rank warns once."""
        try:
            tensor = self._allocated(torch.Size((num_elements,)), dtype)
        except GroupFailed:  # it has been left: a collective will say so
            return None
        if tensor is None and self._place == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Buffers of {num_elements * dtype.itemsize:,} bytes do not fit any more into the shared memory of"
                f" ranks {_listed(self.ranks)}: they are copied there piece by piece, with the same results, more"
                f" slowly. Shard gradients (zero = 2 or 3), or cut the model over more ranks.",
                stacklevel=2,
            )
        return tensor

    def _allocated(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        count = shape.numel()
        memory = self.engine.allocate(max(count, 1) * dtype.itemsize)
        if memory is None:
            return None
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.empty(shape).to(dtype)

    def abort(self) -> None:
        """Release every rank that waits in this group, with `CollectiveError`.  By any one rank."""
        self.engine.abort()
        super().abort()  # what Gloo carries

    def shutdown(self) -> None:
        """Leave the group.  Calls that are under way fail, on every rank."""
        self.engine.leave()
        self.completer.close()
        self._mailbox.close()
        self.engine.close()
        self._held.clear()

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()
        self._mailbox.seconds = self.seconds

    # ── reductions ────────────────────────────────────────────────────────────────────────────────────────────────────

    @_shown
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_sparse:
            return super().allreduce(tensors, opts)
        op = _op(opts)
        dtype = self._reducible(tensor, op)
        # The short way for the most frequent call of tensor ranks: no call object, no work, no queue.
        if opts is not None and not opts.asyncOp and is_as_stored(tensor):
            seen = self._serve("allreduce", tensors)
            check_memory(tensor)
            size = tensor.numel() * tensor.itemsize
            entered = 0 if seen is None else seen.enter_wait()
            try:
                self.let_go()  # of works that nobody waited for
                self.engine.all_reduce(tensor.data_ptr(), size, dtype, op, self.seconds)
            except GroupFailed as failed:
                call = Call(Kind.ALL_REDUCE, dtype, op, num_bytes=size)
                raise explain(failed.failure, call, self.ranks, self.seconds) from None
            finally:
                if seen is not None:
                    seen.exit_wait(entered)
            return self._done
        return self._submit("allreduce", tensors, [self._reducing(tensor, dtype, op)], tensors, opts)

    def _reducing(self, tensor: Tensor, dtype: int, op: int) -> _Prepared:
        flat, back = contiguous(tensor)
        at, size = region(flat)
        return Call(Kind.ALL_REDUCE, dtype, op, at, at, size), [flat], back

    @_shown
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = _op(opts)
        calls = [self._reducing(tensor, self._reducible(tensor, op), op) for tensor in tensors]
        return self._submit("allreduce_coalesced", tensors, calls, tensors, opts)

    @_shown
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = _op(opts)
        dtype = self._reducible(tensor, op)
        flat, back = contiguous(tensor)
        at, size = region(flat)
        send = [(at, size if rank == opts.rootRank else 0) for rank in range(len(self.ranks))]
        call = Call(Kind.REDUCE_SCATTER, dtype, op, output=at, send=send)
        prepared = call, [flat], back if self._place == opts.rootRank else ()
        return self._submit("reduce", tensors, [prepared], tensors, opts)

    @_shown
    def reduce_scatter_regions(
        self, parts: Sequence[Tensor], output: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work:
        """Reduce `parts[rank]` to rank `rank`, whose `output` gets the result; parts may differ in size from rank to
        rank, and this rank's part may be its `output`.  Call on every rank; returns at once.

        All tensors must be contiguous and of one dtype.
        """
        number = int(op)  # pyright: ignore[reportArgumentType]  # an enum of C++
        return self._submit("reduce_scatter_regions", parts, [self._scattering(parts, output, number)], [output], None)

    def _scattering(self, parts: Sequence[Tensor], output: Tensor, op: int) -> _Prepared:
        dtype = self._reducible(output, op)
        flat_parts = [contiguous(part)[0] for part in parts]
        flat, back = contiguous(output)
        own = flat_parts[self._place]
        if own.numel() != flat.numel() or own.dtype != flat.dtype:
            raise CollectiveError(
                f"a reduce-scatter's output has {flat.numel():,} elements of {flat.dtype}, its rank's part"
                f" {own.numel():,} of {own.dtype}: they must agree."
            )
        call = Call(Kind.REDUCE_SCATTER, dtype, op, output=flat.data_ptr(), send=[region(part) for part in flat_parts])
        return call, [*flat_parts, flat], back

    @_shown
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        (output,), (parts,) = outputs, inputs
        return self._submit("reduce_scatter", inputs, [self._scattering(parts, output, _op(opts))], outputs, opts)

    @_shown
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        calls = [self._scattering_evenly(output, whole, _op(opts))]
        return self._submit("reduce_scatter_single", whole, calls, [output], opts)

    def _scattering_evenly(self, output: Tensor, whole: Tensor, op: int) -> _Prepared:
        dtype = self._reducible(output, op)
        flat_whole, (flat, back) = contiguous(whole)[0], contiguous(output)
        at, size = region(flat_whole)
        own = flat.numel() * flat.itemsize
        if own * len(self.ranks) != size or output.dtype != whole.dtype:
            raise CollectiveError(
                f"a reduce-scatter over {len(self.ranks)} ranks of {whole.numel():,} elements of {whole.dtype} needs an"
                f" output of an equal share in the same dtype; this one has {output.numel():,} of {output.dtype}."
            )
        send = [(at + rank * own, own) for rank in range(len(self.ranks))]
        call = Call(Kind.REDUCE_SCATTER, dtype, op, output=flat.data_ptr(), send=send)
        return call, [flat_whole, flat], back

    @_shown
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        op = _op(opts)
        calls = [self._scattering_evenly(output, whole, op) for output, whole in zip(outputs, inputs, strict=True)]
        return self._submit("reduce_scatter_single_coalesced", inputs, calls, outputs, opts)

    # ── what only moves ───────────────────────────────────────────────────────────────────────────────────────────────

    @_shown
    def all_gather_regions(self, region: Tensor, parts: Sequence[Tensor]) -> dist.Work:
        """Fill `parts[rank]` with what rank `rank` gives; sizes may differ from rank to rank, and `region` may be this
        rank's part.  Call on every rank; returns at once.  All tensors must be contiguous and of one dtype."""
        return self._submit("all_gather_regions", parts, [self._gathering(region, parts)], list(parts), None)

    def _gathering(self, own: Tensor, parts: Sequence[Tensor]) -> _Prepared:
        flat_given = contiguous(own)[0]
        flats = [contiguous(part) for part in parts]
        receive = [region(flat) for flat, _ in flats]
        if receive[self._place][1] != flat_given.numel() * flat_given.itemsize:
            raise CollectiveError(
                f"this rank gives {own.numel():,} elements of {own.dtype} to an all-gather whose output has room"
                f" for {receive[self._place][1]:,} bytes of it: they must agree."
            )
        call = Call(Kind.ALL_GATHER, input=flat_given.data_ptr(), receive=receive)
        return call, [flat_given, *(flat for flat, _ in flats)], [pair for _, back in flats for pair in back]

    @_shown
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (parts,), (own,) = outputs, inputs
        return self._submit("allgather", outputs, [self._gathering(own, parts)], parts, opts)

    @_shown
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        calls = [self._gathering(own, [parts[place] for parts in outputs]) for place, own in enumerate(inputs)]
        return self._submit("allgather_coalesced", outputs, calls, [part for parts in outputs for part in parts], opts)

    @_shown
    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        return self._submit("all_gather_single", output, [self._gathering_evenly(output, own)], [output], opts)

    def _gathering_evenly(self, output: Tensor, own_part: Tensor) -> _Prepared:
        flat_given, (flat, back) = contiguous(own_part)[0], contiguous(output)
        at, own = region(flat_given)
        if own * len(self.ranks) != flat.numel() * flat.itemsize or own_part.dtype != output.dtype:
            raise CollectiveError(
                f"an all-gather of {own_part.numel():,} elements of {own_part.dtype} from each of {len(self.ranks)}"
                f" ranks needs an output of as many together; this one has {output.numel():,} of {output.dtype}."
            )
        start = flat.data_ptr()
        receive = [(start + rank * own, own) for rank in range(len(self.ranks))]
        return Call(Kind.ALL_GATHER, input=at, receive=receive), [flat_given, flat], back

    @_shown
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        calls = [self._gathering_evenly(output, own) for output, own in zip(outputs, inputs, strict=True)]
        return self._submit("all_gather_single_coalesced", outputs, calls, outputs, opts)

    @_shown
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_sparse:
            return super().broadcast(tensors, opts)
        flat, back = contiguous(tensor)
        at, size = region(flat)
        receive = [(at, size if rank == opts.rootRank else 0) for rank in range(len(self.ranks))]
        calls = [(Call(Kind.ALL_GATHER, input=at, receive=receive), [flat], back)]
        return self._submit("broadcast", tensors, calls, tensors, opts)

    @_shown
    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        (flat, back), flat_given = contiguous(output), contiguous(own)[0]
        send = self._split(flat_given, own, input_splits or [])
        receive = self._split(flat, output, output_splits or [])
        if output.dtype != own.dtype or send[self._place][1] != receive[self._place][1]:
            raise CollectiveError(
                f"an all-to-all that gives this rank {send[self._place][1]:,} bytes of {own.dtype} cannot take"
                f" {receive[self._place][1]:,} of {output.dtype} from it: they must agree."
            )
        call = Call(Kind.ALL_TO_ALL, send=send, receive=receive)
        return self._submit("all_to_all_single", own, [(call, [flat_given, flat], back)], [output], opts)

    @_shown
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._submit("alltoall", inputs, [_exchange(inputs, outputs)], outputs, opts)

    @_shown
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (own,) = inputs
        nothing = own.new_empty(0)
        given_to = [own if rank == opts.rootRank else nothing for rank in range(len(self.ranks))]
        taken = outputs[0] if self._place == opts.rootRank else [nothing] * len(self.ranks)
        return self._submit("gather", inputs, [_exchange(given_to, taken)], taken, opts)

    @_shown
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        (output,) = outputs
        nothing = output.new_empty(0)
        parts = inputs[0] if self._place == opts.rootRank else [nothing] * len(self.ranks)
        taken = [output if rank == opts.rootRank else nothing for rank in range(len(self.ranks))]
        return self._submit("scatter", outputs, [_exchange(parts, taken)], taken, opts)

    @_shown
    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> dist.Work:
        return self._mailbox.send(tensors, target, tag, self._serve("send", tensors))

    @_shown
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        return self._mailbox.receive(tensors, source, tag, self._serve("recv", tensors))

    @_shown
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._mailbox.receive(tensors, -1, tag, self._serve("recv_anysource", tensors))

    @_shown
    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit("barrier", None, [(Call(Kind.BARRIER), [], ())], [], opts)

    # torch 2.11 and 2.12 call them by these names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ── the queue ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, method: str, tensors: object) -> TraceEvent | None:
        """Count a call that takes the shared memory, and let it be seen."""
        self.served[method] += 1
        return self.launch(_ABOUT[method], tensors)

    def _submit(
        self, method: str, whole: object, calls: Sequence[_Prepared], result: list[Tensor], opts: Any
    ) -> dist.Work:
        """Begin calls that are one method's, on tensors that are `whole` on every rank; wait for them if asked to."""
        seen = self._serve(method, whole)
        is_async = opts is None or opts.asyncOp
        ticket, last, back = 0, None, list[tuple[Tensor, Tensor]]()
        if len(self._held) > _MANY:
            self.let_go()  # of works that nobody waited for
        try:
            for call, used, copy_back in calls:
                ticket, last = self.engine.submit(call, self.seconds, background=is_async), call
                self._held.append((ticket, used))  # the engine works on addresses: somebody must keep the tensors
                back += copy_back
        except GroupFailed as failed:
            raise explain(failed.failure, last, self.ranks, self.seconds) from None
        work = SharedMemoryWork(result, CallsUnderWay(self, ticket, last, back), seen)
        if not is_async:
            work.wait()
        return work

    def let_go(self) -> None:
        """Forget the tensors of calls that are done.  By any thread."""
        if self._held:
            with self._letting_go:
                done = self.engine.completed()
                while self._held and self._held[0][0] <= done:
                    self._held.popleft()

    def _reducible(self, tensor: Tensor, op: int) -> int:
        # Sums of complex numbers are those of their parts, which lie one after another.
        kind = tensor.dtype.to_real() if tensor.is_complex() and op in (_SUM, _AVG) else tensor.dtype
        dtype = DTYPES.get(kind)
        if dtype is None or not 0 <= op < len(OPS) or not self.engine.supports(dtype, op):
            raise undefined(tensor.dtype, op)
        return dtype

    def _split(self, flat: Tensor, tensor: Tensor, splits: Sequence[int]) -> list[Region]:
        """Regions of `flat` by lengths along dim 0, equal where none are given."""
        num_ranks = len(self.ranks)
        length = tensor.shape[0] if tensor.dim() else 1
        lengths = list(splits) or [length // num_ranks] * num_ranks
        if len(lengths) != num_ranks or sum(lengths) != length or min(lengths) < 0:
            raise CollectiveError(
                f"an all-to-all over {num_ranks} ranks cannot cut dim 0 of length {length:,} into {lengths}: there must"
                f" be one length per rank, and they must add up."
            )
        at, size = region(flat)
        row = size // length if length else 0
        regions: list[Region] = []
        for part in lengths:
            regions.append((at, part * row))
            at += part * row
        return regions


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor]) -> _Prepared:
    """Prepare an all-to-all: `sent[rank]` goes to each rank, `received[rank]` comes from it."""
    flats, flats_given = [contiguous(tensor) for tensor in received], [contiguous(tensor)[0] for tensor in sent]
    call = Call(
        Kind.ALL_TO_ALL,
        send=[region(flat) for flat in flats_given],
        receive=[region(flat) for flat, _ in flats],
    )
    back = [pair for _, pairs in flats for pair in pairs]
    return call, [*flats_given, *(flat for flat, _ in flats)], back


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _op(opts: Any) -> int:
    """The operation's number.  Not `opts.reduceOp`: compared with a member of `ReduceOp` it is never equal."""
    return 0 if opts is None else int(opts.reduceOp.op)
