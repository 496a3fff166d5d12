"""How a launcher's agents have ended, by what they note: whether their job is over, or is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.run.places.contract import AGENT_DONE, AGENT_LATER, AGENT_MEND
from weft.run.places.launched import LaunchedAgents
from weft.run.places.submission import FOLDER, AgentNote

LOST = 255


@pytest.mark.parametrize(("noted", "were_told", "expected"), [
    ([AGENT_DONE, AGENT_DONE], False, AGENT_DONE),
    ([AGENT_LATER, AGENT_MEND], False, AGENT_MEND),
    ([AGENT_LATER, AGENT_LATER], True, AGENT_LATER),
    ([AGENT_LATER, AGENT_LATER], False, LOST),  # nobody told them to leave: one of them was missing
    ([AGENT_LATER, None], True, LOST),
    ([AGENT_LATER], True, LOST),
    ([], False, 7),  # nothing has begun: the launcher's own status says why
])  # fmt: skip
def test_what_agents_note_decides(tmp_path: Path, noted: list[int | None], were_told: bool, expected: int) -> None:
    (tmp_path / FOLDER).mkdir()
    agents = LaunchedAgents(tmp_path, 2, LOST)
    agents.begin()
    for index, status in enumerate(noted):
        note = AgentNote(index=index, host=f"node{index}", pid=1, attempt=0, began=0.0, status=status)
        note.write(tmp_path)
    assert agents.status(7, were_told=were_told) == expected
    assert agents.have_all_begun == (len(noted) == 2)
