"""Runs the stages of a pipeline that are not up to date, in order, each in a child process.

The order of writes makes a kill harmless: a folder that is replaced is moved aside, then the state names the stage as
begun with its settings and inputs, then the stage writes its folder, then the state names it as finished.
"""

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from whet.base.errors import ConfigError, WhetError
from whet.base.files import remove_leftovers, write_atomically
from whet.checkpoint.lock import run_lock
from whet.config import dump_yaml
from whet.pipeline.commands import Command, command_of, recipe_file
from whet.pipeline.config import Train
from whet.pipeline.job import Job
from whet.pipeline.plan import OLDER, Action, Decision, decide, in_the_way, inputs_of
from whet.pipeline.process import run_command
from whet.pipeline.results import result_of
from whet.pipeline.state import Record, State

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A stage after a call, or in a plan."""

    name: str
    type: str
    action: Action
    why: str
    command: str
    seconds: float
    result: str
    values: dict[str, float]
    folder: str


def planned(jobs: Mapping[str, Job], folder: Path, chosen: Mapping[str, bool], *, force: bool = False) -> list[Outcome]:
    """Return what a call would do. Changes nothing."""
    state, outcomes, runs = State.read(folder), [], set[str]()
    for job in jobs.values():
        if job.name in chosen:
            decision = decide(job, jobs, state, folder, reruns=runs, force=force and chosen[job.name])
            if decision.action != "up to date":
                runs.add(job.name)
        else:
            decision = Decision("not selected", "")
        outcomes.append(_outcome(job, decision, state, folder))
    return outcomes


def execute(
    jobs: Mapping[str, Job],
    folder: Path,
    chosen: Mapping[str, bool],
    *,
    force: bool = False,
    quiet: bool = False,
    say: Callable[[str], None] = print,
    run: Callable[[Command], None] | None = None,
) -> list[Outcome]:
    """Run the ``chosen`` jobs (see ``selected``) that are not up to date, and return the outcome of all. ``force``:
    also run jobs that are, if they were asked for. ``run`` replaces the child process. Raises ``ConfigError`` where a
    stage that is not chosen has not finished and is needed, and the error of a stage that fails."""
    with run_lock(folder):
        state, outcomes = State.read(folder), []
        remove_leftovers(folder)
        for number, job in enumerate(jobs.values(), 1):
            if job.name not in chosen:
                outcomes.append(_outcome(job, Decision("not selected", ""), state, folder))
                continue
            for need in job.needs:
                if need not in state.stages or not state.stages[need].finished:
                    raise ConfigError(
                        f"stage {job.name!r} needs stage {need!r}, which is neither selected nor finished"
                    )
            decision = decide(job, jobs, state, folder, force=force and chosen[job.name])
            why = f": {decision.why}" if decision.why else ""
            say(f"stage {number} of {len(jobs)}, {job.name} ({job.type}): {decision.action}{why}")
            if decision.action != "up to date":
                _run(job, jobs, decision, state, folder, say, run or (lambda each: run_command(each, quiet=quiet)))
            outcomes.append(_outcome(job, decision, state, folder))
        state.write(folder)  # with the hashes of files that were read
    return outcomes


def _run(
    job: Job,
    jobs: Mapping[str, Job],
    decision: Decision,
    state: State,
    folder: Path,
    say: Callable[[str], None],
    run: Callable[[Command], None],
) -> None:
    place, resume = folder / job.name, False
    if decision.action == "continue":
        resume = isinstance(job.stage, Train) and (place / "recipe.yaml").is_file()
    else:
        of_others = in_the_way(job, folder) if job.name not in state.stages else []
        earlier = [place] if job.stage.kept and place.is_dir() and any(place.iterdir()) else []
        for path in of_others or earlier:
            say(f"what was in {path} is kept as {_move_aside(path, folder)}")
        if place.exists():
            shutil.rmtree(place)
        state.stages[job.name] = Record(job.settings, inputs_of(job, jobs, state, folder))
        state.write(folder)
    if job.value is not None:
        write_atomically(recipe_file(job, folder), dump_yaml(job.value))
    place.mkdir(exist_ok=True)
    record, began = state.stages[job.name], time.monotonic()
    try:
        run(command_of(job, folder, resume=resume))
    except WhetError as error:
        error.args = (f"stage {job.name!r}: {error}", *error.args[1:])
        raise
    finally:
        record.seconds += time.monotonic() - began
        state.write(folder)
    record.result, record.values = result_of(job, place)
    record.outputs = state.hashed(job.stage.files(place, ""), place)
    record.finished = True
    state.write(folder)


def _move_aside(place: Path, folder: Path) -> Path:
    """Rename the folder or recipe of a stage into ``older/``; return its new path."""
    older = folder / OLDER
    older.mkdir(exist_ok=True)
    number = 1
    while (target := older / f"{place.name}-{number}").exists():
        number += 1
    place.rename(target)
    return target


def _outcome(job: Job, decision: Decision, state: State, folder: Path) -> Outcome:
    record = state.stages.get(job.name, Record({}, {}))
    place = folder / job.name
    resume = decision.action == "continue" and isinstance(job.stage, Train) and (place / "recipe.yaml").is_file()
    command = str(command_of(job, folder, resume=resume))
    return Outcome(
        job.name, job.type, decision.action, decision.why, command, record.seconds, record.result, record.values,
        str(place),
    )  # fmt: skip
