"""The ways that the forwards of data ranks take through the blocks, which are the same ones under ZeRO-3.

A block's weights are gathered by all ranks together.  Where the samples of one rank lead its forward to another block,
two gathers would meet that are not of the same weights: they hang, end the process, or, of equal sizes, give each other
wrong numbers without a word.  So each rank holds its way against that of the forward before, which costs nothing.
A rank that leaves it says so through the job's store, before it gathers, and waits until all others have left it alike
or have stopped where they did not.  A thread says where a rank stands that has not moved for a while.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from weft.comm.device import group_store
from weft.comm.mesh import GroupView, Mesh
from weft.comm.untraced import untraced
from weft.errors import CollectiveError
from weft.techniques.core._context import StepContext
from weft.techniques.core.unequal_gathers import paths_differ

_ROOT = "what stands before its blocks"
_END = "the end of its forward"
_LOOK_SECONDS = 0.25
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.001, 0.05
"""Time between two looks of a rank that waits for the others."""
_KNOWN = 16
"""Ways that are remembered: of a training that changes between a few, each change is asked about once."""


def note_gathers(context: StepContext, root: nn.Module, blocks: Sequence[str], mesh: Mesh, *, hold: bool) -> None:
    """From now on know which block a forward has come to, before its weights are gathered; call behind `fully_shard`.

    Where ranks hold what they have gathered, the numbers of their forwards may differ, and their ways are not compared.
    """
    present = dict(root.named_modules())
    own = {name: present[name] for name in blocks if name in present}
    units = {name: block for name, block in own.items() if any(True for _ in block.parameters())}
    view = mesh["data"]
    if view.group is not None and not hold and dist.get_backend(view.group) != "fake":
        path = context.block_path = ForwardPath([*units], view)
        root.register_forward_pre_hook(path.begin, prepend=True)
        root.register_forward_hook(path.end)
    root.register_forward_pre_hook(_Note(context, _ROOT), prepend=True)
    for name, unit in units.items():
        unit.register_forward_pre_hook(_Note(context, name), prepend=True)


@untraced
@dataclass(frozen=True, slots=True)
class _Note:
    """A hook before the forward of a unit."""

    context: StepContext
    name: str

    def __call__(self, unit: nn.Module, args: Any) -> None:
        self.context.gathers = self.name
        if self.context.block_path is not None and self.name != _ROOT:
            self.context.block_path.come_to(self.name)


@untraced
class ForwardPath:
    """The ways of this rank's forwards, through blocks by name.  Create it on every data rank of `view` alike."""

    def __init__(self, blocks: Sequence[str], view: GroupView) -> None:
        # Not the view: hooks of the model hold this, and its group must end when its mesh is left.
        self._ranks, self._rank, self._timeout_seconds = view.ranks, view.ranks[view.index], view.timeout_seconds
        store = group_store()
        self._store = dist.PrefixStore(f"weft/ways/{store.add(f'weft/ways/{self._rank}', 1)}", store)
        self._known = [[*blocks, _END]]
        """Ways that all ranks have gone, the last one last."""
        self._expected = self._known[0]
        self._now: list[str] = []
        self._inside = False
        self._place = (0, 0, -1)
        """Questions that are settled, number of the forward, and place on its way."""
        self._is_over = threading.Event()
        arguments = (weakref.ref(self), self._store, f"at/{self._rank}", self._is_over)
        threading.Thread(target=_say_where, args=arguments, name="weft-ways", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    def begin(self, module: nn.Module, args: Any) -> None:
        """A hook before the forward of the whole."""
        settled, forward, _ = self._place
        self._place, self._now, self._inside = (settled, forward + 1, -1), [], True
        self._expected = self._known[-1]

    def come_to(self, name: str) -> None:
        """Go on to a block.

        Raises:
            PlanError: other ranks went on to another one.
            CollectiveError: a rank does not say where it goes.
        """
        if not self._inside:
            return  # recomputation in backward runs the block again
        settled, forward, place = self._place[0], self._place[1], len(self._now)
        self._now.append(name)
        if self._expected[place : place + 1] != [name]:
            # Only a change of path is agreed on, over the store; the usual forward pays one comparison of lists.
            self._agree(settled, forward, place, name)
            settled += 1
            # All ranks left alike, so the same known path is the best guess for the rest on each of them.
            ahead = (way for way in reversed(self._known) if way[: place + 1] == self._now)
            self._expected = next(ahead, [*self._now])
        self._place = (settled, forward, place)

    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """A hook behind the forward of the whole."""
        self.come_to(_END)
        self._inside = False
        self._known = [*(way for way in self._known if way != self._now), self._now][-_KNOWN:]

    def _agree(self, settled: int, forward: int, place: int, name: str) -> None:
        """Return when all ranks have come to the same block at this place."""
        self._store.set(f"{settled}/{self._rank}", json.dumps([forward, place, name]))
        # The store, not a collective: a rank that did not leave is inside of a gather, and would not answer one.
        deadline, pause = time.monotonic() + self._timeout_seconds, _SHORTEST_SECONDS
        waiting = [rank for rank in self._ranks if rank != self._rank]
        while waiting:
            for rank in [*waiting]:
                other = self._heard(rank, settled, forward, place)
                if other == [forward, place, name]:
                    waiting.remove(rank)
                elif other:
                    raise paths_differ(
                        f"the forward of rank {self._rank} came to {name}, that of rank {rank} to {other[-1]}"
                    )
            if waiting and time.monotonic() > deadline:
                raise CollectiveError(
                    f"rank {waiting[0]} has not said within {self._timeout_seconds:g} s whether its forward comes"
                    f" to {name}, as that of rank {self._rank} does, whose way has changed."
                )
            time.sleep(pause if waiting else 0.0)
            pause = min(1.5 * pause, _LONGEST_SECONDS)

    def _heard(self, rank: int, settled: int, forward: int, place: int) -> list[Any]:
        """Return [forward, place, block] at which a rank left the path, or passed the place on it; empty: not known."""
        if self._store.check([f"{settled}/{rank}"]):
            return list(json.loads(self._store.get(f"{settled}/{rank}")))
        if not self._store.check([f"at/{rank}"]):
            return []
        there, *at = json.loads(self._store.get(f"at/{rank}"))
        stayed = there == settled and at >= [forward, place]
        return [forward, place, self._expected[place]] if stayed else []


def _say_where(path: weakref.ref[ForwardPath], store: dist.Store, key: str, is_over: threading.Event) -> None:
    """Publish where a rank stands, when it has not moved between two looks."""
    before = said = None
    while not is_over.wait(_LOOK_SECONDS) and (alive := path()) is not None:
        place = alive._place  # pyright: ignore[reportPrivateUsage]
        del alive
        if place == before != said:
            try:
                store.set(key, json.dumps(place))
            except RuntimeError:  # the store is gone with the rank that had it
                return
            said = place
        before = place
