"""The entry point: runs a command and turns its outcome into one line and an exit code.

0 done, 1 failed, 2 the recipe or command line is wrong, 141 the output pipe was closed, 128 + N for signal N
(130 interrupted, 143 SIGTERM).
"""

import errno
import io
import os
import resource
import shlex
import signal
import sys
import threading
import traceback
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated

import typer

from whet.base.closing import abandoned_threads
from whet.base.errors import ConfigError, WhetError
from whet.base.escaping import escape_controls
from whet.base.files import check_unicode, write_atomically
from whet.base.scratch import remove_scratch
from whet.cli import (
    attack,
    audit,
    doctor,
    evaluate,
    export,
    gym,
    lineage,
    pipeline,
    plan,
    prep,
    recipes,
    runs,
    serve,
    shells,
    show,
    train,
    validate,
    view,
    watch,
)
from whet.cli.arguments import Session, in_unicode
from whet.cli.ending import signals_interrupt
from whet.cli.launching import launchable
from whet.processes.machine import keep_freed_memory
from whet.processes.sentinel import endings_are_errors
from whet.processes.user_code import brief, user_frames

INTERRUPTED, BROKEN_PIPE = 130, 141
_OF_THE_FILE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}  # the user's to mend


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(print_it: bool) -> None:
    if print_it:
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


app.command("train")(launchable(train.train, train.train_job))
app.command("resume")(launchable(train.resume, train.resume_job))
app.command("eval")(launchable(evaluate.evaluate))
app.command("show")(show.show)
app.command("validate")(validate.validate)
app.command("attack")(attack.attack)
app.command("gym")(gym.gym)
app.command("plan")(plan.plan)
app.command("view")(view.view)
app.command("watch")(watch.watch)
app.command("serve")(serve.serve)
app.command("shells")(shells.shells)
app.command("audit")(audit.audit)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.command("prep")(launchable(prep.prep))
app.command("pipeline")(launchable(pipeline.pipeline))
app.command("runs")(runs.runs)
app.command("lineage")(lineage.lineage)
app.command("recipes")(recipes.recipes)

_OTHER_NAMES_OF_FOLDER = {"--run-dir", "--run-folder", "--output-dir", "--output_dir", "--output", "--out", "--dir"}


