"""The options ``--run``, ``--batch`` and ``--dry-run`` of commands that can run as jobs elsewhere."""

import functools
import inspect
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.base.errors import ConfigError, WhetError
from whet.base.escaping import escape_controls
from whet.cli.ending import SignalInterrupt

if TYPE_CHECKING:
    from whet.launch.job import Job, Record
    from whet.launch.profiles import Profile

RunOn = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="PROFILE", help="Run as a job of this launch profile; print its output until it ends."
    ),
]
BatchOn = Annotated[
    str | None, typer.Option("--batch", metavar="PROFILE", help="Submit as a job of this launch profile, and return.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --run or --batch: print the script or manifest, and submit nothing.")
]


@dataclass(frozen=True, slots=True)
class Request:
    """A command that is to run as a job."""

    words: tuple[str, ...]  # of the command, without the options of the launch
    profile_name: str
    profile: "Profile"

    def job(self, run: Path, **fields: object) -> "Job":
        """Return a job whose record is kept in the run folder; by default it runs the same words."""
        from whet.launch.job import Job, next_folder

        run = run.absolute()
        given: dict[str, Any] = {
            "command": self.words,
            "sent": self.words,
            "folder": next_folder(run),
            "working_folder": Path.cwd(),
        }
        return Job(run=run, profile_name=self.profile_name, profile=self.profile, **given | fields)


Plan = Callable[..., "Job"]  # of the request and the command's arguments


def _same_words(request: Request, **arguments: object) -> "Job":
    from whet.run.folder import new_folder

    return request.job(new_folder(request.words[0]))


def launchable(command: Callable[..., None], plan: Plan = _same_words) -> Callable[..., None]:
    """Return the command with the options of a launch. ``plan`` makes the job from the request and the command's
    arguments; by default the job runs the same words."""
    parameters = inspect.signature(command).parameters
    added: dict[str, Any] = {"run_on": RunOn, "batch_on": BatchOn}
    if "dry_run" not in parameters:
        added["dry_run"] = DryRun
    if "context" not in parameters:
        added["context"] = typer.Context

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        run_on, batch_on, dry_run = (arguments[name] for name in ("run_on", "batch_on", "dry_run"))
        given = {name: value for name, value in arguments.items() if name in parameters}
        if run_on is None and batch_on is None:
            if dry_run and "dry_run" in added:
                raise ConfigError("--dry-run prints what a launch profile would run: add --run or --batch PROFILE")
            command(**given)
        elif run_on is not None and batch_on is not None:
            raise ConfigError("--run waits for the job and --batch does not: choose one of them")
        else:
            given.pop("context", None)
            job = plan(_request(arguments["context"], run_on or batch_on), **given)
            _launch(job, attached=run_on is not None, dry_run=dry_run)

    defaults = {"run_on": None, "batch_on": None, "dry_run": False, "context": inspect.Parameter.empty}
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in added.items()
    ]
    signature = inspect.Signature([*parameters.values(), *more])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = command.__annotations__ | added
    return wrapper


def _request(context: typer.Context, profile: str) -> Request:
    from whet.launch.profiles import load_profile

    return Request(_without_launch(context.obj.words), profile, load_profile(profile))


def _launch(job: "Job", attached: bool, dry_run: bool) -> None:
    from whet.launch.scripts import render
    from whet.launch.submit import launch

    if dry_run:
        print(render(job), end="")
        return
    record = launch(job)
    if attached:
        raise typer.Exit(_attach(record))
    _print_submitted(record)


def _without_launch(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a command line without the options of a launch."""
    kept: list[str] = []
    skipped = False
    for word in words:
        if skipped or word == "--dry-run" or word.startswith(("--run=", "--batch=")):
            skipped = False
        elif word in ("--run", "--batch"):
            skipped = True
        else:
            kept.append(word)
    return tuple(kept)


def _print_submitted(record: "Record") -> None:
    from whet.launch.schedulers import SCHEDULERS

    scheduler = SCHEDULERS[record.kind]
    print(f"job {record.id} was submitted ({record.kind}, profile {record.profile_name})")
    print(f"  what was sent: {record.folder}")
    print(f"  state:         whet runs {shlex.quote(str(record.run.parent))}")
    print(f"  output:        {shlex.join(scheduler.follow_words(record))}")
    print(f"  cancel:        {shlex.join(scheduler.cancel_words(record))}")


def _attach(record: "Record") -> int:
    """Print a job's output until it ends, and return its exit code. An interrupt asks whether to cancel the job."""
    from whet.launch.schedulers import SCHEDULERS

    def say(line: str) -> None:
        print(escape_controls(line), file=sys.stderr, flush=True)

    try:
        from whet.launch.attached import follow

        state = follow(record, sys.stdout.buffer, say)
    except SignalInterrupt:  # a terminal that is closed ends no job elsewhere
        raise
    except KeyboardInterrupt:
        if _cancels(record):
            SCHEDULERS[record.kind].cancel(record)
            say(f"\njob {record.id} was asked to end: a run saves first. Its state: whet runs")
        else:
            say(f"job {record.id} continues. Its output: {shlex.join(SCHEDULERS[record.kind].follow_words(record))}")
        return 130
    if state.phase == "lost":
        raise WhetError(f"job {record.id} was lost: {state.detail}, and it wrote no exit code. Its log: {record.log}")
    return 1 if state.code is None else state.code


def _cancels(record: "Record") -> bool:
    """Ask whether to cancel the job; without a terminal, or at a second interrupt, it is cancelled."""
    if not sys.stdin.isatty():
        return True
    try:
        return input(f"\ncancel job {record.id}? [y/N] ").strip().lower() in ("y", "yes")
    except (KeyboardInterrupt, EOFError):
        return True
