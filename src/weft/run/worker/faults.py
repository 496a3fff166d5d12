"""Faults that `weft chaos` injects into the ranks of a training, at one place of one step.

Nothing of this is loaded by other runs.  A fault is struck once, or as often as it says: a file in a folder of the
chaos command says how often it has been, for ranks that start again.  That file also says when and where.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from weft.config.document import typed
from weft.events.progress import PHASES, ProgressRow
from weft.run.checkpoint import newest_saved_step

SAVE, LOAD, COPY = "save", "load", "copy"
_FULL_SECONDS = 0.5
"""Least time that a disk stays full."""
_PHASE_OF_SPAN = {"data_wait": "data", "reduce_wait": "collective", "optimizer": "optimizer", "checkpoint": SAVE}
_HOLD_SECONDS = 2.5
"""Longest time for which a rank waits until the chaos command has done something; no step may be said to hang."""
_COMPLETE = re.compile(r"step-\d+")
_SLOW_SECONDS, _SLOWEST_SECONDS = 0.05, 0.7
"""How long a slow rank sleeps in a step, and in the last three, in which it must be seen for a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """One fault: what is done, by which rank, and where."""

    deed: str
    """A key of `DEEDS`, or what only the injector can do: `nan`, `hold`, `fill the disk`, `slow`, `flip weights`."""
    rank: int
    phase: str
    """`init`, `rendezvous`, `load`, `data`, `forward`, `backward`, `collective`, `optimizer`, `save` or `shutdown`;
    `copy`: in the process that copies saves to the disk."""
    step: int = 0
    """Step, counted from 1; 0: the first chance."""
    operation: int = 1
    """Number, counted from 1, of the file operation of a save, a copy or a load before which it comes."""
    times: int = 1
    """How often, over all starts of the ranks."""
    after: int = -1
    """Number of the fault that must have been struck before; -1: none."""
    damage: str = ""
    """Damage of the newest save that comes before the deed: `truncate`, `remove`, `flip` or `newer` (of the
    next format), and `memory` or `disk`."""
    drawn: int = 0
    """A drawn number that chooses the file and the place of the damage; of a slow rank, the run's last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that has come, as the rank that it was done to wrote it down."""

    fault: int
    """Number of the fault in its list."""
    pid: int
    unix_time_seconds: float
    step: int
    """Step that the rank was in; 0 before the loop."""
    saved_on_disk: int
    """Finished steps of the newest save on the disk before."""
    saved_in_memory: int
    damaged: str = ""
    """Path of the damaged file."""


def strike_path(folder: Path, fault: int, time_number: int) -> Path:
    """Return the file that says that a fault was struck for the n-th time, counted from 0."""
    return folder / f"strike-{fault}-{time_number}.json"


def strikes_in(folder: Path) -> list[Strike]:
    """Return all strikes so far, in their order."""
    found = [typed(Strike, json.loads(path.read_text())) for path in folder.glob("strike-*.json")]
    return sorted(found, key=lambda strike: strike.unix_time_seconds)


# ── what is done ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _raise() -> None:
    raise ValueError("a fault that weft chaos has injected")


def _no_device_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (injected by weft chaos).")


def _no_host_memory() -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory (weft chaos)")


def _wait() -> None:
    threading.Event().wait()


def _spin() -> None:
    while True:
        sum(range(1000))


def _hold_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # exponential time inside of one call, which never gives up the interpreter


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _fork_server() -> int:
    return _parent_of(os.getppid())


def _supervisor() -> int:
    return _parent_of(_fork_server())


def _signal(number: signal.Signals, whom: Callable[[], int]) -> Callable[[], None]:
    def deed() -> None:
        with suppress(OSError):
            os.kill(whom(), number)

    return deed


DEEDS: dict[str, Callable[[], object]] = {
    "kill": _signal(signal.SIGKILL, os.getpid),
    "segfault": _signal(signal.SIGSEGV, os.getpid),
    "exit": lambda: os._exit(3),
    "raise": _raise,
    "device memory": _no_device_memory,
    "host memory": _no_host_memory,
    "wait": _wait,
    "compute": _spin,
    "interpreter": _hold_interpreter,
    "stop": _signal(signal.SIGSTOP, os.getpid),
    "terminate rank": _signal(signal.SIGTERM, os.getpid),
    "terminate": _signal(signal.SIGTERM, _supervisor),
    "interrupt": _signal(signal.SIGINT, _supervisor),
    "kill parent": _signal(signal.SIGKILL, os.getppid),
    "kill fork server": _signal(signal.SIGKILL, _fork_server),
    "kill supervisor": _signal(signal.SIGKILL, _supervisor),
}