def main(arguments: list[str] | None = None) -> None:
    """The ``whet`` command. Always ends in SystemExit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # --debug may be anywhere, so that it can be appended to a command that failed.
    session = Session(debug="--debug" in words)
    words = [_at_home(word) for word in words if word != "--debug"]
    session.words = tuple(words)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    elif words == ["version"]:
        words = ["--version"]
    code = 0
    keep_freed_memory()  # before any thread: glibc gives one that allocates earlier, and its successors, a second heap
    _open_streams()
    try:
        for word in words:
            check_unicode(word, word)
        _check_filled(words)
        # Not ``app()``, which prints errors and handles interrupts itself.
        command = typer.main.get_command(app)
        with (
            signals_interrupt() as session.signals,
            endings_are_errors(),
            command.make_context("whet", words, obj=session) as context,
        ):
            command.invoke(context)
        sys.stdout.flush()
    except BaseException as error:
        code = finish(error, session, words)
    with suppress(OSError):
        sys.stderr.flush()
    if abandoned_threads or ((code == INTERRUPTED or session.signals) and threading.active_count() > 1):
        remove_scratch()
        os._exit(code)  # running threads would delay or crash Python's normal exit
    sys.exit(code)


def _check_filled(words: list[str]) -> None:
    """Raise ``ConfigError`` if a word is empty, as of ``--host "$HOST"`` without the variable. As the name of a folder
    it would mean the working folder, as a host every address of the machine."""
    if any(not word or (word.startswith("--") and word.find("=") == len(word) - 1) for word in words):
        raise ConfigError(
            f"whet {shlex.join(words)}: a word is empty, perhaps because a variable of the shell is not set; "
            "give it a value or leave it out"
        )


def _at_home(word: str) -> str:
    """Return an option with the home folder in place of ``~``, which shells leave in ``--folder=~/runs/a``."""
    option, is_equal, value = word.partition("=")
    return f"{option}={os.path.expanduser(value)}" if is_equal and option.startswith("--") else word


def finish(error: BaseException, session: Session, words: list[str] | None = None) -> int:
    """Print how a command ended and return the exit code."""
    # rich turns a BrokenPipeError into SystemExit.
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        _drop_output()
        return BROKEN_PIPE
    if isinstance(error, typer.Exit):  # of --help, or of a command that has already printed its result
        return error.exit_code
    if isinstance(error, SystemExit):
        from whet.processes.loop_thread import format_error

        return _say(f"error: code inside the command tried to end the process: {format_error(error)}", 1)
    if session.debug:
        with suppress(OSError):
            traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt would only cut this message short
        # CPython exits by the signal if an interrupt ended the exec of a string; another exec resets that.
        exec("")
        begun = session.run is not None and os.path.exists(session.run / "recipe.yaml")
        resume = f" Resume with: whet resume {session.run}" if begun else ""
        by = session.signals[0] if session.signals else None
        how = "interrupted" if by is None else f"ended by {by.name}"
        return _say(f"{how}.{resume}{_report(session)}{_again(session)}", 128 + by if by else INTERRUPTED)
    if isinstance(error, WhetError):
        return _say(f"{error.label}: {error}{_where(error)}{_report(session)}{_again(session)}", error.exit_code)
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        context = getattr(error, "ctx", None)
        hint = f"\nSee: {context.command_path} --help" if context is not None else ""
        message = error.format_message().replace(": Value error, ", ": ")  # typer's own words for a wrong choice
        return _say(f"error: {message}{_as_setting(error, words or [])}{hint}", 2)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _say(f"error: {str(error.filename)[:60]}...: the name is too long for a file or folder", 2)
    # Python 3.13.0 raises SystemError for an import without a working folder.
    if isinstance(error, FileNotFoundError | SystemError) and not _has_folder():
        return _say("error: the folder that this command was started in is gone; change to another one", 2)
    if isinstance(error, FileNotFoundError) and error.filename is None and "temporary directory" in str(error):
        return _say(f"error: {error.strerror}; name a folder that can be written: TMPDIR=FOLDER", 1)
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return _say(f"error: this process may have {limit} files open, which are too few; raise it: ulimit -n 4096", 1)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO) and _output_fails():
        return _say(f"error: the output of this command can't be written: {error.strerror}", 1)
    if isinstance(error, OSError) and error.errno in _OF_THE_FILE and error.filename is not None:
        return _say(f"error: {os.fsdecode(error.filename)}: {error.strerror}{_report(session)}", 1)
    text = brief(str(error).strip()) or "no message"
    place = "".join(f" at {frame.filename}:{frame.lineno}" for frame in user_frames(error)[-1:])
    return _say(f"error: {type(error).__name__}: {text}{place}{_where(error)}{_keep_traceback(error, session)}", 1)


def _as_setting(error: BaseException, words: list[str]) -> str:
    """Return a hint to write an unknown option as a setting, if the command takes settings and has no option of nearly
    that name."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or "overrides" not in {param.name for param in context.command.params}:
        return ""
    if get_close_matches(option, getattr(error, "possibilities", None) or (), cutoff=0.8):  # already named
        return ""
    index = next((number for number, word in enumerate(words) if word.partition("=")[0] == option), None)
    after = words[index].partition("=")[2] or " ".join(words[index + 1 : index + 2]) if index is not None else ""
    if after.endswith((".yaml", ".yml")):
        return f"\nThe recipe is the first argument: {context.command_path} {after}"
    if option in _OTHER_NAMES_OF_FOLDER and any("--folder" in param.opts for param in context.command.params):
        return f"\nThe run folder is the option --folder: --folder {after if after else 'FOLDER'}"
    value = after if after and not after.startswith("-") else "..."
    return (
        f"\nSettings of a recipe are written KEY=VALUE, without dashes: {option.lstrip('-').replace('-', '_')}={value}"
    )


def _report(session: Session) -> str:
    """Return the path of the report of a run that ended early."""
    path = session.run / "report.html" if session.run else None
    return f"\nReport so far: {path}" if path and os.path.exists(path) else ""


def _again(session: Session) -> str:
    """Return the command that continues work of several parts, if any has begun."""
    return f"\nContinue with: {session.again}" if session.again else ""


def _where(error: BaseException) -> str:
    """Return the worker process that raised the error, if any."""
    where = getattr(error.__cause__, "where", None)
    return f"\n  in {where}" if where else ""


def _keep_traceback(error: BaseException, session: Session) -> str:
    """Write the traceback to the run folder; return its path, or how to see it."""
    if session.debug:
        return ""
    if session.run is None or not session.run.is_dir():
        return "\nThis error is unexpected, perhaps a bug. Add --debug to see the traceback."
    log = session.run / "error.log"
    try:
        write_atomically(log, "".join(traceback.format_exception(error)).encode("utf-8", "replace"))
    except WhetError:
        return "\nAdd --debug to see the traceback."
    return f"\nThe traceback is in {log}."


def _has_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _output_fails() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    """Send further output to the null device, because Python flushes its buffers at exit and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Open the null device for standard streams that are closed (``>&-``). Otherwise a file opened later would get
    their file descriptor and receive the output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # in a locale without Unicode, a character must not end a run
        if isinstance(stream, io.TextIOWrapper) and not in_unicode(stream):
            stream.reconfigure(errors="replace")


def _say(text: str, code: int) -> int:
    with suppress(OSError):  # stderr is closed; the exit code still reports the error
        print(escape_controls(text), file=sys.stderr, flush=True)
    return code
