"""Proofs that were made, by what they depend on: code, plan and versions.  A second start finds its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.plan import Plan
from weft.files import cache_folder, write_whole

_FORMAT = 1
_SETTINGS = (int, float, str, bool, tuple)
"""Types of attributes that say how a module or a loss computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProof:
    """A proof of an earlier start."""

    made: str
    """Date."""
    num_tensors: int
    largest: float

    @property
    def line(self) -> str:
        return (
            f"proof     kept from {self.made}: two steps equal plain PyTorch, largest relative difference"
            f" {self.largest:.1e} over {self.num_tensors} tensors"
        )


def digest_of(
    model: nn.Module,
    loss: object,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
    batch: Mapping[str, Tensor],
    *facts: object,
) -> str:
    """Return what two starts share only if one proof holds for both: the code and settings of model, loss and
    optimizer, the plan, shapes and dtypes, and versions."""
    # Sizes and times of files stand for their content: a start must not read all of a user's code.  What has no file,
    # such as a notebook's functions, goes in by its byte code.
    digest = hashlib.sha256(json.dumps([_FORMAT, torch.__version__, plan.digest, *map(repr, facts)]).encode())
    digest.update(_code_in_use().encode())
    for name, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS)}
        digest.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {kept!r}\n".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n".encode())
    for name, tensor in batch.items():
        digest.update(f"{name} {tuple(tensor.shape[1:])} {tensor.dtype}\n".encode())
    kinds = dict.fromkeys(type(module) for module in model.modules())
    seen = set[int]()
    for value in (*kinds, loss, optimizer):
        digest.update(_described(value, seen).encode())
    return digest.hexdigest()


def read_kept(digest: str) -> KeptProof | None:
    """Return the proof of an earlier start, if there is one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(_path(digest).read_text(encoding="utf-8"))
        return KeptProof(
            made=str(known["made"]), num_tensors=int(known["num_tensors"]), largest=float(known["largest"])
        )
    return None


def keep(digest: str, num_tensors: int, largest: float) -> bool:
    """Keep a proof for the next start; return whether it could be written."""
    path = _path(digest)
    known = {"made": date.today().isoformat(), "num_tensors": num_tensors, "largest": largest}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known))
    except OSError:
        return False
    return True


def _path(digest: str) -> Path:
    return cache_folder("proofs", f"{digest}.json")


@functools.cache
def _code_in_use() -> str:
    """Files of Weft and of all loaded modules that no package manager has installed, by size and time of change."""
    installed = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
    stats: list[tuple[str, int, int]] = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_weft = name.partition(".")[0] == "weft"
        if isinstance(file, str) and (is_weft or not file.startswith(installed)):
            with contextlib.suppress(OSError):
                stat = os.stat(file)
                stats.append((name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _described(value: Any, seen: set[int]) -> str:
    """Code and settings of a class, a loss or an optimizer, and of what they hold: code that has no file, too."""
    if id(value) in seen:
        return ""
    seen.add(id(value))
    match value:
        case torch.optim.Optimizer():
            groups = [{name: v for name, v in group.items() if name != "params"} for group in value.param_groups]
            return f"{type(value).__qualname__} {groups!r}{_described(type(value), seen)}"
        case type() if value.__module__.partition(".")[0] != "torch":
            functions = [one for one in vars(value).values() if isinstance(one, types.FunctionType)]
            return value.__qualname__ + "".join(_described(one, seen) for one in functions)
        case types.FunctionType():
            closed = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            inside = "".join(_described(part, seen) for part in (*closed, *(value.__defaults__ or ())))
            return _code(value.__code__) + inside
        case types.MethodType():
            return _described(value.__func__, seen) + _described(type(value.__self__), seen)
        case functools.partial():
            return _described(value.func, seen) + repr([v for v in value.args if isinstance(v, _SETTINGS)])
        case Tensor():
            return f"tensor {tuple(value.shape)} {value.dtype}"
        case int() | float() | str() | bool() | None:
            return repr(value)
        case type():
            return value.__qualname__
        case _:
            kept = {name: v for name, v in getattr(value, "__dict__", {}).items() if isinstance(v, _SETTINGS)}
            return f"{kept!r}{_described(type(value), seen)}"


def _code(code: types.CodeType) -> str:
    constants = [_code(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names!r} {constants!r}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
