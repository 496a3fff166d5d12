"""Real storage and initial weights for a model part: equal under every plan, one module in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.model.blueprint import Blueprint
from weft.model.seeding import seeded
from weft.techniques.core._layout import ModelLayout, ParameterLayout
from weft.techniques.core.precision import NARROW, dtype_beside, main_dtype

if TYPE_CHECKING:
    from weft.model.stored import StoredTensor


def materialise(
    part: nn.Module,
    blueprint: Blueprint,
    layout: ModelLayout,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    frozen_dtype: torch.dtype | None = None,
    later: Collection[str] = (),
) -> None:
    """Give every parameter and buffer of `part` real storage of its local shape, filled, on `device` and in `dtype`.

    Values depend on `seed` and the name in the whole model alone.  What the initialiser finds stored is read in parts:
    this rank's, and nothing else.  Of the rest each module's own tensors are drawn whole, in fp32 on the CPU, then cut
    by the layout, so that tensor ranks, stages and precisions agree.  A tied parameter is drawn under its first name
    and stays one object.  Where `blueprint.initialise` is None the tensors there are cut, moved and cast.  Buffers
    missing from the layout are whole.  Non-floating tensors keep their dtype.  So do, in bf16 and fp16, the buffers of
    `blueprint.keep_dtype`; in fp32 and fp64, what a constructed module has in another dtype than most of it.
    Parameters that are not trained are in `frozen_dtype`, where it is given.  Those named in `later` stay on the meta
    device, for `weft.techniques.zero.sharded_weights.fill_shards`.

    Not collective.  `blueprint.module` must still be whole (parts are cut from copies of it).
    """
    main = main_dtype(blueprint.module) if blueprint.initialise is None and dtype not in NARROW else None
    fresh = _FreshTensors(part, layout, device, dtype, frozen_dtype or dtype, blueprint.keep_dtype, main)
    if blueprint.initialise is None:
        for name in list(fresh.unplaced):
            fresh.place(name, fresh.unplaced[name])
        return
    for name in later:
        fresh.postpone(name)
    stored: Mapping[str, StoredTensor] = getattr(blueprint.initialise, "stored", {})
    for name in list(fresh.unplaced):
        source = stored.get(fresh.layout_of(name).name)
        if source is not None:
            fresh.read(name, source)
    owned = by_owner({name: fresh.layout_of(name).name for name in fresh.unplaced})
    for owner, names in owned.items():
        drawn = draw(blueprint, owner, seed)
        for name, leaf in names:
            assert drawn[leaf].shape == fresh.layout_of(name).shape, (
                f"{name}: the blueprint's module is no longer whole"
            )
            fresh.place(name, drawn[leaf])


class _FreshTensors:
    """The part's tensors, replaced one after another; a tensor found under several names is replaced under all."""

    def __init__(
        self,
        part: nn.Module,
        layout: ModelLayout,
        device: torch.device,
        dtype: torch.dtype,
        frozen_dtype: torch.dtype,
        keep: Sequence[str],
        main: torch.dtype | None,
    ) -> None:
        self.unplaced: dict[str, Tensor] = {}
        self._part, self._layout, self._device, self._keep = part, layout, device, keep
        self._dtype, self._frozen_dtype, self._main = dtype, frozen_dtype, main
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in _tensors(part):
            aliases = self._aliases.setdefault(id(tensor), [])
            aliases.append(name)
            if len(aliases) == 1:
                self.unplaced[name] = tensor

    def layout_of(self, name: str) -> ParameterLayout:
        tensor = self.unplaced[name]
        entry = self._layout.entries.get(name)
        if entry is None:
            assert not isinstance(tensor, nn.Parameter), f"parameter {name} has no layout"
            return ParameterLayout(name=name, shape=tensor.shape, is_buffer=True)
        return entry

    @torch.no_grad()
    def place(self, name: str, whole: Tensor) -> None:
        """Install this rank's part of `whole` under `name` and all its aliases."""
        layout = self.layout_of(name)
        local = layout.split.slice(whole) if whole.shape == layout.shape else whole
        dtype = self._dtype_of(name, whole.dtype)
        self._install(name, local.detach().to(device=self._device, dtype=dtype).contiguous())

    def read(self, name: str, source: StoredTensor) -> None:
        """Read this rank's part of a stored tensor, and install it."""
        from weft.techniques.core.stored import read_local

        layout = self.layout_of(name)
        assert source.shape == layout.shape, f"{name}: the blueprint's module is no longer whole"
        dtype = self._dtype_of(name, self.unplaced[name].dtype)
        local = torch.empty(layout.split.local_shape(layout.shape), dtype=dtype, device=self._device)
        read_local(local, source, layout.split)
        self._install(name, local)

    def postpone(self, name: str) -> None:
        """Install a parameter of this rank's shape on the meta device."""
        layout = self.layout_of(name)
        dtype = self._dtype_of(name, self.unplaced[name].dtype)
        self._install(name, torch.empty(layout.split.local_shape(layout.shape), dtype=dtype, device="meta"))

    def _install(self, name: str, local: Tensor) -> None:
        old = self.unplaced.pop(name)
        new = nn.Parameter(local, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else local
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
        for alias in self._aliases[id(old)]:
            _install(self._part, alias, new)

    def _dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        old, known = self.unplaced[name], self.layout_of(name).name
        target = self._frozen_dtype if isinstance(old, nn.Parameter) and not old.requires_grad else self._dtype
        if target not in NARROW and self._main is not None:
            return dtype_beside(dtype, self._main, target)
        keeps = target in NARROW and any(fnmatchcase(known, pattern) for pattern in self._keep)
        return dtype if keeps or not dtype.is_floating_point else target


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def by_owner(known: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Group tensors by the module that owns them in the full model.

    `known` is name here → name in the full model; the result is module → [(name here, name in the module)].
    """
    owners: dict[str, list[tuple[str, str]]] = {}
    for name, whole in known.items():
        owner, _, leaf = whole.rpartition(".")
        owners.setdefault(owner, []).append((name, leaf))
    return owners


def draw(blueprint: Blueprint, owner: str, seed: int) -> dict[str, Tensor]:
    """Return the initial values of one module's own tensors, in full, on the CPU."""
    # On the CPU and in fp32 whatever the device and precision: every plan starts from the same numbers.
    module = shallow_copy(blueprint.module.get_submodule(owner))
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        wide = torch.promote_types(parameter.dtype, torch.float32) if parameter.is_floating_point() else parameter.dtype
        setattr(module, leaf, nn.Parameter(torch.empty_like(parameter, device="cpu", dtype=wide), requires_grad=False))
    for leaf, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, leaf, torch.empty_like(buffer, device="cpu"))
    assert blueprint.initialise is not None
    # Seeded by the module's name, so that values do not depend on which modules a rank draws, nor in which order.
    with _seeded(seed, owner), torch.no_grad():
        blueprint.initialise(owner, module)
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module that shares children and settings with `module`, but whose own tensors may be replaced."""
    copied: nn.Module = object.__new__(type(module))  # `copy.copy` refuses modules with parametrizations
    copied.__dict__.update(module.__dict__)
    for attribute in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[attribute] = dict(module.__dict__[attribute])
    return copied


@contextmanager
def _seeded(seed: int, name: str) -> Generator[None]:
    """Seed the default CPU generator for one module, and put its state back."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    with seeded(int.from_bytes(digest, "little") >> 1):
        yield


def _install(part: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(part.get_submodule(owner), leaf, tensor)
