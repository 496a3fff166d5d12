"""Kubernetes: one indexed Job, whose pods are the agents, each on a node of its own.

Only `kubectl` is used.  A plain Job is enough, since membership is Weft's own: where a pod is lost, the Job makes
another with the same index, and its agent joins the run again.  Fields: the API reference of batch/v1 in 1.31, where
`successPolicy` is on by default; annotations of Kueue: its page "Topology Aware Scheduling" (0.13).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from weft.config.pool import KubernetesSettings, Pool
from weft.errors import LaunchError
from weft.run.places.contract import (
    AGENT_LATER,
    AGENT_MEND,
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

_FAILURES = 3
"""Failures of each machine after which the Job ends: a fault in the run would repeat."""
_KEPT_SECONDS = 7 * 86_400
"""Time for which Kubernetes keeps a Job that has ended."""
_LOG_LINE = re.compile(r"[EIW]\d{4} ")
"""Begin of a line that kubectl logs while it tries."""
_INSTANCE = "app.kubernetes.io/instance"
_WHY = {
    "completions": "one agent for each machine of the gang",
    "backoffLimit": f"failures in all: {_FAILURES} of each machine",
    "activeDeadlineSeconds": "time limit of the job; the same command lets the run go on",
    "ttlSecondsAfterFinished": "how long the ended Job can be asked about",
    "successPolicy": "where one agent is done, the run is",
    "podFailurePolicy": (
        f"status {AGENT_MEND}: the user must mend something; {AGENT_LATER}, or a node that was drained, is lost or is"
        " wanted by another: the agent comes back, and that is no failure"
    ),
    "podAntiAffinity": "each agent has a node of its own",
    "podAffinity": "machines lie together where there is room",
    "terminationGracePeriodSeconds": "ranks save before the end",
    "/dev/shm": "shared memory between the ranks of a machine; 64 MB by default",
    "kueue.x-k8s.io/queue-name": "Kueue admits the gang as a whole",
}


@final
class KubernetesPlace:
    """A namespace under Kubernetes."""

    name = "kubernetes"
    replaces_machines = True

    def request(self, gang: Gang, job: Job, pool: Pool) -> Request:
        text = json.dumps(_whole_job(gang, job, pool), indent=1)
        reasons = {**_WHY, **_placement_reasons(gang, _settings(pool))}
        lines: list[RequestLine] = []
        for line in text.splitlines():
            key = line.strip().split('"')[1:2]
            # The reason stands at the first line that has the key: some keys come twice.
            why = reasons.pop(key[0], "") if key else ""
            if not why and '"/dev/shm"' in line:
                why = reasons.pop("/dev/shm", "")
            lines.append(RequestLine(line, why))
        return Request(lines=tuple(lines), command=(*_kubectl(pool), "create", "-f", "-", "-o", "name"))

    def check(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlaceVerdict:
        settings = _settings(pool)
        if not any(job.run.is_relative_to(volume.path) for volume in settings.volumes):
            paths = ", ".join(volume.path for volume in settings.volumes)
            text = f"no volume of the pool holds the run's folder {job.run}: give a --run-folder below {paths}"
            return PlaceVerdict(accepts=False, text=text)
        if problem := _wrong_block(gang, settings):
            return PlaceVerdict(accepts=False, text=problem)
        done = _run([*request.command, "--dry-run=server"], text=request.text)
        if done.returncode:
            return PlaceVerdict(accepts=False, text=f"Kubernetes says: {_said(done)}")
        nodes = _nodes(pool)
        if nodes is None:
            return PlaceVerdict(accepts=True, text="the API server takes it; this account may not list nodes")
        fitting = sum(_num_devices(node, settings) >= gang.num_devices for node in nodes)
        if gang.accelerator and fitting < gang.least:
            wanted = f"{gang.least} nodes with {gang.num_devices} {settings.device_resource} are wanted"
            return PlaceVerdict(accepts=False, text=f"{wanted}, and the cluster has {fitting}: lower --nodes")
        if len(nodes) < gang.least:
            return PlaceVerdict(accepts=False, text=f"{gang.least} nodes are wanted, and the cluster has {len(nodes)}")
        return PlaceVerdict(accepts=True, text=f"the API server takes it; {len(nodes)} nodes could be used")

    def submit(self, request: Request, gang: Gang, job: Job, pool: Pool) -> PlacedJob:
        name = _asked(request.command, text=request.text)
        return PlacedJob(place=self.name, number=name.rpartition("/")[2])

    def state(self, placed: PlacedJob, job: Job, pool: Pool) -> PlaceState:
        done = _run([*_kubectl(pool), "get", "job", placed.number, "-o", "json"])
        if done.returncode:
            if "NotFound" in done.stderr:
                return PlaceState(phase="ended", why=why_ended(job.run))
            raise LaunchError(f"Kubernetes says: {_said(done)}")
        found: dict[str, Any] = json.loads(done.stdout)
        for condition in found.get("status", {}).get("conditions", []):
            if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
                why = why_ended(job.run)
                said = f"{condition.get('reason', 'failed')}; " if condition["type"] == "Failed" else ""
                return PlaceState(phase="ended", why=f"{said}{why}")
        listed = _asked([*_kubectl(pool), "get", "pods", "-l", f"job-name={placed.number}", "-o", "json"])
        pods: list[dict[str, Any]] = json.loads(listed)["items"]
        running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        if not running:
            why = "suspended: its queue has not admitted it" if found["spec"].get("suspend") else _why_pending(pods)
            return PlaceState(phase="pending", why=why)
        is_leaving = "deletionTimestamp" in found["metadata"]
        nodes = tuple(sorted(pod["spec"].get("nodeName", "") for pod in running))
        return PlaceState(phase="stopping" if is_leaving else "running", nodes=nodes)

    def stop(self, placed: PlacedJob, job: Job, pool: Pool) -> None:
        # Each agent gets a TERM, and is killed after the pod's grace.
        words = ["delete", "job", placed.number, "--cascade=foreground", "--wait=false"]
        _asked([*_kubectl(pool), *words])

    def free(self, pool: Pool) -> list[FreeNodes]:
        nodes, settings = _nodes(pool), _settings(pool)
        if nodes is None:
            raise LaunchError("this account may not list the nodes of the cluster, so nobody knows what is free.")
        kinds: dict[int, int] = {}
        for node in nodes:
            count = _num_devices(node, settings)
            kinds[count] = kinds.get(count, 0) + 1
        note = "ready; only the scheduler knows what is free"
        return [
            FreeNodes(num_nodes=number, num_free=number, devices=f"{count} × {settings.device_resource}", note=note)
            for count, number in sorted(kinds.items(), reverse=True)
        ]

    def seat(self, environment: Mapping[str, str]) -> PlaceSeat | None:
        return None  # the command itself says: Kubernetes fills the index in


def _settings(pool: Pool) -> KubernetesSettings:
    assert pool.kubernetes is not None, "a pool of this place has its table"
    return pool.kubernetes


# ── the Job ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _whole_job(gang: Gang, job: Job, pool: Pool) -> dict[str, Any]:
    settings = _settings(pool)
    labels = {"app.kubernetes.io/name": "weft", _INSTANCE: job.name}
    own = {} if settings.queue is None else {"kueue.x-k8s.io/queue-name": settings.queue}
    metadata: dict[str, Any] = {"generateName": f"{job.name}-", "labels": {**labels, **own}}
    metadata["annotations"] = {"weft/run": str(job.run)}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    limit = {} if gang.limit_seconds is None else {"activeDeadlineSeconds": gang.limit_seconds}
    annotations = _kueue_annotations(gang, settings)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": gang.most,
            "parallelism": gang.most,
            "backoffLimit": _FAILURES * gang.most,
            **limit,
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "successPolicy": {"rules": [{"succeededCount": 1}]},
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {
                "metadata": {"labels": labels, **({"annotations": annotations} if annotations else {})},
                "spec": _pod(gang, job, pool, settings),
            },
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    def exit_code(action: str, status: int) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": "agent", "operator": "In", "values": [status]}}

    drained = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [exit_code("FailJob", AGENT_MEND), exit_code("Ignore", AGENT_LATER), drained]


def _pod(gang: Gang, job: Job, pool: Pool, settings: KubernetesSettings) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": gang.grace_seconds,
        "affinity": _affinity(gang, job, settings),
        "containers": [_container(gang, job, pool, settings)],
        "volumes": [
            *(
                {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": volume.claim}}
                for index, volume in enumerate(settings.volumes)
            ),
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    numbers = {"runAsUser": settings.user, "runAsGroup": settings.group}
    optional: dict[str, Any] = {
        "nodeSelector": dict(label.split("=", 1) for label in settings.node_labels),
        "tolerations": [_toleration(text) for text in settings.tolerations],
        "priorityClassName": settings.priority,
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": name} for name in settings.pull_secrets],
        "securityContext": {name: number for name, number in numbers.items() if number is not None},
        "hostNetwork": settings.host_network,
    }
    return {**pod, **{name: value for name, value in optional.items() if value}}


def _container(gang: Gang, job: Job, pool: Pool, settings: KubernetesSettings) -> dict[str, Any]:
    # Kubernetes replaces `$(NAME)` in a command, and `$$(` by `$(`.
    in_image = replace(pool, command=pool.command or ("weft",))
    words = [word.replace("$(", "$$(") for word in agent_command(in_image, job.run)]
    limits: dict[str, Any] = {}
    if gang.accelerator:
        limits[settings.device_resource] = str(gang.num_devices)
    if gang.num_cores is not None:
        limits["cpu"] = str(gang.num_cores)
    if settings.memory is not None:
        limits["memory"] = settings.memory
    mounts = [{"name": f"volume-{index}", "mountPath": volume.path} for index, volume in enumerate(settings.volumes)]
    return {
        "name": "agent",
        "image": settings.image,
        "command": [*words, "--seat", f"$(JOB_COMPLETION_INDEX)/{gang.most}"],
        "resources": {"limits": limits},
        "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def _toleration(text: str) -> dict[str, str]:
    """Read `key[=value][:effect]`."""
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    borne = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return {**borne, **({"effect": effect} if effect else {})}


# ── where the machines lie ────────────────────────────────────────────────────────────────────────────────────────────


def _label(block: GangBlock, settings: KubernetesSettings) -> str | None:
    """The label of nodes for a block's tier; None: the pool names none."""
    return settings.topology[-1 - block.level] if block.level < len(settings.topology) else None


