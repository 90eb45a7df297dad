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
from contextlib import suppress
from typing import Annotated

import typer

from whet.base.closing import abandoned_threads
from whet.base.errors import WhetError
from whet.base.escaping import escape_controls
from whet.base.files import write_atomically
from whet.cli import audit, doctor, evaluate, export, gym, plan, recipes, serve, show, train, validate, view
from whet.cli.words import Session
from whet.processes.sentinel import endings_are_errors

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
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
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
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    elif words == ["version"]:
        words = ["--version"]
    code = 0
    _open_streams()
    try:
        # Not ``app()``, which prints errors in its own way and takes interrupts for itself.
        command = typer.main.get_command(app)
        with endings_are_errors(), command.make_context("whet", words, obj=session) as context:
            command.invoke(context)
        sys.stdout.flush()
    except BaseException as error:
        code = finish(error, session, words)
    with suppress(OSError):
        sys.stderr.flush()
    if abandoned_threads or (code == INTERRUPTED and threading.active_count() > 1):
        os._exit(code)  # threads that still run would hold up, or crash, Python's own exit
    sys.exit(code)


def finish(error: BaseException, session: Session, words: list[str] | None = None) -> int:
    """Print how a command ended, and return the exit code."""
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # rich makes it an exit
        _drop_output()
        return BROKEN_PIPE
    if isinstance(error, typer.Exit):  # of --help, or of a command that has said it all
        return error.exit_code
    if isinstance(error, SystemExit):
        from whet.processes.loop_thread import described

        return _say(f"error: some code tried to end the process: {described(error)}", 1)
    if session.debug:
        with suppress(OSError):
            traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one could only cut this message short
        # CPython exits by the signal where an interrupt cut the exec of a string short; another exec resets that.
        exec("")
        resume = f" Go on with: whet resume {session.run}" if session.run and session.run.exists() else ""
        return _say(f"interrupted.{resume}{_report(session)}", INTERRUPTED)
    if isinstance(error, WhetError):
        return _say(f"{error.label}: {error}{_where(error)}{_report(session)}", error.exit_code)
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        context = getattr(error, "ctx", None)
        hint = f"\nSee: {context.command_path} --help" if context is not None else ""
        return _say(f"error: {error.format_message()}{_as_setting(error, words or [])}{hint}", 2)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _say(f"error: {str(error.filename)[:60]}...: the name is too long for a file or folder", 2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO) and _output_fails():
        return _say(f"error: what this command prints can't be written: {error.strerror}", 1)
    text = str(error).strip() or "no message"
    return _say(f"error: {type(error).__name__}: {text}{_where(error)}{_keep_traceback(error, session)}", 1)


def _as_setting(error: BaseException, words: list[str]) -> str:
    """Return how an unknown option is written if it is a setting, where the command takes settings."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or "overrides" not in {one.name for one in context.command.params}:
        return ""
    given = next((number for number, word in enumerate(words) if word.partition("=")[0] == option), None)
    after = words[given].partition("=")[2] or " ".join(words[given + 1 : given + 2]) if given is not None else ""
    if after.endswith((".yaml", ".yml")):
        return f"\nA recipe is the first word: {context.command_path} {after}"
    value = after if after and not after.startswith("-") else "..."
    return f"\nA recipe's settings are KEY=VALUE, without dashes: {option.lstrip('-').replace('-', '_')}={value}"


def _report(session: Session) -> str:
    """Name the report of a run that ended early."""
    path = session.run / "report.html" if session.run else None
    return f"\nIts report so far: {path}" if path and path.exists() else ""


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


def _output_fails() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    """Write nothing more: what is still buffered has no reader, and Python would complain once more while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Give a process that was started without outputs (``>&-``) the null device for them, so that no file that is
    opened later takes their numbers and gets what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _say(text: str, code: int) -> int:
    with suppress(OSError):  # the reader went away; the code says it too
        print(escape_controls(text), file=sys.stderr, flush=True)
    return code
