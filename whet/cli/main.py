"""The entry point: runs a command and turns its outcome into one line and an exit code.

0 done, 1 failed, 2 the recipe or command line is wrong, 141 the reader of the output went away, 128 plus the number of
the signal that ended it (130 interrupted, 143 SIGTERM).
"""

import errno
import os
import signal
import sys
import threading
import traceback
from typing import Annotated

import typer

from whet.cli import audit, doctor, evaluate, export, gym, plan, recipes, serve, show, train, validate, view
from whet.cli.words import Session
from whet.closing import left_behind
from whet.errors import WhetError
from whet.files import write_atomically
from whet.visible import visible

INTERRUPTED, BROKEN_PIPE = 130, 141


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from whet import __version__

        print(f"whet {__version__}")
        raise typer.Exit


@app.callback()
def whet(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sharpen a language model after pretraining. Start with: whet train quickstart"""


app.command("train")(train.train)
app.command("resume")(train.resume)
app.command("eval")(evaluate.evaluate)
app.command("show")(show.show)
app.command("validate")(validate.validate)
app.command("gym")(gym.gym)
app.command("plan")(plan.plan)
app.command("view")(view.view)
app.command("serve")(serve.serve)
app.command("audit")(audit.audit)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.command("recipes")(recipes.recipes)


def main(arguments: list[str] | None = None) -> None:
    """The ``whet`` command. Always ends in SystemExit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # --debug may stand anywhere, so that it can be added to a command that went wrong.
    session = Session(debug="--debug" in words)
    words = [word for word in words if word != "--debug"]
    code = 0
    try:
        # Not ``app()``, which prints errors in its own way and takes interrupts for itself.
        command = typer.main.get_command(app)
        with command.make_context("whet", words, obj=session) as context:
            command.invoke(context)
        sys.stdout.flush()
    except BaseException as error:
        code = finish(error, session)
    sys.stderr.flush()
    if left_behind or (code == INTERRUPTED and threading.active_count() > 1):
        os._exit(code)  # threads that still run would hold up, or crash, Python's own exit
    sys.exit(code)


def finish(error: BaseException, session: Session) -> int:
    """Print how a command ended, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        # What is still buffered has no reader; without this, Python complains once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    if isinstance(error, typer.Exit):  # of --help, or of a command that has said it all
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if session.debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one could only cut this message short
        resume = f" Go on with: whet resume {session.run}" if session.run and session.run.exists() else ""
        return _say(f"interrupted.{resume}", INTERRUPTED)
    if isinstance(error, WhetError):
        return _say(f"{error.label}: {error}{_where(error)}", error.exit_code)
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        context = getattr(error, "ctx", None)
        hint = f"\nSee: {context.command_path} --help" if context is not None else ""
        return _say(f"error: {error.format_message()}{hint}", 2)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _say(f"error: {str(error.filename)[:60]}...: the name is too long for a file or folder", 2)
    text = str(error).strip() or "no message"
    return _say(f"error: {type(error).__name__}: {text}{_where(error)}{_keep_traceback(error, session)}", 1)


def _where(error: BaseException) -> str:
    """Name the worker that raised it, if that was another process."""
    where = getattr(error.__cause__, "where", None)
    return f"\n  in {where}" if where else ""


def _keep_traceback(error: BaseException, session: Session) -> str:
    """Write the traceback into the run folder; return where it is, or how to see it."""
    if session.debug:
        return ""
    if session.run is None or not session.run.is_dir():
        return "\nThis is not an error whet expected. Add --debug to see the traceback."
    log = session.run / "error.log"
    try:
        write_atomically(log, "".join(traceback.format_exception(error)).encode("utf-8", "replace"))
    except WhetError:
        return "\nAdd --debug to see the traceback."
    return f"\nThe traceback is in {log}."


def _say(text: str, code: int) -> int:
    print(visible(text), file=sys.stderr, flush=True)
    return code
