"""`weft pools init`: what it writes for Ray and Slurm, and what it refuses.  No engine is needed."""

from __future__ import annotations

import json
import random
import re
import shlex
import socket
import subprocess
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli import run
from weft.config.pool import Pool, PoolHost, RaySettings, SlurmSettings, SshSettings, parse_pool
from weft.errors import ClusterError, LaunchError, WeftError
from weft.run.places.engines import EngineHost, check_topology, write_files
from weft.run.places.look import MachineFacts
from weft.run.places.ray_init import level_names, ray_files
from weft.run.places.slurm_init import slurm_files
from weft.run.places.ssh import read_answer
from weft.version import VERSION

DRAWS = 60
ODD = ["$(id)", "`id`", "a'b", 'a"b', "a;b", "a&&b", "a|b>c", "*", "a\\b", "#a", "alice@10.0.0.9", "10.0.0.8"]
"""Addresses that a pool takes, since it is for ssh to judge them."""
ALL_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")


def facts_of(index: int, **more: Any) -> MachineFacts:
    told: dict[str, Any] = {
        "version": VERSION,
        "address": f"10.0.0.{index + 1}",
        "devices": "8 cores",
        "host": f"node{index}.lab.org",
        "num_cores": 8,
        "memory_bytes": 16 << 30,
        "is_root": True,
        "ray": ("/shared/venv/bin/ray",),
        "programs": ALL_PROGRAMS,
    }
    return MachineFacts(**{**told, **more})


def draw_lab(seed: int) -> tuple[Pool, list[EngineHost]]:
    """A pool, and what its hosts say: racks are numbered anew under each spine in some of them."""
    draw = random.Random(seed)
    depth, count = draw.randint(0, 3), draw.randint(1, 12)
    anew = draw.random() < 0.5
    hosts: list[PoolHost] = []
    for address in draw.sample([*ODD, *(f"10.0.1.{index}" for index in range(12))], count):
        numbers = [draw.randrange(3) for _ in range(depth)]
        shown = [numbers[level : level + 1] if anew else numbers[: level + 1] for level in range(depth)]
        kinds = ("site", "spine", "rack")[3 - depth :]
        path = tuple(f"{kind}{'-'.join(map(str, each))}" for kind, each in zip(kinds, shown, strict=True))
        hosts.append(PoolHost(address=address, topology=path))
    ssh = SshSettings(
        hosts=tuple(hosts),
        user=draw.choice([None, "train", "a b"]),
        port=draw.choice([None, 2222]),
        identity=draw.choice([None, "~/.ssh/id", "keys/my key"]),
    )
    pool = Pool(
        place="ssh",
        name="lab",
        command=draw.choice([(), ("/shared/my venv/bin/weft",)]),
        network=draw.choice([None, "10.0.0.0/16"]),
        cluster=draw.choice([None, "4x8xh100"]),
        rendezvous=draw.choice(["folder", "etcd://10.0.0.1:2379"]),
        limit_seconds=draw.choice([None, 3600]),
        grace_seconds=draw.choice([120, 300]),
        ssh=ssh,
    )
    ray = draw.choice([("/shared/venv/bin/ray",), ("/a b/python", "-m", "ray.scripts.scripts")])
    devices = [draw.choice([0, 0, 1, 8]) for _ in hosts]
    told = [facts_of(index, ray=ray, num_accelerators=devices[index]) for index in range(count)]
    return pool, [EngineHost(host=host, facts=facts) for host, facts in zip(hosts, told, strict=True)]


def lab_of(*facts: MachineFacts, topology: tuple[tuple[str, ...], ...] = ()) -> tuple[Pool, list[EngineHost]]:
    """A pool of as many hosts as have said something."""
    paths = topology or ((),) * len(facts)
    hosts = tuple(PoolHost(address=f"10.0.0.{index + 1}", topology=path) for index, path in enumerate(paths))
    pool = Pool(place="ssh", name="lab", ssh=SshSettings(hosts=hosts))
    return pool, [EngineHost(host=host, facts=told) for host, told in zip(hosts, facts, strict=True)]


