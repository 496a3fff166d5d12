"""How ranks that share a sequence see one another's keys and values, and send back their gradients.

Both exchanges visit the keys of every rank once, this rank's own first.  Their backward sums, for this rank's keys, the
gradients from the queries of all ranks.  Call on every rank of the group, forward and backward, in the same order.

`RingExchange`: what arrives from the rank before goes on to the next rank while it is used, c − 1 times; in the
backward the sums of gradients follow one step behind, and end where they belong.  On CPUs the messages travel by
themselves; nothing but the wait for them costs time.

    step              0         1         2         3         4 ranks, rank 0; Kᵣ: keys and values of rank r
    attends to        K₀        K₃        K₂        K₁
    sends meanwhile   K₀        K₃        K₂        –
    backward sends    –         dK₃       dK₂       dK₁       each with what earlier ranks have added

`GatherExchange`: one all-gather, and in the backward another and a reduce-scatter: 1/c of the keys stays from the
forward to the backward, as in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import all_gather, reduce_scatter_shards
from weft.comm.device import runs_on_gloo
from weft.comm.mesh import GroupView
from weft.techniques.context.token_runs import Shown

Gradients = Callable[[int, Tensor, Tensor, slice], tuple[Tensor, Tensor]]
"""Function (source rank, keys, values, heads of keys) → gradients of these keys and values from this rank's queries.

Keys are (samples, heads of keys, tokens, size); `heads of keys` is the slice of all of them that is passed."""


class KeyExchange(Protocol):
    """Brings the keys and values of every rank to each rank."""

    scheme: str
    """The name in a plan (`context_parallel.scheme`)."""

    def visit(self, key: Tensor, value: Tensor, shown: Shown) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (source rank, keys, values) for every rank: all of this rank's tokens, and those that others show.

        `key` and `value` are (samples, heads of keys, own tokens, size).  Call on every rank of the group.
        """
        ...

    def gradients(self, key: Tensor, value: Tensor, shown: Shown, compute: Gradients) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over the ranks."""
        ...


@final
class _Packing:
    """Packs keys and values into one flat tensor, so that one message carries both."""

    def __init__(self, key: Tensor, value: Tensor, shown: Shown) -> None:
        self._key, self._value, self._shown = key.shape, value.shape, shown

    def pack_shown(self, key: Tensor, value: Tensor, index: int) -> Tensor:
        """Return the keys and values that rank `index` shows, flat; with a window these are the ends of its runs."""
        if self._shown.window is None:
            return self.pack(key, value)
        places = self._shown.places(index)
        parts = [torch.cat([tensor[:, :, start:stop] for start, stop in places], 2) for tensor in (key, value)]
        return self.pack(*parts)

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def size(self, source: int) -> int:
        return self._per_token * self._shown.tokens(source)

    @property
    def longest(self) -> int:
        return self._per_token * self._shown.most

    def unpack(self, flat: Tensor, source: int) -> tuple[Tensor, Tensor]:
        tokens = self._shown.tokens(source)
        shapes = [(*shape[:2], tokens, shape[3]) for shape in (self._key, self._value)]
        border = shapes[0][0] * shapes[0][1] * tokens * shapes[0][3]
        return flat[:border].view(shapes[0]), flat[border : self.size(source)].view(shapes[1])

    def add(self, own: tuple[Tensor, Tensor], flat: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Add gradients `flat` of the tokens that rank `index` shows to `own`, the gradients of all its tokens."""
        arrived, (head, tail) = self.unpack(flat, index), self._shown.places(index)
        for mine, theirs in zip(own, arrived, strict=True):
            border = head[1] - head[0]
            mine[:, :, slice(*head)] += theirs[:, :, :border]
            mine[:, :, slice(*tail)] += theirs[:, :, border:]
        return own

    @property
    def _per_token(self) -> int:
        return self._key[0] * self._key[1] * (self._key[3] + self._value[3])


