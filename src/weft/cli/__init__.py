"""The command line.  Each command is one file and thin; torch is imported only by the commands that need it."""

from weft.cli._launch import mark_script as mark_script
from weft.cli._main import build_app as build_app
from weft.cli._main import main as main
from weft.cli._main import run as run
