"""A training loop of one's own, under any plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.api.batches.stream import UserBatch
from weft.api.planning.arguments import refuse_without_loss
from weft.api.planning.session_plan import Planning, UserLoss
from weft.api.planning.settings import SafetyChecks
from weft.api.prepared.models import Models
from weft.api.prepared.prepared_model import PreparedModel
from weft.api.prepared.state import TrainState
from weft.api.prepared.with_loss import ModelWithLoss, Split
from weft.api.ranks.calls import RankCalls
from weft.api.ranks.exchange import RankExchange
from weft.api.ranks.recording import SessionRuns
from weft.api.ranks.supervision import ReplacedPlan
from weft.api.sessions.share_errors import explain_share
from weft.comm.device import group_store
from weft.config.plan import MeshPlan
from weft.model.families import CutTable
from weft.run.engine.proof import ProveMode
from weft.run.launch import Distributed, RankFailure
from weft.run.launch.exit_hooks import add_exit_hook

if TYPE_CHECKING:
    from weft.api.batches.sharded_loader import HandedBatch
    from weft.api.loop.own_loop import OwnLoop

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


class Session:
    """This process's place in a job.  Made by `weft.session`."""

    def __init__(
        self, distributed: Distributed, planning: Planning, runs: SessionRuns, prove: ProveMode, leaving: ExitStack
    ) -> None:
        """`leaving`: what is to be undone of the joining."""
        self.rank = distributed.rank
        self.world_size = distributed.world_size
        self.device = distributed.device
        self._distributed, self._planning, self._runs = distributed, planning, runs
        self._prove: ProveMode = prove
        self._calls = RankCalls(_store_of_session(self.rank, self.world_size), self.rank, self.world_size, self.device)
        self._nets = SafetyChecks()  # what is looked for; tests switch nets off, before `prepare`
        self._models = Models(planning, self._calls, runs, lambda: self._nets)
        self._loop: OwnLoop | None = None
        leaving.callback(register_optimizer_step_pre_hook(self._models.refuse_foreign_optimizer).remove)
        self._leaving: ExitStack | None = leaving.pop_all()
        if runs.supervised is not None:
            runs.supervised.on_leaving(self.close)
        self._stay_open = add_exit_hook(self._leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def close(self) -> None:
        """Wait for the other ranks to come here, end what prepared models run in the background, and their last rounds
        of local steps, and leave the job; nothing more can be done in it.

        The end of a `with` block does it, and so does that of a script.  Closing again does nothing.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        """Close; or leave with what the ranks know of one another, where an error has ended the session here."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        self._stay_open()
        if error is None:
            try:
                self._close_models()  # not after an error, when others may be gone whose messages it would wait for
                with self._calls.call("the end of the session", meets=True):
                    pass
            except BaseException as problem:
                self._fail(problem, leaving)
                raise
            self._calls.close()
            leaving.close()
        else:
            self._fail(error, leaving)

    def _close_models(self) -> None:
        if self._loop is not None:
            self._loop.close()
        self._models.rounds.close()
        for state in self._models:
            state.close()

    def _fail(self, error: BaseException, leaving: ExitStack) -> None:
        """Tell the other ranks the error that ends the session on this rank, and leave. Raises the explanation, where
        one is known."""
        if self._loop is not None:
            self._loop.restore()
        self._models.restore()
        self._runs.fail(error)
        models = [(state.model, state.plan) for state in self._models]
        explained = self._calls.explained(error) or explain_share(error, models)
        self._calls.close(error)
        self._runs.tell_failure()
        leaves = error if explained is None else explained
        if explained is not None:
            explained.__cause__ = error
        leaving.__exit__(type(leaves), leaves, leaves.__traceback__)
        if explained is not None:
            raise explained from error

    @property
    def rank_failure(self) -> RankFailure | None:
        """The first other rank that failed, and how; None while all live, or where no supervisor would say so (under
        torchrun).  Nothing collective can be done any more then, `save` included."""
        return self._distributed.rank_failure

    def on_change(self, callback: Callable[[ReplacedPlan], object]) -> None:
        """Have a function called on every rank, with the plans and the step, where `weft replan` has changed the plan.

        The script begins again at its top then, on as many ranks as the new plan has, and the loop goes on at the batch
        that was not finished.  The call comes when the model has its weights, before that batch.  What hangs on the
        number of ranks can be set there; under other launchers than `weft launch` it is never called.
        """
        if self._runs.supervised is not None:
            self._runs.supervised.on_change(callback)

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Print on rank 0 alone, and at once.  Not collective."""
        if self.rank == 0:
            print(*values, sep=sep, end=end, flush=True)

    @contextmanager
    def first(self, *, per_host: bool = False) -> Generator[None]:
        """A section that rank 0 goes through before the others: what it downloads or prepares, they find.

        Call on every rank.  With `per_host` the first rank of every host goes first, for folders that hosts do not
        share.  The others wait no longer than for any collective (`collective_timeout_seconds`).

        Raises:
            CollectiveError: on the others, if a rank that goes first leaves the section by an error.
        """
        info = self._planning.rank_info
        goes_first = self.rank == 0 or (per_host and info is not None and info.local_rank == 0)
        if goes_first:
            yield
        with self._calls.call("session.first()", meets=True):
            pass
        if not goes_first:
            yield

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[UserBatch],
        /,
        *,
        loss: UserLoss,
        inputs: Mapping[str, str] | None = None,
        split: Split = (),
        cut: CutTable | None = None,
        vocabulary_head: str | None = None,
        max_grad_norm: float | None = None,
        batch_size: int | None = None,
    ) -> TrainState: ...

    @overload
    def prepare(self, thing: A, /, *, split: Split = ()) -> A: ...

    @overload
    def prepare(self, first: A, second: B, /, *, split: Split = ()) -> tuple[A, B]: ...

    @overload
    def prepare(self, first: A, second: B, third: C, /, *, split: Split = ()) -> tuple[A, B, C]: ...

    @overload
    def prepare(self, first: A, second: B, third: C, fourth: D, /, *, split: Split = ()) -> tuple[A, B, C, D]: ...

    @overload
    def prepare(
        self, first: Any, second: Any, third: Any, fourth: Any, fifth: Any, /, *things: Any, split: Split = ()
    ) -> tuple[Any, ...]: ...

    def prepare(
        self,
        *things: Any,
        loss: UserLoss | None = None,
        inputs: Mapping[str, str] | None = None,
        split: Split = (),
        cut: CutTable | None = None,
        vocabulary_head: str | None = None,
        max_grad_norm: float | None = None,
        batch_size: int | None = None,
    ) -> Any:
        """Bring models and their optimizers under the session's plan.  Call on every rank with equal arguments.

        With a loss, `prepare(model, optimizer, loader, loss=…)` returns a `TrainState`, whose `step(batch)` does all of
        a step.  Without one, it returns what it was given, in its order: models, optimizers, loaders and LR schedulers,
        in any number and in one or several calls.  The loop stays what it was but for `session.backward(loss)`::

            model, optimizer, loader = session.prepare(model, optimizer, loader)
            for x, y in loader:  # this rank's share of the global batch, on the device
                loss = F.cross_entropy(model(x), y)  # a mean over this rank's samples
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        A model stays the same object of the same class with the same parameter names; its weights, which must be equal
        on all ranks (rank 0's are taken), become this rank's share: without a loss, in its first forward.  The
        optimizer stays yours and so do its schedulers.

        Args:
            things: a model, constructed on the CPU or the session's device; an optimizer over its parameters, before
                its first step; a loader, whose batch size is the global batch, whatever the number of ranks (the
                batches of a batch sampler may differ in size and length).  A model without a prepared optimizer stays
                plain, and whole on every rank.
            loss: `loss(outputs, batch)`; the batch is a microbatch in the shape that the loader gives.
            inputs: argument of the model's forward → field of the batch (by position for tuples: "0"); found by name.
            split: how modules split over the tensor axis; found for Hugging Face models.
            cut: where the model may be cut into stages; likewise.
            vocabulary_head: name of a head that only a vocabulary loss reads, which then may never hold full logits.
            max_grad_norm: clip the global gradient norm; without a loss, call `session.clip_grad_norm_`.
            batch_size: the global batch, where the loader does not say it; the largest, where batches differ.

        Raises:
            WeftError: of the class of what does not fit: model, optimizer, batches or plan.
        """
        given = {
            "inputs": inputs,
            "cut": cut,
            "vocabulary_head": vocabulary_head,
            "max_grad_norm": max_grad_norm,
            "batch_size": batch_size,
        }
        if loss is not None:
            with_loss = ModelWithLoss(self._models, self._planning, self._nets, self._prove)
            with self._calls.call("session.prepare()", meets=True):
                return with_loss.prepare(*things, loss=loss, split=split, **given)
        refuse_without_loss({**given, "ledger": self._runs.keeps_ledger or None})
        with self._calls.call("session.prepare()", meets=True):
            found = self._own_loop.take(things, split)
        return found[0] if len(found) == 1 else tuple(found)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        retain_graph: bool = False,
        is_last: bool | None = None,
    ) -> None:
        """Add a loss's gradients to those of every prepared model that it reaches, in place of `loss.backward()`.

        Args:
            loss: a scalar: the mean over this rank's samples of the batch that a prepared loader has handed out last.
                It counts with their part in the global batch, so that an uneven last batch is exact.
            reduction: `"sum"` of a loss that is a sum over this rank's samples, whose gradients add up.
            retain_graph: keep the graph for another backward of the same forward, as torch's own does.
            is_last: whether a further backward follows before `optimizer.step()`: gradients are reduced while the last
                one goes on.  By default the steps before tell which it is; a wrong guess costs time and nothing else.

        Raises:
            RecipeError: no prepared model has had a forward, the loss has no gradient, or gradients were changed.
            DataError: the loss is no scalar, or there is no such reduction.
        """
        self._own_loop.backward(loss, reduction=reduction, retain_graph=retain_graph, is_last=is_last)

    def clip_grad_norm_(
        self, model: nn.Module | torch.Tensor | Iterable[torch.Tensor], max_norm: float
    ) -> torch.Tensor:
        """Clip the gradients of a prepared model (or of its `parameters()`) to a global norm, and return what it was,
        in place of `torch.nn.utils.clip_grad_norm_`.  Between the step's last backward and `optimizer.step()`.

        Raises:
            RecipeError: it was given a part of a model's parameters, or none of a prepared model.
        """
        return self._own_loop.clip_norm(model, max_norm)

    def clip_grad_value_(self, model: nn.Module | torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """`clip_grad_norm_`, of each element by itself."""
        self._own_loop.clip_value(model, clip_value)

    @overload
    def share(self, value: A, /, *, dim: int = 0) -> A: ...

    @overload
    def share(self, first: A, second: B, /, *, dim: int = 0) -> tuple[A, B]: ...

    @overload
    def share(self, first: Any, second: Any, third: Any, /, *values: Any, dim: int = 0) -> tuple[Any, ...]: ...

    def share(self, *values: Any, dim: int = 0) -> Any:
        """Return this rank's rows of a batch that the loop has made without a loader, whole and equally on every rank::

            x, y = session.share(*get_batch())  # by offsets that the loop draws: every rank draws the same

        Call on every rank.  It stands for a prepared loader: `backward`, `mean` and `gather` count by its samples.

        Args:
            values: tensors, or tuples and dictionaries of such, with equally many samples.
            dim: where samples lie.

        Raises:
            DataError: there are no tensors, of equally many samples; or other ranks gave others.
        """
        found = self._own_loop.share(values, dim)
        return found[0] if len(found) == 1 else tuple(found)

    def mean(self, value: torch.Tensor | float) -> float:
        """Return the mean over the whole global batch, of a mean over this rank's samples of it, such as its loss."""
        return self._own_loop.mean(value)

    def gather(self, value: Any) -> Any:
        """Return what has a row for each of this rank's samples (a tensor, or a tuple or dictionary of such) for the
        whole global batch, in its order, on every rank and on the CPU.

        Raises:
            DataError: on every rank: samples do not lie along dim 0, or other ranks gave other fields.
        """
        return self._own_loop.gather(value)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that share out each global batch: all, unless the plan splits the model over some."""
        return self._together.num_data_ranks

    @property
    def local_rank(self) -> int:
        """Place of this rank on its machine."""
        return self._distributed.rank_info.local_rank

    @property
    def is_closed(self) -> bool:
        """Whether this process has left the job."""
        return self._leaving is None

    def wait(self) -> None:
        """Go on when all ranks have come here.  Call on every rank."""
        self._together.wait()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return what the rank `source` has given: tensors, numbers, texts, and lists, tuples and dictionaries of such.
        Call on every rank.

        Raises:
            DataError: on every rank; it is something else.
        """
        return self._together.broadcast(value, source)

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of each data rank, in their order, whatever its shape.  Call on every rank."""
        return self._together.all_gather(value)

    def all_reduce(
        self, value: torch.Tensor | float, operation: Literal["sum", "mean", "min", "max"] = "sum"
    ) -> torch.Tensor:
        """Return the sum, mean, smallest or largest of the data ranks' tensors, by element.  Call on every rank.

        Each data rank counts once, whatever it has of a batch: a mean over its samples is what `session.mean` makes.

        Raises:
            DataError: there is no such operation.
        """
        return self._together.all_reduce(value, operation)

    @cached_property
    def _together(self) -> RankExchange:
        plan = self._planning.plan
        mesh = MeshPlan(replicate=self.world_size) if plan is None else plan.mesh
        return RankExchange(self._calls, self.device, dist.group.WORLD if self.world_size > 1 else None, mesh)

    def save(self, folder: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Save all that was prepared without a loss: models with their optimizers, LR schedulers, the place of each
        loader in its pass, and the generators of Python, NumPy and torch.  Any later plan loads it, on any number of
        ranks.  A save that is in the folder stays until this one is whole, which then takes its place.

        Args:
            folder: of this save, which all ranks see.
            extra: further objects by name, each with `state_dict` and `load_state_dict`: tensors and plain values.

        Raises:
            RecipeError: on every rank; an object has no state, or other states on other ranks.
            CheckpointError: on every rank; it cannot be written.
        """
        with self._calls.call("session.save()", meets=True):
            return self._own_loop.saves.save(folder, extra)

    def load(self, folder: str | Path, *, extra: Mapping[str, Any] | None = None) -> int:
        """Load what `save` has written into what is prepared now, in the same order, and return its number of steps.

        It may be called before the models are, right behind `prepare`.  The next pass through a loader that was left in
        mid-pass is the rest of that pass.

        Raises:
            CheckpointError: on every rank; there is no save, it is damaged, or it is of other things.
        """
        with self._calls.call("session.load()", meets=True):
            return self._own_loop.saves.load(folder, extra)

    def state(self, model: nn.Module) -> PreparedModel:
        """Return what saves, loads and exports a model that was prepared without a loss, after its first forward."""
        return self._own_loop.state(model)

    @property
    def _own_loop(self) -> OwnLoop:
        if self._loop is None:
            from weft.api.loop.own_loop import OwnLoop  # loaded where a loop keeps its own steps

            self._loop = OwnLoop(self._models, dist.group.WORLD if self.world_size > 1 else None)
        return self._loop


class SessionInternals:
    """Methods of a session for `weft.accelerate` and `weft.fabric`, which no loop need call."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _loop(self) -> OwnLoop:
        return self._session._own_loop  # pyright: ignore[reportPrivateUsage] - of this file

    @property
    def _together(self) -> RankExchange:
        return self._session._together  # pyright: ignore[reportPrivateUsage]

    @property
    def data_index(self) -> int:
        """Place of this rank among the data ranks."""
        return self._loop.sharing.index

    @property
    def batch(self) -> HandedBatch | None:
        """Return which samples of a global batch a prepared loader has handed out last; None: none yet."""
        return self._loop.sharing.last

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole state of a model that was prepared without a loss, as its `state_dict()` was before: on
        rank 0, and nothing elsewhere where ranks hold parts of it.  Call on every rank."""
        return self._loop.weights(model, self._together.exchange_of_ranks)

    def forget(self, *things: Any) -> None:
        """Let go of what was prepared without a loss, a model with its optimizer: others may be prepared in their
        place.  Call on every rank."""
        self._loop.forget(things)

    def settle(self, *, seed: int | None = None, local_steps: int | None = None) -> None:
        """Say what `weft.session` was not told, before a model that was prepared without a loss has its first forward.
        Call on every rank.

        Args:
            seed: of what models draw from then on.
            local_steps: as that of `weft.session`.

        Raises:
            RecipeError: local steps are asked for, and a model has begun.
        """
        self._loop.settle(seed, local_steps)

    def exchange(self, value: Any) -> list[Any]:
        """Return what each data rank has given, in their order: tensors, numbers, texts, and lists, tuples and
        dictionaries of such.  Call on every rank.

        Raises:
            DataError: on every rank; it is something else.
        """
        return self._together.exchange(value)


def _store_of_session(rank: int, num_ranks: int) -> dist.Store | None:
    """A store for one session's ranks alone: each counts there how many it has had."""
    if num_ranks == 1 or not dist.is_initialized():
        return None
    store = group_store()
    return dist.PrefixStore(f"weft/session/{store.add(f'weft/sessions/{rank}', 1)}", store)