def commands_in(script: str) -> list[tuple[str, list[str]]]:
    """The hosts that a script of Ray's reaches, and what is run there, as their shells read it."""
    words = [shlex.split(line) for line in script.splitlines() if line.startswith("on ")]
    return [(each[1], shlex.split(each[2])) for each in words]


def options_of(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)


def check_shell(files: dict[str, str]) -> None:
    for name, text in files.items():
        if name.endswith(".sh"):
            done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", range(DRAWS))
def test_ray_is_started_on_each_host_and_its_pool_is_what_was_meant(seed: int) -> None:
    pool, hosts = draw_lab(seed)
    files = ray_files(pool, hosts)
    check_shell(files)
    listens = "127.0.0.1" if pool.network is None else hosts[0].facts.address
    levels = tuple(level_names([each.host.topology for each in hosts]))
    meant = RaySettings(address=f"http://{listens}:8265", labels=levels)
    assert parse_pool(files["pool.toml"]) == replace(pool, place="ray", name="", ssh=None, ray=meant)

    started, ended = commands_in(files["start.sh"]), commands_in(files["stop.sh"])
    assert [address for address, _ in started] == [each.host.address for each in hosts]
    assert sorted(ended) == sorted((each.host.address, [*each.facts.ray, "stop"]) for each in hosts)
    assert ended[-1][0] == hosts[0].host.address, "the head is the last one to end"
    for index, (each, (_, words)) in enumerate(zip(hosts, started, strict=True)):
        assert words[: len(each.facts.ray) + 1] == [*each.facts.ray, "start"]
        options = options_of(words)
        assert options["--node-ip-address"] == each.facts.address
        labels = ",".join(f"{level}={name}" for level, name in zip(levels, each.host.topology, strict=True))
        assert options.get("--labels", "") == labels
        assert ("--head" in words) == (index == 0)
        assert options.get("--dashboard-host") == (listens if index == 0 else None)
        assert index == 0 or options["--address"] == f"{hosts[0].facts.address}:6379"


def test_a_dashboard_listens_on_no_public_address() -> None:
    pool, hosts = lab_of(facts_of(0, address="8.8.8.8"))
    files = ray_files(replace(pool, network="8.8.8.0/24"), hosts)
    assert "--dashboard-host=127.0.0.1" in files["start.sh"]
    assert "the head, or by ssh -L" in files["start.sh"]
    assert 'address = "http://127.0.0.1:8265"' in files["pool.toml"]


def test_levels_are_called_what_their_names_have_in_common() -> None:
    assert level_names([("spine0", "rack-1"), ("spine12", "rack-2")]) == ["spine", "rack"]
    assert level_names([("east", "rack1"), ("west", "rack2")]) == ["level0", "rack"]
    assert level_names([("r0", "r1"), ("r0", "r2")]) == ["level0", "level1"], "two would have one name"
    assert level_names([("0",), ("1",)]) == ["level0"]
    assert level_names([(), ()]) == []


@pytest.mark.parametrize("seed", range(DRAWS))
def test_slurm_knows_each_host_and_its_pool_is_what_was_meant(seed: int) -> None:
    pool, hosts = draw_lab(seed)
    files = slurm_files(pool, hosts)
    check_shell(files)
    has_tree = bool(hosts[0].host.topology)
    meant = SlurmSettings(partition="all", topology="tree" if has_tree else "none")
    assert parse_pool(files["pool.toml"]) == replace(pool, place="slurm", name="", ssh=None, slurm=meant)

    nodes = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in files["slurm.conf"].splitlines() if "NodeAddr" in line]
    for index, (node, each) in enumerate(zip(nodes, hosts, strict=True)):
        assert (node["NodeName"], node["NodeAddr"], node["CPUs"]) == (f"node{index}", each.facts.address, "8")
        assert 0.98 < int(node["RealMemory"]) / (16 << 10) <= 0.99
        count = each.facts.num_accelerators
        assert node.get("Gres") == (f"gpu:{count}" if count else None)
        assert (f"NodeName=node{index} Name=gpu File=/dev/nvidia" in files.get("gres.conf", "")) == bool(count)
    assert f"SlurmctldHost=node0({hosts[0].facts.address})\n" in files["slurm.conf"]
    assert ("GresTypes=gpu" in files["slurm.conf"]) == any(each.facts.num_accelerators for each in hosts)
    assert ("topology/tree" in files["slurm.conf"]) == ("topology.conf" in files) == has_tree
    loops = re.findall(r"^for each in (.*); do$", files["start.sh"] + files["stop.sh"], re.MULTILINE)
    addresses = [each.host.address for each in hosts]
    assert [shlex.split(each) for each in loops] == [addresses] * 3 + [[*addresses[1:], addresses[0]]]
    if has_tree:
        check_tree(files["topology.conf"], hosts)


