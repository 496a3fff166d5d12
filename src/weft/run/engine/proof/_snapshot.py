"""Everything that a forward, a loss or an optimizer may change, remembered and put back.

What a user's module, loss or optimizer keeps lies in parameters, buffers, plain attributes, the variables that a
function closes over, and the lists and dictionaries in any of these.  A snapshot goes through them without knowing a
name.  `put_back` gives every object its old content and every name its old object.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

_DEPTH = 6
"""Objects inside of objects that are gone into."""
_LARGEST = 1 << 24
"""Elements of a tensor, beside parameters and buffers, that is still copied: data sets are held by losses, too."""
_MOST_ENTRIES = 4096
"""Entries of a container that are gone into; its own content is remembered whatever its size."""
_FOREIGN = ("torch", "numpy", "builtins", "collections", "weft", "threading", "logging", "io", "_io", "re")
"""Packages whose objects (apart from modules and optimizers) are left alone: nothing of theirs belongs to a model."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OF_TORCH = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules", "training"}
"""Names in a module's `__dict__` that are torch's own, such as hooks."""


class Snapshot:
    """A copy of everything that the roots hold now.  A root is given with the prefix of its tensors' names.

    Parameters of `except_weights_of` are left alone: somebody else puts them back.
    """

    def __init__(
        self, *roots: tuple[str, object], except_weights_of: Sequence[nn.Module] = (), enters_modules: bool = True
    ) -> None:
        """`enters_modules=False`: of modules only what their classes' functions can reach is remembered."""
        self._enters_modules = enters_modules
        modules = [inner for module in except_weights_of for inner in module.modules()]
        self._left_alone = {id(inner) for inner in modules} | {id(p) for m in except_weights_of for p in m.parameters()}
        self._seen: dict[int, object] = {}
        self._undo: list[Callable[[], None]] = []
        self._tensors: dict[str, tuple[Callable[[], object], Tensor]] = {}
        self.untouchable: dict[str, tuple[Tensor, int]] = {}
        """Name → tensor too large to be copied, and its version: it must not be changed."""
        for name, root in roots:
            self._visit(name, root, 0)

    def put_back(self) -> None:
        """Give everything its old value.  Not collective."""
        # Backwards, as they were recorded: a name gets its old object before that object gets its old content.
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()

    def names(self) -> frozenset[str]:
        """Names of the tensors that are held."""
        return frozenset(self._tensors)

    def initial(self, name: str) -> Tensor:
        """A tensor as it was."""
        return self._tensors[name][1]

    def now(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that was held, by name, as it is now; what is none any more is left out."""
        for name, (read, _) in self._tensors.items():
            value = read()
            if isinstance(value, Tensor):
                yield name, value.detach()

    def changed_but_kept(self) -> list[str]:
        """Names of tensors that were too large to be copied, and were changed."""
        return [name for name, (tensor, version) in self.untouchable.items() if tensor._version != version]

    # ── going through ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen[id(value)] = value  # kept: a number of an object that is gone may be given again
        if isinstance(value, Tensor):
            self._visit_tensor(name, value)
        elif isinstance(value, nn.Module):
            self._visit_class(type(value), depth)
            if self._enters_modules:
                self._visit_module(name, value, depth)
            elif depth == 0:
                for kind in dict.fromkeys(type(inner) for inner in value.modules()):
                    self._visit_class(kind, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._visit_class(type(value), depth)
            if self._enters_modules:
                self._visit_attributes(name, value, depth, skipped=_hooks_of(value))
        elif isinstance(value, dict | list | deque | set):
            self._visit_container(name, cast(Any, value), depth)
        elif isinstance(value, tuple | frozenset):
            for index, entry in enumerate(cast(Any, value)):
                self._visit(f"{name}[{index}]", entry, depth + 1)
        elif isinstance(value, types.MethodType):
            self._visit(name, value.__self__, depth)
            self._visit(name, value.__func__, depth)
        elif isinstance(value, functools.partial):
            self._visit(name, value.func, depth)
            self._visit(name, (value.args, value.keywords), depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(name, value, depth)
        elif _is_of_user(value):
            self._visit_attributes(name, value, depth)

    def _visit_tensor(self, name: str, tensor: Tensor) -> None:
        if id(tensor) in self._left_alone:
            return
        if tensor.numel() > _LARGEST and not isinstance(tensor, nn.Parameter):
            self.untouchable[name] = (tensor, tensor._version)
            return
        if tensor.is_inference() or tensor.is_meta or tensor.layout != torch.strided:
            return
        storage, kept = tensor.detach(), tensor.detach().clone()
        requires_grad, grad = tensor.requires_grad, tensor.grad if tensor.is_leaf else None

        def undo() -> None:
            storage.copy_(kept)
            if not tensor.is_leaf:
                return
            # The content went into the storage that the tensor had; a step may have given it another one.
            if tensor.data_ptr() != storage.data_ptr() or tensor.shape != storage.shape:
                tensor.data = storage  # an assignment to .data gave it another one
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad

        self._undo.append(undo)
        self._tensors.setdefault(name, (lambda: tensor, kept))

    def _visit_class(self, kind: type, depth: int) -> None:
        """Visit the class attributes of a user's class, and the variables that its functions can reach."""
        for base in kind.__mro__:
            if id(base) in self._seen or base.__module__.partition(".")[0] in _FOREIGN:
                continue
            self._seen[id(base)] = base
            # Numbers and texts are replaced by assignment, so the name is restored; containers are changed in place, so
            # their content is.
            for leaf, value in vars(base).items():
                if isinstance(value, list | dict | deque | set | Tensor | types.FunctionType):
                    self._visit(f"{base.__qualname__}.{leaf}", value, depth + 1)
                elif isinstance(value, int | float | str | tuple) and not leaf.startswith("__"):
                    self._undo.append(functools.partial(_set_if_changed, base, leaf, value))

    def _visit_module(self, name: str, module: nn.Module, depth: int) -> None:
        parts, has_weights = module.__dict__, id(module) not in self._left_alone
        self._restore_names(parts, skipped=_OF_TORCH if has_weights else _OF_TORCH | {"_parameters"})
        for kind in ("_parameters", "_buffers"):
            tensors: dict[str, Tensor | None] = parts[kind]
            if kind == "_buffers" or has_weights:
                self._restore_names(tensors)
            for leaf, tensor in tensors.items():
                if tensor is not None:
                    self._visit(f"{name}.{leaf}", tensor, depth)
                    if kind == "_buffers" and f"{name}.{leaf}" in self._tensors:
                        kept = self._tensors[f"{name}.{leaf}"][1]
                        self._tensors[f"{name}.{leaf}"] = (functools.partial(tensors.get, leaf), kept)
        for leaf, child in module.named_children():
            self._visit(f"{name}.{leaf}", child, 0)
        for leaf, value in parts.items():
            if leaf not in _OF_TORCH and leaf not in ("_parameters", "_buffers", "_modules", "training"):
                self._visit_named(name, parts, leaf, value, depth)

    def _visit_named(self, name: str, owner: dict[str, Any], leaf: str, value: Any, depth: int) -> None:
        """An attribute: a name that may be given another tensor."""
        own = f"{name}.{leaf}"
        self._visit(own, value, depth + 1)
        if isinstance(value, Tensor) and own in self._tensors:
            self._tensors[own] = (functools.partial(owner.get, leaf), self._tensors[own][1])

    def _visit_attributes(self, name: str, value: Any, depth: int, skipped: frozenset[str] = frozenset()) -> None:
        attributes = cast(dict[str, Any], value.__dict__)
        self._restore_names(attributes, skipped)
        for leaf, entry in list(attributes.items()):
            if leaf not in skipped:
                self._visit_named(name, attributes, leaf, entry, depth)

    def _visit_container(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            entries = cast(dict[Any, Any], value)
            self._restore_names(entries)
            pairs: list[tuple[Any, Any]] = list(entries.items())
        else:
            kept = list(value)
            self._undo.append(functools.partial(_refill, value, kept))
            pairs = list(enumerate(kept))
        for key, entry in pairs[:_MOST_ENTRIES]:
            if key == "params" and "lr" in value:
                continue  # of an optimizer's group: the model's own, or views of what a plan keeps
            self._visit(f"{name}[{key!r:.40}]", entry, depth + 1)

    def _visit_function(self, name: str, function: types.FunctionType, depth: int) -> None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # a variable that has no value yet
            self._undo.append(functools.partial(setattr, cell, "cell_contents", content))
            self._visit(f"{name}.{variable}", content, depth + 1)
            if isinstance(content, Tensor) and f"{name}.{variable}" in self._tensors:
                kept = self._tensors[f"{name}.{variable}"][1]
                self._tensors[f"{name}.{variable}"] = (functools.partial(getattr, cell, "cell_contents"), kept)
        self._visit(name, (function.__defaults__, function.__kwdefaults__, dict(function.__dict__)), depth)
        # Globals of the user's own script: a loss that appends to a list at module level keeps state there.
        for variable in names_read(function):
            if variable in function.__globals__:
                self._visit_global(name, function.__globals__, variable, depth)

    def _visit_global(self, name: str, variables: dict[str, Any], variable: str, depth: int) -> None:
        value = variables[variable]
        if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            return
        if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] in _FOREIGN:
            return
        self._undo.append(functools.partial(variables.__setitem__, variable, value))
        self._visit_named(name, variables, variable, value, depth)

    def _restore_names(self, names: dict[Any, Any], skipped: frozenset[str] = frozenset()) -> None:
        """Let every name lead to its object again, and names that have come go."""
        kept = {name: value for name, value in names.items() if name not in skipped}

        def undo() -> None:
            for name in [name for name in names if name not in kept and name not in skipped]:
                del names[name]
            for name, value in kept.items():
                if name not in names or names[name] is not value:
                    names[name] = value

        self._undo.append(undo)


def _set_if_changed(owner: type, name: str, value: object) -> None:
    if vars(owner).get(name) is not value:
        setattr(owner, name, value)


def _refill(container: Any, entries: list[Any]) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(entries)


def _is_of_user(value: object) -> bool:
    """Whether an object may be something that a model or a loss keeps, and has attributes."""
    if not hasattr(value, "__dict__") or isinstance(value, type | types.ModuleType):
        return False
    return type(value).__module__.partition(".")[0] not in _FOREIGN


def names_read(function: types.FunctionType) -> frozenset[str]:
    """Return the names that a function, and those written inside of it, look up outside of their own variables."""
    names: set[str] = set()
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names)


def _hooks_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    return frozenset(name for name in optimizer.__dict__ if "hook" in name)
