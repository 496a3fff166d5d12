"""Ray: one job, whose driver runs on the head, asks for a bundle on each machine, and has an agent run in each.

The submitting machine speaks HTTP alone.  What is asked: Ray's manual, "Ray Jobs REST API" (2.60).
"""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.client import NOT_FOUND
from typing import Any, final

from weft.config.document import plain, typed
from weft.config.pool import Pool, RaySettings
from weft.files import write_whole
from weft.run.places.contract import (
    FreeNodes,
    Gang,
    Job,
    PlacedJob,
    PlaceSeat,
    PlaceState,
    PlaceVerdict,
    Request,
    RequestLine,
    agent_command,
)
from weft.run.places.ray_api import JOBS, RayRefusalError, call, check_version, nodes_of
from weft.run.places.ray_nodes import RayNode, bundle_of, choose_nodes, labelled_blocks
from weft.run.places.settle import why_ended
from weft.run.places.submission import FOLDER

_STATE = "ray-state.json"
"""What the driver tells of the job."""
_MARGIN_SECONDS = 30
"""Time that the driver takes besides the agents, when it is told to stop."""
_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


@final
class RayPlace:
    """A cluster under Ray."""

    name = "ray"
    replaces_machines = True

    def request(self, gang: Gang, job: Job, pool: Pool) -> Request:
        settings = settings_of(pool)
        lines = [RequestLine("{"), *_lines(gang, job, pool), RequestLine("}")]
        return Request(lines=tuple(lines), command=("POST", f"{settings.address.rstrip('/')}{JOBS}"))

    def check(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlaceVerdict:
        settings = settings_of(pool)
        version = check_version(settings)
        nodes = nodes_of(settings)
        able = [node.empty for node in nodes if node.could_hold(bundle_of(gang))]
        if problem := _wrong_network(nodes, pool) or _too_few(able, len(nodes), gang, settings):
            return PlaceVerdict(accepts=False, text=problem)
        free = sum(node.holds(bundle_of(gang)) for node in nodes)
        when = "it starts at once" if free >= gang.least else f"it waits until {gang.least} are free"
        return PlaceVerdict(accepts=True, text=f"Ray {version}: {free} of {len(able)} machines are free, {when}")

    def submit(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlacedJob:
        (job.run / FOLDER / _STATE).unlink(missing_ok=True)
        answer = call(settings_of(pool), "POST", JOBS, request.text)
        return PlacedJob(place=self.name, number=str(answer["submission_id"]))

    def state(self, placed: PlacedJob, job: Job, pool: Pool) -> PlaceState:
        told = _told(job)
        try:
            found = call(settings_of(pool), "GET", f"{JOBS}{placed.number}")
        except RayRefusalError as error:
            if error.code != NOT_FOUND:
                raise
            # A head that was started anew knows no jobs, and none of them has outlived the one before.
            return PlaceState(phase="ended", why=f"Ray knows it no longer; {why_ended(job.run)}")
        if found["status"] in _ENDED:
            known = told is not None and told.phase == "ended"
            return told if known and told is not None else PlaceState(phase="ended", why=_why_failed(found, job))
        if told is not None:
            return replace(told, phase="stopping") if told.phase == "ended" else told
        return PlaceState(phase="pending", why="its driver has not begun")

    def stop(self, placed: PlacedJob, job: Job, pool: Pool) -> None:
        call(settings_of(pool), "POST", f"{JOBS}{placed.number}/stop")

    def free(self, pool: Pool) -> list[FreeNodes]:
        settings = settings_of(pool)
        version = check_version(settings)
        kinds: dict[str, list[int]] = {}
        for node in nodes_of(settings):
            if node.total.get("CPU", 0) >= 1:  # a head may be there for itself
                numbers = kinds.setdefault(_devices(node), [0, 0])
                numbers[0] += 1
                numbers[1] += node.holds({name: node.total.get(name, 0.0) for name in ("CPU", "GPU")})
        return [
            FreeNodes(num_nodes=count, num_free=free, devices=devices, note=f"Ray {version}")
            for devices, (count, free) in kinds.items()
        ]

    def seat(self, environment: Mapping[str, str]) -> PlaceSeat | None:
        return None  # the command itself says


def settings_of(pool: Pool) -> RaySettings:
    """The table `[ray]` of a pool."""
    return pool.ray or RaySettings()


def tell(job: Job, state: PlaceState) -> None:
    """Tell, as the job's driver, how the job stands."""
    write_whole(job.run / FOLDER / _STATE, json.dumps(plain(state)))


def _told(job: Job) -> PlaceState | None:
    try:
        return typed(PlaceState, json.loads((job.run / FOLDER / _STATE).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lines(gang: Gang, job: Job, pool: Pool) -> Iterator[RequestLine]:
    """The keys of the request, one in a line."""

    def line(key: str, value: Any, why: str, end: str = ",") -> RequestLine:
        return RequestLine(f"  {json.dumps(key)}: {json.dumps(value)}{end}", why)

    driver = shlex.join(agent_command(pool, job.run, ("--ray",)))
    yield line("entrypoint", driver, "the driver, on the head: it asks for the machines, and keeps an agent on each")
    bundle = ", ".join(f"{name} {number:g}" for name, number in bundle_of(gang).items())
    shown = {"name": job.name, "run": str(job.run), "machines": gang.nodes, "bundle": bundle}
    for block in labelled_blocks(gang, settings_of(pool).labels):
        wanted = "must" if block.must else "wish"
        shown[f"blocks in one {block.tier}"] = f"{block.num_nodes} machines, a {wanted}"
    yield line("metadata", shown, "what Ray's dashboard shows; the driver asks for one bundle on each machine")
    seconds = str(gang.grace_seconds + _MARGIN_SECONDS)
    why = "time to save after the word to stop; by itself Ray gives three seconds"
    yield line("runtime_env", {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": seconds}}, why, end="")


def _too_few(able: list[RayNode], count: int, gang: Gang, settings: RaySettings) -> str:
    """Say that the gang would wait for ever."""
    if settings.autoscales:
        return ""
    bundle = bundle_of(gang)
    if len(able) < gang.least:
        wanted = ", ".join(f"{name} {number:g}" for name, number in bundle.items())
        return (
            f"{len(able)} of its {count} nodes have {wanted}, and {gang.least} are wanted: the job would wait for"
            " ever. Lower --nodes, or set autoscales in [ray] where Ray gets more"
        )
    blocks = [block for block in labelled_blocks(gang, settings.labels) if block.must]
    if choose_nodes(able, bundle, gang.least, blocks, settings.labels) is None:
        sizes = " and ".join(f"{block.num_nodes} in one {block.tier}" for block in blocks)
        return (
            f"its nodes do not hold blocks of {sizes}, by their labels {', '.join(settings.labels)}: the job would wait"
            " for ever. Start nodes with these labels (ray start --labels), or take another plan"
        )
    return ""


def _wrong_network(nodes: list[RayNode], pool: Pool) -> str:
    if pool.network is None:
        return ""
    wanted = ipaddress.ip_network(pool.network, strict=False)
    # Agents may talk on another network than Ray: only Ray's is known here.
    if any(ipaddress.ip_address(node.address) in wanted for node in nodes):
        return ""
    shown = ", ".join(sorted(node.address for node in nodes)[:3])
    return f"no node has an address in network {pool.network}; theirs are {shown}"


def _why_failed(found: dict[str, Any], job: Job) -> str:
    """Why a job has ended whose driver has not told."""
    said = str(found.get("message") or "").strip().splitlines()
    last = f"; Ray says: {said[-1]}" if said and found["status"] == "FAILED" else ""
    return f"{found['status'].lower()}; {why_ended(job.run)}{last}"


def _devices(node: RayNode) -> str:
    cores = f"{node.total.get('CPU', 0):g} cores"
    if not (count := node.total.get("GPU", 0)):
        return cores
    return f"{count:g} × {node.labels.get('ray.io/accelerator-type', 'GPU')}, {cores}"