@final
class GatherExchange:
    """All keys at once."""

    scheme = "all_gather"

    def __init__(self, view: GroupView) -> None:
        self._view = view

    def visit(self, key: Tensor, value: Tensor, shown: Shown) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `KeyExchange`."""
        packing, mine = _Packing(key, value, shown), self._view.index
        if self._view.size == 1 or not shown.most:
            yield mine, key, value
            return
        # Ranks may show one token more or less, and a gather wants equal parts: the shorter ones are filled up.
        every = all_gather(_filled_up(packing.pack_shown(key, value, mine), packing.longest), self._view)
        yield mine, key, value
        for step in range(1, self._view.size):
            source = (mine - step) % self._view.size
            yield source, *packing.unpack(every[source], source)

    def gradients(self, key: Tensor, value: Tensor, shown: Shown, compute: Gradients) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`."""
        packing, mine, every_head = _Packing(key, value, shown), self._view.index, slice(0, key.shape[1])
        gradients = {
            source: compute(source, keys, values, every_head) for source, keys, values in self.visit(key, value, shown)
        }
        own = gradients.pop(mine)
        if not gradients:
            return own
        nothing = key.new_zeros(packing.longest)
        # (ranks, longest): row r holds the gradients of rank r's keys, and the reduce-scatter brings each row home.
        others = {source: _filled_up(packing.pack(*said), packing.longest) for source, said in gradients.items()}
        every = torch.stack([others.get(source, nothing) for source in range(self._view.size)])
        return packing.add(own, reduce_scatter_shards(every, self._view, 0)[0], mine)


@final
class RingExchange:
    """Keys go round from rank to rank while they are used."""

    scheme = "ring"

    def __init__(self, view: GroupView) -> None:
        self._view = view

    def visit(self, key: Tensor, value: Tensor, shown: Shown) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `KeyExchange`."""
        packing, mine = _Packing(key, value, shown), self._view.index
        if not shown.most:
            yield mine, key, value
            return
        packed = packing.pack_shown(key, value, mine)
        for step in range(self._view.size):
            source = (mine - step) % self._view.size
            is_last = step == self._view.size - 1
            # Started before the keys are used: the message travels while attention computes on the same keys.
            passing = None if is_last else self._pass_on(packed, packing.size(self._before(source)))
            yield source, *((key, value) if step == 0 else packing.unpack(packed, source))
            if passing is not None:
                packed = passing()

    def gradients(self, key: Tensor, value: Tensor, shown: Shown, compute: Gradients) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`.

        A rank's own keys are visited in two parts, some heads first and the others last.  So it has work while the
        first keys arrive, and again while the last gradients of its own keys do.
        """
        packing, mine = _Packing(key, value, shown), self._view.index
        first = slice(0, (key.shape[1] + 1) // 2)
        own: tuple[Tensor, Tensor] | None = None
        arriving: Callable[[], Tensor] | None = None
        for source, keys, values in self.visit(key, value, shown):
            if own is None:
                own = compute(source, keys[:, first], values[:, first], first)
                continue
            said = packing.pack(*compute(source, keys, values, slice(0, key.shape[1])))
            # The sum for `source` has come from the rank before, one step behind the keys: this rank adds its part and
            # passes it on.  After the last step it has gone round and arrives at `source` itself.
            if arriving is not None:
                said = said + arriving()
            arriving = self._pass_on(said, packing.size(self._before(source)))
        assert own is not None, "a ring visits this rank's keys first"
        if (rest := slice(first.stop, key.shape[1])).start < rest.stop:
            others = compute(mine, key[:, rest], value[:, rest], rest)
            own = torch.cat([own[0], others[0]], 1), torch.cat([own[1], others[1]], 1)
        return own if arriving is None else packing.add(own, arriving(), mine)

    def _before(self, member: int) -> int:
        return (member - 1) % self._view.size

    def _pass_on(self, flat: Tensor, arriving: int) -> Callable[[], Tensor]:
        """Start to send `flat` to the next rank and to receive `arriving` elements from the rank before.

        Returns a function that waits for both messages and returns the received tensor, (arriving,).
        """
        view = self._view
        assert view.group is not None, "a ring has two members or more"
        transport_device = torch.device("cpu") if runs_on_gloo(flat.device, view.group) else flat.device
        leaving, buffer = flat.to(transport_device), flat.new_empty(arriving, device=transport_device)
        peers = view.ranks[(view.index + 1) % view.size], view.ranks[self._before(view.index)]
        works = _start(leaving, buffer, peers, view.group)

        def wait(sent: Tensor = leaving) -> Tensor:  # the default keeps the sent tensor alive until it has left
            for work in works:
                work.wait()
            return buffer.to(flat.device)

        return wait


def _start(leaving: Tensor, buffer: Tensor, peers: tuple[int, int], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start both messages at once: NCCL runs messages that are not started together one after another."""
    if buffer.device.type == "cpu":
        works = [dist.isend(leaving, peers[0], group=group), dist.irecv(buffer, peers[1], group=group)]
        return [work for work in works if work is not None]
    send, receive = (dist.P2POp(dist.isend, leaving, peers[0], group), dist.P2POp(dist.irecv, buffer, peers[1], group))
    return dist.batch_isend_irecv([send, receive])


def _filled_up(flat: Tensor, length: int) -> Tensor:
    missing = length - flat.numel()
    return flat if not missing else torch.cat([flat, flat.new_zeros(missing)])
