"""Submitting jobs, and asking for the states of launched jobs."""

import os
from collections.abc import Iterable
from pathlib import Path

from whet.base.errors import ConfigError
from whet.base.files import write_atomically
from whet.launch.job import Job, Record, keep, launches, record
from whet.launch.profiles import Kubernetes
from whet.launch.scheduler import SchedulerError, State
from whet.launch.schedulers import SCHEDULERS
from whet.launch.scripts import file_name, render


def launch(job: Job) -> Record:
    """Submit a job and keep what was sent with the run."""
    missing = [name for name in job.profile.secrets if name not in os.environ]
    if missing and not isinstance(job.profile, Kubernetes):
        raise ConfigError(
            f"profiles.{job.profile_name}.secrets: {missing[0]} is not set in this shell; export it first"
        )
    kind = job.profile.model_dump()["kind"]
    scheduler = SCHEDULERS[kind]
    scheduler.check_installed()
    write_atomically(job.folder / file_name(job.profile), render(job))
    commits = keep(job)
    id, extra = scheduler.submit(job)
    return record(job, id, kind, commits, extra)


def states(records: Iterable[Record]) -> dict[Record, State]:
    """Return the state of each job. Each scheduler is asked once; this machine, which uses process ids again, for each
    job. For a scheduler that can't be asked, the state says why."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for each in records:
        place = (each.kind, each.profile.get("context") or "", each.profile.get("namespace") or "", str(each.extra))
        groups.setdefault(place, []).append(each)
    answers: dict[Record, State] = {}
    for (kind, *_), members in groups.items():
        try:
            states = SCHEDULERS[kind].states(members)
        except SchedulerError as error:
            states = {each.id: State("unknown", str(error)) for each in members}
        lost = State("lost", "its scheduler does not list it")
        answers |= {each: states.get(each.id) or _written(each) or lost for each in members}
    return answers


def newest(folders: Iterable[Path]) -> dict[Path, tuple[Record, State]]:
    """Return the newest launch of each run folder that has one, with its state."""
    records = [Record.read(every[-1]) for folder in folders if (every := launches(folder))]
    return {each.run: (each, state) for each, state in states(records).items()}


def _written(record: Record) -> State | None:
    """Return the end of a job as its own script wrote it, for a job that its scheduler has forgotten."""
    code = record.exit_code()
    return None if code is None else State("ended", "", code)
