"""Plays packs of drawn programs in the pool of ranks, and gives each a verdict under each setting."""

from __future__ import annotations

import faulthandler
import gc
import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from battery_programs import Program, drawn
from battery_runs import SETTINGS, Found, difference, play
from pool import ECHOES, RankError, RankPool

from weft.comm.device import forget_meshes
from weft.errors import CollectiveError, WeftError

HANGS_SECONDS = 30.0
PATIENCE = timedelta(seconds=20)
LIMITS = {"float64": (1e-10, 1e-9), "float32": (2e-5, 2e-4)}
"""Relative: of losses, and of the largest entry of every tensor."""
CHANGE = re.compile(
    r"\b(give|use|make|write|leave|take|set|train|put|call|choose|add|remove|keep|name|wrap|move|return|say|prepare|"
    r"freeze|build|compute|register|replace|pass|split|cut|save|load|construct|run|do|read|update|change|let|try|"
    r"raise|lower|draw|clip|hold|have|edit|gather|mark|start|begin|delete|rename|state\.\w+|session\.\w+)\b",
    re.IGNORECASE,
)
"""Words of a change to make."""
Job = tuple[int, tuple[str, ...] | None, str]
"""Seed, strange things in place of its own, and setting."""
BAD = ("WRONG", "TRACEBACK", "HANG", "FALSE ALARM", "WORDS")


def _verdict(program: Program, setting: str, path: Path) -> dict[str, str]:
    """Play a program on this rank, and compare with what the oracle has left."""
    oracle = path.with_suffix(".oracle")
    is_oracle = setting == ("one" if program.draws else "plain")
    if setting == "one" and is_oracle:
        oracle.unlink(missing_ok=True)  # of plain PyTorch
    try:
        found = play(path, setting)
    except BaseException as error:
        return of_error(error)
    if ("the calls differ", False) in found.notes and setting != "plain":
        return {"verdict": "WRONG", "text": "two calls of a module draw the same"}
    if is_oracle:
        torch.save((found.losses, found.values, found.notes), oracle)
        return {"verdict": "equal", "text": ""}
    if not oracle.exists():
        return {"verdict": "equal", "text": "nothing to compare with"}
    losses, values = (max(limit, program.tolerance) for limit in LIMITS[program.dtype])
    text = difference(Found(*torch.load(oracle)), found, losses=losses, values=values)
    if text and found.warned:
        text += f"; warned: {found.warned[0]}"
    return {"verdict": "WRONG" if text else "equal", "text": text}


def of_error(error: BaseException) -> dict[str, str]:
    """The verdict of what a rank has raised; an echo only says that another rank has left."""
    text = f"{type(error).__name__}: {error}"
    frames = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in traceback.extract_tb(error.__traceback__)]
    where = " < ".join(reversed(frames[-4:]))
    if not isinstance(error, WeftError):
        is_echo = any(echo in text for echo in ECHOES)
        return {"verdict": "echo" if is_echo else "TRACEBACK", "text": text[:600], "where": where}
    if isinstance(error, CollectiveError):
        return {"verdict": "echo", "text": text, "where": where}
    words = ""
    if not CHANGE.search(str(error)):
        words = "names no change to make"
    elif re.search(r"\brecipes?\b", str(error)):
        words = "speaks of a recipe"
    elif "Traceback (most" in text or len(text) > 1500:
        words = "is no sentence"
    if words:
        return {"verdict": "WORDS", "text": f"{words}: {text}", "where": where}
    return {"verdict": "refused", "text": text, "where": where}


def together(ends: Sequence[dict[str, str]], program: Program, setting: str) -> dict[str, str]:
    """The verdict of all ranks."""
    order = ("HANG", "TRACEBACK", "WRONG", "WORDS", "refused", "echo", "equal")
    worst = min(ends, key=lambda end: order.index(end["verdict"]))
    if worst["verdict"] == "echo":  # nobody said anything else
        is_torch = not worst["text"].startswith("CollectiveError")
        return worst | {"verdict": "TRACEBACK" if is_torch else "refused"}
    cannot_split = setting in ("tensor", "pipeline") and not program.has_tables
    if worst["verdict"] == "refused" and not program.strange and not cannot_split:
        return worst | {"verdict": "FALSE ALARM"}
    return worst


