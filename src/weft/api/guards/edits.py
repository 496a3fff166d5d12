"""What a loop writes into the weights between two steps: taken over where the plan trains copies, or refused."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.api.guards.structure import Structure
from weft.config.plan import Plan
from weft.errors import RecipeError
from weft.techniques.core import ModelPart, StoreSet


@dataclass(slots=True)
class _Watched:
    name: str
    parameter: nn.Parameter
    is_cut: bool
    """Whether ranks of the tensor axis have parts of it."""
    trained: Tensor
    """What trains, or its copy to compute with: the storage that the parameter had from the plan."""


@final
class Edits:
    """Knows which parameters somebody else than Weft has written to, by their versions and their storages.

    In bf16 and fp16 the weights are copies of what trains, and a write through `.data`, which has no version that could
    be read, must be known, too: there parameters tell who asks for it, between two steps, and the first steps, and then
    ever fewer, compare all weights with their masters besides.
    """

    def __init__(self, parts: Sequence[ModelPart], stores: StoreSet, plan: Plan) -> None:
        self._stores, self._plan = stores, plan
        self._watched = [
            _Watched(part.layout[name].name, each, "tensor" in part.layout[name].split_axes, each.detach())
            for part in parts
            for name, each in part.module.named_parameters()
        ]
        self._shards = stores.shards
        self._parameters = [each.parameter for each in self._watched]
        self._masters = [shard.master for shard in self._shards]
        self._has_copies = any(shard.weights is not None for shard in self._shards)
        # Alone, and without copies, what is written in place is where it is trained, and differs from nobody's.
        self._counts_writes = self._has_copies or plan.mesh.world_size > 1
        self._seen, self._versions = self._look(), _versions(self._masters)
        self._structure = Structure([part.module for part in parts])
        self._spread = [each for each in self._watched if isinstance(each.parameter, DTensor)]
        self._places = _places(self._spread)
        self._touched = False
        self._looks = self._edits = 0
        self._is_inside = False
        self._facts: dict[str, str] = {}
        self._telling = [
            each.parameter
            for each in self._watched
            if self._has_copies and type(each.parameter) is nn.Parameter and not plan.compute.compile
        ]
        self._watching = _watching(weakref.ref(self))
        self._tell(True)

    # ── told by parameters ────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, told: bool) -> None:
        """Let parameters tell who asks for `.data`, or not: each operator on one that does takes longer, by 2 % of a
        step of 5 ms in all (a Xeon core, 2026-11)."""
        kind = self._watching if told else nn.Parameter
        for each in self._telling:
            each.__class__ = kind

    def touch(self) -> None:
        """Somebody has asked for the `.data` of a parameter."""
        self._touched = self._touched or not self._is_inside

    def rebind(self, parameter: nn.Parameter, old: Tensor, new: Tensor) -> bool:
        """Somebody gives a parameter other storage.  Take its values over, and return whether that was done.

        Raises:
            RecipeError: they do not fit into what trains.
        """
        if self._is_inside or (new.data_ptr() == old.data_ptr() and new.shape == old.shape and new.dtype == old.dtype):
            return self._is_inside is False
        _check_fits(next((each.name for each in self._watched if each.parameter is parameter), "a parameter"), old, new)
        with torch.no_grad():
            parameter.copy_(new)
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
        self._tell(False)
        self._refuse_other_storage()
        has_copies = self._has_copies
        edited = self._edited()
        if _versions(self._masters) != self._versions:
            self._take_optimizers(edited, has_copies=has_copies)
        elif has_copies and (edited or self._touched or _is_due(self._looks)):
            for shard in self._shards:
                shard.take_over()
        if edited:
            self._note_edited(edited)

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
        self._tell(True)
        self._touched = self._is_inside = False

    def release(self) -> None:
        """Let a write reach what trains, and not weights that were gathered to compute with."""
        if self._plan.data_parallel.shards_weights:
            self._stores.release()

    def _refuse_other_storage(self) -> None:
        """A share that is given another tensor goes on with its own values, and torch keeps the others."""
        places = _places(self._spread)
        if places == self._places:
            return
        name = next(
            each.name for each, one, other in zip(self._spread, places, self._places, strict=True) if one != other
        )
        raise RecipeError(
            f"the loop has given {name} another tensor (`.data = …`), which does not reach the share of it that a rank"
            " trains under data_parallel.zero = 3. Write into it: `with torch.no_grad(): parameter.copy_(new)`, or"
            " use data_parallel.zero = 0, 1 or 2."
        )

    def _edited(self) -> list[_Watched]:
        """Those that were written to, as far as versions tell, or given storages of their own (`.data = …`, `set_`),
        whose values are brought to where they are trained."""
        seen = self._look()
        if seen == self._seen:
            return []
        edited: list[_Watched] = []
        for place, each in enumerate(self._watched):
            address, version = seen[place], seen[place - len(self._watched)]
            if address != self._seen[place] and not isinstance(each.parameter, DTensor):
                given = each.parameter.detach()
                _check_fits(each.name, each.trained, given)
                each.trained.copy_(given)
                each.parameter.data = each.trained
            if self._counts_writes and version != self._seen[place - len(self._watched)]:
                edited.append(each)
        self._seen = self._look()
        return edited

    def _look(self) -> list[int]:
        """The address of each parameter, and behind these its version, where it is asked for.  After a step none of
        them is in a processor's cache, so to look takes 0.2 µs for each number (a Xeon core, 2026-11)."""
        addresses = [each.data_ptr() for each in self._parameters]
        return addresses + _versions(self._parameters) if self._counts_writes else addresses

    def _follow(self) -> None:
        """Take up versions, and storages, that Weft itself has given to parameters since `settle`."""
        before, self._seen = self._seen, self._look()
        addresses = slice(len(self._watched))
        if before[addresses] != self._seen[addresses]:
            for each in self._watched:
                each.trained = each.parameter.detach()

    def take_facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks of edits since this was asked last."""
        facts, self._facts = self._facts, {}
        return facts

    def let_go(self) -> None:
        """Watch no more: parameters are torch's own again."""
        self._tell(False)
        self._structure.let_go()

    def _take_optimizers(self, edited: Sequence[_Watched], *, has_copies: bool) -> None:
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
            self._stores.publish()

    def _note_edited(self, edited: Sequence[_Watched]) -> None:
        cut = next((each.name for each in edited if each.is_cut), None)
        if cut is not None:
            raise RecipeError(
                f"the loop has changed {cut} since the last step, of which this rank has a part (mesh.tensor ="
                f" {self._plan.mesh.tensor}): what is computed of the whole (a norm, an average) would be another on"
                " each rank. Write it as a parametrization in the model, or use mesh.tensor = 1."
            )
        self._edits += 1
        mesh = self._plan.mesh
        if mesh.pipeline > 1 and len({each.name.rpartition(".")[0] for each in edited}) > 1:
            raise RecipeError(
                f"the loop has changed {edited[0].name} and {len(edited) - 1} more weights since the last step, and"
                f" other ranks have the other stages of the model (mesh.pipeline = {mesh.pipeline}): what is computed"
                " of several weights (a norm of all, an average) would be another on each. Write it as a"
                " parametrization in the model, change the weights of one module alone, or use mesh.pipeline = 1."
            )
        is_same = mesh.tensor * mesh.pipeline * mesh.context == 1 and _is_due(self._edits)
        said = [f"{each.name}{_digest(each.parameter) if is_same else ''}" for each in edited]
        if mesh.pipeline == 1:
            self._facts["what the loop has written into the weights"] = ", ".join(said)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [each._version for each in tensors]


