"""Watch what a loop does to a model between two steps. Writes into weights are taken over where the plan trains copies,
or refused; parameters that are taken out or exchanged are refused."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from weft.api.guards.reads_of_parts import DIFFERS, ZERO, HeldWeight, PartReads, digests_of, module_of
from weft.api.guards.state_checks import digest_of, is_due
from weft.api.guards.watched_parameters import ReadWatcher, refuse_part_of_sum, watched_class
from weft.config.plan import BATCH_AXES, Axis, Plan
from weft.errors import RecipeError
from weft.techniques.core import ModelPart, ParameterLayout, ReducerSet


@dataclass(slots=True)
class _WatchedParameter:
    name: str
    parameter: nn.Parameter
    cut_by: Axis | None
    """The axis whose ranks have parts of it, other than those that only share out a step's samples."""
    trained: Tensor
    """The storage that trains, or its copy to compute with: the one that the parameter had from the plan."""


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """What an optimizer's parameter groups hold of a parameter."""

    name: str
    tensor: Tensor
    layout: ParameterLayout
    is_cut_by_zero: bool
    """Whether other ranks update other parts of the weights."""


@dataclass(frozen=True, slots=True)
class _WriteMarks:
    """Marks by which a write into parameters is seen."""

    addresses: list[int]
    versions: list[int]
    """Empty: nobody asks for them."""
    strides: list[tuple[int, ...]]
    """Strides of those that keep their address and shape when they are turned (`p.data = p.data.t()`)."""