def check_tree(text: str, hosts: list[EngineHost]) -> None:
    """Each host hangs on one switch, those with one topology on the same, and all on one root."""
    switches = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in text.splitlines() if line.startswith("Switch")]
    names = [switch["SwitchName"] for switch in switches]
    assert len(set(names)) == len(names)
    above = {under: each["SwitchName"] for each in switches for under in each.get("Switches", "").split(",") if under}
    assert set(names) - set(above) == {names[-1]}, "one root, which stands last"
    leaf_of = {node: each["SwitchName"] for each in switches for node in each.get("Nodes", "").split(",") if node}
    listed = Counter(node for each in switches for node in each.get("Nodes", "").split(",") if node)
    assert listed == Counter(f"node{index}" for index in range(len(hosts)))
    for index, each in enumerate(hosts):
        for other, second in enumerate(hosts):
            same = each.host.topology == second.host.topology
            assert (leaf_of[f"node{index}"] == leaf_of[f"node{other}"]) == same


def test_a_tree_of_one_rack_has_no_switch_above_it() -> None:
    pool, hosts = lab_of(facts_of(0), facts_of(1), topology=(("rack0",), ("rack0",)))
    assert slurm_files(pool, hosts)["topology.conf"].splitlines()[1:] == ["SwitchName=rack0 Nodes=node0,node1"]


def test_who_is_not_root_uses_sudo_and_a_pool_of_root_does_not() -> None:
    user = {"is_root": False, "programs": (*ALL_PROGRAMS, "sudo")}
    for facts, become in ((facts_of(0, **user), "sudo -n "), (facts_of(0), "")):
        files = slurm_files(*lab_of(facts))
        for name in ("start.sh", "stop.sh"):
            assert f"become='{become}'\n" in files[name]


def test_files_of_ssh_are_found_from_everywhere_and_comments_stay_comments() -> None:
    pool, hosts = lab_of(facts_of(0))
    assert pool.ssh is not None
    ssh = replace(pool.ssh, identity="my key", known_hosts="~/.ssh/lab")
    for text in ray_files(replace(pool, name="x\nreboot", ssh=ssh), hosts).values():
        assert "\nreboot" not in text
        if "ssh -o" in text:
            line = next(line for line in text.splitlines() if line.startswith("    ssh "))
            words = shlex.split(line)
            assert words[words.index("-i") + 1] == str(Path.cwd() / "my key")
            assert "UserKnownHostsFile=~/.ssh/lab" in words