def _places(watched: Sequence[_Watched]) -> list[int]:
    """Which storage torch knows each parameter by; a DTensor's own is empty, and stays the same."""
    return [each.parameter.untyped_storage()._cdata for each in watched]  # pyright: ignore[reportPrivateUsage]


def _check_fits(name: str, old: Tensor, new: Tensor) -> None:
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        raise RecipeError(
            f"{name} was given {_said(new)} in place of {_said(old)} after session.prepare, and the plan trains the"
            " latter. Change dtype, device and shape of a model before prepare; compute.precision says what it"
            " computes in."
        )


def _is_due(number: int) -> bool:
    return number & (number - 1) == 0 or number % 1000 == 0


def _digest(parameter: Tensor) -> str:
    if isinstance(parameter, DTensor) or not parameter.numel():
        return ""
    values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f" ({xxhash.xxh3_64_hexdigest(values.data)})"


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _watching(edits: weakref.ref[Edits]) -> type[nn.Parameter]:
    """Return a class of parameters that tell of `.data`.  It is made anew for each model, and copies and pickles are
    torch's own parameters: nothing of Weft goes with them."""
    plain: Any = cast(Any, torch.Tensor).data

    class Parameter(nn.Parameter):
        @property
        def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
            if (told := edits()) is not None:
                told.touch()
            return plain.__get__(self)

        @data.setter
        def data(self, value: Tensor) -> None:
            told = edits()
            if told is None or not told.rebind(self, plain.__get__(self), value):
                plain.__set__(self, value)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                copied = plain.__get__(self).clone(memory_format=torch.preserve_format)
                memo[id(self)] = nn.Parameter(copied, self.requires_grad)
            return memo[id(self)]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Parameter(plain.__get__(self), self.requires_grad).__reduce_ex__(protocol)

    Parameter.__module__, Parameter.__qualname__ = nn.Parameter.__module__, nn.Parameter.__qualname__
    return Parameter
