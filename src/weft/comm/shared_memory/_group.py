"""`torch.distributed`'s view of the shared-memory transports: the process group of the backend `weft`.

Gloo, of which it is made (see `WatchedGroup`), carries what is left: sparse tensors, and messages where the transport
is not the engine.
"""

# torch's stubs overload these methods by what Python may pass; what arrives here is always options.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from weft.comm._untraced import untraced
from weft.comm._watch import Seen
from weft.comm._watched_group import WatchedGroup
from weft.comm.shared_memory._call import DTYPES, OPS, Call, GroupFailed, Kind, Region, Transport
from weft.comm.shared_memory._failure import explain, undefined
from weft.comm.shared_memory._post import Post
from weft.comm.shared_memory._process import Process
from weft.comm.shared_memory._recorded import recorded
from weft.comm.shared_memory._tensors import CopyBack, check_memory, contiguous, is_as_stored, region
from weft.comm.shared_memory._work import Completer, SharedMemoryWork
from weft.errors import CollectiveError

_SUM, _AVG = OPS.index("sum"), OPS.index("avg")
_MANY = 32
"""Works under way before it is looked which of them are done."""


@untraced
@recorded
class SharedMemoryGroup(WatchedGroup):
    """The ranks of one host as a process group.  Reductions are summed in the order of the ranks: the result is the
    same on all, and at 2 ranks Gloo's to the last bit; bf16 and fp16 are summed in fp32 and rounded once.

    `served` counts, by method, the calls that took the shared memory and not Gloo.  `processes` are those of the other
    ranks, by global rank: by them a later group's ranks are watched while it is formed.
    """

    def __init__(
        self,
        transport: Transport,
        gloo: dist.ProcessGroupGloo,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        processes: Mapping[int, Process],
    ) -> None:
        super().__init__(gloo, rank=rank, num_ranks=len(ranks))
        self.transport = transport
        self.seconds = timeout.total_seconds()
        self.ranks = tuple(ranks)
        self.processes = processes
        self.served: Counter[str] = Counter()
        self._place = rank
        self._has_warned = False
        self._held: deque[tuple[int, Any]] = deque()
        self._letting_go = threading.Lock()
        self._completer: Completer | None = None
        self._post = None if transport.mail is None else Post(transport.mail, self.ranks, self.seconds)
        self._done = SharedMemoryWork(None, 0, None, [], (), None)

    # ── what the works need ───────────────────────────────────────────────────────────────────────────────────────────

    def finish(self, ticket: int, call: Call | None, seconds: float) -> None:
        try:
            self.transport.wait(ticket, seconds)
            self._let_go()
        except GroupFailed as failed:
            raise explain(failed.failure, call, self.ranks, seconds) from None

    def done_ns(self, ticket: int) -> int:
        """When a call was done, by `perf_counter_ns`; 0 where that is not known any more."""
        return self.transport.done_ns(ticket)

    def has_done(self, ticket: int) -> bool:
        try:
            return self.transport.completed() >= ticket
        except GroupFailed:
            return True

    def complete_later(self, work: SharedMemoryWork, future: Future[Any]) -> bool:
        """False on the very thread that would do so: what is chained to a future may wait for another."""
        if self._completer is None:
            self._completer = Completer()
        return self._completer.add(work, future)

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
            found = self._allocated(torch.Size(shape), dtype)
        except GroupFailed as failed:
            raise explain(failed.failure, None, self.ranks, self.seconds) from None
        if found is None:
            raise CollectiveError(
                f"{torch.Size(shape).numel() * dtype.itemsize:,} bytes do not fit any more into this rank's arena in"
                f" the shared memory. Free tensors that `allocate` gave, or make this one with torch.empty: it is then"
                f" staged."
            )
        return found

    def allocate_if_possible(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """As `allocate`, flat; None where there is no such memory, of which the group's first rank warns once."""
        try:
            found = self._allocated(torch.Size((num_elements,)), dtype)
        except GroupFailed:  # it has been left: a collective will say so
            return None
        if found is None and self.transport.has_arena and self._place == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Buffers of {num_elements * dtype.itemsize:,} bytes do not fit any more into the shared memory of"
                f" ranks {_listed(self.ranks)}: they are copied there piece by piece, with the same results, more"
                f" slowly. Shard gradients (zero = 2 or 3), or cut the model over more ranks.",
                stacklevel=2,
            )
        return found

    def _allocated(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        count = shape.numel()
        memory = self.transport.allocate(max(count, 1) * dtype.itemsize)
        if memory is None:
            return None
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape) if count else torch.empty(shape).to(dtype)

    def abort(self) -> None:
        """Release every rank that waits in this group, with `CollectiveError`.  By any one rank."""
        self.transport.abort()
        super().abort()  # what Gloo carries

    def shutdown(self) -> None:
        """Leave the group.  Calls that are under way fail, on every rank."""
        completer, self._completer = self._completer, None
        self.transport.leave()
        if completer is not None:
            completer.close()
        if self._post is not None:
            self._post.close()
        self.transport.close()
        self._held.clear()

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()
        if self._post is not None:
            self._post.seconds = self.seconds

    # ── reductions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_sparse:
            return super().allreduce(tensors, opts)
        op = _op(opts)
        dtype = self._reducible(tensor, op)
        seen = self._serve("allreduce", tensors)
        if opts is not None and not opts.asyncOp and is_as_stored(tensor):
            check_memory(tensor)
            size = tensor.numel() * tensor.itemsize
            entered = 0 if seen is None else seen.enter_wait()
            try:
                self._let_go()  # of works that nobody waited for
                self.transport.all_reduce(tensor.data_ptr(), size, dtype, op, self.seconds)
            except GroupFailed as failed:
                call = Call(Kind.ALL_REDUCE, dtype, op, num_bytes=size)
                raise explain(failed.failure, call, self.ranks, self.seconds) from None
            finally:
                if seen is not None:
                    seen.exit_wait(entered)
            return self._done
        return self._submit(*self._reducing(tensor, dtype, op), tensors, opts, seen)

    def _reducing(self, tensor: Tensor, dtype: int, op: int) -> tuple[Call, list[Tensor], CopyBack]:
        flat, back = contiguous(tensor)
        at, size = region(flat)
        return Call(Kind.ALL_REDUCE, dtype, op, at, at, size), [flat], back

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = _op(opts)
        seen = self._serve("allreduce_coalesced", tensors)
        return self._submit_all([self._reducing(t, self._reducible(t, op), op) for t in tensors], tensors, opts, seen)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = _op(opts)
        dtype = self._reducible(tensor, op)
        seen = self._serve("reduce", tensors)
        flat, back = contiguous(tensor)
        at, size = region(flat)
        send = [(at, size if rank == opts.rootRank else 0) for rank in range(len(self.ranks))]
        call = Call(Kind.REDUCE_SCATTER, dtype, op, output=at, send=send)
        return self._submit(call, [flat], back if self._place == opts.rootRank else (), tensors, opts, seen)

    def reduce_scatter_regions(
        self, parts: Sequence[Tensor], output: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work:
        """Reduce `parts[rank]` to rank `rank`, whose `output` gets the result; parts may differ in size from rank to
        rank, and this rank's part may be its `output`.  Call on every rank; returns at once.

        All tensors must be contiguous and of one dtype.
        """
        seen = self._serve("reduce_scatter_regions", list(parts))
        return self._submit(*self._scattering(parts, output, _number(op)), [output], None, seen)

    def _scattering(self, parts: Sequence[Tensor], output: Tensor, op: int) -> tuple[Call, list[Tensor], CopyBack]:
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

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        (output,), (parts,) = outputs, inputs
        seen = self._serve("reduce_scatter", inputs)
        return self._submit(*self._scattering(parts, output, _op(opts)), outputs, opts, seen)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        seen = self._serve("reduce_scatter_single", whole)
        return self._submit(*self._scattering_evenly(output, whole, _op(opts)), [output], opts, seen)

    def _scattering_evenly(self, output: Tensor, whole: Tensor, op: int) -> tuple[Call, list[Tensor], CopyBack]:
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

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        seen = self._serve("reduce_scatter_single_coalesced", inputs)
        op = _op(opts)
        calls = [self._scattering_evenly(output, whole, op) for output, whole in zip(outputs, inputs, strict=True)]
        return self._submit_all(calls, outputs, opts, seen)

    # ── what only moves ───────────────────────────────────────────────────────────────────────────────────────────────

    def all_gather_regions(self, given: Tensor, parts: Sequence[Tensor]) -> dist.Work:
        """Fill `parts[rank]` with what rank `rank` gives; sizes may differ from rank to rank, and `given` may be this
        rank's part.  Call on every rank; returns at once.  All tensors must be contiguous and of one dtype."""
        seen = self._serve("all_gather_regions", list(parts))
        return self._submit(*self._gathering(given, parts), list(parts), None, seen)

    def _gathering(self, given: Tensor, parts: Sequence[Tensor]) -> tuple[Call, list[Tensor], CopyBack]:
        flat_given = contiguous(given)[0]
        flats = [contiguous(part) for part in parts]
        receive = [region(flat) for flat, _ in flats]
        if receive[self._place][1] != flat_given.numel() * flat_given.itemsize:
            raise CollectiveError(
                f"this rank gives {given.numel():,} elements of {given.dtype} to an all-gather whose output has room"
                f" for {receive[self._place][1]:,} bytes of it: they must agree."
            )
        call = Call(Kind.ALL_GATHER, input=flat_given.data_ptr(), receive=receive)
        return call, [flat_given, *(flat for flat, _ in flats)], [pair for _, back in flats for pair in back]

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (parts,), (given,) = outputs, inputs
        seen = self._serve("allgather", outputs)
        return self._submit(*self._gathering(given, parts), parts, opts, seen)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        seen = self._serve("allgather_coalesced", outputs)
        calls = [self._gathering(given, [parts[place] for parts in outputs]) for place, given in enumerate(inputs)]
        return self._submit_all(calls, [part for parts in outputs for part in parts], opts, seen)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        seen = self._serve("all_gather_single", output)
        return self._submit(*self._gathering_evenly(output, given), [output], opts, seen)

    def _gathering_evenly(self, output: Tensor, given: Tensor) -> tuple[Call, list[Tensor], CopyBack]:
        flat_given, (flat, back) = contiguous(given)[0], contiguous(output)
        at, own = region(flat_given)
        if own * len(self.ranks) != flat.numel() * flat.itemsize or given.dtype != output.dtype:
            raise CollectiveError(
                f"an all-gather of {given.numel():,} elements of {given.dtype} from each of {len(self.ranks)} ranks"
                f" needs an output of as many together; this one has {output.numel():,} of {output.dtype}."
            )
        start = flat.data_ptr()
        receive = [(start + rank * own, own) for rank in range(len(self.ranks))]
        return Call(Kind.ALL_GATHER, input=at, receive=receive), [flat_given, flat], back

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        seen = self._serve("all_gather_single_coalesced", outputs)
        calls = [self._gathering_evenly(output, given) for output, given in zip(outputs, inputs, strict=True)]
        return self._submit_all(calls, outputs, opts, seen)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_sparse:
            return super().broadcast(tensors, opts)
        seen = self._serve("broadcast", tensors)
        flat, back = contiguous(tensor)
        at, size = region(flat)
        receive = [(at, size if rank == opts.rootRank else 0) for rank in range(len(self.ranks))]
        return self._submit(Call(Kind.ALL_GATHER, input=at, receive=receive), [flat], back, tensors, opts, seen)

    def alltoall_base(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        seen = self._serve("all_to_all_single", given)
        (flat, back), flat_given = contiguous(output), contiguous(given)[0]
        send = self._split(flat_given, given, input_splits or [])
        receive = self._split(flat, output, output_splits or [])
        if output.dtype != given.dtype or send[self._place][1] != receive[self._place][1]:
            raise CollectiveError(
                f"an all-to-all that gives this rank {send[self._place][1]:,} bytes of {given.dtype} cannot take"
                f" {receive[self._place][1]:,} of {output.dtype} from it: they must agree."
            )
        call = Call(Kind.ALL_TO_ALL, send=send, receive=receive)
        return self._submit(call, [flat_given, flat], back, [output], opts, seen)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        seen = self._serve("alltoall", inputs)
        return self._exchange(inputs, outputs, opts, seen)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        seen = self._serve("gather", inputs)
        (given,) = inputs
        nothing = given.new_empty(0)
        given_to = [given if rank == opts.rootRank else nothing for rank in range(len(self.ranks))]
        taken = outputs[0] if self._place == opts.rootRank else [nothing] * len(self.ranks)
        return self._exchange(given_to, taken, opts, seen)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        seen = self._serve("scatter", outputs)
        (output,) = outputs
        nothing = output.new_empty(0)
        given = inputs[0] if self._place == opts.rootRank else [nothing] * len(self.ranks)
        return self._exchange(
            given, [output if rank == opts.rootRank else nothing for rank in range(len(self.ranks))], opts, seen
        )

    def _exchange(self, given: Sequence[Tensor], taken: Sequence[Tensor], opts: Any, seen: Seen | None) -> dist.Work:
        flats, flats_given = [contiguous(tensor) for tensor in taken], [contiguous(tensor)[0] for tensor in given]
        call = Call(
            Kind.ALL_TO_ALL,
            send=[region(flat) for flat in flats_given],
            receive=[region(flat) for flat, _ in flats],
        )
        back = [pair for _, pairs in flats for pair in pairs]
        return self._submit(call, [*flats_given, *(flat for flat, _ in flats)], back, list(taken), opts, seen)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> dist.Work:
        if self._post is None:
            return super().send(tensors, target, tag)
        return self._post.send(tensors, target, tag, self._serve("send", tensors))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        if self._post is None:
            return super().recv(tensors, source, tag)
        return self._post.receive(tensors, source, tag, self._serve("recv", tensors))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        if self._post is None:
            return super().recv_anysource(tensors, tag)
        return self._post.receive(tensors, -1, tag, self._serve("recv_anysource", tensors))

    def barrier(self, opts: Any = None) -> dist.Work:
        seen = self._serve("barrier", None)
        return self._submit(Call(Kind.BARRIER), [], (), [], opts, seen)

    # torch 2.11 and 2.12 call them by these names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    all_to_all_single = alltoall_base

    # ── the queue ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, method: str, tensors: object) -> Seen | None:
        """Count a call that takes the shared memory, and let it be seen."""
        self.served[method] += 1
        return self.launch(method, tensors)

    def _submit(
        self, call: Call, used: list[Tensor], copy_back: CopyBack, result: list[Tensor], opts: Any, seen: Seen | None
    ) -> dist.Work:
        return self._submit_all([(call, used, copy_back)], result, opts, seen)

    def _submit_all(
        self,
        calls: Sequence[tuple[Call, list[Tensor], CopyBack]],
        result: list[Tensor],
        opts: Any,
        seen: Seen | None,
    ) -> dist.Work:
        """Calls are carried out in the order of their numbers, so the last one's end is the end of all."""
        is_async = opts is None or opts.asyncOp
        ticket, last, back = 0, None, list[tuple[Tensor, Tensor]]()
        if len(self._held) > _MANY:
            self._let_go()  # of works that nobody waited for
        try:
            for call, used, copy_back in calls:
                ticket, last = self.transport.submit(call, self.seconds, background=is_async), call
                self._held.append((ticket, used))  # the transport works on addresses: somebody must keep the tensors
                back += copy_back
        except GroupFailed as failed:
            raise explain(failed.failure, last, self.ranks, self.seconds) from None
        work = SharedMemoryWork(self, ticket, last, result, back, seen)
        if not is_async:
            work.wait()
        return work

    def _let_go(self) -> None:
        """Forget the tensors of calls that are done.  By any thread."""
        if self._held:
            with self._letting_go:
                done = self.transport.completed()
                while self._held and self._held[0][0] <= done:
                    self._held.popleft()

    def _reducible(self, tensor: Tensor, op: int) -> int:
        # Sums of complex numbers are those of their parts, which lie one after another.
        kind = tensor.dtype.to_real() if tensor.is_complex() and op in (_SUM, _AVG) else tensor.dtype
        dtype = DTYPES.get(kind)
        if dtype is None or not 0 <= op < len(OPS) or not self.transport.supports(dtype, op):
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


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _op(opts: Any) -> int:
    """The operation's number.  Not `opts.reduceOp`: compared with a member of `ReduceOp` it is never equal."""
    return 0 if opts is None else _number(opts.reduceOp.op)


def _number(op: Any) -> int:
    return int(op)
