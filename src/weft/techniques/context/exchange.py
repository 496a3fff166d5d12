"""How ranks that share a sequence see one another's keys and values, and send back their gradients.

Both ways show the keys of every rank once, this rank's own first, and return the sum of what all ranks say of this
rank's.  Call on every rank of the group, forward and backward, in the same order.

`RingExchange`: what arrives from the rank before goes on to the rank behind while it is used, c − 1 times; in the
backward the sums of gradients follow one step behind, and end where they belong.  On CPUs the messages travel by
themselves; nothing but the wait for them costs time.

`GatherExchange`: one all-gather, and in the backward another and a reduce-scatter: 1/c of the keys stays from the
forward to the backward, as in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import GroupView, all_gather, reduce_scatter_shards, runs_on_gloo
from weft.techniques.context.shares import most_tokens, tokens_of

Gradients = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Source, its keys and values → what this rank's queries say of their gradients."""


class KeyExchange(Protocol):
    """How the keys of all ranks are shown to each."""

    def visit(self, key: Tensor, value: Tensor, length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (source, keys, values) of every rank of the group; `length` is that of the whole sequence."""
        ...

    def gradients(self, key: Tensor, value: Tensor, length: int, compute: Gradients) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over the ranks."""
        ...


@final
class _Packing:
    """Keys and values of any rank as one flat tensor."""

    def __init__(self, key: Tensor, value: Tensor, length: int, ranks: int) -> None:
        self._key, self._value, self._length, self._ranks = key.shape, value.shape, length, ranks

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def size(self, source: int) -> int:
        return self._per_token * tokens_of(self._length, self._ranks, source)

    @property
    def longest(self) -> int:
        return self._per_token * most_tokens(self._length, self._ranks)

    def unpack(self, flat: Tensor, source: int) -> tuple[Tensor, Tensor]:
        tokens = tokens_of(self._length, self._ranks, source)
        shapes = [(*shape[:2], tokens, shape[3]) for shape in (self._key, self._value)]
        border = shapes[0][0] * shapes[0][1] * tokens * shapes[0][3]
        return flat[:border].view(shapes[0]), flat[border : self.size(source)].view(shapes[1])

    @property
    def _per_token(self) -> int:
        return self._key[0] * self._key[1] * (self._key[3] + self._value[3])


@final
class GatherExchange:
    """All keys at once."""

    def __init__(self, view: GroupView) -> None:
        self._view = view

    def visit(self, key: Tensor, value: Tensor, length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `KeyExchange`."""
        packing = _Packing(key, value, length, self._view.size)
        every = all_gather(_filled_up(packing.pack(key, value), packing.longest), self._view)
        for step in range(self._view.size):
            source = (self._view.index - step) % self._view.size
            yield source, *packing.unpack(every[source], source)

    def gradients(self, key: Tensor, value: Tensor, length: int, compute: Gradients) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`."""
        packing = _Packing(key, value, length, self._view.size)
        by_source: dict[int, Tensor] = {}
        for source, keys, values in self.visit(key, value, length):
            by_source[source] = _filled_up(packing.pack(*compute(source, keys, values)), packing.longest)
        every = torch.stack([by_source[source] for source in range(self._view.size)])
        return packing.unpack(reduce_scatter_shards(every, self._view, 0)[0], self._view.index)


@final
class RingExchange:
    """Keys go round from rank to rank while they are used."""

    def __init__(self, view: GroupView) -> None:
        self._view = view

    def visit(self, key: Tensor, value: Tensor, length: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `KeyExchange`."""
        packing = _Packing(key, value, length, self._view.size)
        held = packing.pack(key, value)
        for step in range(self._view.size):
            source = (self._view.index - step) % self._view.size
            is_last = step == self._view.size - 1
            passing = None if is_last else self._pass_on(held, packing.size(self._before(source)))
            yield source, *((key, value) if step == 0 else packing.unpack(held, source))
            if passing is not None:
                held = passing()

    def gradients(self, key: Tensor, value: Tensor, length: int, compute: Gradients) -> tuple[Tensor, Tensor]:
        """See `KeyExchange`."""
        packing = _Packing(key, value, length, self._view.size)
        own: Tensor | None = None
        arriving: Callable[[], Tensor] | None = None
        for source, keys, values in self.visit(key, value, length):
            said = packing.pack(*compute(source, keys, values))
            if own is None:
                own = said
                continue
            if arriving is not None:
                said = said + arriving()
            arriving = self._pass_on(said, packing.size(self._before(source)))
        assert own is not None, "a ring visits this rank's keys first"
        assert arriving is not None, "a ring has two members or more"
        return packing.unpack(own + arriving(), self._view.index)

    def _before(self, member: int) -> int:
        return (member - 1) % self._view.size

    def _pass_on(self, flat: Tensor, arriving: int) -> Callable[[], Tensor]:
        """Start to send `flat` to the rank behind and to take so many elements from the rank before; return what waits
        for both and returns these."""
        view = self._view
        assert view.group is not None, "a ring has two members or more"
        wire = torch.device("cpu") if runs_on_gloo(flat.device, view.group) else flat.device
        leaving, buffer = flat.to(wire), flat.new_empty(arriving, device=wire)
        peers = view.ranks[(view.index + 1) % view.size], view.ranks[self._before(view.index)]
        works = _start(leaving, buffer, peers, view.group)

        def wait(sent: Tensor = leaving) -> Tensor:  # what leaves must stay until it has left
            for work in works:
                work.wait()
            return buffer.to(flat.device)

        return wait


def _start(leaving: Tensor, buffer: Tensor, peers: tuple[int, int], group: dist.ProcessGroup) -> list[dist.Work]:
    """Both messages at once: NCCL runs what is not started together one after another."""
    if buffer.device.type == "cpu":
        works = [dist.isend(leaving, peers[0], group=group), dist.irecv(buffer, peers[1], group=group)]
        return [work for work in works if work is not None]
    send, receive = (dist.P2POp(dist.isend, leaving, peers[0], group), dist.P2POp(dist.irecv, buffer, peers[1], group))
    return dist.batch_isend_irecv([send, receive])


def _filled_up(flat: Tensor, length: int) -> Tensor:
    missing = length - flat.numel()
    return flat if not missing else torch.cat([flat, flat.new_zeros(missing)])
