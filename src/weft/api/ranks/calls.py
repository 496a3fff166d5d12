"""What every rank of a session is doing, so that ranks that do different things are named and do not wait for ever.

A call only writes down its number, its name and the user's line.  A thread looks: when a call has lasted a second, or
has failed, its rank says through the store what it did, and reads what the others say.  All ranks must have made the
same calls in the same order; the first that differ are the error of all of them.  So a step costs nothing more.
"""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.api.ranks.agreement import differs, gather_texts
from weft.comm.mesh import Mesh
from weft.comm.release import release_groups
from weft.errors import CheckpointError, CollectiveError, RecipeError, WeftError
from weft.techniques.randomness.draws import line_of_user

# What the settings of a recipe are called in a session, which has none: errors of a session speak of its own.
_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"by the recipe, whose permit\.precision = ", "by this session, whose permit = "),
        (r"by the recipe, whose permit\.compression = ", "by this session, whose compression = "),
        (r"by the recipe, whose permit\.local_steps = ", "by this session, whose local_steps = "),
        (r"permit\.local_steps = \d+; of a session, ", ""),
        (r"\bdifferent recipes\b", "different settings"),
        (r"\bhas recipe\b", "has settings"),
        (r"(?:recipe\.)?\bpermit\.precision = (\[[^\]]*\])", r"weft.session(permit=\1)"),
        (r"(?:recipe\.)?\bpermit\.compression = (\[[^\]]*\])", r"weft.session(compression=\1)"),
        (r"(?:recipe\.)?\bpermit\.(\w+)", r"\1 of weft.session"),
        (r"the recipe's global_batch_size( is| =|)\b", r"the loader's batch size\1"),
        (r"(?:recipe\.)?\bbatch\.global_batch_size|\bglobal_batch_size", "the loader's batch size"),
        (r"(?:recipe\.)?\boptimizer\.max_grad_norm", "max_grad_norm of session.prepare"),
        (r"(?:recipe\.)?\brun\.seed", "seed of weft.session"),
        (r"\[model\.split\]|(?:recipe\.)?\bmodel\.split\b", "split= of session.prepare"),
        (r"\[model\.cut\]|(?:recipe\.)?\bmodel\.cut\b", "cut= of session.prepare"),
        (r"\[model\.inputs\]|(?:recipe\.)?\bmodel\.inputs\b", "inputs= of session.prepare"),
        (r"the recipe that (saved|trained) it", r"the session that \1 it"),
        (r"train (?:from|by) a recipe with weft train", "train it by `weft train`"),
        (r"\b(the|this) recipe's\b", r"\1 session's"),
        (r"\b(the|this|a) recipe\b", r"\1 session"),
    )
)
_WEFT_TRAIN = re.compile(r"`weft train[^`]*`|\S*recipe\.toml\S*")
"""Messages about files and commands stay as they are."""


def of_session(text: str) -> str:
    """Return a message with a session's own names for what it speaks of."""
    kept = _WEFT_TRAIN.findall(text)
    text = _WEFT_TRAIN.sub("\0", text)
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    for line in kept:
        text = text.replace("\0", line, 1)
    return text


@contextmanager
def words_of_session() -> Generator[None]:
    """Translate the errors of a call into the terms of the session."""
    try:
        yield
    except WeftError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (of_session(error.args[0]), *error.args[1:])
        raise


_LOOK_SECONDS = 0.25
_STUCK_SECONDS = 1.0
_EXPLAIN_SECONDS = 3.0
"""Time that a rank which has failed waits for what the others publish."""
_LAST_CALLS = 16
_NOBODY = -1
_EXCHANGED = (
    "Under this plan the ranks exchange parts of the model in every forward, so all make it: take it out of branches"
    " that only some ranks go into."
)


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    name: str
    """Name of the method: what must be equal on all ranks."""
    place: str
    """File and line of the user."""

    def __str__(self) -> str:
        return f"{self.name} at {self.place}" if self.place else self.name


@dataclass(frozen=True, slots=True)
class _PublishedCalls:
    """The calls that a rank has last published in the store."""

    calls: tuple[_Call, ...]
    end: str
    """Why it has left the session; empty while it has not."""
    in_call: bool
    """Whether it was in the last of these calls, and not behind it."""
    forwards: Mapping[str, int]
    """Model → forwards outside a call that the rank has begun."""
    forward: tuple[str, str]
    """The model whose forward it is in, and the user's line; both empty where it is in none."""
    facts: Mapping[str, str]
    """Facts that must be equal on all ranks in the last call, while it lasts."""

    @property
    def number(self) -> int:
        """Number of the last call."""
        return self.calls[-1].number if self.calls else 0

    @classmethod
    def read(cls, text: str) -> _PublishedCalls:
        calls, end, in_call, forwards, (model, place), facts = json.loads(text)
        made = tuple(_Call(int(number), str(name), str(place)) for number, name, place in calls)
        return cls(made, str(end), bool(in_call), forwards, (str(model), str(place)), facts)


