"""What a host believes: only what was signed with the job's secret, for the place where it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.errors import LaunchError
from weft.run.hosts.membership import Membership
from weft.run.hosts.roster import HostFacts
from weft.run.hosts.signed import JobSecret
from weft.run.hosts.torch_store import TorchStoreRegistry, serve_store

FACTS = HostFacts(host="a", address="127.0.0.1", num_devices=2, version="1", recipe="r")


def test_all_hosts_get_the_same_secret(tmp_path: Path) -> None:
    first, second = JobSecret.of_folder(tmp_path), JobSecret.of_folder(tmp_path)
    assert first.job == second.job
    assert second.open("here", first.sign("here", {"a": 1})) == {"a": 1}
    assert (tmp_path / "job-secret").stat().st_mode & 0o777 == 0o600
    assert first.job not in (tmp_path / "job-secret").read_text()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '["", ""]', "[1, 2]", "[" * 5000, '["a"]', "x" * (2 << 20), '["ü", "{}"]']
)
def test_garbage_is_not_believed(text: str, tmp_path: Path) -> None:
    assert JobSecret.of_folder(tmp_path).open("here", text) is None


def test_neither_is_what_was_altered_or_moved(tmp_path: Path) -> None:
    secret = JobSecret.of_folder(tmp_path)
    text = secret.sign("roster/1", {"number": 1})
    code, body = json.loads(text)
    assert secret.open("roster/2", text) is None
    assert secret.open("roster/1", json.dumps([code, body.replace("1", "2")])) is None
    (tmp_path / "other").mkdir()
    assert JobSecret.of_folder(tmp_path / "other").open("roster/1", text) is None


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    JobSecret.of_folder(tmp_path)
    (tmp_path / "job-secret").chmod(0o644)
    with pytest.raises(LaunchError, match="readable by nobody else"):
        JobSecret.of_folder(tmp_path)


def test_a_stranger_in_the_registry_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reaches the store may write; what it writes is passed over: members, generations, verdicts."""
    store, port = serve_store("127.0.0.1")
    stranger = TorchStoreRegistry.connect("127.0.0.1", port)
    stranger.join(lambda _: '{"host": "evil"}')
    stranger.put("latest", "7")
    stranger.put("roster/7", '["00", "{}"]')
    secret = JobSecret.of_folder(tmp_path)
    with Membership(TorchStoreRegistry(store), secret, FACTS, is_stopping=lambda: False) as membership:
        stranger.put("verdict", '["00", "{\\"status\\": 0, \\"text\\": \\"\\"}"]')
        membership.wait_for_change(1.0)
        membership.wait_for_change(1.0)
        view = membership.view
    assert [facts.host for facts in view.members.values()] == ["a"]
    assert (view.roster, view.verdict) == (None, None)
    assert "does not know this job's secret" in caplog.text
    stranger.close()


def test_what_was_signed_at_an_earlier_meeting_does_not_hold(tmp_path: Path) -> None:
    secret = JobSecret.of_folder(tmp_path)
    text = secret.of_meeting("one").sign("verdict", {"status": 0})
    assert secret.of_meeting("one").open("verdict", text) == {"status": 0}
    assert secret.of_meeting("two").open("verdict", text) is None
    assert secret.open("verdict", text) is None
