"""`weft`: read the command line, run one command, turn errors into one paragraph and an exit status."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownOptionError

from weft.cli import (
    _agent,
    _chaos,
    _check,
    _checkpoint,
    _comm_advise,
    _comm_draw,
    _comm_explain,
    _data,
    _describe,
    _doctor,
    _export,
    _generate,
    _jobs,
    _launch,
    _metrics,
    _migrate,
    _plan,
    _pools_init,
    _probe,
    _profile,
    _replan,
    _report,
    _trace,
    _train,
    _watch,
)
from weft.cli._refuse_words import refuse_words
from weft.errors import WeftError, did_you_mean

USAGE_STATUS = 2


def build_app() -> App:
    """Return the application with every command."""
    app = App(
        name="weft",
        help="Train PyTorch models across devices: what to train is a recipe, how to split it a plan.",
        version=_version,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
        config=refuse_words,
        help_epilogue="`weft COMMAND --help` says more.  First thing to try: weft train examples/demo/recipe.toml",
    )
    app.command(_train.train)
    plan = App(name="plan", help_format="plaintext")
    plan.default(_plan.plan)
    plan.command(_plan.validate, show=False)
    app.command(plan)
    app.command(_check.check)
    app.command(_chaos.chaos)
    app.command(_describe.describe)
    app.command(_doctor.doctor)
    app.command(_trace.trace)
    app.command(_profile.profile)
    app.command(_metrics.metrics)
    app.command(_probe.probe)
    app.command(_generate.generate)
    app.command(_export.export)
    app.command(_replan.replan)
    app.command(_watch.watch)
    app.command(_report.report)
    app.command(_migrate.migrate)
    app.command(_launch.launch)
    for command in (_jobs.jobs, _jobs.logs, _jobs.stop):
        app.command(command)
    pools = App(name="pools", help_format="plaintext")
    pools.default(_jobs.pools)
    pools.command(_pools_init.init)
    app.command(pools)
    app.command(_agent.agent, show=False)
    checkpoint = App(name="checkpoint", help="List, verify, compare and keep saved states.", help_format="plaintext")
    for command in (_checkpoint.ls, _checkpoint.show, _checkpoint.verify, _checkpoint.diff, _checkpoint.pin):
        checkpoint.command(command)
    checkpoint.command(_checkpoint.unpin)
    checkpoint.command(_checkpoint.prune)
    checkpoint.command(_checkpoint.import_, name="import")
    app.command(checkpoint)
    data = App(name="data", help="Prepare data for training, and prove which were used.", help_format="plaintext")
    data.command(_data.prepare)
    data.command(_data.ledger)
    app.command(data)
    comm = App(name="comm", help="Look at how ranks communicate.", help_format="plaintext")
    comm.command(_comm_draw.draw)
    comm.command(_comm_advise.advise)
    comm.command(_comm_explain.explain)
    app.command(comm)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when all went well, 2 for input that a user can mend, 1 when a rank failed,
    130 after Ctrl-C, and 75 ("try again later") where SIGTERM stopped a training, which has saved its state."""
    _print_in_any_encoding()
    status = run(list(sys.argv[1:] if arguments is None else arguments))
    # Without this the garbage collector looks through all of torch at the end: 0.8 s (Xeon 2.5 GHz, 2026-11-22).
    # Ranks need that collection: it alone closes process groups which reference cycles hold.
    if "RANK" not in os.environ:
        gc.freeze()
    sys.exit(status)


def _print_in_any_encoding() -> None:
    """Print a question mark for what a terminal's encoding lacks (the dots between words, in ASCII), here and in the
    processes that are started: an error would end the command for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    encoding = os.environ.get("PYTHONIOENCODING", "")
    if encoding and ":" not in encoding:
        os.environ["PYTHONIOENCODING"] = f"{encoding}:replace"


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a recipe's factory lies beside the recipe, as a rule
    try:
        result = build_app()(
            _launch.mark_script(arguments), exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except CycloptsError as error:
        return _complain(_explain(error), USAGE_STATUS)
    except WeftError as error:
        return _complain(str(error), error.status)
    except KeyboardInterrupt:
        return _complain("stopped by Ctrl-C; what was saved before is kept.", 128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader (`| head`) has left.  Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return result if isinstance(result, int) else 0


def _complain(text: str, status: int) -> int:
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from weft.run.launch.excepthook import report_to_torchrun

        report_to_torchrun(text)
    print(text, file=sys.stderr)
    return status


def _explain(error: CycloptsError) -> str:
    """Say what cyclopts found, and the nearest option for an unknown one."""
    text = str(error).strip()
    if isinstance(error, UnknownOptionError) and "Did you mean" not in text:
        names = [name for argument in error.argument_collection or () for name in argument.names]
        text += did_you_mean(error.token.keyword or "", names)
    command = " ".join(["weft", *(error.command_chain or ())])
    return f"{text}\n`{command} --help` lists what there is."


def _version() -> str:
    from importlib.metadata import version

    return f"weft {version('weft')}"
