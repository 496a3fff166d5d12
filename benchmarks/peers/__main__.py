"""Tokens per second on a tiny Llama, two ranks of one thread each, beside everybody else.

Weft runs through the whole measurement; rivals come in heats of a few (memory), each heat interleaved with Weft step by
step.  A rival's figure is the ratio of its seconds to Weft's in the same round, so that what the machine did to one
round it did to both.  Same numerics are compared with same numerics; a rival at its defaults (fp32, the framework's own
optimizer settings) with Weft where the recipe permits bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks._contender import Block, Contender, Entry, contenders, interleave
from benchmarks._llama import shape_of
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import round_ratios, spread, summary
from benchmarks._weft import recipe_for_auto
from benchmarks.peers._environment import peer_versions, peers_python
from weft.api import decide_by_trials
from weft.config.cluster import known_machine
from weft.config.plan import dump_plan
from weft.model.description import facts_of, profile_of
from weft.planning.search import choose_plan

_BATCH, _RANKS = 8, 2
_HEAT = 4
_LOSS_TOLERANCE = 1e-3
"""Of the first losses (about 9.05), which are good to 2e-4 in bf16."""
_KINDS = ("default", "tuned fp32", "tuned bf16")
_TUNED = {"fused": True, "tuned": True, "compile": True}
_WEFT = "benchmarks._weft:weft"
_BACKENDS = {"gloo": "", "weft": " on shared memory"}


def own(stages: Sequence[int], backends: Sequence[str]) -> dict[str, Entry]:
    """Weft with a plan of its user's, by what tells one such plan from another; ZeRO-1 on Gloo is not named."""
    found: dict[str, Entry] = {}
    for backend in backends:
        for zero in stages:
            for precision in ("fp32", "bf16"):
                stage = "" if zero == 1 else f"zero-{zero} "
                kind = f"{stage}{precision}{_BACKENDS[backend]}"
                settings = {"zero": zero, "compile": True, "precision": precision, "backend": backend}
                found[kind] = Entry(name=f"weft {kind}", target=_WEFT, settings=settings)
    return found


def auto_entry() -> Entry:
    """What `weft train --plan auto` would run here: searched, tried, compiled where that pays; any processes."""
    recipe, known = recipe_for_auto(_BATCH * _RANKS), known_machine()
    facts = facts_of(recipe)
    choice = choose_plan(recipe, known.cluster, facts, profile=profile_of(recipe))
    plan = decide_by_trials(recipe, choice, known.cluster, log=log).plan
    settings = {"plan": dump_plan(plan, everything=True), "threads": plan.compute.threads_per_rank}
    return Entry(name="weft auto", target=_WEFT, settings=settings, ranks=plan.mesh.world_size)


def rivals(python: str | None) -> list[Entry]:
    """Everybody at defaults, tuned in fp32, and tuned in bf16."""
    found = [entry for name in ("ddp", "fsdp") for entry in _variants(name, f"benchmarks._handwritten:{name}")]
    if python is None:
        return found
    for name in ("accelerate", "fabric"):
        found += _variants(name, f"benchmarks.peers._frameworks:{name}", python=python)
    for stage in (1, 2, 3):
        target = "benchmarks.peers._frameworks:deepspeed"
        found += _variants(f"deepspeed zero-{stage}", target, python=python, stage=stage)
    return found


def _variants(name: str, target: str, *, python: str = sys.executable, **settings: Any) -> Iterator[Entry]:
    for kind, chosen in (
        ("default", {}),
        ("tuned fp32", _TUNED),
        ("tuned bf16", {**_TUNED, "precision": "bf16"}),
    ):
        yield Entry(name=f"{name} {kind}", target=target, settings={**settings, **chosen}, python=python)


def measure(entries: Sequence[Entry], weft: Mapping[str, Entry], *, rounds: int, steps: int) -> dict[str, Any]:
    """Run all heats; returns per rival its blocks and those of Weft in the same rounds."""
    kept: dict[str, Any] = {}
    with contenders(list(weft.values()), warmup_steps=3) as own:
        for start in range(0, len(entries), _HEAT):
            with contenders(entries[start : start + _HEAT], warmup_steps=3) as heat:
                _check_losses(own, heat)
                blocks = interleave([*own, *heat], rounds=rounds, steps=steps)
                ours = {kind: blocks[entry.name] for kind, entry in weft.items()}
                for rival in heat:
                    name = rival.entry.name
                    kept[name] = _compared(name, blocks[name], ours)
                    log(f"{name:28s} {_tokens(kept[name]['seconds']):6.0f} tokens/s, {_ratio_line(kept[name])}")
                for kind, entry in weft.items():
                    _extend(kept.setdefault(entry.name, {}), ours[kind])
    return kept


def _check_losses(own: Sequence[Contender], heat: Sequence[Contender]) -> None:
    """Everybody trains the same model on the same data; who does not is no rival."""
    for rival in heat:
        for mine, theirs in zip(own[0].warm_losses, rival.warm_losses, strict=True):
            what = f"{rival.entry.name} trains something else: its loss is {theirs}, not {mine}"
            assert abs(mine - theirs) < _LOSS_TOLERANCE, what