@final
class ParameterEdits:
    """Knows which parameters somebody else than Weft has written to, by their versions and their storages.

    In bf16 and fp16 the weights are copies of what trains, and a write through `.data`, which has no version that could
    be read, must be known, too: there parameters tell who asks for it, between two steps, and the first steps, and then
    ever fewer, compare all weights with their masters besides.

    Where ranks have parts of the model, a value that is computed of a part (a norm, an average) is another on each
    rank, and so would be what is written by it.  There parameters tell, too, who reads them.
    """

    def __init__(
        self, parts: Sequence[ModelPart], stores: ReducerSet, plan: Plan, of_optimizer: Sequence[OptimizerTensor] = ()
    ) -> None:
        """`of_optimizer` is what the optimizer's parameter groups hold."""
        self._stores, self._plan = stores, plan
        self._watched = [
            _WatchedParameter(part.layout[name].name, parameter, _cut_by(part.layout[name]), parameter.detach())
            for part in parts
            for name, parameter in part.module.named_parameters()
        ]
        self._shards = stores.shards
        self._parameters = [watched.parameter for watched in self._watched]
        self._masters = [shard.master for shard in self._shards]
        self._has_copies = any(shard.weights is not None for shard in self._shards)
        # Alone, and without copies, what is written in place is where it is trained, and differs from nobody's.
        self._counts_writes = self._has_copies or plan.mesh.world_size > 1
        self._turnable = [
            place
            for place, parameter in enumerate(self._parameters)
            if len(longer := [size for size in parameter.shape if size > 1]) > len(set(longer))
        ]
        """Places of parameters with two dimensions of one size."""
        self._seen, self._versions = self._look(), _versions(self._masters)
        self._structure = ModuleStructure([part.module for part in parts])
        self._spread = [watched for watched in self._watched if isinstance(watched.parameter, DTensor)]
        self._places = _places(self._spread)
        self._touched = False
        self._looks = self._edits = 0
        self._is_inside = False
        self.has_parts = plan.mesh.pipeline > 1 or any(watched.cut_by for watched in self._watched)
        """Whether ranks have parts of the model, by another plan than ZeRO-3, whose shares know what they are of."""
        self._lent: dict[int, list[Tensor]] = {}
        """Digests of parameters of which the loop has `.data`, as they were when it asked."""
        self._facts: dict[str, str] = {}
        self._watched_parameters = [
            watched.parameter
            for watched in self._watched
            if type(watched.parameter) is nn.Parameter
            and (self.has_parts or (self._has_copies and not plan.compute.compile))
        ]
        self._buffers = [
            (known.name if (known := part.layout.entries.get(name)) else name, buffer)
            for part in parts
            for name, buffer in part.module.named_buffers()
            if self.has_parts
        ]
        self._buffers_seen: list[tuple[int, int]] = []
        self._written_buffers: list[str] = []
        """Those that the loop has written into since the last step."""
        held = [
            HeldWeight(each.name, each.parameter, f"mesh.{each.cut_by}" if each.cut_by else "")
            for each in self._watched
        ]
        held += [HeldWeight(each.name, each.tensor, _part_by(each), of_optimizer=True) for each in of_optimizer]
        self._reads = PartReads(held, [part.module for part in parts], plan)
        reader = ReadWatcher(weakref.ref(self))
        self._watched_class = watched_class(weakref.ref(self), reader if self.has_parts else None)
        self._part_class = reader.part_class
        self._watched_of_optimizer = [
            each.tensor for each in of_optimizer if self.has_parts or any(map(_part_by, of_optimizer))
        ]
        self._is_watching = False
        self.watch(True)

    # ── told by parameters ────────────────────────────────────────────────────────────────────────────────────────────

    def watch(self, on: bool) -> None:
        """Switch on, or off, that parameters report reads of `.data` and of values: each operator on a reporting one
        takes longer, by 2 % of a step of 5 ms in all (a Xeon core, 2026-11)."""
        if on is not self._is_watching:
            self._is_watching = on
            self._look_at_buffers(is_first=on)
            if self._spread:
                refuse_part_of_sum(on)
            kind = self._watched_class if on else nn.Parameter
            # Weft itself computes with torch's own class, which reports nothing.
            for parameter in self._watched_parameters:
                parameter.__class__ = kind
            part_class = self._part_class if on else Tensor
            for part in self._watched_of_optimizer:
                part.__class__ = part_class

    @property
    def listens(self) -> bool:
        """Whether the loop has its turn."""
        return self._is_watching and not self._is_inside

    def _look_at_buffers(self, *, is_first: bool) -> None:
        seen, self._buffers_seen = (
            self._buffers_seen,
            [(buffer.data_ptr(), buffer._version) for _, buffer in self._buffers],
        )
        if not is_first and seen != self._buffers_seen:
            changed = zip(self._buffers, seen, self._buffers_seen, strict=True)
            self._written_buffers += [name for (name, _), one, other in changed if one != other]

    def touch(self, parameter: Tensor, data: Tensor) -> None:
        """Somebody has asked for the `.data` of a parameter, by which it may write."""
        if self._is_inside:
            return
        self._touched = True
        if self.has_parts:
            self._reads.read([id(parameter)])
            if id(parameter) not in self._lent:
                self._lent[id(parameter)] = digests_of(data)

    def read(self, parameters: Iterable[Tensor]) -> None:
        """Note that the loop has computed something of parameters."""
        if not self._is_inside:
            self._reads.read(map(id, parameters))

    def read_across(self, weights: Iterable[int]) -> None:
        """Somebody has computed of weights what is not computed element by element."""
        if not self._is_inside:
            self._reads.read_across(weights)

    def rebind(self, parameter: nn.Parameter, old: Tensor, new: Tensor) -> bool:
        """Copy the values of the storage that the loop gives a parameter, and return whether that was done.

        Raises:
            RecipeError: they do not fit into what trains.
        """
        if self._is_inside or (new.data_ptr() == old.data_ptr() and _form(new) == _form(old)):
            return self._is_inside is False
        _check_fits(
            next((watched.name for watched in self._watched if watched.parameter is parameter), "a parameter"), old, new
        )
        with torch.no_grad():
            parameter.copy_(new.clone() if new.data_ptr() == old.data_ptr() else new)  # its own, turned
        return True

    # ── told by the guard ─────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def settle(self, *, gathered: bool = False) -> None:
        """Take over what was written since `note`, before Weft does anything with the model.

        Raises:
            RecipeError: it cannot be taken over under this plan; it says how to write it.
        """
        self._is_inside = True
        if not gathered:
            self.release()
            self._structure.check()
        self._looks += 1
        self.watch(False)
        self._refuse_other_storage()
        has_copies = self._has_copies
        edited = self._edited()
        if self._lent:
            known, lent = {id(parameter) for parameter in edited}, self._written_through_data()
            edited += [parameter for parameter in lent if id(parameter) not in known]
        if _versions(self._masters) != self._versions:
            self._take_optimizers(edited, has_copies=has_copies)
        # Comparing all copies with their masters reads every weight: done where a mark has changed, and else rarely,
        # for writes that leave no mark.
        elif has_copies and (edited or self._touched or is_due(self._looks)):
            for shard in self._shards:
                shard.take_over()
        if edited:
            self._note_edited(edited)
        names, self._written_buffers = self._written_buffers, []
        for name in names:
            self._reads.refuse(name)
        self._reads.check_values()
        self._facts |= self._reads.attributes_set()
        self._reads.forget()

    def note(self, *, gathered: bool = False) -> None:
        """Weft has done what it had to do: what is written from now on is somebody else's.  Unless what is `gathered`
        is still needed, ZeRO-3's weights are shards from now on."""
        if not gathered and self._plan.data_parallel.shards_weights:  # whose gathers put others in the modules
            self._stores.release()
            self._structure.note()
        self._versions, self._places = _versions(self._masters), _places(self._spread)
        if (
            self._plan.data_parallel.shards_weights or self._has_copies
        ):  # elsewhere a step writes into the masters alone
            self._follow()
        self.watch(not (gathered and self.has_parts))  # a manual step's own forwards read weights as a step does
        self._lent = {}
        self._reads.remember()
        self._touched = self._is_inside = False

    def release(self) -> None:
        """Release gathered weights, so that a write reaches the shards that train."""
        if self._plan.data_parallel.shards_weights:
            self._stores.release()

    def _refuse_other_storage(self) -> None:
        """A share that is given another tensor goes on with its own values, and torch keeps the others."""
        places = _places(self._spread)
        if places == self._places:
            return
        name = next(
            parameter.name
            for parameter, one, other in zip(self._spread, places, self._places, strict=True)
            if one != other
        )
        raise RecipeError(
            f"the loop has given {name} another tensor (`.data = …`), which does not reach the share of it that a rank"
            " trains under data_parallel.zero = 3. Write into it: `with torch.no_grad(): parameter.copy_(new)`, or"
            " use data_parallel.zero = 0, 1 or 2."
        )

    def _edited(self) -> list[_WatchedParameter]:
        """Return the parameters that were written to, as far as versions show it, or given storages of their own
        (`.data = …`, `set_`). Their values are copied to where they are trained."""
        seen, known = self._look(), self._seen
        if seen == known:
            return []
        # `parameter.data = parameter.data.t()` keeps address, and version, of a square matrix: only strides tell.
        turned = {
            place for place, one, two in zip(self._turnable, seen.strides, known.strides, strict=True) if one != two
        }
        edited: list[_WatchedParameter] = []
        for place, watched in enumerate(self._watched):
            is_turned = place in turned
            is_other = is_turned or seen.addresses[place] != known.addresses[place]
            if is_other and not isinstance(watched.parameter, DTensor):
                data = watched.parameter.detach()
                _check_fits(watched.name, watched.trained, data)
                # A view of the same storage must be copied before it is written into it.
                watched.trained.copy_(data.clone() if is_turned else data)
                watched.parameter.data = watched.trained
            if self._counts_writes and (is_other or seen.versions[place] != known.versions[place]):
                edited.append(watched)
        self._seen = self._look()
        return edited

    def _written_through_data(self) -> list[_WatchedParameter]:
        """Return the parameters whose `.data` the loop has asked for and whose values have changed since."""
        lent = [
            (watched, self._lent[id(watched.parameter)])
            for watched in self._watched
            if id(watched.parameter) in self._lent
        ]
        now = [digests_of(parameter.parameter.detach()) for parameter, _ in lent]
        return [each for (each, then), sums in zip(lent, now, strict=True) if not all(map(torch.equal, then, sums))]

    def _look(self) -> _WriteMarks:
        """Return the present marks of all parameters.  After a step no parameter is in a processor's cache, so to read
        one number takes 0.2 µs (a Xeon core, 2026-11)."""
        return _WriteMarks(
            addresses=[parameter.data_ptr() for parameter in self._parameters],
            versions=_versions(self._parameters) if self._counts_writes else [],
            strides=[self._parameters[place].stride() for place in self._turnable],
        )

    def _follow(self) -> None:
        """Take up versions, and storages, that Weft itself has given to parameters since `settle`."""
        before, self._seen = self._seen, self._look()
        if before.addresses != self._seen.addresses:
            for watched in self._watched:
                watched.trained = watched.parameter.detach()

    def take_facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks of edits since this was asked last."""
        facts, self._facts = self._facts, {}
        return facts

    def restore(self) -> None:
        """Watch no more: parameters are torch's own again."""
        self.watch(False)
        self._structure.restore()

    def _take_optimizers(self, edited: Sequence[_WatchedParameter], *, has_copies: bool) -> None:
        """The optimizer has changed what it trains between two steps, as those do that average weights."""
        data = self._plan.data_parallel
        cut = any(shard.cut_group is not None for shard in self._shards) and not data.shards_weights
        if cut or (edited and has_copies):
            raise RecipeError(
                "the optimizer has changed weights outside of a step (as train() and eval() of one that averages them"
                " do), and under this plan the model has copies, which would differ. Use data_parallel.zero = 0"
                " or 3, and leave the model's parameters alone in between."
            )
        if has_copies:
            self._stores.gather_weights()

    def _note_edited(self, edited: Sequence[_WatchedParameter]) -> None:
        if self.has_parts:
            self._refuse_of_parts(edited)
        self._reads.refuse(edited[0].name)
        self._edits += 1
        mesh = self._plan.mesh
        # Only data ranks have equal values; digests of them are compared rarely, for they read every weight.
        is_same = mesh.tensor * mesh.pipeline * mesh.context == 1 and is_due(self._edits)
        said = [f"{parameter.name}{_values_of(parameter.parameter) if is_same else ''}" for parameter in edited]
        if mesh.pipeline == 1:
            self._facts["what the loop has written into the weights"] = ", ".join(said)

    def _refuse_of_parts(self, edited: Sequence[_WatchedParameter]) -> None:
        """Refuse what may have been computed of parts of the model."""
        mesh, first = self._plan.mesh, edited[0]
        if (cut := next((parameter for parameter in edited if parameter.cut_by), None)) is not None:
            raise RecipeError(
                f"the loop has changed {cut.name} since the last step, {self._part_of(cut)}: what is computed of the"
                f" whole {DIFFERS}, or use mesh.{cut.cut_by} = 1."
            )
        if mesh.pipeline > 1 and len({module_of(parameter.name) for parameter in edited}) > 1:
            raise RecipeError(
                f"the loop has changed {first.name} and {len(edited) - 1} more weights since the last step, and other"
                f" ranks have the other stages of the model (mesh.pipeline = {mesh.pipeline}): what is computed of"
                f" several weights {DIFFERS}, change the weights of one module alone, or use mesh.pipeline = 1."
            )

    def _part_of(self, cut: _WatchedParameter) -> str:
        return f"of which this rank has a part (mesh.{cut.cut_by} = {getattr(self._plan.mesh, cut.cut_by or '')})"