def _play(folder: str, jobs: Sequence[Job]) -> None:
    """Play programs one after another, and append each verdict to a file of this rank.

    All use the default group that is there; after one that did not end well on some rank it is made anew, because
    others may have left collectives in it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(str(Path(folder, f"store-of-{world}")), world)
    _join(dist.PrefixStore("first", store), rank, world)
    gc.freeze()  # what was imported: every session ends with a look for garbage
    with Path(folder, f"found-{rank}-of-{world}").open("a") as said:
        for number, (seed, strange, setting) in enumerate(jobs):
            faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
            begun, cpu = time.monotonic(), time.process_time()
            found = _verdict(_program(seed, strange), setting, Path(folder, f"program_{seed}.py"))
            faulthandler.cancel_dump_traceback_later()
            said.write(
                json.dumps(found | {"seconds": time.monotonic() - begun, "cpu": time.process_time() - cpu}) + "\n"
            )
            said.flush()
            failed = _any_failed(store, number, world, failed=found["verdict"] != "equal")
            if failed or number % 8 == 7:  # groups of sessions end with the default group
                _join(dist.PrefixStore(f"after/{number}", store), rank, world)


def _join(store: dist.Store, rank: int, world: int) -> None:
    """Leave the default group, and make another."""
    dist.destroy_process_group()
    forget_meshes()
    gc.collect()  # of the groups that tracebacks held
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)


def _any_failed(store: dist.Store, number: int, world: int, *, failed: bool) -> bool:
    """Wait for the other ranks at the end of a program; whether one of them has not come to its end."""
    store.add(f"failed/{number}", int(failed))
    store.add(f"came/{number}", 1)
    while store.add(f"came/{number}", 0) < world:
        time.sleep(0.002)
    return store.add(f"failed/{number}", 0) > 0


def _program(seed: int, strange: tuple[str, ...] | None) -> Program:
    from battery_programs import BY_NAME

    return drawn(seed, None if strange is None else [BY_NAME[name] for name in strange])


def _ends(ranks: RankPool, folder: Path, world: int, jobs: Sequence[Job]) -> Iterator[tuple[Job, list[dict[str, str]]]]:
    """Each job with its verdict on every rank."""
    left = list(jobs)
    while left:
        files = [folder / f"found-{rank}-of-{world}" for rank in range(world)]
        hung = ""
        try:
            ranks.run(world, _play, str(folder), left, timeout=HANGS_SECONDS * (len(left) + 1))
        except (RankError, dist.DistError) as error:
            hung = "\n".join([str(error), *getattr(error, "__notes__", ())])
        (folder / f"store-of-{world}").unlink(missing_ok=True)
        of_ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        for file in files:
            file.unlink()
        played = min(map(len, of_ranks))
        for place in range(played):
            yield left[place], [one[place] for one in of_ranks]
        if hung:
            if played == len(left):
                return
            yield left[played], [{"verdict": "HANG", "text": hung[-1500:]}]
            played += 1
        left = left[played:]


def judged(
    ranks: RankPool,
    folder: Path,
    seeds: Sequence[int],
    settings_of: Callable[[int], Sequence[str]] = lambda seed: tuple(SETTINGS),
    strange: tuple[str, ...] | None = None,
) -> Iterator[dict[str, Any]]:
    """Play the programs of some seeds, and yield each one's verdict under each of its settings, of which `one` is
    always one."""
    programs = {seed: _program(seed, strange) for seed in seeds}
    for seed, program in programs.items():
        (folder / f"program_{seed}.py").write_text(program.text)
    for world in (1, 2):
        jobs = [(seed, strange, name) for seed in seeds for name in _of_world(world, settings_of(seed))]
        for (seed, _, setting), ends in _ends(ranks, folder, world, jobs) if jobs else ():
            end = together(ends, programs[seed], setting)
            if setting != "plain":
                yield _row(programs[seed], setting, end)
            elif end["verdict"] != "equal":
                yield _row(programs[seed], setting, end | {"verdict": "BROKEN"})


def _of_world(world: int, settings: Sequence[str]) -> list[str]:
    """What is played on so many ranks, in order: what is compared with first."""
    first = ["plain", "one"] if world == 1 else []
    return first + [name for name in settings if SETTINGS[name] == world and name != "one"]


def _row(program: Program, setting: str, end: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": program.seed,
        "strange": list(program.strange),
        "kinds": list(program.kinds),
        "setting": setting,
        **end,
    }