def _is_sliced(block: GangBlock, gang: Gang) -> bool:
    return gang.most % block.num_nodes == 0


def _wrong_block(gang: Gang, settings: KubernetesSettings) -> str:
    """Say that a block which must lie together cannot be asked for."""
    block = gang.dearest_block
    if block is None or not block.must:
        return ""
    wanted = f"blocks of {block.num_nodes} machines must each lie in one {block.tier}"
    if _label(block, settings) is None:
        return f"{wanted}, and the pool's topology names no label of nodes for that: list it in [kubernetes]"
    if settings.queue is None and block.num_nodes < gang.most:
        return f"{wanted}, which Kubernetes alone cannot be asked for: name a queue of Kueue in [kubernetes]"
    if settings.queue is not None and not _is_sliced(block, gang):
        return f"{wanted}, and Kueue takes only whole blocks: give --nodes as a multiple of {block.num_nodes}"
    return ""


def _kueue_annotations(gang: Gang, settings: KubernetesSettings) -> dict[str, str]:
    """What Kueue is told of the dearest block.  It gives places to pods in the order of their index."""
    block = gang.dearest_block
    if block is None or settings.queue is None or (label := _label(block, settings)) is None:
        return {}
    if block.must:
        return {
            "kueue.x-k8s.io/podset-slice-required-topology": label,
            "kueue.x-k8s.io/podset-slice-size": str(block.num_nodes),
        }
    return {"kueue.x-k8s.io/podset-preferred-topology": label}


