"""Trace one forward and loss of a model on the meta device: its operators, and the tensors that it keeps for
backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor  # nothing public says so
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves, tree_map

from weft.analysis.trace._events import Event, Save, Trace, Value
from weft.analysis.trace._fused import FUSED, Fused, FusedCall
from weft.errors import RecipeError
from weft.model.attention.places import places_beside_padding
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.meta_forward import OneDevice, StandIns, on_trial, without_fast_path
from weft.model.positions import arguments_for
from weft.model.samples import draw_integers

Mode = Literal["as it is", "evaluation"]
"""How the model's forward runs: in the mode that it is in, or as it is evaluated, without gradients."""
SAMPLES = 2
"""Samples of a traced batch: batch statistics want more than one."""
LOSS = "loss"
"""Stands for the loss where a module's name is asked."""


def trace(
    blueprint: Blueprint,
    dtype: torch.dtype,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    loss: bool = True,
    watch: Callable[[Event], None] | None = None,
    fused: Fused = FUSED,
    reads: bool = False,
    modes: Sequence[Mode] = ("as it is",),
) -> Trace:
    """Run the model in `dtype` as it is (training or evaluation mode), and its loss if wanted; nothing is computed.

    The model's own tensors are not touched: meta tensors of their shapes, or the given `parameters`, stand in for the
    run.  `watch` sees every event as it happens; what it raises ends the run.  `fused`: calls that run in one kernel.
    `reads`: events tell the values of their operands, where there are any.  `modes`: how the forward runs, several
    times in one trace if there are more; `results` and `entries` are those of the first.

    Raises:
        RecipeError: the model has no example batch, its forward raises, or asks what only a real run can answer.
    """
    recorder = _Recorder(blueprint, dtype, parameters or {}, watch, fused, reads)
    return recorder.run(loss, modes)


_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
"""Calls that make a tensor's values numbers of Python."""


class FailedForward(RecipeError):
    """A forward that raised, and what it had done until then."""

    def __init__(self, message: str, events: Sequence[Event]) -> None:
        super().__init__(message)
        self.events = events


class _SavedTensorHandle:
    """Object that autograd keeps in place of a saved tensor; alive as long as its node is."""

    __slots__ = ("__weakref__",)


