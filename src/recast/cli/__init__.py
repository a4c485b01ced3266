"""The command line: one file per verb, and everything that talks to a terminal."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from recast import _start, processes
from recast._version import __version__
from recast.cli import analyze, rewards, shapes
from recast.cli.compare import compare
from recast.cli.doctor import doctor
from recast.cli.estimate import estimate
from recast.cli.evaluate import evaluate
from recast.cli.integrate import integrate
from recast.cli.judge import judge
from recast.cli.plan import plan
from recast.cli.plot import plot
from recast.cli.propose import propose
from recast.cli.report import report
from recast.cli.run import run
from recast.cli.selftest import selftest
from recast.cli.sweep import sweep
from recast.cli.train import train
from recast.cli.weigh import weigh
from recast.errors import RecastError
from recast.sweep.workers import end_with_parent

__all__ = ["app", "main"]


_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory")
"""In torch's messages about a lack of memory, which are plain runtime errors on a CPU."""
_NO_PEER = ("by peer", "Broken pipe", "Socket closed", "remote process exited", "NCCL communicator was aborted")
"""In the messages of gloo and NCCL if another process of the launcher is gone."""


class _Group(TyperGroup):
    """Prints a `RecastError` as one sentence with exit code 2, and warnings as plain lines."""

    def invoke(self, ctx: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        try:
            processes.check()
            _require_folder()
            return super().invoke(ctx)
        except RecastError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except (MemoryError, RuntimeError) as error:
            if not (said := _known(error)):
                raise
            print(f"error: {said}", file=sys.stderr)
            raise typer.Exit(2) from None


def _known(error: MemoryError | RuntimeError) -> str:
    """A sentence for an error of torch that the user can do something about; empty for others."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        return f"there is not enough memory ({text:.300}): choose smaller settings"
    if processes.COUNT > 1 and any(words in text for words in _NO_PEER):
        return f"another of the {processes.COUNT} processes has ended ({text:.100}): see what it printed, and resume"
    return ""


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Reward credit assignment across timesteps: from gain curves to a reward-by-timestep weight matrix W.",
)
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # click's own, wherever this typer keeps click
_STAGES = (propose, estimate, weigh, train, evaluate, judge, report, run, sweep)
for verb in (*_STAGES, plan, doctor, selftest, compare, plot, integrate):
    app.command()(verb)
app.add_typer(analyze.app, name="analyze")
app.add_typer(rewards.app, name="rewards")
app.add_typer(shapes.app, name="shapes")


def _version(asked: bool) -> None:
    if asked:
        print(f"recast {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before any verb."""


def _failed(error: OSError) -> int:
    """The exit code for an error of the system that nothing has foreseen, such as an output that is full or closed."""
    closed = isinstance(error, BrokenPipeError)
    if not closed:
        what = f"{error.filename}: " if error.filename else ""
        print(f"error: {what}{error.strerror or error}", file=sys.stderr)
    with open(os.devnull, "w") as nothing:  # or the interpreter tries to write the rest again when it ends
        os.dup2(nothing.fileno(), 1)
    return 141 if closed else 2


class _TerminatedError(BaseException):
    """The process was told to end; not an Exception, so that nothing on the way takes it for a failure."""


def _require_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise RecastError("the working folder does not exist any more: change to another one") from error


def _terminate(*_: Any) -> None:
    raise _TerminatedError


def _signals() -> None:
    """Ctrl-C is an exception again; SIGTERM too, except in a job or worker, which whoever started it ends at once."""
    if signal.getsignal(signal.SIGINT) is _start.interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (
        processes.COUNT == 1
        and processes.PARENT not in os.environ
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _terminate)


def main() -> None:
    """Entry point of the `recast` command."""
    _signals()
    end_with_parent()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show σ shows "?"
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            path = error.ctx.command_path if error.ctx else "recast"
            print(f"error: {error.format_message().rstrip('.')}. See '{path} --help'.", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _TerminatedError:
        code = 143
    except SystemExit as error:  # no command ends like this, so success is not what it means
        code = error.code if isinstance(error.code, int) and error.code else 1
    except OSError as error:
        code = _failed(error)
    if code == 130:  # newer typers turn an interrupt into this code themselves
        print(_start.INTERRUPTED, file=sys.stderr)
    if code == 143:
        print(_start.INTERRUPTED.replace("interrupted", "terminated"), file=sys.stderr)
    processes.leave_group()
    sys.exit(code if isinstance(code, int) else 0)