def _cut_by(layout: ParameterLayout) -> Axis | None:
    return next((axis for axis in layout.split_axes if axis not in BATCH_AXES), None)


def _part_by(held: OptimizerTensor) -> str:
    axis = _cut_by(held.layout)
    return f"mesh.{axis}" if axis else ZERO if held.is_cut_by_zero else ""


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _places(watched: Sequence[_WatchedParameter]) -> list[tuple[int, ...]]:
    """Return the storage that torch knows each parameter by, and its strides. A DTensor's own storage is empty, and
    stays the same."""
    return [(entry.parameter.untyped_storage()._cdata, *entry.parameter.stride()) for entry in watched]  # pyright: ignore[reportPrivateUsage]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _check_fits(name: str, old: Tensor, new: Tensor) -> None:
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        raise RecipeError(
            f"{name} was given {_said(new)} in place of {_said(old)} after session.prepare, and the plan trains the"
            " latter. Change dtype, device and shape of a model before prepare; compute.precision says what it"
            " computes in."
        )


def _values_of(parameter: Tensor) -> str:
    return "" if isinstance(parameter, DTensor) or not parameter.numel() else f" ({digest_of(parameter)})"


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


@final
class ModuleStructure:
    """Knows the parameters of a rank's modules, and refuses to go on without them.

    What a loop adds (a teacher, an average, a metric) is its own affair.  Each step looks at the parameters and at the
    numbers of submodules.  A submodule in another's place is told by torch when it is registered: to look at all of
    them, too, takes 0.3 % of a step of 5 ms.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self._is_touched = False
        self._handle = register_module_module_registration_hook(_RegistrationHook(weakref.ref(self)))
        self._known = _names(parts)
        self._homes: list[Collection[Any]] = []
        """The dictionaries in which modules hold their parameters, as they are at any time."""
        self._parameters: list[Any] = []
        self._children: list[dict[str, Any]] = []
        self._numbers: list[int] = []
        self._look()

    def touch(self) -> None:
        """Some module of the process was given another."""
        self._is_touched = True

    def restore(self) -> None:
        """Watch no more."""
        self._handle.remove()

    def note(self) -> None:
        """Note that the present values are as Weft has left them."""
        if not self._is_same():
            self._known = _names(self._parts)
            self._look()

    def check(self) -> None:
        """Refuse what the loop has done since `note`.

        Raises:
            RecipeError: a parameter was taken out, or has another one in its place.
        """
        if not self._is_touched and self._is_same():
            return
        self._is_touched = False
        now = _names(self._parts)
        for name, parameter in self._known.items():
            if now.get(name) is not parameter:
                what = f"put another parameter in the place of {name}" if name in now else f"taken {name} out"
                raise RecipeError(
                    f"the loop has {what} since session.prepare, and the plan trains, saves and exports those that"
                    " prepare was given. Write into a weight (`with torch.no_grad(): parameter.copy_(new)`), or change"
                    " the model before prepare: state.export() first, and a new session with the changed model."
                )
        self._look()

    def _look(self) -> None:
        modules = [module for part in self._parts for module in part.modules()]
        self._homes = [own.values() for module in modules if (own := vars(module)["_parameters"])]
        self._children = [own for module in modules if (own := vars(module)["_modules"])]
        self._parameters, self._numbers = [*chain.from_iterable(self._homes)], [*map(len, self._children)]

    def _is_same(self) -> bool:
        if [*map(len, self._children)] != self._numbers:
            return False
        parameters = [*chain.from_iterable(self._homes)]
        return len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))


class _RegistrationHook:
    """Tells of every module that is registered.  Weak, as torch holds it until it is taken out."""

    def __init__(self, structure: weakref.ref[ModuleStructure]) -> None:
        self._structure = structure

    def __call__(self, *_: Any) -> None:
        if (structure := self._structure()) is not None:
            structure.touch()


def _names(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {name: parameter for part in parts for name, parameter in part.named_parameters(remove_duplicate=False)}
