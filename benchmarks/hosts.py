"""From the loss of a host to the next step, and from the start of a further one: `weft train --nodes` on fake machines.

The machines are namespaces of this one with networks of their own (tests/support/machines.py), so all share its cores.
What is measured is the time from the loss to the end of the first step after it, at the smaller world.  For a host that
joins it is the time without training: its command starts, imports and prepares while the others go on.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread

sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "run" / "hosts")]

from hosts_kit import HostJob, job_on_machines  # noqa: E402
from machines import Machine, why_not  # noqa: E402

_STEPS = 100_000
_BEFORE = 40
_DEADLINE_SECONDS = 90.0
_UNDER_WAY_SECONDS = 0.3
"""A step that was under way may still be finished."""
_SECONDS, _JOIN_SECONDS = 7.0, 5.0
Act = Callable[[list[Machine]], object]
CASES: dict[str, tuple[str, Act]] = {
    "etcd, a host loses its power": ("etcd", lambda hosts: hosts[1].lose_power()),
    "etcd, the leader crashes": ("etcd", lambda hosts: hosts[0].crash()),
    "folder, a host loses its power": ("folder", lambda hosts: hosts[1].lose_power()),
    "folder, the leader crashes": ("folder", lambda hosts: hosts[0].crash()),
}
"""What happens, on three hosts of one rank each."""


def _times(job: HostJob) -> list[tuple[int, float]]:
    return [(each["step"], each["unix_time_seconds"]) for each in job.events("step")]


def lost_seconds(rendezvous: str, act: Act, folder: Path) -> float:
    """Time from the loss of a host to the first step after it."""
    plan = "[mesh]\nreplicate = 2\n"
    with job_on_machines(3, folder, rendezvous=rendezvous, nodes="2..3", steps=_STEPS, plan=plan) as (job, hosts):
        job.start(hosts[0])
        job.wait_for(("hosts     ",), hosts[0])
        job.start(hosts[1])
        job.wait_for_step(3)
        job.start(hosts[2])
        job.wait_for(("data 2 → data 3",), hosts[0])
        job.wait_for_step(job.num_steps + _BEFORE)
        lost = time.time()
        act(hosts)
        return _first_step(job, after=lost + _UNDER_WAY_SECONDS) - lost


def joined_seconds(folder: Path) -> float:
    """Time without training while a second host is taken in."""
    with job_on_machines(2, folder, rendezvous="folder", nodes="1..2", steps=_STEPS, plan="[mesh]\n") as (job, hosts):
        job.start(hosts[0])
        job.wait_for_step(_BEFORE)
        job.start(hosts[1])
        job.wait_for(("since host node1 has come",), hosts[0])
        reached = job.num_steps
        job.wait_for_step(reached + 3)
        times = [at for step, at in _times(job) if step >= reached - 3]
        return max(after - before for before, after in zip(times, times[1:], strict=False))


def _first_step(job: HostJob, *, after: float) -> float:
    """When the first step was finished after a time."""
    until = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < until:
        if found := [at for _, at in _times(job) if at > after]:
            return found[0]
        time.sleep(0.02)
    raise TimeoutError("the job has not gone on")


def main() -> None:
    parser = options_parser(__doc__, rounds=4)
    options = parser.parse_args()
    if problem := why_not():
        parser.error(problem)
    before = machine()
    samples: dict[str, list[float]] = {name: [] for name in (*CASES, "a host joins")}
    for number in range(options.rounds):
        for name in samples:
            with tempfile.TemporaryDirectory() as folder:
                if name in CASES:
                    samples[name].append(lost_seconds(*CASES[name], Path(folder)))
                else:
                    samples[name].append(joined_seconds(Path(folder)))
            log(f"round {number + 1}: {name}: {samples[name][-1]:.2f} s")
    goals = [
        Goal(
            what=f"{name}: to the end of the next step",
            measured=median(times),
            goal=_SECONDS if name in CASES else _JOIN_SECONDS,
            better="lower",
            spread=spread(times),
            unit=" s",
        )
        for name, times in samples.items()
    ]
    about = {"machine": before, "versions": versions(), "settings": {"hosts": 3}, "note": options.note}
    write_result("hosts", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