@pytest.mark.parametrize(
    ("facts", "words", "error"),
    [
        (
            [facts_of(0), facts_of(0)],
            "10.0.0.1 (node0.lab.org) and 10.0.0.2 (node0.lab.org) have one name",
            ClusterError,
        ),
        ([facts_of(0, host="a_b")], "calls itself 'a_b'", ClusterError),
        ([facts_of(0, programs=("munged", "slurmd"))], "10.0.0.1 (node0.lab.org) lacks slurmctld, sbatch", LaunchError),
        ([facts_of(0), facts_of(1, programs=())], "10.0.0.2 (node1.lab.org) lacks munged, slurmd.", LaunchError),
        ([facts_of(0, is_root=False)], "lacks sudo", LaunchError),
    ],
)
def test_slurm_is_not_written_for_hosts_that_cannot_run_it(
    facts: list[MachineFacts], words: str, error: type[WeftError]
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        slurm_files(*lab_of(*facts))


def test_two_switches_of_one_name_are_refused() -> None:
    pool, hosts = lab_of(*map(facts_of, range(4)), topology=(("a", "b"), ("c", "b"), ("c", "a-b"), ("c", "d")))
    with pytest.raises(ClusterError, match="two switches would be called a-b"):
        slurm_files(pool, hosts)


def test_ray_is_not_written_for_hosts_that_have_none() -> None:
    with pytest.raises(LaunchError, match=r"no Ray in the Python .* 10\.0\.0\.2 \(node1\.lab\.org\)\. Install it"):
        ray_files(*lab_of(facts_of(0), facts_of(1, ray=())))


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ((("rack 0",), ("rack1",)), "10.0.0.1: 'rack 0' can be neither"),
        ((("a",), ("b.c",)), "10.0.0.2: 'b.c' can be neither"),
        ((("a",), ("b,c=d",)), "can be neither"),
        ((("a", "b"), ("a",)), "10.0.0.2 has 1 names, and that of 10.0.0.1 2"),
        (((), ("a",)), "as many, from the outside in, or none at all"),
    ],
)
def test_a_topology_that_no_engine_takes_is_refused(topology: tuple[tuple[str, ...], ...], words: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(words)):
        check_topology([PoolHost(address=f"10.0.0.{index + 1}", topology=path) for index, path in enumerate(topology)])


def test_files_are_written_all_or_none(tmp_path: Path) -> None:
    files = ray_files(*lab_of(facts_of(0)))
    write_files(files, tmp_path / "new" / "ray")
    assert {path.name for path in (tmp_path / "new" / "ray").iterdir()} == set(files)
    assert (tmp_path / "new" / "ray" / "start.sh").stat().st_mode & 0o111
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "stop.sh").write_text("mine")
    with pytest.raises(LaunchError, match=r"ray/stop\.sh is there already, and nothing was written"):
        write_files(files, tmp_path / "ray")
    assert (tmp_path / "ray" / "stop.sh").read_text() == "mine"
    assert len(list((tmp_path / "ray").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="file/ray cannot be written: Not a directory"):
        write_files(files, tmp_path / "file" / "ray")


HOSTS = 'place = "ssh"\n[ssh]\nhosts = [{ address = "127.0.0.1" }]\n'


@pytest.mark.parametrize(
    ("options", "text", "words"),
    [
        ([], HOSTS, "neither --ray nor --slurm was given"),
        (["--ray", "--slurm"], HOSTS, "both --ray and --slurm were given"),
        (["--slrum"], HOSTS, "Did you mean --slurm?"),
        (["--ray"], 'place = "slurm"\n', 'hosts.toml has place = "slurm"'),
        (["--ray"], 'place = "ssh"\n', "needs a table [ssh]"),
    ],
)
def test_what_is_wrong_is_said_in_a_paragraph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str, words: str
) -> None:
    (tmp_path / "hosts.toml").write_text(text)
    assert run(["pools", "init", *options, str(tmp_path / "hosts.toml")]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.toml"]


def test_a_file_that_is_there_is_said_before_a_host_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "gres.conf").write_text("")
    assert run(["pools", "init", "--slurm", str(tmp_path / "hosts.toml")]) == 2
    assert "gres.conf is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said",
    ["", "Welcome!", "[]", "{}", f'{{"version": "{VERSION}"}}', json.dumps({**asdict(facts_of(0)), "address": "1\n2"})],
)
def test_what_is_no_answer_of_weft_is_said(said: str) -> None:
    answer = read_answer(PoolHost(address="10.0.0.1"), said)
    assert answer.is_wrong
    assert "is no answer of Weft" in answer.problem


@pytest.mark.needs_sshd
def test_a_host_that_does_not_answer_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        (tmp_path / "hosts.toml").write_text(f"{HOSTS}port = {taken.getsockname()[1]}\n")
        assert run(["pools", "init", "--ray", str(tmp_path / "hosts.toml")]) == 2
    said = capsys.readouterr().err
    assert "1 of 1 hosts did not say what they are. 127.0.0.1: " in said
    assert "Connection refused" in said
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.toml"]
