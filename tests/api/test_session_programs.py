"""Drawn programs of calls on two ranks: each ends in what one process computes with the same program, or in an error
soon that names the user's file and line.  Nothing hangs, nothing is silent.

A failing seed is looked at with `python tests/api/session_programs.py SEED`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool
from program_kit import Trouble
from session_places import agent, as_launched
from session_programs import Program, drawn
from torch import Tensor

from weft.errors import WeftError

SECONDS = 10.0
"""In which every program must have ended."""
HANGS_SECONDS = 25.0
PACK = 20
"""Programs that the same processes play, one after another."""


def _noted(value: Any) -> Any:
    """A result as JSON."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist()
    if isinstance(value, dict):
        return {str(name): _noted(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_noted(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _lines_of(error: BaseException) -> list[str]:
    """What `weft launch` shows of where an error was raised."""
    if isinstance(error, WeftError):
        return error.lines_of_user()
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}, line {frame.lineno}" for frame in frames if frame.filename.startswith("/")][-4:]


def _play_one(program: Program, path: Path, rank: int, world: int) -> dict[str, Any]:
    notes: list[Any] = []
    found: dict[str, Any] = {"seed": program.seed, "notes": notes, "error": "", "text": "", "trace": []}
    scope: dict[str, Any] = {"__name__": "program"}

    def note(value: Any) -> None:
        notes.append(_noted(value))

    odd = program.odd if world > 1 else -1
    Trouble.in_loss = False
    torch.manual_seed(rank)
    begun = time.monotonic()
    try:
        exec(compile(path.read_text(), str(path), "exec"), scope)
        scope["main"](path.with_suffix(f".{world}"), note, odd, rank)
    except BaseException as error:
        found |= {"error": type(error).__name__, "text": str(error), "trace": _lines_of(error)}
    return found | {"seconds": time.monotonic() - begun}


def _play(folder: str, ports: Sequence[int], seeds: Sequence[int]) -> None:
    """Play programs one after another, and append what each came to to a file of this rank."""
    sys.path.insert(0, str(Path(__file__).parent))
    world = dist.get_world_size()
    with as_launched(ports[0]) as rank, Path(folder, f"found-{rank}-of-{world}").open("a") as said:
        store = dist.TCPStore("127.0.0.1", ports[0], is_master=False, timeout=timedelta(seconds=60))
        for number, (port, seed) in enumerate(zip(ports[1:], seeds, strict=True), 1):
            os.environ["MASTER_PORT"] = str(port)
            store.add(f"came/{number}", 1)
            while store.add(f"came/{number}", 0) < world:
                time.sleep(0.005)
            faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
            found = _play_one(drawn(seed), Path(folder, f"program_{seed}.py"), rank, world)
            faulthandler.cancel_dump_traceback_later()
            gc.collect()  # of the groups that tracebacks held
            said.write(json.dumps(found) + "\n")
            said.flush()


def _ends(ranks: RankPool, folder: Path, world: int, seeds: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Seed → what the program came to on each rank; of one that hung, why that is thought."""
    ends: dict[int, list[dict[str, Any]]] = {}
    left = list(seeds)
    while left:
        files = [folder / f"found-{rank}-of-{world}" for rank in range(world)]
        hung = ""
        with ExitStack() as stack:
            ports = [stack.enter_context(agent()) for _ in range(len(left) + 1)]
            try:
                ranks.run(world, _play, str(folder), ports, left, timeout=HANGS_SECONDS * (len(left) + 1))
            except (RankError, dist.DistError) as error:
                hung = "\n".join([str(error), *getattr(error, "__notes__", ())])
        of_ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        for file in files:
            file.unlink()
        played = min(map(len, of_ranks))
        ends |= {left[place]: [one[place] for one in of_ranks] for place in range(played)}
        if hung:
            assert played < len(left), hung
            ends[left[played]] = [{"error": "HANGS", "text": hung, "notes": [], "trace": [], "seconds": 99.0}] * world
            played += 1
        left = left[played:]
    return ends


def _wrong(program: Program, alone: dict[str, Any], together: Sequence[dict[str, Any]]) -> str:
    """What is not as it should be; empty where all is."""
    if late := [end for end in together if end["seconds"] > SECONDS]:
        return f"takes {late[0]['seconds']:.1f} s"
    for rank, end in enumerate(together):
        whole = alone["notes"] if not end["error"] else alone["notes"][: len(end["notes"])]
        # What the odd rank does otherwise is not noted.
        in_order = program.ends != "error"  # what was left out may have come first
        is_odd = rank == program.odd
        if not (_is_part(end["notes"], alone["notes"], in_order) if is_odd else alike(end["notes"], whole)):
            return f"rank {rank} computes other than one process"
        if end["error"] and program.ends == "right":
            return f"rank {rank} has an error"
        if not end["error"] and program.ends == "error":
            return f"rank {rank} is silent"
        named = f"program_{program.seed}.py"
        if end["error"] in ("", "SystemExit"):
            continue
        if end["error"] == "CollectiveError" and f"{named}:" not in end["text"]:
            return f"rank {rank} names no line"
        if not any(f"{file}, line" in line for file in (named, "program_kit.py") for line in end["trace"]):
            return f"rank {rank} shows no line"
        if len(end["text"].splitlines()) + len(end["trace"]) > 15:
            return f"rank {rank} says more than 15 lines"
    return ""


def _is_part(found: Sequence[Any], whole: Sequence[Any], in_order: bool) -> bool:
    """Whether `found` are some of the notes `whole`, perhaps in their order."""
    left = iter(whole)
    return all(any(alike(note, other) for other in (left if in_order else whole)) for note in found)


def alike(found: Any, expected: Any) -> bool:
    """Whether two notes are equal but for rounding."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(alike(found[name], expected[name]) for name in found)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(alike, found, expected))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(found, float) and isinstance(expected, int | float):
        return found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
    return found == expected


def judged(ranks: RankPool, folder: Path, seeds: Sequence[int]) -> dict[int, str]:
    """Seed → what is wrong with a program's end, and how it ended."""
    programs = {seed: drawn(seed) for seed in seeds}
    for seed, program in programs.items():
        (folder / f"program_{seed}.py").write_text(program.text)
    alone, together = (_ends(ranks, folder, world, seeds) for world in (1, 2))
    found: dict[int, str] = {}
    for seed, program in programs.items():
        wrong = _wrong(program, alone[seed][0], together[seed])
        # A program of all ranks' own fault is one process's, too.
        if program.ends != "either" and bool(alone[seed][0]["error"]) != ("all ranks" in program.what):
            wrong = wrong or f"one process ends with {alone[seed][0]}"
        if wrong:
            ends = "\n".join(f"  rank {rank}: {end}"[:1500] for rank, end in enumerate(together[seed]))
            found[seed] = f"{wrong} ({program.kind}; {program.what})\n{ends}"
    return found


@pytest.mark.parametrize("first", range(0, 2000, PACK))
def test_drawn_programs_end_right_or_name_the_users_line(ranks: RankPool, tmp_path: Path, first: int) -> None:
    wrong = judged(ranks, tmp_path, range(first, first + PACK))
    assert not wrong, "\n".join(f"program {seed}: {text}" for seed, text in wrong.items())


def test_programs_are_drawn_by_their_seed() -> None:
    seeds = random.Random(0).sample(range(2000), 50)
    assert [drawn(seed).text for seed in seeds] == [drawn(seed).text for seed in seeds]
    assert {drawn(seed).ends for seed in range(200)} == {"right", "error", "either"}
