"""Slurm: one batch job, whose script starts an agent on each machine, and has itself requeued where the run goes on.

Only Slurm's own commands are used.  Options: the manual pages of sbatch, srun, scontrol and squeue of 22.05 and 24.11.
"""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from weft.config.pool import Pool, SlurmSettings
from weft.errors import LaunchError
from weft.run.places.contract import (
    AGENT_LATER,
    ANSWER_SECONDS,
    FreeNodes,
    Gang,
    GangBlock,
    Job,
    PlacedJob,
    PlaceSeat,
    PlaceState,
    PlaceVerdict,
    Request,
    RequestLine,
    agent_command,
)
from weft.run.places.settle import why_ended
from weft.run.places.submission import FOLDER

_LONG_SECONDS = 30 * 86_400
"""Wait for switches where a block must lie together: as long as the site permits."""
_MOST_SWITCH_WAIT_SECONDS = 300
"""Longest wait for switches where the site says nothing else (slurm.conf(5), max_switch_wait)."""
_MARGIN_SECONDS = 60
"""Slurm may send the signal before a time limit as much earlier (sbatch(1), --signal)."""
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED")
_ENDING = ("COMPLETING", "STAGE_OUT", "SIGNALING")
_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")


@final
class SlurmPlace:
    """A partition under Slurm."""

    name = "slurm"
    replaces_machines = False

    def request(self, gang: Gang, job: Job, pool: Pool) -> Request:
        lines = [RequestLine("#!/bin/sh"), *_options(gang, job, pool, pool.slurm or SlurmSettings())]
        agent = shlex.join(agent_command(pool, job.run))
        settled = shlex.join(agent_command(pool, job.run, ("--settle",)))
        cores = "" if gang.num_cores is None else f" --cpus-per-task={gang.num_cores}"
        lines += [
            RequestLine(
                f"srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --cpu-bind=none{cores} {agent}",
                "one agent on each machine; Weft decides what the loss of one means",
            ),
            RequestLine(settled, f"says by its status how the job ended: {AGENT_LATER} where the run is to go on"),
            RequestLine("status=$?"),
            RequestLine(f'[ "$status" -ne {AGENT_LATER} ] || exec scontrol requeue "$SLURM_JOB_ID"'),
            RequestLine('exit "$status"'),
        ]
        return Request(lines=tuple(lines), command=("sbatch", "--parsable"))

    def check(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlaceVerdict:
        if odd := re.search(r"[^\w./+:=@,-]", str(job.run)):
            text = (
                f"Slurm reads {odd.group()!r} in the run's folder {job.run} otherwise: give a --run-folder without it"
            )
            return PlaceVerdict(accepts=False, text=text)
        if problem := _wrong_network(pool):
            return PlaceVerdict(accepts=False, text=problem)
        done = _run([*request.command, "--test-only"], text=request.text)
        said = " ".join(re.sub(r"^sbatch: (error: )?", "", line) for line in done.stderr.strip().splitlines())
        if done.returncode:
            return PlaceVerdict(accepts=False, text=f"Slurm says: {said}")
        text = re.sub(r"^Job \d+ to start", "Slurm would start it", said) + _shorter_wait(gang, pool)
        return PlaceVerdict(accepts=True, text=text)

    def submit(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlacedJob:
        number = _asked(request.command, text=request.text).partition(";")[0]
        return PlacedJob(place=self.name, number=number)

    def state(self, placed: PlacedJob, job: Job, pool: Pool) -> PlaceState:
        done = _run(["squeue", "-h", "-j", placed.number, "-o", "%T|%r|%N"])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise _down(done.stderr)
        if not done.stdout.strip():
            return PlaceState(phase="ended", why=why_ended(job.run))
        state, why, nodes = done.stdout.strip().splitlines()[0].split("|")
        if state in _ENDED:
            return PlaceState(phase="ended", why=f"{state.lower().replace('_', ' ')}; {why_ended(job.run)}")
        if state in _PENDING:
            return PlaceState(phase="pending", why=why)
        phase = "stopping" if state in _ENDING else "running"
        return PlaceState(phase=phase, nodes=tuple(expand_nodes(nodes)))

    def stop(self, placed: PlacedJob, job: Job, pool: Pool) -> None:
        if self.state(placed, job, pool).phase == "pending":
            _asked(["scancel", placed.number])
        else:
            # The batch shell is spared: it sees that the run was told to stop, and does not requeue it.
            _asked(["scancel", "--signal=TERM", placed.number])
            _end_after(placed.number, pool.grace_seconds)

    def free(self, pool: Pool) -> list[FreeNodes]:
        settings = pool.slurm or SlurmSettings()
        words = ["sinfo", "-h", "-o", "%R|%c|%G|%t|%D"]
        words += [f"--partition={settings.partition}"] if settings.partition is not None else []
        kinds: dict[tuple[str, str, str], list[int]] = {}
        for line in _asked(words).splitlines():
            partition, cores, devices, state, count = line.split("|")
            numbers = kinds.setdefault((partition, cores, devices), [0, 0])
            numbers[0] += int(count)
            numbers[1] += int(count) if state == "idle" else 0
        return [
            FreeNodes(
                num_nodes=count,
                num_free=free,
                devices=f"{cores} cores" if devices == "(null)" else f"{devices}, {cores} cores",
                note=f"partition {partition}",
            )
            for (partition, cores, devices), (count, free) in kinds.items()
        ]

    def seat(self, environment: Mapping[str, str]) -> PlaceSeat | None:
        if "SLURM_PROCID" not in environment or environment.get("SLURM_STEP_ID", "batch") == "batch":
            return None
        # `spine.leaf0.node0`, the machine last (topology/tree), or `b1.node4` (topology/block).
        topology = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:-1]
        return PlaceSeat(
            index=int(environment["SLURM_PROCID"]),
            count=int(environment["SLURM_NTASKS"]),
            attempt=int(environment.get("SLURM_RESTART_COUNT", "0")),
            topology=tuple(topology),
            node=environment.get("SLURMD_NODENAME", ""),
            # srun waits for ever for a machine that has started again before Slurm has missed it.
            end_command=("scancel", f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"),
        )


def _options(gang: Gang, job: Job, pool: Pool, settings: SlurmSettings) -> Iterator[RequestLine]:
    """The options of sbatch, one in a line."""

    def option(text: str, why: str = "") -> RequestLine:
        return RequestLine(f"#SBATCH {text}", why)

    yield option(f"--job-name={job.name}")
    yield option(f"--comment={job.run}")
    nodes = str(gang.least) if gang.least == gang.most else f"{gang.least}-{gang.most}"
    yield option(f"--nodes={nodes}", "the gang")
    if gang.num_cores is not None:
        yield option(f"--cpus-per-task={gang.num_cores}", "cores of a machine, by the pool's cluster")
    if settings.gpus if settings.gpus is not None else bool(gang.accelerator):
        yield option(f"--gpus-per-node={gang.num_devices}", "each agent sees all devices of its machine")
    if settings.exclusive:
        yield option("--exclusive", "no other job on the machines")
        yield option("--mem=0", "all of a machine's memory")
    for name in ("partition", "account", "qos", "reservation", "constraint"):
        if (value := getattr(settings, name)) is not None:
            yield option(f"--{name}={value}", f"as pool {pool.name} says")
    yield from _placement(gang, settings)
    if gang.limit_seconds is not None:
        yield option(f"--time={_clock(gang.limit_seconds)}", "time limit of the job; then it is requeued, and goes on")
    seconds = gang.grace_seconds + _MARGIN_SECONDS
    yield option(f"--signal=TERM@{seconds}", "ranks save before a time limit")
    yield option("--requeue", "after the loss of machines, or preemption, the same job goes on")
    yield option("--no-kill", "Weft goes on with the machines that are left")
    yield option("--open-mode=append")
    yield option(f"--output={job.run / FOLDER / 'slurm.log'}")
    for line in settings.lines:
        yield option(line, f"as pool {pool.name} says")


def _placement(gang: Gang, settings: SlurmSettings) -> Iterator[RequestLine]:
    """The options that keep blocks together."""
    if (block := _wished_block(gang, settings)) is None:
        return
    if settings.topology == "block":
        if gang.least % block.num_nodes == 0 and gang.most % block.num_nodes == 0:
            yield RequestLine(f"#SBATCH --segment={block.num_nodes}", block.why)
        return
    switches = math.ceil(gang.most / block.tier_nodes)
    yield RequestLine(f"#SBATCH --switches={switches}@{_clock(_switch_wait(block, settings))}", block.why)


def _wished_block(gang: Gang, settings: SlurmSettings) -> GangBlock | None:
    return None if settings.topology == "none" else gang.dearest_block


def _switch_wait(block: GangBlock, settings: SlurmSettings) -> int:
    return _LONG_SECONDS if block.must else settings.switch_wait_seconds


def _shorter_wait(gang: Gang, pool: Pool) -> str:
    """Say that the site lets a job wait less long for its switches than it is asked: Slurm itself only cuts it."""
    settings = pool.slurm or SlurmSettings()
    block = _wished_block(gang, settings)
    if block is None or settings.topology != "tree":
        return ""
    found = re.search(r"\bmax_switch_wait=(\d+)", _asked(["scontrol", "show", "config"]))
    limit = int(found[1]) if found is not None else _MOST_SWITCH_WAIT_SECONDS
    if _switch_wait(block, settings) <= limit:
        return ""
    return f"; after {limit} s (the site's max_switch_wait) it takes machines under any switches"


def _end_after(number: str, seconds: int) -> None:
    """Have Slurm end a running job after a time, in whole minutes since its start, whatever becomes of this command:
    its time limit is lowered, which every user may do with jobs of their own."""
    fields = _asked(["squeue", "-h", "-j", number, "-O", "TimeUsed:20,TimeLeft:20"]).split()
    if len(fields) != 2:  # it has ended meanwhile
        return
    used, left = (_read_clock(each) for each in fields)
    if used is None or (left is not None and left <= seconds + 60):
        return
    done = _run(["scontrol", "update", f"JobId={number}", f"TimeLimit={math.ceil((used + seconds) / 60)}"])
    if done.returncode and "already finished" not in done.stderr:
        raise _down(done.stderr)


def _read_clock(text: str) -> int | None:
    """Seconds of a time as squeue prints it, `1-02:03:04` or `3:04`; None: there is none (`UNLIMITED`, `INVALID`)."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def _wrong_network(pool: Pool) -> str:
    """Say that no machine of the partition lies in the pool's network, where Slurm knows their addresses as numbers."""
    if pool.network is None:
        return ""
    partition = (pool.slurm or SlurmSettings()).partition
    words = ["sinfo", "-h", "-N", "-o", "%o"]
    words += [f"--partition={partition}"] if partition is not None else []
    found = [ipaddress.ip_address(each) for each in set(_asked(words).split()) if re.fullmatch(r"[\d.]+", each)]
    wanted = ipaddress.ip_network(pool.network, strict=False)
    # Agents may talk on another network than the daemons: only that of the daemons is known here.
    if not found or any(each in wanted for each in found):
        return ""
    shown = ", ".join(map(str, sorted(found, key=int)[:3]))
    return f"no machine of the partition has an address in network {pool.network}; theirs are {shown}"


def _clock(seconds: int) -> str:
    """Days, hours, minutes and seconds, as sbatch takes them."""
    days, rest = divmod(seconds, 86_400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def expand_nodes(text: str) -> list[str]:
    """Return the machines of a list as Slurm writes it: `node[0-2,7],other` has five."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        names += _expand_part(part)
    return names


def _expand_part(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, ranges, after = match.groups()
    names: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        names += [f"{before}{number:0{len(first)}}{rest}" for number in numbers for rest in _expand_part(after)]
    return names


def _asked(command: Sequence[str], *, text: str = "") -> str:
    """Return what one of Slurm's commands prints.

    Raises:
        LaunchError: it is not there, does not answer, or refuses.
    """
    done = _run(command, text=text)
    if done.returncode:
        raise _down(done.stderr)
    return done.stdout.strip()


def _run(command: Sequence[str], *, text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=ANSWER_SECONDS, cwd="/", check=False
        )
    except FileNotFoundError:
        raise LaunchError(f"--on slurm needs the command {command[0]}: give it on a machine that has Slurm.") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Slurm's {command[0]} has not answered in {ANSWER_SECONDS:.0f} s.") from None


def _down(said: str) -> LaunchError:
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in said.strip().splitlines()]
    return LaunchError(f"Slurm says: {' '.join(lines) or 'nothing'}")