def _affinity(gang: Gang, job: Job, settings: KubernetesSettings) -> dict[str, Any]:
    mine = {"labelSelector": {"matchLabels": {_INSTANCE: job.name}}}
    apart = {**mine, "topologyKey": "kubernetes.io/hostname"}
    affinity: dict[str, Any] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    block = gang.dearest_block
    if block is not None and settings.queue is None and (label := _label(block, settings)) is not None:
        beside = {**mine, "topologyKey": label}
        if block.must:
            affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}
        else:
            wish = {"weight": 100, "podAffinityTerm": beside}
            affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}
    return affinity


def _placement_reasons(gang: Gang, settings: KubernetesSettings) -> dict[str, str]:
    block = gang.dearest_block
    if block is None:
        return {}
    keys = ("podset-slice-required-topology", "podset-preferred-topology")
    return {"podAffinity": block.why, **{f"kueue.x-k8s.io/{key}": block.why for key in keys}}


# ── kubectl ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _kubectl(pool: Pool) -> list[str]:
    settings = _settings(pool)
    words = ["kubectl", f"--request-timeout={ANSWER_SECONDS / 2:.0f}s"]
    words += [f"--context={settings.context}"] if settings.context is not None else []
    return words + ([f"--namespace={settings.namespace}"] if settings.namespace is not None else [])


