"""Checkpoints in an object store, on a real S3 server: saved, loaded, looked at, altered, and away."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from altered import BEFORE, NEWEST, files_of, loaded_step, save_steps, shards_of
from s3_server import S3Server

from weft.cli import run
from weft.config.recipe import RunRecipe
from weft.errors import CheckpointError, RecipeError
from weft.run.checkpoint import Checkpointer
from weft.run.checkpoint.inspect import list_checkpoints
from weft.run.checkpoint.store import CheckpointStore
from weft.run.checkpoint.store_tier import StoreDrain, saves_in_store
from weft.run.checkpoint.tiers import Drained, TieredCheckpointer
from weft.run.launch.memory_folder import create_memory_folder, remove_memory_folder
from weft.techniques.core import CheckpointShard


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as made:
        yield made


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of its own, and a run in it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    server.make_bucket(bucket)
    return f"s3://{bucket}/models/run-1"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_steps(tmp_path / "checkpoints", (BEFORE, NEWEST, 30), file_bytes=4096)
    return tmp_path / "checkpoints"


def names(store: CheckpointStore) -> list[str]:
    return [save.name for save in store.complete()]


def zeros() -> list[CheckpointShard]:
    shards = shards_of(NEWEST)
    for shard in shards:
        shard.tensor.zero_()
    return shards


def test_what_is_sent_comes_back_and_the_oldest_go(url: str, saved: Path, tmp_path: Path) -> None:
    store = CheckpointStore(url)
    assert store.newest_step() == 0
    store.claim(goes_on=False)
    assert store.copy(saved / "step-000020") == f"{url}/step-000020"
    with pytest.raises(CheckpointError, match="holds saves of an earlier run .the newest: step-000020.*--resume"):
        store.claim(goes_on=False)
    store.pin("step-000020", is_pinned=True)
    save_steps(tmp_path / "more", (30, 40, 50))
    for step in (30, 40, 50):
        store.copy(tmp_path / "more" / f"step-{step:06d}")
    assert names(store) == ["step-000050", "step-000040", "step-000020"]
    path = store.fetch("step-000020", tmp_path / "here")
    assert files_of(path).keys() == files_of(saved / "step-000020").keys()
    shards = zeros()
    Checkpointer(tmp_path / "here").load("latest", shards)
    assert loaded_step(shards) == 20
    store.pin("step-000020", is_pinned=False)
    assert store.remove_old(1) == ["step-000040", "step-000020"]


def test_the_same_step_is_not_put_over_what_lies_there_and_what_was_interrupted_goes(
    url: str, saved: Path, tmp_path: Path
) -> None:
    store = CheckpointStore(url)
    first = store.copy(saved / "step-000030")
    again = store.copy(saved / "step-000030")
    assert first != again
    assert names(store) == [again.rpartition("/")[2]]
    other = CheckpointStore(url.replace("run-1", "run-2"))
    other.copy(saved / "step-000030")
    _files(url).rm_file(f"{other.url.partition('://')[2]}/step-000030/manifest.json")  # as if a kill came before it
    assert names(other) == []
    other.copy(saved / "step-000020")
    assert names(other) == ["step-000020"]
    assert not [path for path in _files(url).find(other.url.partition("://")[2]) if "step-000030" in path]


def _files(url: str) -> Any:
    return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)


def test_a_large_file_goes_in_parts(url: str, tmp_path: Path) -> None:
    big = CheckpointShard(name="model/w", shape=torch.Size((9_000_000,)), tensor=torch.rand(9_000_000))
    Checkpointer(tmp_path / "big").save(1, [big])
    store = CheckpointStore(url)
    store.copy(tmp_path / "big" / "step-000001")
    store.fetch_newest(tmp_path / "back")
    assert (
        files_of(tmp_path / "back" / "step-000001")["rank-00000-0000.safetensors"]
        == (files_of(tmp_path / "big" / "step-000001")["rank-00000-0000.safetensors"])
    )


def test_the_commands_take_urls(url: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(url, keep=9)
    for step in (BEFORE, NEWEST, 30):
        store.copy(saved / f"step-{step:06d}")
    assert [entry.step for entry in list_checkpoints(url)] == [30, 20, 10]
    assert run(["checkpoint", "ls", url]) == 0
    assert run(["checkpoint", "show", url]) == 0
    assert run(["checkpoint", "verify", url]) == 0
    assert run(["checkpoint", "pin", f"{url}/step-000010"]) == 0
    assert run(["checkpoint", "diff", f"{url}/step-000020", str(saved / "step-000020")]) == 0
    assert run(["checkpoint", "prune", url, "--keep", "1"]) == 0
    said = capsys.readouterr().out
    assert f"checkpoint  {url}/step-000030" in said
    assert [line.split()[0] for line in said.splitlines() if f"  {url}/" in line and line[0] == "s"] == ["sound"] * 3
    assert f"pinned    {url}/step-000010" in said
    assert f"removed   {url}/step-000020\n1 removed" in said
    assert "tensors are equal bit for bit, 0 differ" in said
    _files(url).pipe_file(f"{url.partition('://')[2]}/step-000030/rank-00000-0000.safetensors", b"x")
    assert run(["checkpoint", "verify", url]) == 2
    assert f"{url}/step-000030/rank-00000-0000.safetensors has 1 bytes, but" in capsys.readouterr().err
    assert run(["checkpoint", "ls", url.rpartition("/")[0]]) == 2
    assert "Give the URL of a run" in capsys.readouterr().err


def test_a_damaged_save_is_passed_over_for_the_one_before(
    url: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(url)
    store.copy(saved / "step-000020")
    store.copy(saved / "step-000030")
    place = f"{url.partition('://')[2]}/step-000030/rank-00001-0000.safetensors"
    content = bytearray(_files(url).cat_file(place))
    content[-1] ^= 1
    _files(url).pipe_file(place, bytes(content))
    with caplog.at_level(logging.WARNING):
        assert store.fetch_newest(tmp_path / "here") == tmp_path / "here" / "step-000020"
    assert f"{url}/step-000030/rank-00001-0000.safetensors does not match its digest" in caplog.text
    assert str(tmp_path / "here" / "step-000030") not in caplog.text


def test_each_thing_that_is_wrong_is_said_in_a_paragraph(
    url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="its bucket does not exist. Make it, or correct run.checkpoints"):
        CheckpointStore("s3://nobody-made-this/x").newest_step()
    server.deny_unknown_keys(denies=True)
    try:
        with pytest.raises(CheckpointError, match="access is denied .*Let this machine's credentials") as denied:
            CheckpointStore(url).newest_step()
    finally:
        server.deny_unknown_keys(denies=False)
    assert "never-printed" not in str(denied.value)
    with pytest.raises(CheckpointError, match="Protocol not known: nothing. Use s3://bucket/prefix"):
        CheckpointStore("nothing://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert run(["checkpoint", "ls", url]) == 2
    said = capsys.readouterr().err
    assert "cannot be reached" in said
    assert "AWS_ENDPOINT_URL" in said
    assert "Traceback" not in said
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    with pytest.raises(CheckpointError, match="no credentials were found. Set AWS_PROFILE"):
        CheckpointStore(url).newest_step()
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match=r'not installed. Install it: pip install "weft\[s3\]"'):
        CheckpointStore(url).newest_step()


def drained(tiers: TieredCheckpointer, seconds: float = 30.0) -> Drained:
    until = time.monotonic() + seconds
    while (done := tiers.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return done


def test_a_run_goes_on_while_the_store_is_away_and_sends_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.run.checkpoint.store_tier._WAIT_SECONDS", (0.1,) * 100)
    monkeypatch.setattr("weft.run.checkpoint.store_tier._LOOK_AT_DISK_SECONDS", 0.1)
    memory = create_memory_folder()
    assert memory is not None
    disk = tmp_path / "checkpoints"
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("bucket")
        store = CheckpointStore("s3://bucket/run")
        tiers = TieredCheckpointer(Checkpointer(disk), memory, ranks_on_host=1)
        drain = StoreDrain(memory, store, disk)
        with drain, caplog.at_level(logging.WARNING):
            tiers.save(10, shards_of(10), {}, at_once=False)
            assert drained(tiers).path == "s3://bucket/run/step-000010"
            server.kill()
            tiers.save(20, shards_of(20), {}, at_once=False)
            done = drained(tiers)
            assert "the checkpoint of step 20 did not reach s3://bucket/run: " in done.problem
            assert "cannot be reached" in done.problem
            server.start("bucket")
            until = time.monotonic() + 30
            while store.newest_step() != 20:
                assert time.monotonic() < until
                time.sleep(0.05)
            tiers.save(20, shards_of(20), {}, at_once=False)  # the same step again
            assert drained(tiers).problem == ""
        assert drain.flush()
        assert "the checkpoint of step 20 has reached s3://bucket/run now" in caplog.text
        tiers.save(30, shards_of(30), {}, at_once=True)  # on the disk, as the last save of a run
        assert drain.flush()
        assert store.newest_step() == 30
    remove_memory_folder(memory)


def test_what_cannot_be_sent_at_the_end_stays_in_the_runs_folder(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.run.checkpoint.store_tier._WAIT_AT_END_SECONDS", (0.01,))
    disk = tmp_path / "checkpoints"
    with caplog.at_level(logging.WARNING), saves_in_store(url, disk, None) as saves:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        saves.store._files = CheckpointStore(url)._files
        Checkpointer(saves.memory).save(10, shards_of(10))
    assert f"the newest save stays in {disk}, and going on with the run by --resume sends it: s3" in caplog.text
    assert Checkpointer(disk).latest() == disk / "step-000010"
    assert not saves.memory.exists()
    assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("runs/x", "is no URL of an object store. Write s3://bucket/prefix, or leave it out"),
        ("s3://", "is no URL"),
        ("s3://bucket/a b", "is no URL"),
        ("s3://bucket/../x?y", "is no URL"),
        ("s3://tester:never-printed@bucket/x", "holds credentials: those belong to the machine"),
    ],
)
def test_a_place_that_is_none_is_refused_without_repeating_credentials(place: str, match: str) -> None:
    with pytest.raises(RecipeError, match=match) as refused:
        RunRecipe(steps=1, checkpoints=place)
    assert "never-printed" not in str(refused.value)
