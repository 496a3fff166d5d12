"""What each page of a run shows, as JSON: for the dashboard, the terminal view and the report alike.

`page_of` is a pure function of a `RunRecord` and of the options in a page's address; `_blocks` says what a page is
made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.watch.run_record import RunRecord
from weft.watch.views._blocks import Block as Block
from weft.watch.views._blocks import Page as Page
from weft.watch.views._common import hang_block
from weft.watch.views._events import events, hang
from weft.watch.views._overview import overview
from weft.watch.views._plan import memory_page, plan, plan_terms
from weft.watch.views._ranks import mesh, ranks
from weft.watch.views._time import communication, pipeline
from weft.watch.views._training import training

__all__ = ["PAGES", "Block", "Page", "page_of", "plan_terms"]

PAGES: Mapping[str, str] = {
    "overview": "Overview",
    "ranks": "Ranks",
    "pipeline": "Pipeline",
    "communication": "Communication",
    "memory": "Memory",
    "mesh": "Mesh map",
    "events": "Events",
    "hang": "Hang",
    "plan": "Plan and measurement",
    "training": "Training",
}
"""Pages in their order, with their titles."""

_VIEWS: Mapping[str, Callable[[RunRecord, Mapping[str, str]], list[Block]]] = {
    "overview": overview,
    "ranks": ranks,
    "pipeline": pipeline,
    "communication": communication,
    "memory": memory_page,
    "mesh": mesh,
    "events": events,
    "hang": hang,
}


def page_of(
    record: RunRecord, page: str, options: Mapping[str, str] | None = None, others: Sequence[RunRecord] = ()
) -> Page:
    """Return a page of a run.

    Args:
        record: the run, refreshed by the caller.
        page: one of `PAGES`.
        options: choices in the page's address, by name; unknown ones and bad values count as not given.
        others: runs that stand beside it, on the pages *plan* and *training*.
    """
    given = options or {}
    if page == "plan":
        blocks = plan(record, given, others)
    elif page == "training":
        blocks = training(record, given, others)
    else:
        blocks = _VIEWS[page](record, given)
    banner = hang_block(record)
    if banner is not None and page not in ("overview", "hang"):
        blocks = [banner, *blocks]
    return {
        "id": page,
        "title": PAGES[page],
        "run": record.name,
        "state": record.state,
        "step": record.steps[-1].step if record.steps else 0,
        "blocks": blocks,
    }