class RankCalls:
    """This rank's calls.  `store` is for this session alone; without one, nobody else is there."""

    def __init__(self, store: dist.Store | None, rank: int, num_ranks: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._device = device
        self._calls: deque[_Call] = deque(maxlen=_LAST_CALLS)
        self._depth = 0
        self._since = 0.0
        self._forwards: dict[str, int] = {}
        self._forward = ("", "")
        self._facts: Callable[[], Mapping[str, str]] = dict
        self._peers: dict[str, Collection[int]] = {}
        self._handles: list[RemovableHandle] = []
        self._nesting: dict[str, int] = {}
        """Model → forwards under way, one inside the other."""
        self.blocks = 0
        """Manual steps that the loop is in: what it draws there is looked for, and Weft's own draws are none of it."""
        self._verdict = ""
        self._has_ended = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and num_ranks > 1:
            self._thread = threading.Thread(target=self._watch, name="weft-calls", daemon=True)
            self._thread.start()

    @contextmanager
    def call(self, name: str, *, meets: bool = False, facts: Callable[[], Mapping[str, str]] = dict) -> Generator[None]:
        """All ranks make this call now.  A call inside another is a part of it.  One that `meets` is compared before it
        begins, at the price of two small collectives: those of two such calls might fit one another by chance.
        `facts` are what must be equal on all ranks in it; they are looked at where it fails or lasts long.

        Raises:
            CollectiveError: they do not; its text says who does what, and where.
            RecipeError: the session has ended.
        """
        if self._has_ended:
            raise RecipeError(
                f"{name} was called after its session had ended, when the ranks are joined no more. Move it before"
                " session.close(), or into the `with weft.session(…)` block."
            )
        if self._depth:
            yield
            return
        with words_of_session(), _generators_kept(self._device) if self.blocks else nullcontext():
            if self._thread is None:
                yield
            else:
                with self._compared(name, meets, facts):
                    yield

    @contextmanager
    def _compared(self, name: str, meets: bool, facts: Callable[[], Mapping[str, str]]) -> Generator[None]:
        # Ranks compare calls by their numbers: the n-th call must have the same name everywhere.
        number = self._calls[-1].number + 1 if self._calls else 1
        self._calls.append(_Call(number, name, line_of_user()))
        self._depth, self._since, self._facts = 1, time.monotonic(), facts
        self._forward = ("", "")  # one that failed, and whose error the loop has caught
        self._nesting.clear()
        try:
            if meets:
                self._meet()
            yield
        except (WeftError, RuntimeError) as error:
            explanation = self._explain(error)
            if explanation is None:
                raise
            raise explanation from error
        finally:
            self._depth, self._since, self._facts = 0, 0.0, dict

    def watch_exchanges(self, model: nn.Module, name: str, mesh: Mesh, *, gathers: bool, batch_norm: bool) -> None:
        """`watch_forwards`, of the ranks with which this one exchanges something in each: parts of layers, weights that
        are gathered, or statistics of batch norms, which are exchanged in training mode alone."""
        peers = {*mesh["tensor"].ranks, *(mesh["shard"].ranks if gathers else ())}
        if len(peers) > 1:
            self.watch_forwards(model, name, peers)
        elif batch_norm:
            self.watch_forwards(model, name, mesh["data"].ranks, in_training=True)

    def watch_forwards(self, model: nn.Module, name: str, peers: Collection[int], *, in_training: bool = False) -> None:
        """From now on know of the forwards (those `in_training` mode alone) that the loop makes of a model by itself,
        where ranks exchange something in them: all `peers` must make them together.  They have no place in the order of
        calls, because other ranks may make more or fewer of them, as where each generates until its own samples end."""
        if self._thread is None or len(peers) < 2:
            return
        self._peers[name] = peers

        nesting = self._nesting

        def begin(module: nn.Module, *_: Any) -> None:
            if in_training and not module.training:
                return
            # Forwards inside a call, or inside one another, are part of that.
            if self._depth == 0 and nesting.get(name, 0) == 0:
                self._forwards[name] = self._forwards.get(name, 0) + 1
                self._forward, self._since = (name, line_of_user()), time.monotonic()
            nesting[name] = nesting.get(name, 0) + 1

        def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if not nesting.get(name):  # of a forward that was refused before it began
                return
            nesting[name] -= 1
            if self._depth or nesting[name]:
                return
            self._since = 0.0
            error = sys.exc_info()[1] if outputs is None else None
            # The error may come of a peer that was elsewhere: keep the forward as the place where this rank stands.
            if error is not None and _may_be_of_others(error):
                return  # with which the rank leaves, and says where it was
            if isinstance(error, RecipeError):  # refused before anything was exchanged
                self._forwards[name] -= 1
            self._forward = ("", "")

        self._handles += [
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        ]

    def explained(self, error: BaseException) -> CollectiveError | None:
        """Return the explanation of an error that came of the ranks' doing different things, outside of a call: in a
        forward."""
        if not isinstance(error, WeftError | RuntimeError) or str(error) == self._verdict:
            return None
        if not self._verdict and self._forward[0] and _may_be_of_others(error):
            self._verdict = _within(_EXPLAIN_SECONDS + _STUCK_SECONDS, self._await_explanation)
        return CollectiveError(self._verdict, status=1) if self._verdict else None

    def close(self, error: BaseException | None = None) -> None:
        """End the watch.  What this rank leaves with is said to the others."""
        self._has_ended = True
        while self._handles:
            self._handles.pop().remove()
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join(_STUCK_SECONDS)
        if error is not None:
            end = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            _within(_STUCK_SECONDS, lambda: self._publish(end))

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        published: object = None
        while not self._is_over.wait(_LOOK_SECONDS):
            # Read once: the main thread goes on meanwhile.
            since, last = self._since, self._calls[-1].number if self._calls else 0
            if not since or time.monotonic() - since < _STUCK_SECONDS:
                continue
            with suppress(RuntimeError):  # the store is gone with the rank that had it: its groups say so
                state = (last, dict(self._forwards), bool(self._facts()))
                text = self._spell()
                # The call has ended while its text was written: the two would not fit together.
                if self._since != since:
                    continue  # what it says is of two moments
                if published != state:
                    self._store_of_all.set(f"calls/{self._rank}", text)
                    published = state
                verdict = self._difference(self._statements())
                if verdict and self._since == since:
                    self._verdict = verdict
                    # The main thread waits in a collective that cannot end; its groups are aborted, and the error
                    # explained there.
                    release_groups(_NOBODY, set())

    def _meet(self) -> None:
        texts = gather_texts(self._spell(), self._device)
        verdict = self._difference({rank: _PublishedCalls.read(text) for rank, text in enumerate(texts)})
        if verdict:
            self._verdict = verdict
            raise CollectiveError(verdict, status=1)

    def _spell(self, end: str = "") -> str:
        calls = [[call.number, call.name, call.place] for call in list(self._calls)]
        state = [bool(self._depth), self._forwards, self._forward, dict(self._facts())]
        return json.dumps([calls, end, *state])

    @property
    def _store_of_all(self) -> dist.Store:
        assert self._store is not None
        return self._store

    def _publish(self, end: str = "") -> None:
        self._store_of_all.set(f"calls/{self._rank}", self._spell(end))

    def _statements(self) -> dict[int, _PublishedCalls]:
        """Return the calls that each rank has published so far."""
        assert self._store is not None
        keys = {rank: f"calls/{rank}" for rank in range(self._num_ranks)}
        return {
            rank: _PublishedCalls.read(self._store.get(key).decode())
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _difference(self, statements: dict[int, _PublishedCalls]) -> str:
        """The first calls that differ; empty where none do, as far as is known."""
        made: dict[int, dict[int, _Call]] = {}
        for rank, statement in statements.items():
            for call in statement.calls:
                made.setdefault(call.number, {})[rank] = call
        # The first difference is the cause, later ones follow from it.
        for _, by_rank in sorted(made.items()):
            if len({call.name for call in by_rank.values()}) > 1:
                whole = ", ".join(f"rank {rank} is in {call}" for rank, call in sorted(by_rank.items()))
                return (
                    f"the ranks do different things: {whole}. Every rank makes the same calls of its session and states"
                    " in the same order: take them out of branches that only some ranks go into (`if session.rank =="
                    " 0:` is for printing and for files of one's own)."
                )
        return self._lonely_forward(statements) or self._other_forwards(statements) or self._other_facts(statements)

    def _other_forwards(self, statements: dict[int, _PublishedCalls]) -> str:
        """A forward of the loop's own that met another in a peer's call, and so let them come apart later."""
        for model, peers in self._peers.items():
            here = {rank: statements[rank] for rank in peers if rank in statements and statements[rank].calls}
            here = {rank: call for rank, call in here.items() if call.in_call and not call.end}
            latest = max((call.number for call in here.values()), default=0)
            same = {rank: call for rank, call in here.items() if call.number == latest}
            if len({call.forwards.get(model, 0) for call in same.values()}) > 1:
                whole = ", ".join(
                    f"rank {rank} is in {call.calls[-1]} after {call.forwards.get(model, 0)} forwards of the model"
                    for rank, call in sorted(same.items())
                )
                return f"the ranks do different things: {whole} outside of their calls. {_EXCHANGED}"
        return ""

    def _other_facts(self, statements: dict[int, _PublishedCalls]) -> str:
        """Return the facts that differ in a call that ranks make alike."""
        having = {rank: statement for rank, statement in statements.items() if statement.facts}
        latest = max((fact.number for fact in having.values()), default=0)
        same = {rank: fact for rank, fact in having.items() if fact.number == latest}
        for name in dict.fromkeys(name for call in same.values() for name in call.facts):
            values: dict[str, list[int]] = {}
            for rank, call in same.items():
                values.setdefault(call.facts.get(name, "nothing"), []).append(rank)
            if len(values) > 1:
                where = ", ".join(f"rank {rank} is in {call.calls[-1]}" for rank, call in same.items())
                return f"{differs(name, values)} The ranks came apart by it: {where}."
        return ""

    def _lonely_forward(self, statements: dict[int, _PublishedCalls]) -> str:
        """A forward of the loop's own that a rank waits in, where a peer is past it without having made it."""
        for rank, statement in statements.items():
            model, place = statement.forward
            for other in self._peers.get(model, ()) if rank in self._peers.get(model, ()) else ():
                there = statements.get(other)
                # A peer in an earlier call may still come to this forward.
                if there is None or there.number <= statement.number:
                    continue
                if there.forwards.get(model, 0) < statement.forwards.get(model, 0):
                    return (
                        f"the ranks do different things: rank {rank} is in a forward of the model at {place}, rank"
                        f" {other} is in {there.calls[-1]} without it. {_EXCHANGED}"
                    )
        return ""

    def _explain(self, error: BaseException) -> CollectiveError | None:
        """Return the calls' explanation of an error: that they differ, or that a rank has left by an error of its
        own."""
        if self._verdict:
            return CollectiveError(self._verdict, status=1)
        if not _may_be_of_others(error):
            return None
        text = _within(_EXPLAIN_SECONDS + _STUCK_SECONDS, self._await_explanation)
        return CollectiveError(text, status=1) if text else None

    def _await_explanation(self) -> str:
        """Publish what this rank did, and wait until the others' calls explain its error, or all have come to this
        call."""
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        self._publish()
        while True:
            statements = self._statements()
            if verdict := self._difference(statements):
                return verdict
            left = next((rank for rank, statement in statements.items() if statement.end and rank != self._rank), None)
            if left is not None:
                return (
                    f"rank {left} has left the group ({statements[left].end}), while this one was in {self._calls[-1]}."
                )
            own = self._calls[-1].number
            # All ranks have come to this call: the error is none of theirs.
            has_come = [statement.number >= own for statement in statements.values()]
            if sum(has_come) == self._num_ranks or time.monotonic() >= deadline:
                return ""
            time.sleep(_LOOK_SECONDS / 5)


@contextmanager
def _generators_kept(device: torch.device) -> Generator[None]:
    """Put the generators back that Weft's own work moves: a step seeds torch's, a loader's iterator draws a seed."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def _within(seconds: float, ask: Callable[[], str | None]) -> str:
    """Return the result of `ask` from the store; nothing where the store is gone, or silent: torch's waits without end
    for a host that is stopped."""
    answers: list[str | None] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, name="weft-calls-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    return (answers[0] if answers else None) or ""


def _may_be_of_others(error: BaseException) -> bool:
    """Whether an error may come of what other ranks did: a collective's, Weft's or torch's own, or a checkpoint's."""
    return isinstance(error, CollectiveError | CheckpointError | dist.DistError) or "gloo" in str(error).lower()