# ── where it is done ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class FaultInjector:
    """Waits in one process for the places at which its faults are to come."""

    faults: Sequence[InjectedFault]
    rank: int
    """This rank; -1: the supervisor's process."""
    folder: Path
    """Folder of the chaos command, for strikes."""
    run: Path
    """Folder of the run."""
    memory: Path | None
    """Folder in memory for saves."""
    step: int = 0
    """Step that this rank is in, counted from 1; 0 before its loop."""
    _operations: dict[str, int] = field(default_factory=dict[str, int])
    _is_saving: bool = False
    _is_striking: bool = False
    _is_poisoned: bool = False
    _is_late: bool = False
    _slow_until: int = 0
    """Last step of the run, where this rank is slow."""
    _weights: Tensor | None = None
    """Weights of a module of this rank."""
    _ballast: Path | None = None
    _ballast_until: int = 0
    _ballast_at: float = 0.0

    @classmethod
    def of_json(cls, known: dict[str, Any], rank: int, run: Path, memory: Path | None) -> FaultInjector:
        """The injector of a rank, from what `weft chaos` passed on."""
        faults = [typed(InjectedFault, fault) for fault in known["faults"]]
        injector = cls(faults, rank, Path(known["folder"]), run, memory)
        injector.watch_files()
        injector.watch_modules()
        return injector

    def reach(self, phase: str, operation: int = 0) -> None:
        """The process has come to a phase, or before a file operation of one: do what is due."""
        if self._is_striking:
            return  # what a strike itself reads and writes is no place for another
        for number, fault in enumerate(self.faults):
            here = fault.rank == self.rank or (fault.phase == COPY and self.rank < 0)
            if not here or fault.phase != phase or (operation and operation < fault.operation):
                continue
            in_time = self.step >= fault.step if fault.times == 1 else self.step == fault.step
            if in_time and self._is_due(number, fault):
                self._strike(number, fault)

    def progress(self, row: ProgressRow | None) -> ProgressRow | None:
        """The row on which the rank writes its progress; it tells this injector of it, too."""
        return None if row is None else _WatchedRow(row, self)

    # ── places ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, step: int) -> None:
        if step:
            self.reach(LOAD, sys.maxsize)  # a load that had fewer file operations than the fault was to wait for
        self.step = step + 1

    def finished(self, step: int) -> None:
        self.step = step + 1
        self._is_late = False
        if self._ballast is not None and step >= self._ballast_until:
            # Three steps may take a millisecond each: the copy beside training must have met the full disk by then.
            time.sleep(max(0.0, self._ballast_at + _FULL_SECONDS - time.monotonic()))
            self._ballast.unlink(missing_ok=True)
            self._ballast = None

    def enter(self, span: str) -> None:
        """A span of a step begins."""
        phase = _PHASE_OF_SPAN.get(span)
        if phase == SAVE:
            self._is_saving, self._operations[SAVE] = True, 0
        elif phase is not None:
            self.reach(phase)

    def leave(self) -> None:
        """A span ends; a save that had fewer file operations than the fault was to wait for is struck at its end."""
        if self._is_saving:
            self.reach(SAVE, sys.maxsize)
            self._is_saving = False

    def watch_files(self) -> None:
        """Count the file operations of saves, copies and loads."""
        phases = {fault.phase for fault in self.faults if fault.rank == self.rank or self.rank < 0}
        if phases & {SAVE, COPY}:
            for name in ("write", "fsync", "rename", "replace", "mkdir"):
                setattr(os, name, self._counting(getattr(os, name)))
        if LOAD in phases:
            sys.addaudithook(self._on_audit)

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Count a file operation before it is done."""

        def counted(*arguments: Any, **keywords: Any) -> Any:
            if self.rank >= 0 and self._is_saving and threading.current_thread() is threading.main_thread():
                self._count(SAVE)
            elif self.rank < 0 and _is_of_checkpoint(arguments[0]):
                self._count(COPY)
            return call(*arguments, **keywords)

        return counted

    def _count(self, phase: str) -> None:
        self._operations[phase] = self._operations.get(phase, 0) + 1
        self.reach(phase, self._operations[phase])

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        # The loop has not begun: what is opened among checkpoints is read.
        if event == "open" and self.step == 0 and _COMPLETE.search(str(arguments[0])):
            self._count(LOAD)

    def watch_modules(self) -> None:
        """Look at every module's forward, where a fault is to come in one or in the backward."""
        mine = {fault.phase for fault in self.faults if fault.rank == self.rank}
        if mine & {"forward", "backward"}:
            torch_modules.register_module_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, _inputs: object, output: object) -> None:
        if not module.training or self.step == 0:
            return
        self._weights = next(module.parameters(recurse=False), self._weights)
        self.reach("forward")
        if self._slow_until and not self._is_late:
            self._is_late = True
            time.sleep(_SLOWEST_SECONDS if self.step > self._slow_until - 3 else _SLOW_SECONDS)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> Tensor | None:
        self.reach("backward")
        if self._is_poisoned:
            self._is_poisoned = False
            return gradient * float("nan")
        return None

    # ── deeds ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_due(self, number: int, fault: InjectedFault) -> bool:
        if fault.after >= 0 and not strike_path(self.folder, fault.after, 0).exists():
            return False
        return not strike_path(self.folder, number, fault.times - 1).exists()

    def _strike(self, number: int, fault: InjectedFault) -> None:
        self._is_striking = True
        self._write_down(number, fault)
        self._is_striking = False
        if fault.deed == "nan":
            self._is_poisoned = True
        elif fault.deed == "hold":
            self._hold()
        elif fault.deed == "fill the disk":
            self._fill_disk()
        elif fault.deed == "slow":
            self._slow_until = fault.drawn
        elif fault.deed == "flip weights":
            assert self._weights is not None, "a step before had a module with weights"
            self._weights.detach().view(torch.uint8).view(-1)[1] ^= 1 << 4
        else:
            DEEDS[fault.deed]()

    def _write_down(self, number: int, fault: InjectedFault) -> None:
        """Do the damage, and write for the chaos command where and when the fault came."""
        strike = Strike(
            fault=number,
            pid=os.getpid(),
            unix_time_seconds=time.time(),
            step=self.step,
            saved_on_disk=newest_saved_step(self.run / "checkpoints"),
            saved_in_memory=newest_saved_step(self.memory) if self.memory is not None else 0,
        )
        if fault.damage:
            strike = replace(strike, damaged=self._damage(fault))
        time_number = 0
        while (path := strike_path(self.folder, number, time_number)).exists():
            time_number += 1
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps({name: getattr(strike, name) for name in Strike.__slots__}))
        aside.rename(path)

    def _hold(self) -> None:
        """Wait until the chaos command has done what it does beside this run, or a while."""
        until = time.monotonic() + _HOLD_SECONDS
        while not (self.folder / "go-on").exists() and time.monotonic() < until:
            time.sleep(0.01)

    def _fill_disk(self) -> None:
        """Leave no byte free on the run's disk, which is a small one of its own, for three steps or longer."""
        self._ballast = self.run.parent / "ballast"
        self._ballast_until, self._ballast_at = self.step + 3, time.monotonic()
        chunk, descriptor = bytes(1 << 20), os.open(self._ballast, os.O_CREAT | os.O_WRONLY, 0o600)
        while chunk:
            try:
                os.write(descriptor, chunk)
            except OSError as problem:
                if problem.errno != errno.ENOSPC:
                    raise
                chunk = chunk[: len(chunk) // 2]
        os.close(descriptor)

    def _damage(self, fault: InjectedFault) -> str:
        """Damage a file of the newest save, and return its path."""
        how, tier = fault.damage.split()
        folder = self.memory if tier == "memory" and self.memory is not None else self.run / "checkpoints"
        saves = _wait_for_saves(folder, 2 if tier == "disk" else 1)
        if not saves:
            return ""
        files = sorted(file for file in saves[-1].iterdir() if file.name != "pinned")
        path = files[fault.drawn % len(files)] if how != "newer" else saves[-1] / "manifest.json"
        if how == "newer":
            _make_newer(path)
        elif how == "remove":
            path.unlink()
        elif how == "truncate":
            os.truncate(path, fault.drawn % path.stat().st_size)
        else:
            content = bytearray(path.read_bytes())
            content[fault.drawn % len(content)] ^= 1 << fault.drawn % 8
            path.write_bytes(content)
        return str(path)


def _make_newer(path: Path) -> None:
    """Let a manifest, which has a digest of itself, say that it is of the next format."""
    page = json.loads(path.read_text())
    page["manifest"]["version"] += 1
    body = json.dumps(page["manifest"], sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**page, "digest": xxhash.xxh3_128_hexdigest(body.encode())}))


