"""The command line.  Each command is one file and thin; torch is imported only by the commands that need it."""

from weft.cli._main import main as main