class _Recorder(TorchDispatchMode):
    def __init__(
        self,
        blueprint: Blueprint,
        dtype: torch.dtype,
        parameters: Mapping[str, Tensor],
        watch: Callable[[Event], None] | None,
        fused: Fused,
        reads: bool,
    ) -> None:
        super().__init__()
        self._blueprint, self._dtype, self._watch, self._fused, self._reads = blueprint, dtype, watch, fused, reads
        self._stand_ins = StandIns()
        self._events: list[Event] = []
        self._saves: list[tuple[Save, weakref.ref[_SavedTensorHandle]]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._per_sample: set[int] = set()
        self._entries: dict[str, tuple[int, Value]] = {}
        self._exits: dict[str, int] = {}
        self._results: dict[str, tuple[Value | None, ...]] = {}
        self._num_runs: Counter[str] = Counter()
        self._touched: dict[int, set[str]] = {}
        self._modules: list[str] = [""]
        self._call = 0
        self._paused = False
        self._inner: dict[int, Value] = {}
        self._fields: dict[str, Value] = {}
        self._tensors = _stand_in_tensors(blueprint, dtype, parameters)
        self._parameters, self._buffers = self._name_storages(parameters)

    def run(self, loss: bool, modes: Sequence[Mode]) -> Trace:
        module = self._blueprint.module
        fields = _fields(self._blueprint, self._dtype)
        self._fields = {name: self.value(tensor) for name, tensor in fields.items()}
        self._per_sample.update(value.storage for value in self._fields.values())
        arguments = arguments_for(self._blueprint.module, self._blueprint.keywords(fields))
        with ExitStack() as stack:
            stack.enter_context(self._hooked(module))
            stack.enter_context(without_fast_path())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            stack.enter_context(self)
            stack.enter_context(OneDevice())
            stack.enter_context(_Functions(self))
            with self._explained(module):
                outputs: Any = None
                results: list[tuple[Value, ...]] = []
                for mode in modes:
                    with _evaluating(module) if mode == "evaluation" else nullcontext():
                        outputs = torch.func.functional_call(module, self._each_once(), *arguments, tie_weights=False)
                    results.append(tuple(self.value(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)))
                loss_event = len(self._events)
                self._modules.append(LOSS)
                total = on_trial(self._blueprint.loss)(outputs, fields) if loss else None
        made = self._finished(tuple(results), loss_event)
        del outputs, total
        return made

    @contextmanager
    def _explained(self, module: nn.Module) -> Generator[None]:
        try:
            yield
        except FailedForward:
            raise
        except RecipeError as problem:
            raise FailedForward(str(problem), self._events) from problem
        except Exception as problem:
            first = next(iter(str(problem).splitlines()), "")
            raise FailedForward(
                f"{type(module).__name__} cannot be described: its forward or its loss raised"
                f" {type(problem).__name__}: {first.rstrip('.')}. Make one forward of its example batch work first.",
                self._events,
            ) from problem

    def _finished(self, outputs: tuple[tuple[Value, ...], ...], loss_event: int) -> Trace:
        return Trace(
            samples=SAMPLES,
            events=self._events,
            saves=[save for save, handle in self._saves if handle() is not None],
            storage_bytes={key: storage.nbytes() for key, storage in self._storages.items()},
            storage_dtypes=self._dtypes,
            parameters=self._parameters,
            buffers=self._buffers,
            per_sample=frozenset(self._per_sample),
            entries=self._entries,
            exits=self._exits,
            results=self._results,
            num_runs=self._num_runs,
            touched={storage: frozenset(modules) for storage, modules in self._touched.items()},
            inputs=self._fields,
            outputs_of=outputs,
            loss_event=loss_event,
            notes=tuple(self._stand_ins.notes),
        )

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor, whose storage is kept from now on: so no other gets its address."""
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] # looking is no call of the model's
            recorded = Value.of(tensor)
        if recorded.storage not in self._storages:
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
                self._storages[recorded.storage], self._dtypes[recorded.storage] = (
                    tensor.untyped_storage(),
                    tensor.dtype,
                )
        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one ATen operator and write it down."""
        result = self._stand_ins.run(func, args, kwargs or {}, self._modules[-1])
        if not self._paused:
            self._note(func.overloadpacket.__name__, args, kwargs or {}, result, mutates=func._schema.is_mutable)
        return result

    def touch(self, tensors: Iterable[Any]) -> None:
        """Note what a function was called with, or asked for; tensors inside a `torch.vmap` have no storage."""
        for leaf in tensors:
            if isinstance(leaf, Tensor) and not self._paused and not is_batchedtensor(leaf):
                self._touched.setdefault(self.value(leaf).storage, set()).add(self._modules[-1])

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call of the model or the loss, in one kernel where devices have one."""
        self._call += 1
        if func in _READS:  # what they read is seen by no operator
            self._note(func.__name__, args[:1], {}, None)
        fused = self._fused.get(func)
        if fused is None:
            return func(*args, **kwargs)
        planned: FusedCall | None = fused(args, kwargs)
        if planned is None:
            return func(*args, **kwargs)
        if planned.composed:
            with _Functions(self):
                return planned.run()
        self._paused, first = True, len(self._saves)
        try:
            result = planned.run()
        finally:
            self._paused = False
        if planned.name is not None:
            within = [save.storage for save, _ in self._saves[first:]]
            self._note(planned.name, planned.operands, planned.settings, result, within=within)
        return result

    def _note(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        mutates: bool = False,
        within: Sequence[int] = (),
    ) -> None:
        """`within` are storages that a fused kernel keeps: those that are not its operands it has made."""

        def convert(leaf: Any) -> Any:
            return self.value(leaf) if isinstance(leaf, Tensor) else leaf

        arguments, keywords = tree_map(convert, tuple(args)), tree_map(convert, dict(kwargs))
        inputs = tuple(leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Value))
        outputs = tuple(self.value(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        known = {value.storage for value in (*inputs, *outputs)}
        outputs += tuple(self._inner[key] for key in dict.fromkeys(within) if key not in known)
        if any(value.storage in self._per_sample for value in inputs):
            self._per_sample.update(value.storage for value in outputs if value.storage not in self._parameters)
        self._events.append(
            Event(
                index=len(self._events),
                name=name,
                arguments=arguments,
                keywords=keywords,
                inputs=inputs,
                outputs=outputs,
                module=self._modules[-1],
                call=self._call,
                mutates=mutates,
                reads=_values((args, kwargs)) if self._reads else (),
            )
        )
        if self._watch is not None:
            self._watch(self._events[-1])

    def _pack(self, tensor: Tensor) -> _SavedTensorHandle:
        handle, value = _SavedTensorHandle(), self.value(tensor)
        if self._paused:
            self._inner[value.storage] = value
        self._saves.append((Save(value.storage, self._call), weakref.ref(handle)))
        return handle

    def _unpack(self, handle: Any) -> Tensor:
        raise RecipeError(
            "the model's forward or its loss runs a backward of its own, which cannot be described without a real run."
            " Take the gradient outside the forward."
        )

    @contextmanager
    def _hooked(self, module: nn.Module) -> Generator[None]:
        """Hook all modules within, so that each event knows which module is running."""
        with ExitStack() as stack:
            for name, child in module.named_modules():
                if name:
                    enter = child.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True)
                    leave = child.register_forward_hook(partial(self._leave, name), always_call=True)
                    stack.callback(enter.remove)
                    stack.callback(leave.remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if first is not None and name not in self._entries:
            self._entries[name] = (len(self._events), self.value(first))
        self._modules.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._exits[name] = len(self._events)
        self._num_runs[name] += 1
        if name not in self._results:
            leaves = tree_leaves(output)
            self._results[name] = tuple(self.value(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
        while len(self._modules) > 1 and self._modules.pop() != name:
            pass

    def _each_once(self) -> dict[str, Tensor]:
        """The stand-ins under one name of each module: torch puts them in and takes them out name by name, and a module
        that has two would keep them."""
        owners = {name for name, _ in self._blueprint.module.named_modules()}
        return {name: tensor for name, tensor in self._tensors.items() if name.rpartition(".")[0] in owners}

    def _name_storages(self, tensors: Mapping[str, Tensor]) -> tuple[dict[int, tuple[str, ...]], dict[int, str]]:
        """Storages of the stand-ins and of the real tensors, for modules that hold on to those."""
        parameters: dict[int, tuple[str, ...]] = {}
        buffers: dict[int, str] = {}
        module = self._blueprint.module
        owners = dict(module.named_parameters(remove_duplicate=False))
        for name, tensor in self._tensors.items():
            keys = {self.value(tensor).storage}
            if name in owners:
                keys.add(self.value(owners[name]).storage)
                for key in keys:
                    parameters[key] = (*parameters.get(key, ()), name)
            else:
                buffers |= dict.fromkeys(keys, name)
        return parameters, buffers


@contextmanager
def _evaluating(module: nn.Module) -> Generator[None]:
    """Run the forward as the engine evaluates (`weft.techniques.core.evaluating`)."""
    training = [inner for inner in module.modules() if inner.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for inner in training:
            inner.training = True


def _values(given: Any) -> tuple[tuple[bool, str, int], ...]:
    """The values of tensors that have any: floats of activations and weights have none here."""
    values: list[tuple[bool, str, int]] = []
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor) and not leaf.is_meta and not is_batchedtensor(leaf):
                # Indices of all samples, one behind the other, are told as those of one.
                is_flat = leaf.dim() == 1 and leaf.numel() > SAMPLES and leaf.numel() % SAMPLES == 0
                by_sample = leaf.reshape(SAMPLES, -1) if is_flat and not leaf.is_floating_point() else leaf
                is_equal = by_sample.dim() > 1 and leaf.shape[0] and bool((by_sample == by_sample[:1]).all())
                rows = by_sample[0] if is_equal else leaf
                # As bytes: a mask of thousands of tokens squared would take seconds as numbers of Python.
                # One entry may keep the stride of what it was taken from, which a copy does not.
                content = (
                    rows.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
                )
                values.append((rows.numel() == 1, str(rows.dtype), hash(content)))
    return tuple(values)


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recorder.touch((*args, *(kwargs or {}).values()))
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **(kwargs or {}))
        return self._recorder.call(func, args, kwargs or {})


def _stand_in_tensors(blueprint: Blueprint, dtype: torch.dtype, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers by name, on meta and in `dtype`; what is tied stays tied, small integer buffers real."""
    made: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    module = blueprint.module
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    for name, tensor in (*parameters, *buffers):
        if id(tensor) not in made:
            made[id(tensor)] = given[name] if name in given else _stand_in(name, tensor, dtype, blueprint.keep_dtype)
        tensors[name] = made[id(tensor)]
    return tensors


def _stand_in(name: str, tensor: Tensor, dtype: torch.dtype, keep: Sequence[str]) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()  # counts of a batch norm: the forward adds to them
    keeps = any(fnmatchcase(name, pattern) for pattern in keep)
    stand_in = torch.empty(tensor.shape, dtype=tensor.dtype if keeps else dtype, device="meta")
    return nn.Parameter(stand_in, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stand_in


def _fields(blueprint: Blueprint, dtype: torch.dtype) -> dict[str, Tensor]:
    """A batch: floats on meta, integers real, all of them permissible."""
    example = blueprint.example
    if example is None and blueprint.sequence_length is not None:  # whatever it reads has one entry per token
        example = token_example(blueprint.sequence_length, blueprint.inputs.values())
    if example is None:
        raise RecipeError(
            f"{type(blueprint.module).__name__} brings no example batch, so nobody knows the shapes of its inputs."
            " Give its Blueprint an `example`."
        )
    generator = torch.Generator().manual_seed(0)
    fields: dict[str, Tensor] = {}
    for name, like in example(SAMPLES).items():
        fields[name] = _field(blueprint, name, like, dtype, generator)
    if blueprint.padding_token is not None:
        fields["tokens"][:, ::3] = blueprint.padding_token  # enough to show how a forward counts beside it
        if "positions" in fields:
            fields["positions"] = places_beside_padding(fields["tokens"], blueprint.padding_token)
    return fields


def _field(blueprint: Blueprint, name: str, like: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.empty(like.shape, dtype=dtype, device="meta")
    if name == "positions":
        return torch.arange(like.shape[-1]).expand(like.shape).contiguous()
    if name == "document_ids":
        return torch.zeros(like.shape, dtype=like.dtype)
    if like.dtype == torch.bool or name == "attention_mask":
        return torch.ones(like.shape, dtype=like.dtype)
    high = 2 if name == "labels" else blueprint.vocabulary_size or 2
    return draw_integers(blueprint.samples.get(name), like.shape, high, generator).to(like.dtype)
