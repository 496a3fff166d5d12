"""The terminal's screen: one page at a time, keys to change it, and the newest figures every second."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from weft.watch.run_record import RunRecord
from weft.watch.terminal._render import ACCENT, render_page
from weft.watch.views import PAGES, page_of

_REFRESH_SECONDS = 1.0
_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1b[5~": "page up",
         "\x1b[6~": "page down", "\t": "right", "k": "up", "j": "down", "l": "right", "h": "left", "b": "page up",
         " ": "page down", "q": "quit", "\x03": "quit", "r": "run"}  # fmt: skip
_NAMES = tuple(PAGES)


@final
class TerminalView:
    """Shows runs in a terminal until `q` or Ctrl-C; where its output is no terminal, prints one page and returns."""

    def __init__(self, records: Sequence[RunRecord], console: Console | None = None) -> None:
        """Take the runs, of which one is shown at a time; the others stand beside it on the pages that compare."""
        self._records = list(records)
        self._console = console or Console()
        self.page = 0
        """Place of the page in `PAGES`."""
        self.run_shown = 0
        self.first_line = 0
        """Lines of the page that are scrolled past."""

    def serve(self) -> None:
        """Draw the page again each second and after every key."""
        if not (self._console.is_terminal and sys.stdin.isatty()):
            self._console.print(self._content())
            return
        with _keys_at_once(), Live(console=self._console, screen=True, auto_refresh=False) as live:
            next_refresh = 0.0
            while True:
                now = time.monotonic()
                if now >= next_refresh:
                    for record in self._records:
                        record.refresh()
                    next_refresh = now + _REFRESH_SECONDS
                live.update(self.screen(), refresh=True)
                if not self.press(_read_key(next_refresh - time.monotonic())):
                    return

    def press(self, key: str) -> bool:
        """Do what a key says (a name of `_KEYS`, or a digit).  Return False where it ends the view."""
        height = max(1, self._console.height - 3)
        if key == "quit":
            return False
        if key in ("left", "right"):
            self._turn_to((self.page + (1 if key == "right" else -1)) % len(_NAMES))
        elif key.isdigit():
            self._turn_to((int(key) - 1) % len(_NAMES))
        elif key == "run":
            self.run_shown = (self.run_shown + 1) % len(self._records)
        else:
            step = {"up": -1, "down": 1, "page up": -height, "page down": height}.get(key, 0)
            self.first_line = max(0, self.first_line + step)
        return True

    def _turn_to(self, page: int) -> None:
        self.page, self.first_line = page, 0

    def screen(self) -> RenderableType:
        """Return what the screen shows: a line of pages, a part of the page, and a line of keys."""
        width, height = self._console.width, max(1, self._console.height - 3)
        options = self._console.options.update(width=width, height=None)
        lines = self._console.render_lines(self._content(), options, pad=False)
        self.first_line = min(self.first_line, max(0, len(lines) - height))
        shown = lines[self.first_line : self.first_line + height]
        shown += [[] for _ in range(height - len(shown))]
        head = self._console.render_lines(self._tabs(), options, pad=False)[:1]
        more = f"lines {self.first_line + 1}–{self.first_line + min(height, len(lines))} of {len(lines)}"
        keys = Text(f"1–9, 0, ←→ pages   ↑↓ space scroll   {'r run   ' if len(self._records) > 1 else ''}q quit   "
                    f"{more if len(lines) > height else ''}", style="dim")  # fmt: skip
        foot = self._console.render_lines(keys, options, pad=False)[:1]
        segments: list[Segment] = []
        for line in (*head, [], *shown, *foot):
            segments += [*line, Segment.line()]
        return Segments(segments[:-1])

    def _tabs(self) -> Text:
        tabs = Text(overflow="ellipsis", no_wrap=True)
        for place, (name, title) in enumerate(PAGES.items()):
            text = f" {(place + 1) % 10} {title if place == self.page else name} "
            tabs.append(text, style=f"reverse bold {ACCENT}" if place == self.page else "dim")
        return tabs

    def _content(self) -> RenderableType:
        record = self._records[self.run_shown]
        others = [other for other in self._records if other is not record]
        page = page_of(record, _NAMES[self.page], {}, others)
        name = Text.assemble((record.name, "bold"), (f"   {page['state']}, step {page['step']:,}\n", "dim"))
        return Group(name, render_page(page, self._console.width))


@contextmanager
def _keys_at_once() -> Generator[None]:
    """Give every key when it is pressed, without echo."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read_key(seconds: float) -> str:
    """Return the name of the key that is pressed within so many seconds; empty where none is.  Ctrl-C quits."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
        if not ready:
            return ""
        # Past Python's own buffer: the letters of an arrow come together, and none may be left behind in it.
        read = os.read(sys.stdin.fileno(), 16).decode(errors="replace")
    except KeyboardInterrupt:
        return "quit"
    return _KEYS.get(read, read if read.isdigit() and len(read) == 1 else "" if read else "quit")
