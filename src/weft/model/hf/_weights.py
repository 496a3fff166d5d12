"""Initial weights of Hugging Face models: from safetensors beside the config, else drawn as the model's class says."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from weft.config.document import JsonObject, is_plain_name, read_plain_file
from weft.errors import RecipeError
from weft.model.blueprint import Initialiser
from weft.model.hf._conversion import converted
from weft.model.hf._deferred import DeferredBuild
from weft.model.seeding import seeded
from weft.model.stored import Box, StoredTensor

_UNSET = torch.iinfo(torch.int64).min
"""A whole number that nobody has set."""
_DRAWN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm)
"""Modules of which `_init_weights` draws everything."""
_COPY = "Copy the model's folder again from where you trust it."
_NARROWEST = 2
"""Bytes of the narrowest number that weights are trained from."""


def random_initialiser(model: Any) -> Initialiser:
    """Draw a module's own tensors by the class's `_init_weights`, then by that of every module around it.

    The latter matters where a parent rules over its children (GPT-2 narrows the outputs of its blocks).  Everything
    else of the model is on the meta device, where drawing costs nothing and takes nothing from the generator.
    """
    skeleton = copy.deepcopy(model)
    constructed = _Constructed(skeleton)

    def initialise(name: str, module: nn.Module) -> None:
        _uninitialised(name, module)
        if not name:
            skeleton._init_weights(module)
            constructed.fill(name, module)
            return
        parent_name, _, leaf = name.rpartition(".")
        parent = skeleton.get_submodule(parent_name)
        before = getattr(parent, leaf)
        parent._modules[leaf] = module
        try:
            parts = name.split(".")
            for depth in range(len(parts), -1, -1):
                path = ".".join(parts[:depth])
                _innermost(skeleton, path)._init_weights(skeleton.get_submodule(path))
        finally:
            parent._modules[leaf] = before
        constructed.fill(name, module)

    return initialise


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype == torch.int64 and bool((tensor == _UNSET).any())


class _Constructed:
    """Tensors that a model's constructors set and its `_init_weights` does not: tokens and scales of their own.

    The whole model is really constructed once, where such a tensor is first met, always from the same seed, so that all
    ranks have the same; only these tensors are kept.
    """

    def __init__(self, skeleton: Any) -> None:
        self._skeleton = skeleton
        self._tensors: dict[str, Tensor] | None = None

    def fill(self, name: str, module: nn.Module) -> None:
        """Fill what is unset of a module's own tensors.

        Raises:
            RecipeError: the constructor leaves it unset, too.
        """
        named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        unset = {leaf: tensor for leaf, tensor in named if _is_unset(tensor)}
        for leaf, tensor in unset.items():
            value = self._value(f"{name}.{leaf}" if name else leaf)
            if value is None or value.shape != tensor.shape or not value.isfinite().all():
                raise RecipeError(
                    f"model.hf: transformers' own initialisation leaves {name}.{leaf} unset, so it cannot be trained"
                    " from a config alone. Give a folder with weights (model.safetensors)."
                )
            tensor.data.copy_(value)

    def _value(self, full: str) -> Tensor | None:
        if self._tensors is None:
            # One seed on every rank and for every plan: the values are the same wherever they are made.
            with seeded(0), torch.device("cpu"):
                whole = type(self._skeleton)(copy.deepcopy(self._skeleton.config))
            owners = dict(whole.named_modules())
            self._tensors = {
                name: tensor.detach()
                for name, tensor in (*whole.named_parameters(), *whole.named_buffers())
                if not isinstance(owners[name.rpartition(".")[0]], _DRAWN)
            }
        return self._tensors.get(full)


def _innermost(skeleton: Any, path: str) -> Any:
    """The model that rules over a module: a model in a model has rules of its own."""
    module = skeleton
    inner = skeleton
    for name in path.split(".") if path else ():
        inner = getattr(inner, name)
        module = inner if hasattr(inner, "_init_weights") else module
    return module


def _uninitialised(name: str, module: nn.Module) -> None:
    """Mark floating tensors, so that one which nobody fills is found instead of training on garbage."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        elif tensor.dtype == torch.int64:
            tensor.data.fill_(_UNSET)