def _nodes(pool: Pool) -> list[dict[str, Any]] | None:
    """The nodes that are ready and have the pool's labels; None: this account may not list them."""
    settings = _settings(pool)
    words = ["get", "nodes", "-o", "json", *(["-l", ",".join(settings.node_labels)] if settings.node_labels else [])]
    done = _run([*_kubectl(pool), *words])
    if done.returncode:
        if "Forbidden" in done.stderr:
            return None
        raise LaunchError(f"Kubernetes says: {_said(done)}")

    def is_ready(node: dict[str, Any]) -> bool:
        conditions = node.get("status", {}).get("conditions", [])
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
        return ready and not node.get("spec", {}).get("unschedulable", False)

    return [node for node in json.loads(done.stdout)["items"] if is_ready(node)]


def _num_devices(node: dict[str, Any], settings: KubernetesSettings) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get(settings.device_resource, 0))


def _why_pending(pods: Sequence[dict[str, Any]]) -> str:
    """Why no pod runs: the scheduler's words, or those of the machine that starts it."""
    for pod in pods:
        status = pod.get("status", {})
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get("message", condition.get("reason", "")))
        for container in status.get("containerStatuses", []):
            if waiting := container.get("state", {}).get("waiting"):
                return str(waiting.get("message", waiting.get("reason", "")))
    return ""


def _asked(command: Sequence[str], *, text: str = "") -> str:
    """Return what kubectl prints.

    Raises:
        LaunchError: it is not there, the cluster does not answer, or refuses.
    """
    done = _run(command, text=text)
    if done.returncode:
        raise LaunchError(f"Kubernetes says: {_said(done)}")
    return done.stdout.strip()


def _run(command: Sequence[str], *, text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        raise LaunchError("--on kubernetes needs the command kubectl, and this machine has none.") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Kubernetes has not answered in {ANSWER_SECONDS:.0f} s.") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """What kubectl says, in one line, without its log of tries."""
    said = done.stderr.strip().splitlines()
    lines = [line for line in said if not _LOG_LINE.match(line)]
    return " ".join((lines or said or ["nothing"])[-4:])
