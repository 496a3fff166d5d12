"""`weft watch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli._options import FLAG

if TYPE_CHECKING:
    from weft.watch.run_record import RunRecord


def watch(
    *runs: Path,
    port: Annotated[int, Parameter(show_default=False)] = 0,
    host: str = "127.0.0.1",
    no_token: Annotated[bool, FLAG] = False,
    terminal: Annotated[bool, FLAG] = False,
) -> None:
    """Show where the time of a run goes, live or afterwards.

    In a browser, or in the terminal.

    It only reads the run's folder, and prints a link. Ctrl-C ends it; the run goes on.

    Parameters
    ----------
    runs
        Folder of the run; several stand side by side.
    port
        Port to listen on; by default a free one.
    host
        Address to listen on; by default nobody but this machine can look.
    no_token
        Answer without the token that is part of the link; on this machine alone.
    terminal
        Show the same pages here, without a server: digits and arrows change the page, q ends it. Where the output is no
        terminal, the overview is printed once.
    """
    from weft.errors import LaunchError
    from weft.watch.run_record import RunRecord

    if not runs:
        raise LaunchError("Say which run: weft watch runs/NAME. Several stand side by side.")
    if terminal and (port or no_token or host != "127.0.0.1"):
        raise LaunchError("--terminal starts no server: leave --port, --host and --no-token out.")
    records = [RunRecord(run) for run in runs]
    if terminal:
        from weft.watch.terminal import TerminalView

        TerminalView(records).serve()
        return
    from weft.watch.server import WatchServer

    server = WatchServer(records, host=host, port=port, has_token=not no_token)
    for record in records:
        print(f"watching  {record.name}   {_state(record)}")
    print(f"open      {server.url}")
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("          Whoever reads along on the network can read the token, too: an ssh tunnel keeps it private.")
    goes_on = "; the run goes on" if any(record.state == "running" for record in records) else ""
    print(f"          Ctrl-C ends it{goes_on}.", flush=True)
    server.serve()
    for record in records:
        record.close()


def _state(record: RunRecord) -> str:
    step = f"step {record.steps[-1].step:,}" if record.steps else "no step yet"
    ranks = f", {record.num_ranks} rank{'s' if record.num_ranks != 1 else ''}" if record.num_ranks else ""
    state = {"running": "it runs", "ended": "it has ended", "lost": "its process is gone"}.get(
        record.state, "not running"
    )
    return f"{state}, {step}{ranks}"
