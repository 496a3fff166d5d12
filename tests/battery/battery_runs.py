"""Plays a drawn program: with plain PyTorch on one process, and in a session under a setting."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from battery_kit import BATCH, SAID, inputs_of, loader_of
from safetensors.torch import load_file
from torch import Tensor, nn

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.model.families import CutTable

STEPS = 4
HELD_OUT = {"size": 10, "seed": 1}
SETTINGS = {"one": 1, "accumulate": 1, "data": 2, "zero3": 2, "tensor": 2, "pipeline": 2}
"""Setting → its ranks."""
WHOLE = ("one", "accumulate", "data")
"""Settings under which every rank holds whole parameters."""


@dataclass
class Found:
    """What a run came to."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    """Parameters, buffers and what modules keep, by name."""
    notes: list[tuple[str, Any]] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    """Those of `values` that are plain attributes."""
    warned: list[str] = field(default_factory=list)
    """What Weft has warned of."""


def scope_of(path: Path) -> dict[str, Any]:
    """Run a program's module; each run has its own, and so its own globals."""
    module = ModuleType("program")
    module.__file__ = str(path)
    sys.modules["program"] = module
    text = path.read_text()
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module.__dict__


class Run:
    """What a program's loop is handed: the model, the optimizer, and what loops do in between."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.form, self.skeleton, self.dtype = scope["FORM"], scope["SKELETON"], scope["DTYPE"]
        self.manual: int = scope.get("MANUAL", 0)
        self.losses: list[float] = []
        self.build()

    def build(self) -> None:
        scope = self.scope
        self.model: nn.Module = scope["build"]()
        self.own: nn.Module | None = scope["LOSS_MODULE"]().to(self.dtype) if "LOSS_MODULE" in scope else None
        own = list(self.own.parameters()) if self.own is not None else []
        second = bool(scope.get("SECOND_OPTIMIZER"))
        self.loss: Callable[[Any, Any], Any] = scope["loss_for"](self.model, self.own)
        scope["before"](self)
        self.optimizer: torch.optim.Optimizer = scope["optimizer_for"](self.model, [] if second else own)
        self.scheduler = scope["scheduler_for"](self.optimizer)
        self.second = torch.optim.SGD(own, lr=0.1) if second else None

    def note(self, what: str, value: Any) -> None:
        """Note what all ranks must find alike."""
        SAID.append((what, float(value)))

    def note_of_share(self, what: str, value: Any) -> None:
        """Note what a rank reads of weights and gradients: of its share, where a plan cuts them."""
        self.note(what, value)

    def loader(self) -> Any:
        return loader_of(self.form, self.skeleton, self.dtype)

    def _look_at_what_is_kept(self, found: Found) -> None:
        """Buffers, and tensors and numbers that modules of the program keep as plain attributes."""
        for name, value in self.model.named_buffers(remove_duplicate=False):
            found.values[name] = value.detach().clone()
        if self.own is not None:
            found.values |= {f"loss {name}": value.detach().clone() for name, value in self.own.state_dict().items()}
        for prefix, module in self.model.named_modules():
            if type(module).__module__ != "program":
                continue
            for name, value in vars(module).items():
                if name.startswith("_") or name in ("training", "active", "source"):
                    continue
                if (plain := _plain(value)) is not None:
                    found.values[f"{prefix}.{name}".lstrip(".")] = plain
                    found.attributes.add(f"{prefix}.{name}".lstrip("."))

    def held_out(self) -> Any:
        return loader_of(self.form, self.skeleton, self.dtype, **HELD_OUT)


class PlainRun(Run):
    """A loop of plain PyTorch."""

    def go(self) -> Found:
        found = Found(self.losses)
        loader = self.loader()
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for step, batch in enumerate(itertools.islice(batches, STEPS)):
            for one in (self.optimizer, self.second):
                if one is not None:
                    one.zero_grad()
            loss = self._mean(batch)
            if self.manual > 1:
                loss = loss + 0.3 * self.model(inputs_of(self.form, batch)).square().mean()
            loss.backward()
            if (limit := self.scope.get("MAX_GRAD_NORM")) is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
            for one in (self.optimizer, self.second, self.scheduler):
                if one is not None:
                    one.step()
            self.losses.append(float(loss))
            self.scope["after"](self, step)
        found.losses.append(self.evaluate())
        found.values = {
            name: value.detach().clone() for name, value in self.model.named_parameters(remove_duplicate=False)
        }
        self._look_at_what_is_kept(found)
        return found

    def _mean(self, batch: Any) -> Tensor:
        loss = self.loss(self.model(inputs_of(self.form, batch)), batch)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    def evaluate(self) -> float:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        total, count = 0.0, 0
        for batch in self.held_out():
            with torch.no_grad():
                loss = self.loss(self.model(inputs_of(self.form, batch)), batch)
            size = len(inputs_of(self.form, batch))
            one, number = loss if isinstance(loss, tuple) else (loss * size, size)
            total, count = total + float(one), count + float(number)
        for module, training in modes:
            module.training = training
        return total / count

    @torch.no_grad()
    def predict(self) -> Tensor:
        self.model.eval()
        outputs = [self.model(inputs_of(self.form, batch)) for batch in self.held_out()]
        self.model.train()
        return torch.cat(outputs)

    def save(self) -> None:
        pass

    save_and_load = save


class WeftRun(Run):
    """The same loop in a session."""

    def __init__(self, scope: dict[str, Any], setting: str, folder: Path) -> None:
        self.setting, self.folder = setting, folder
        super().__init__(scope)
        self.state: Any = None

    def go(self) -> Found:
        found = Found(self.losses)
        resumes = self.scope.get("RESUMES_AFTER")
        if resumes is not None:
            self._session(found, 0, resumes)
            self.build()
        self._session(found, resumes or 0, STEPS)
        return found

    def _session(self, found: Found, first: int, last: int) -> None:
        permit = ("fp64",) if self.dtype == torch.float64 else ("fp32",)
        with weft.session(
            plan_for(self.setting, permit[0]),
            permit=permit,
            folder=self.folder,
            record=False,
            quiet=True,
            device="cpu",
            collective_timeout_seconds=12,
        ) as session:
            self._prepare(session)
            if self.scheduler is not None:
                self.state.attach(scheduler=self.scheduler)
            if first:
                self.state.load()
            for step, batch in enumerate(self._batches(last - first), first):
                if self.second is not None:
                    self.second.zero_grad()
                self.losses.append(self._step(batch))
                for one in (self.second, self.scheduler):
                    if one is not None:
                        one.step()
                self.scope["after"](self, step)
            if last < STEPS:
                self.state.save()
            else:
                self._finish(found)

    def _batches(self, steps: int) -> Iterator[Any]:
        """`state.batches(steps)` ends with the pass of a loader that only iterates."""
        begun = self.state.steps
        while (left := steps - (self.state.steps - begun)) > 0:
            yield from self.state.batches(left)

    def _step(self, batch: Any) -> float:
        if not self.manual:
            return self.state.step(batch).loss
        with self.state.manual_step(batch) as step:
            for part in step.parts():
                outputs = self.model(inputs_of(self.form, part))
                loss = self.loss(outputs, part)
                step.backward(loss[0] / loss[1] if isinstance(loss, tuple) else loss)
                if self.manual > 1:
                    step.backward(0.3 * self.model(inputs_of(self.form, part)).square().mean())
        return step.event.loss

    def _prepare(self, session: Any) -> None:
        given: dict[str, Any] = {}
        if self.setting == "pipeline" and self.scope["CUT"] is not None:
            given["cut"] = CutTable(**self.scope["CUT"])
        if self.setting == "tensor" and self.scope["SPLIT"]:
            given["split"] = self.scope["SPLIT"]
        if self.form in ("iterable", "short", "sizes"):
            given["batch_size"] = BATCH
        if (limit := self.scope.get("MAX_GRAD_NORM")) is not None:
            given["max_grad_norm"] = limit
        self.state = session.prepare(self.model, self.optimizer, self.loader(), loss=self.loss, **given)
        self.model = self.state.model

    def _finish(self, found: Found) -> None:
        found.losses.append(self.evaluate())
        if self.setting in WHOLE:
            found.values |= {
                name: value.detach().clone() for name, value in self.model.named_parameters(remove_duplicate=False)
            }
        self._look_at_what_is_kept(found)
        folder = self.folder / "exported"
        self.state.export(folder)
        exported = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
        found.values |= {
            name if self.setting not in WHOLE else f"exported {name}": value for name, value in exported.items()
        }

    def note_of_share(self, what: str, value: Any) -> None:
        if self.setting in WHOLE:
            self.note(what, value)

    def evaluate(self) -> float:
        return self.state.evaluate(self.held_out())

    def predict(self) -> Tensor:
        return self.state.predict(self.held_out(), outputs=lambda outputs, batch: outputs)

    def save(self) -> None:
        self.state.save()

    def save_and_load(self) -> None:
        path = self.state.save()
        self.state.load(path)


def plan_for(setting: str, precision: str) -> Plan:
    """The plan of a setting: a step has `BATCH` samples under all."""
    axes = {"data": {"replicate": 2}, "zero3": {"shard": 2}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    size = {"one": BATCH, "tensor": BATCH}.get(setting, BATCH // 2)
    per_step = 2 if setting in ("accumulate", "pipeline") else 1
    return Plan(
        mesh=MeshPlan(**axes.get(setting, {})),
        data_parallel=DataParallelPlan(zero=3 if setting == "zero3" else 0),
        microbatch=MicrobatchPlan(size=size, per_step=per_step),
        compute=ComputePlan(precision=precision),  # type: ignore[arg-type]
    )


def _plain(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, int | float):
        return torch.tensor(float(value), dtype=torch.float64)
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, list) and value and all(isinstance(one, int | float | Tensor) for one in value):
        return torch.cat([torch.as_tensor(one, dtype=torch.float64).detach().flatten() for one in value])
    return None


def play(path: Path, setting: str) -> Found:
    """Play a program once; `plain` is the setting without Weft."""
    SAID.clear()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as caught:  # torch's, of what a program is made of, are no findings
            warnings.simplefilter("always")
            scope = scope_of(path)
            run = PlainRun(scope) if setting == "plain" else WeftRun(scope, setting, path.with_suffix(f".{setting}"))
            found = run.go()
    finally:
        sys.modules.pop("program", None)  # its globals may hold models, and these groups of processes
    found.warned = [str(one.message) for one in caught if "weft" in one.filename or "Weft" in str(one.message)]
    found.notes = list(SAID)
    return found


def difference(expected: Found, found: Found, *, losses: float, values: float) -> str:
    """The first thing in which two runs differ by more than the limits; empty where there is none."""
    if len(expected.losses) != len(found.losses):
        return f"{len(found.losses) - 1} steps were taken, and {len(expected.losses) - 1} in plain PyTorch"
    for step, (one, two) in enumerate(zip(expected.losses, found.losses, strict=True)):
        if not abs(one - two) <= losses * max(abs(one), 1e-3):
            what = f"the loss of step {step + 1}" if step < STEPS else "the evaluation"
            return f"{what} is {two:.12g}, and {one:.12g} in plain PyTorch"
    for name, value in found.values.items():
        known = expected.values.get(name.removeprefix("exported "))
        if known is None:
            return f"{name} is none of plain PyTorch's"
        if known.shape != value.shape and name in found.attributes:
            continue  # a cache, or what was carried on from the last batch of an evaluation, of this rank's rows
        if known.shape != value.shape:
            return f"{name} has the shape {tuple(value.shape)}, and {tuple(known.shape)} in plain PyTorch"
        if known.dtype != value.dtype:
            return f"{name} has the dtype {value.dtype}, and {known.dtype} in plain PyTorch"
        if (off := _off(known, value)) > values:
            return f"{name} is {off:.1e} off"
    for what in {note[0] for note in found.notes} - {"the calls differ"}:
        one, two = ([value for name, value in run.notes if name == what] for run in (expected, found))
        known, seen = torch.tensor(one, dtype=torch.float64), torch.tensor(two, dtype=torch.float64)
        if known.shape != seen.shape or _off(known, seen) > 10 * values:
            return f"it noted {what}: {two}, and {one} in plain PyTorch"
    return ""


def _off(known: Tensor, value: Tensor) -> float:
    wide = torch.complex128 if known.is_complex() else torch.float64
    one, two = known.to(wide), value.to(wide)
    if one.numel() == 0:
        return 0.0
    off = float((one - two).abs().max() / max(float(one.abs().max()), 1e-3))
    return off if not math.isnan(off) else math.inf
