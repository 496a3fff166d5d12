"""Pools: their files, their names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.pool import Pool, all_pools, find_pool, parse_pool
from weft.errors import ClusterError

SSH = 'place = "ssh"\n[ssh]\nhosts = [{ address = "10.0.0.1" }, { address = "10.0.0.2", topology = ["a"] }]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = tmp_path / "weft" / "pools"
    made.mkdir(parents=True)
    return made


def test_a_pool_is_found_by_name_by_place_and_by_file(folder: Path, tmp_path: Path) -> None:
    (folder / "lab.toml").write_text(SSH)
    assert find_pool("lab").name == "lab"
    assert find_pool("slurm") == Pool(place="slurm", name="slurm")
    (tmp_path / "mine.toml").write_text('place = "slurm"\ncluster = "cluster.toml"\n')
    mine = find_pool(f"slurm:{tmp_path}/mine.toml")
    assert mine.cluster == str(tmp_path / "cluster.toml"), "beside the pool's own file"
    assert find_pool(f"{tmp_path}/mine.toml") == mine
    assert list(all_pools()) == ["lab"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("slrum", "Did you mean slurm?"),
        ("lap", "Did you mean lab?"),
        ("ssh", "needs a file"),
        ("slurm:lab.toml", 'has place = "ssh". Give --on ssh:'),
        ("lbs:lab.toml", "no such pool or place"),
        ("slurm:gone.toml", "gone.toml does not exist"),
    ],
)
def test_other_names_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str) -> None:
    (folder / "lab.toml").write_text(SSH)
    monkeypatch.chdir(folder)
    with pytest.raises(ClusterError, match=words):
        find_pool(given)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('place = "ssh"\n', r"needs a table \[ssh\]"),
        ('place = "slurm"\n' + SSH.partition("\n")[2], r"does not go with \[ssh\]"),
        ('place = "slurm"\nnetwork = "10.0.0.0/99"\n', "is no network"),
        ('place = "slurm"\ngrace_seconds = 0\n', "is too small"),
        ('place = "slurm"\n[slurm]\nlines = ["rm -rf"]\n', "is no option"),
        ('place = "slurm"\n[slurm]\npartition = "a\\nb"\n', "is no name"),
        ('place = "ssh"\n[ssh]\nhosts = []\n', "is empty"),
        (SSH.replace("10.0.0.2", "10.0.0.1"), "is listed twice"),
        (SSH.replace("10.0.0.2", "-oProxyCommand=x"), "is no address"),
        ('place = "slurm"\nplaces = 1\n', "places"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse_pool(text)
