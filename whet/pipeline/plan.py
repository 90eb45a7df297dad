"""Decides which stages run, and why. A stage is up to date if it was finished with the same settings and inputs of
the same content, and its outputs are there. A stage that was begun with these and not finished continues. Any other
stage is run."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.base.errors import ConfigError, WhetError
from whet.base.files import expanded
from whet.config.issues import did_you_mean
from whet.config.tree import from_plain
from whet.data.files import data_files
from whet.pipeline.commands import recipe_file
from whet.pipeline.config import Train
from whet.pipeline.job import Job, Reference
from whet.pipeline.state import FILE, Record, State

Action = Literal["up to date", "run", "continue", "not selected"]
OLDER = "older"


@dataclass(frozen=True, slots=True)
class Decision:
    """The action for a stage, and the reason."""

    action: Action
    why: str


def selected(jobs: Mapping[str, Job], start: str | None, only: str | None) -> dict[str, bool]:
    """Return the names of the jobs that may run, and whether each was asked for: ``only`` one, or ``start`` and all
    that depend on it; by default all. An export between two stages is selected with the stage that reads it. Raises
    ``ConfigError`` for unknown names."""
    for option, name in (("--from", start), ("--only", only)):
        if name is not None and name not in jobs:
            raise ConfigError(f"{option} {name}: no stage has this name.{did_you_mean(name, jobs)} "
                              f"Stages: {', '.join(jobs)}")  # fmt: skip
    if start and only:
        raise ConfigError("--from and --only exclude each other; give one of them")
    names = {only} if only else {start} if start else set(jobs)
    if start:
        for name, job in jobs.items():  # in order, so one pass is enough
            if names & set(job.needs):
                names.add(name)
    return dict.fromkeys((need for name in names for need in jobs[name].needs if "." in need), False) | dict.fromkeys(
        names, True
    )


def decide(
    job: Job, jobs: Mapping[str, Job], state: State, folder: Path, *, reruns: Collection[str] = (), force: bool = False
) -> Decision:
    """Return what is to be done with a job. ``reruns``: the jobs that will run before it, for a plan; ``force``: run it
    even if it is up to date."""
    record, place = state.stages.get(job.name), folder / job.name
    if record is None:
        if (others := in_the_way(job, folder)) and not force:
            what = "is not empty" if others[0].is_dir() else "is there"
            raise ConfigError(
                f"{others[0]} {what}, and {folder / FILE} has no record of it; choose another --folder, or move "
                f"it to {folder / OLDER} with --force"
            )
        return Decision("run", "it was not run yet")
    if changed := _changed(record.settings, job.settings):
        return Decision("run", changed)
    if before := [name for name in job.needs if name in reruns]:
        return Decision("run", f"{' and '.join(before)} run{'s' * (len(before) == 1)} before it")
    now = inputs_of(job, jobs, state, folder)
    if changes := [name for name in now.keys() | record.inputs.keys() if now.get(name) != record.inputs.get(name)]:
        return Decision("run", f"its input {min(changes)} changed")
    if force:
        return Decision("run", "--force")
    if not record.finished:
        return Decision("continue", "it was not finished")
    if lost := _lost(job, record, state, place):
        return Decision("run", lost)
    return Decision("up to date", "")


def in_the_way(job: Job, folder: Path) -> list[Path]:
    """Return what is in the place of a job's folder and of its recipe: of a job without a record, files of others."""
    place, recipe = folder / job.name, recipe_file(job, folder)
    others = [place] if place.is_file() or (place.is_dir() and any(place.iterdir())) else []
    return others + [recipe] * (job.value is not None and recipe.exists())


def inputs_of(job: Job, jobs: Mapping[str, Job], state: State, folder: Path) -> dict[str, str]:
    """Return the hash of each input: of outputs of other stages, and of files and folders that settings name."""
    hashes = {}
    for each in job.inputs.values():
        if isinstance(each, Reference):
            source = jobs[each.stage]
            files = source.stage.files(folder / each.stage, each.output)
            name = each.stage if "." in each.stage or str(each) == job.name else str(each)
            hashes[name] = state.hash_all(files, folder)
    named = [*_texts(job), *(each for each in job.inputs.values() if isinstance(each, str))]
    for text in dict.fromkeys(named):
        for path in _files(text, folder):
            hashes[str(path)] = state.hash(path)
    return hashes


def _texts(job: Job) -> Iterator[str]:
    if job.value is not None:
        tree = from_plain(job.value.model_dump(mode="json"))
        yield from (text for path in tree.leaves() if isinstance(text := tree.find(path)[0].value, str))


def _files(text: str, folder: Path) -> list[Path]:
    """Return the files that a setting names: a file, a file of Python code, a pattern, or a folder with its files. Of
    texts without a slash or dot, and outputs of this pipeline, none."""
    name = text.partition(".py:")[0] + ".py" if ".py:" in text else text
    if not re.search(r"[/.]\w", name) or "\n" in name or len(name) > 1000 or name.startswith(("hf:", f"{folder}/")):
        return []
    try:
        path = expanded(name)
        if path.is_dir():
            return sorted(file for file in path.iterdir() if file.is_file())
        return [file for file in data_files(path) if file.is_file()]
    except (WhetError, OSError, RuntimeError, ValueError):
        return []


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the first settings that differ, as text; empty without any."""
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    shown = [f"{key} was {_shown(before, key)} and is {_shown(now, key)}" for key in keys[:2]]
    return "; ".join(shown) + (f"; and {len(keys) - 2} more settings changed" if len(keys) > 2 else "")


def _shown(settings: Mapping[str, object], key: str) -> str:
    return str(settings[key]) if key in settings else "the default"


def _lost(job: Job, record: Record, state: State, place: Path) -> str:
    """Return which output is missing or was changed, as text; empty if all are intact."""
    if isinstance(job.stage, Train):  # a run may be resumed by hand, which replaces its checkpoints
        there = not record.outputs or any(job.stage.files(place, ""))
        return "" if there else f"{place} has no checkpoints or rollouts any more"
    for name, value in record.outputs.items():
        path = place / name
        if not path.is_file():
            return f"{path} is missing"
        if state.hash(path) != value:
            return f"{path} was changed"
    return ""