class SafetensorsFolder:
    """The tensors of `model.safetensors` or of the shards that `model.safetensors.index.json` names.

    Nothing in the folder is trusted: names lead to files in it only, and what a file holds is read by its header.

    Raises:
        RecipeError: an index, a header or a name that is not as it should be; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _files(folder)
        """Key → name of the file that holds it."""

    @property
    def is_empty(self) -> bool:
        return not self.files

    def tensors(self) -> dict[str, DeferredBuild]:
        """Return all tensors by their key; each file's header is read once, and nothing else."""
        keys: dict[str, list[str]] = {}
        for key, name in self.files.items():
            keys.setdefault(name, []).append(key)
        tensors: dict[str, DeferredBuild] = {}
        for name, held in keys.items():
            with _opened(self.folder / name) as file:
                for key in held:
                    part = file.get_slice(key)
                    shape = tuple(part.get_shape())
                    # An empty slice has the dtype and reads nothing.
                    dtype = (part[0:0] if shape else part[...]).dtype
                    tensors[key] = DeferredBuild(shape, dtype, partial(self._read, key))
        return tensors

    def _read(self, key: str, box: Box) -> Tensor:
        with _opened(self.folder / self.files[key]) as file:
            part = file.get_slice(key)
            return part[tuple(slice(start, stop) for start, stop in box)] if box else part[...]


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    """A safetensors file; whatever the library says against it names the file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as problem:
        raise RecipeError(f"model.hf: {path} is not readable as safetensors ({problem}). {_COPY}") from None


def _files(folder: Path) -> Mapping[str, str]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return _mapped(folder, index)
    if single.is_file():
        _check_inside(folder, single.name, single)
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single.name)
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        raise RecipeError(
            f'model.hf = "{folder}": its weights are only in {pickled[0]}, a pickle, which can run code when read.'
            " Convert it with transformers' save_pretrained, which writes safetensors."
        )
    return {}


def _mapped(folder: Path, index: Path) -> Mapping[str, str]:
    """Return the file of each tensor by the folder's index; every name is checked before a file is opened."""
    _check_inside(folder, index.name, index)
    content = read_plain_file(index.resolve(), RecipeError, _COPY)
    weight_map = JsonObject.parse(index, content, RecipeError, _COPY).object("weight_map")
    held: dict[str, list[str]] = {}
    for key in weight_map.values:
        name = weight_map.text(key)
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            raise weight_map.fail(key, "the plain name of a .safetensors file in this folder")
        held.setdefault(name, []).append(key)
    missing = sorted(name for name in held if not (folder / name).is_file())
    if missing:
        raise RecipeError(
            f'model.hf = "{folder}": {index.name} names {missing[0]}, which is not there'
            f" ({len(missing)} files missing). Copy the whole folder."
        )
    for name, keys in held.items():
        _check_inside(folder, index.name, folder / name)
        with _opened(folder / name) as file:
            absent = set(keys) - set(file.keys())
        if absent:
            raise weight_map.fail(min(absent), f"the file that holds it: {name} does not")
    return {key: weight_map.text(key) for key in weight_map.values}


def _check_inside(folder: Path, named_by: str, path: Path) -> None:
    """Refuse a link out of the folder.  The cache of the Hugging Face hub is made of links, from a model's snapshots to
    the same model's blobs."""
    home = folder.resolve()
    # A link could lead to any file of this machine.
    places = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if path.resolve().parent not in places:
        raise RecipeError(
            f'model.hf = "{folder}": {path.name} (named by {named_by}) is a link to {path.resolve()}, outside the'
            f" folder. {_COPY}"
        )


class FolderInitialiser:
    """Fills a module's own tensors from the folder, and draws or computes those that nobody stores."""

    def __init__(self, model: Any, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        """See `weft.model.stored.stored_tensors`."""
        self._random = random_initialiser(model)

    def __call__(self, name: str, module: nn.Module) -> None:
        own = {f"{name}.{leaf}": tensor for leaf, tensor in _own_tensors(module)}
        if not all(full in self.stored for full in own):
            self._random(name, module)  # buffers that are computed, not stored
        for full, tensor in own.items():
            if full in self.stored:
                tensor.data.copy_(self.stored[full].read())


def folder_initialiser(model: Any, weights: SafetensorsFolder) -> tuple[Initialiser, list[str]]:
    """Return an initialiser that reads each module's own tensors from the folder, and the keys that nothing reads.

    Raises:
        RecipeError: a parameter is missing, has another shape, or is quantised.
    """
    tensors = weights.tensors()
    stored, unread = converted(model, tensors, str(weights.folder))
    _check_numbers(tensors, weights)
    return FolderInitialiser(model, _complete(model, stored, unread, weights)), unread


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _check_numbers(tensors: Mapping[str, DeferredBuild], weights: SafetensorsFolder) -> None:
    """Refuse numbers of 8 bits or fewer: they mean something only together with their scales."""
    for key, tensor in tensors.items():
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < _NARROWEST:
            raise RecipeError(
                f'model.hf = "{weights.folder}": {key} in {weights.files[key]} is quantised'
                f" ({str(tensor.dtype).removeprefix('torch.')}), and Weft trains from bf16, fp16, fp32 or fp64."
                " Load the folder with transformers, call `dequantize()` on the model, and save it again."
            )


def _complete(
    model: Any, stored: dict[str, StoredTensor], unread: Sequence[str], weights: SafetensorsFolder
) -> dict[str, StoredTensor]:
    """The stored tensors, checked to be all of the model's and as it has them, tied ones under each name."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    # Tied weights are one tensor under several names, of which the file has one. Reversed, so that the first name wins.
    by_tensor = {id(state[name]): tensor for name, tensor in reversed(stored.items())}
    complete = {name: stored[name] if name in stored else by_tensor.get(id(tensor)) for name, tensor in state.items()}
    missing = [name for name, tensor in complete.items() if tensor is None]
    if missing:
        others = f" What nothing of the model takes: {', '.join(unread[:3])}." if unread else ""
        raise RecipeError(
            f'model.hf = "{weights.folder}": the weights lack {missing[0]} ({len(missing)} of {len(state)} tensors are'
            f" missing).{others} Is config.json of the same model? Remove the weights to start from random ones."
        )
    for name, tensor in complete.items():
        assert tensor is not None
        if state[name].is_floating_point() and not tensor.dtype.is_floating_point:
            raise RecipeError(
                f'model.hf = "{weights.folder}": {name} holds no floating-point numbers in {_file_of(name, weights)},'
                f" and the model's parameter does. {_COPY}"
            )
        if tensor.shape != state[name].shape:
            raise RecipeError(
                f'model.hf = "{weights.folder}": {name} has shape {tuple(tensor.shape)} in the weights but'
                f" {tuple(state[name].shape)} by config.json. Use the config of the same model."
            )
    return {name: tensor for name, tensor in complete.items() if tensor is not None}


def _file_of(name: str, weights: SafetensorsFolder) -> str:
    return weights.files.get(name, "the folder")
