"""`weft watch --terminal`: the pages of a run as text, live."""

from weft.watch.terminal._render import render_page as render_page
from weft.watch.terminal._view import TerminalView as TerminalView
