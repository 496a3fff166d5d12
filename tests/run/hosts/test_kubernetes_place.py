"""Kubernetes: what it is asked for passes the published schemas whole, and kubectl hands over what was shown."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_api import KubeApi, kube_api, problem_of

from weft.config.pool import ClaimedVolume, KubernetesSettings, Pool
from weft.errors import LaunchError
from weft.run.places import place_of
from weft.run.places.contract import AGENT_LATER, AGENT_MEND, Gang, GangBlock, Job, Request

JOB = Job(name="weft-run-1", run=Path("/shared/run-1"))
PLACE = place_of("kubernetes")


def settings_of(draw: random.Random | None = None, **more: Any) -> KubernetesSettings:
    drawn: dict[str, Any] = {}
    if draw is not None:
        choices: dict[str, list[Any]] = {
            "queue": [None, "team"],
            "priority": [None, "high"],
            "service_account": [None, "trainer"],
            "pull_secrets": [(), ("registry",)],
            "user": [None, 1000],
            "group": [None, 1000],
            "memory": [None, "512Gi"],
            "node_labels": [(), ("pool=train", "lab/kind=h100")],
            "tolerations": [(), ("nvidia.com/gpu:NoSchedule", "lab/team=a", "lab/any")],
            "topology": [(), ("lab/leaf",), ("lab/spine", "lab/leaf")],
            "host_network": [False, True],
        }
        drawn = {name: draw.choice(values) for name, values in choices.items()}
    volumes = (ClaimedVolume(claim="shared", path="/shared"),)
    return KubernetesSettings(**{"image": "lab/weft:1", "volumes": volumes, "namespace": "train", **drawn, **more})


def pool_of(settings: KubernetesSettings, command: tuple[str, ...] = ()) -> Pool:
    return Pool(place="kubernetes", name="lab", kubernetes=settings, command=command)


def block_of(num_nodes: int, *, must: bool) -> GangBlock:
    return GangBlock(
        tier="leaf",
        level=0,
        tier_nodes=4,
        num_nodes=num_nodes,
        axes=("shard", "tensor"),
        must=must,
        whole_seconds=1.0,
        split_seconds=1.2,
        scattered_seconds=2.0,
    )


def gang_of(nodes: int = 2, *blocks: GangBlock, accelerator: str = "h100", least: int | None = None) -> Gang:
    return Gang(least=least or nodes, most=nodes, num_devices=8, accelerator=accelerator, num_cores=64, blocks=blocks)


def object_of(request: Request) -> dict[str, Any]:
    return json.loads(request.text)


def drawn_request(seed: int) -> tuple[Gang, Request]:
    """A request for drawn settings and a drawn gang."""
    draw = random.Random(seed)
    settings, most = settings_of(draw), draw.choice((1, 2, 4, 12))
    blocks = [block_of(draw.choice((2, 4)), must=draw.random() < 0.5)] if draw.random() < 0.7 else []
    least = draw.randint(1, most)
    gang = gang_of(most, *blocks, accelerator=draw.choice(("", "h100")), least=least)
    return gang, PLACE.request(gang, JOB, pool_of(settings))


@pytest.mark.parametrize("seed", range(20))
def test_every_request_passes_the_schemas_and_asks_for_the_whole_gang(seed: int) -> None:
    gang, request = drawn_request(seed)
    most = gang.most
    asked = object_of(request)
    assert problem_of(asked) == ""
    spec, pod = asked["spec"], asked["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == most
    (container,) = pod["containers"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == ("8" if gang.accelerator else None)
    assert container["command"] == ["weft", "agent", "/shared/run-1", "--seat", f"$(JOB_COMPLETION_INDEX)/{most}"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = spec["template"]["metadata"]["labels"].items()
    assert apart["labelSelector"]["matchLabels"].items() <= labels, "no two agents on one node"


def through_own_types(asked: dict[str, Any]) -> dict[str, Any]:
    """The same object, read into Kubernetes' own Go types and written again by kubectl, without any server.

    It gets a variable on the way, since kubectl writes nothing that it has not changed.
    """
    words = ["kubectl", "set", "env", "--local", "-f", "-", "-o", "json", "WEFT_TRIED=1"]
    done = subprocess.run(words, input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    written = json.loads(done.stdout)
    (container,) = written["spec"]["template"]["spec"]["containers"]
    container["env"] = [each for each in container["env"] if each["name"] != "WEFT_TRIED"]
    return written


def lost(asked: Any, written: Any, path: str = "") -> Iterator[str]:
    """What of an object is not in another one."""
    if isinstance(asked, dict) and isinstance(written, dict):
        for key, value in asked.items():
            yield from lost(value, written.get(key), f"{path}.{key}")
    elif isinstance(asked, list) and isinstance(written, list) and len(asked) == len(written):
        for index, pair in enumerate(zip(asked, written, strict=True)):
            yield from lost(*pair, f"{path}[{index}]")
    elif asked != written and asked not in (None, {}, [], ""):
        yield f"{path}: {asked!r} became {written!r}"


@pytest.mark.needs_kubectl
def test_nothing_of_a_request_is_lost_in_kubernetes_own_types() -> None:
    for seed in range(20):
        asked = object_of(drawn_request(seed)[1])
        assert list(lost(asked, through_own_types(asked))) == []
    asked["spec"]["complations"] = 2
    assert list(lost(asked, through_own_types(asked))) == [".spec.complations: 2 became None"]
    asked["spec"]["completions"] = "two"
    with pytest.raises(ValueError, match="cannot unmarshal string into Go struct field JobSpec.spec.completions"):
        through_own_types(asked)


def test_what_an_agents_status_means_is_said() -> None:
    spec = object_of(PLACE.request(gang_of(), JOB, pool_of(settings_of())))["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes == {"FailJob": [AGENT_MEND], "Ignore": [AGENT_LATER]}
    (lost,) = [rule for rule in rules if "onPodConditions" in rule]
    assert (lost["action"], lost["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", "lab/weft:2"),
        ("volumes", (ClaimedVolume(claim="other", path="/shared"),)),
        ("context", "lab"),
        ("namespace", "other"),
        ("queue", "team"),
        ("priority", "high"),
        ("service_account", "trainer"),
        ("pull_secrets", ("registry",)),
        ("user", 1000),
        ("group", 1000),
        ("device_resource", "amd.com/gpu"),
        ("memory", "512Gi"),
        ("node_labels", ("pool=train",)),
        ("tolerations", ("lab/team=a:NoSchedule",)),
        ("topology", ("lab/leaf",)),
        ("host_network", True),
    ],
)
def test_every_setting_is_obeyed(name: str, value: Any) -> None:
    gang = gang_of(4, block_of(4, must=False))
    plain, changed = (
        PLACE.request(gang, JOB, pool_of(settings)) for settings in (settings_of(), settings_of(**{name: value}))
    )
    assert (changed.text, changed.command) != (plain.text, plain.command)
    assert problem_of(object_of(changed)) == ""


def test_an_altered_request_does_not_pass() -> None:
    asked = object_of(PLACE.request(gang_of(), JOB, pool_of(settings_of())))
    asked["spec"]["succesPolicy"] = asked["spec"].pop("successPolicy")
    assert "succesPolicy" in problem_of(asked)


def test_blocks_are_asked_of_kueue_or_of_the_scheduler() -> None:
    def template(gang: Gang, **more: Any) -> dict[str, Any]:
        request = PLACE.request(gang, JOB, pool_of(settings_of(topology=("lab/spine", "lab/leaf"), **more)))
        return object_of(request)["spec"]["template"]

    must = template(gang_of(8, block_of(4, must=True)), queue="team")
    assert must["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-slice-required-topology": "lab/leaf",
        "kueue.x-k8s.io/podset-slice-size": "4",
    }
    wish = template(gang_of(8, block_of(4, must=False)), queue="team")
    assert wish["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": "lab/leaf"}
    beside = template(gang_of(4, block_of(4, must=True)))["spec"]["affinity"]["podAffinity"]
    assert beside["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == "lab/leaf"
    beside = template(gang_of(4, block_of(4, must=False)))["spec"]["affinity"]["podAffinity"]
    (wished,) = beside["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wished["podAffinityTerm"]["topologyKey"] == "lab/leaf"


@pytest.mark.parametrize(
    ("gang", "more", "words"),
    [
        (gang_of(8, block_of(4, must=True)), {}, "names no label of nodes"),
        (gang_of(8, block_of(4, must=True)), {"topology": ("lab/leaf",)}, "name a queue of Kueue"),
        (gang_of(6, block_of(4, must=True)), {"topology": ("lab/leaf",), "queue": "team"}, "as a multiple of 4"),
    ],
)
def test_blocks_that_cannot_be_asked_for_are_refused(gang: Gang, more: dict[str, Any], words: str) -> None:
    pool = pool_of(settings_of(**more))
    verdict = PLACE.check(PLACE.request(gang, JOB, pool), gang, JOB, pool)
    assert (verdict.accepts, words in verdict.text) == (False, True), verdict.text


def test_a_folder_outside_the_volumes_is_refused_and_its_dollars_are_no_variables() -> None:
    pool, job = pool_of(settings_of()), Job(name="weft-run", run=Path("/elsewhere/run"))
    verdict = PLACE.check(PLACE.request(gang_of(), job, pool), gang_of(), job, pool)
    assert verdict.text.endswith("give a --run-folder below /shared")
    odd = Job(name="weft-run", run=Path("/shared/$(HOME)"))
    (container,) = object_of(PLACE.request(gang_of(), odd, pool))["spec"]["template"]["spec"]["containers"]
    assert container["command"][2] == "/shared/$$(HOME)"


# ── with a real kubectl ───────────────────────────────────────────────────────────────────────────────────────────────


def node(name: str, gpus: int, *, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": conditions}
    return {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}, "status": status}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[KubeApi]:
    monkeypatch.setenv("HOME", str(tmp_path))  # where kubectl keeps what it has discovered
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with kube_api(tmp_path) as (api, path):
        monkeypatch.setenv("KUBECONFIG", str(path))
        api.nodes = [node("a", 8), node("b", 8), node("c", 8, ready=False)]
        yield api


@pytest.mark.needs_kubectl
def test_what_the_engine_stores_is_what_a_dry_run_shows(api: KubeApi) -> None:
    pool, gang = pool_of(settings_of(random.Random(3), node_labels=())), gang_of()
    request = PLACE.request(gang, JOB, pool)
    verdict = PLACE.check(request, gang, JOB, pool)
    assert verdict.accepts, verdict.text
    assert not api.jobs, "a check stores nothing"
    placed = PLACE.submit(request, gang, JOB, pool)
    (stored,) = api.jobs.values()
    assert stored["metadata"].pop("name") == placed.number
    assert stored == object_of(request)


@pytest.mark.needs_kubectl
def test_a_job_is_followed_from_its_queue_to_its_end(api: KubeApi, tmp_path: Path) -> None:
    pool, gang = pool_of(settings_of(queue="team")), gang_of()
    job = Job(name="weft-run", run=tmp_path)
    placed = PLACE.submit(PLACE.request(gang, job, pool), gang, job, pool)
    (stored,) = api.jobs.values()
    stored["spec"]["suspend"] = True
    assert PLACE.state(placed, job, pool).why == "suspended: its queue has not admitted it"
    stored["spec"]["suspend"] = False
    full = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}
    api.pods = [{"metadata": {"name": "p0"}, "spec": {}, "status": {"phase": "Pending", "conditions": [full]}}]
    assert PLACE.state(placed, job, pool).why == "0/2 nodes are available"
    api.pods = [
        {"metadata": {"name": f"p{name}"}, "spec": {"nodeName": name}, "status": {"phase": "Running"}} for name in "ba"
    ]
    state = PLACE.state(placed, job, pool)
    assert (state.phase, state.nodes) == ("running", ("a", "b"))
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    api.statuses[placed.number] = {"conditions": [failed]}
    state = PLACE.state(placed, job, pool)
    assert (state.phase, state.why) == ("ended", "BackoffLimitExceeded; no agent has started")
    PLACE.stop(placed, job, pool)
    assert api.deleted == [placed.number]
    assert PLACE.state(placed, job, pool).phase == "ended", "forgotten"


@pytest.mark.needs_kubectl
def test_what_is_wrong_is_said_and_nothing_is_stored(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(settings_of())

    def refused(gang: Gang, pool: Pool = pool) -> str:
        verdict = PLACE.check(PLACE.request(gang, JOB, pool), gang, JOB, pool)
        assert not verdict.accepts, verdict.text
        return verdict.text

    assert "3 nodes with 8 nvidia.com/gpu are wanted, and the cluster has 2" in refused(gang_of(3))
    api.refusal = 'exceeded quota "team", requested: 16 of nvidia.com/gpu'
    assert 'exceeded quota "team"' in refused(gang_of())
    assert 'context "lba" does not exist' in refused(gang_of(), pool_of(settings_of(context="lba")))
    api.refusal, api.nodes = "", None
    verdict = PLACE.check(PLACE.request(gang_of(), JOB, pool), gang_of(), JOB, pool)
    assert verdict.accepts, "an account that may not list nodes can submit"
    with pytest.raises(LaunchError, match="may not list the nodes"):
        PLACE.free(pool)
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    assert "refused" in refused(gang_of())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="needs the command kubectl"):
        refused(gang_of())
    assert not api.jobs