def _wait_for_saves(folder: Path, count: int) -> list[Path]:
    """The complete saves in a folder, oldest first, once there are so many."""
    until = time.monotonic() + _HOLD_SECONDS
    while True:
        saves = sorted(path for path in folder.glob("step-*") if _COMPLETE.fullmatch(path.name))
        if len(saves) >= count or time.monotonic() > until:
            return saves if len(saves) >= count else []
        time.sleep(0.01)


def _is_of_checkpoint(target: object) -> bool:
    """Whether a path, or an open file, lies in a checkpoint on the disk that is being written."""
    if isinstance(target, int):
        with suppress(OSError):
            return "/checkpoints/step-" in os.readlink(f"/proc/self/fd/{target}")
        return False
    return isinstance(target, str | os.PathLike) and "/checkpoints/step-" in os.fspath(target)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType, reportOperatorIssue]


class _WatchedRow(ProgressRow):
    """A rank's row of progress, of which an injector hears."""

    __slots__ = ("_injector",)

    def __init__(self, row: ProgressRow, injector: FaultInjector) -> None:
        super().__init__(row._cells)
        self._injector = injector

    def begin(self, step: int) -> None:
        super().begin(step)
        self._injector.begin(step)

    def end(self) -> None:
        super().end()
        self._injector.reach("shutdown")

    def finished(self, step: int) -> None:
        super().finished(step)
        self._injector.finished(step)

    def enter(self, phase: int) -> int:
        before = super().enter(phase)
        if phase < len(PHASES):
            self._injector.enter(PHASES[phase])
        return before

    def leave(self, before: int) -> None:
        self._injector.leave()
        super().leave(before)