def _extend(mine: dict[str, Any], blocks: Sequence[Block]) -> None:
    """Add the rounds of a heat to Weft's own."""
    mine["seconds"] = [*mine.get("seconds", ()), *_seconds(blocks)]
    mine["cpu_seconds"] = [*mine.get("cpu_seconds", ()), *_cpu_seconds(blocks)]
    mine["peak_mib"] = round(max(block.peak_bytes for block in blocks) / 2**20)


def _compared(name: str, blocks: Sequence[Block], weft: Mapping[str, Sequence[Block]]) -> dict[str, Any]:
    kind = next(kind for kind in _KINDS if name.endswith(kind))
    precision = kind.removeprefix("tuned ")
    against = [which for which in weft if which == "auto" or precision in ("default", *which.split())]
    rival: dict[str, Any] = {"kind": kind}
    _extend(rival, blocks)
    rival["weft_seconds"] = {which: _seconds(weft[which]) for which in against}
    rival["ratios"] = {which: round_ratios(rival["seconds"], _seconds(weft[which])) for which in against}
    rival["cpu_ratios"] = {which: round_ratios(rival["cpu_seconds"], _cpu_seconds(weft[which])) for which in against}
    return rival


def _seconds(blocks: Sequence[Block]) -> list[float]:
    return [median(block.seconds) for block in blocks]


def _cpu_seconds(blocks: Sequence[Block]) -> list[float]:
    return [median(block.cpu_seconds) for block in blocks]


def _tokens(seconds: Sequence[float]) -> float:
    return _BATCH * _RANKS * shape_of({}).sequence_length / median(seconds)


def _ratio_line(rival: dict[str, Any]) -> str:
    return ", ".join(f"weft {kind} is {median(r):.2f}x" for kind, r in rival["ratios"].items())


def goals_of(kept: dict[str, Any]) -> list[Goal]:
    """Against the best rival of each kind: the one that leaves Weft the smallest lead."""
    goals: list[Goal] = []
    plain = [
        (f"tuned {word}", which, 1.0) for which in _kinds_of(kept) for word in ("fp32", "bf16") if word in which.split()
    ]
    for kind, which, wanted in (
        *plain,
        ("default", "bf16", 1.5),
        ("default", "auto", 1.8),
        ("tuned", "auto", 1.2),
    ):
        leads = {
            name: rival["ratios"][which]
            for name, rival in kept.items()
            if rival.get("kind", "").startswith(kind) and which in rival["ratios"]
        }
        if not leads:
            continue
        best = min(leads, key=lambda name: median(leads[name]))
        goals.append(
            Goal(
                what=f"weft {which} over the best of {len(leads)} {kind} ({best})",
                measured=median(leads[best]),
                goal=wanted,
                better="higher",
                spread=spread(leads[best]),
                unit="x",
            )
        )
    return goals


def _kinds_of(kept: Mapping[str, Any]) -> list[str]:
    """Weft's plans that rivals were compared with, in their order, but the searched one."""
    found = {which: None for rival in kept.values() for which in rival.get("ratios", ()) if which != "auto"}
    return list(found)


def main() -> None:
    parser = options_parser(__doc__, rounds=15)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a rival's name")
    parser.add_argument("--without", default=None, help="part of the names of those that stay away, such as bf16")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 3), default=[1, 3], help="of Weft's ZeRO")
    parser.add_argument("--backends", nargs="+", choices=_BACKENDS, default=list(_BACKENDS), help="of Weft's plans")
    options = parser.parse_args()
    before, python = machine(), peers_python()
    everybody = [entry for entry in rivals(python) if options.only in entry.name]
    entries, weft = everybody, {**own(options.stages, options.backends), "auto": auto_entry()}
    if options.without:
        entries = [entry for entry in everybody if options.without not in entry.name]
        weft = {kind: entry for kind, entry in weft.items() if options.without not in entry.name}
    kept = measure(entries, weft, rounds=options.rounds, steps=options.steps)
    samples = {
        name: {
            **rival,
            "tokens_per_second": _tokens(rival["seconds"]),
            "summary": summary(rival["seconds"]),
        }
        for name, rival in kept.items()
    }
    about = {
        "machine": before,
        "versions": versions() | ({"peers": peer_versions(python)} if python else {}),  # pyright: ignore[reportOperatorIssue]
        "settings": {
            "model": "6 layers, hidden 256, FFN 1024, 8 heads, vocabulary 8192, sequence 256, untied",
            "batch": f"{_BATCH} per rank, {_RANKS} ranks of one thread, AdamW, no clipping",
            "weft": {kind: dict(entry.settings) for kind, entry in weft.items()},
            "left_out": options.without or "nobody",
            "tuned": dict(_TUNED),
            "rounds": options.rounds,
            "steps_per_round": options.steps,
        },
        "note": options.note,
    }
    write_result("peers", goals=goals_of(kept), samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
