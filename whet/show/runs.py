"""The runs of a folder in a table, with the jobs that were launched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Column, Table

from whet.base.errors import ConfigError, WhetError
from whet.base.escaping import escape_controls
from whet.base.strict_json import JsonObject
from whet.checkpoint.lock import is_locked
from whet.config.tree import dotted, from_plain
from whet.launch.job import FOLDER, RECORD, Record
from whet.launch.scheduler import State
from whet.launch.submit import newest
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.show.facts import Measured, RunFacts, Summary, read_recipe
from whet.show.metric_catalog import show

_NARROW = 50  # columns of characters of a terminal


@dataclass(frozen=True, slots=True)
class RunState:
    """A run as its folder shows it."""

    folder: Path
    state: str  # running, finished, stopped, or damaged
    facts: RunFacts
    summary: Summary
    settings: JsonObject  # dotted key -> value
    last: Mapping[str, object]  # metrics of the last step

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the folder of a run. Raises ``ConfigError`` for a folder that is not a run, and ``DataError`` for
        damaged metrics."""
        if not (folder / "recipe.yaml").is_file():
            raise ConfigError(f"{folder} is not a run: it contains no recipe.yaml")
        lines = read_metrics(folder / FILE)
        reported = {key: value for line in lines for key, value in line.items() if key.startswith("run/")}
        recipe = read_recipe(folder)[1]
        facts, summary = RunFacts.of(folder, recipe, reported), Summary.of(lines)
        done = facts.steps is not None and summary.steps >= facts.steps
        tree = from_plain(recipe)
        settings = {dotted(path): tree.find(path)[0].value for path in tree.leaves()}
        train = [line for line in lines if line.get("kind", "train") == "train" and line["step"] > 0]
        state = "running" if is_locked(folder) else "finished" if done else "stopped"
        return cls(folder, state, facts, summary, settings, train[-1] if train else {})

    def as_json(self) -> dict[str, object]:
        """Return the state as values of JSON."""
        whole, held_out = self.summary.whole, self.summary.losses
        return {
            "folder": str(self.folder), "state": self.state, "step": self.summary.steps, "steps": self.facts.steps,
            "algorithm": self.facts.algorithm, "model": self.facts.model, "task": self.facts.task,
            "accuracy_before": whole.before and whole.before.accuracy,
            "accuracy_after": whole.after and whole.after.accuracy,
            "loss_before": held_out[0].loss if held_out else None,
            "loss_after": held_out[1].loss if len(held_out) > 1 else None, "seconds": self.summary.seconds,
        }  # fmt: skip


def find_runs(root: Path) -> list[Path]:
    """Return the folders of runs in a folder, and of the stages of pipelines in it, the oldest first. Raises
    ``ConfigError`` if there is no such folder."""
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}; name the folder that holds the runs")
    files = {file.parents[2]: file for file in root.glob(f"*/{FOLDER}/*/{RECORD}")}
    files |= {file.parent: file for file in root.glob("*/recipe.yaml")}
    stages = {file.parent: file for file in root.glob("*/*/recipe.yaml")}
    files |= {stage: file for stage, file in stages.items() if stage.parent not in files}
    return sorted(files, key=lambda run: (_written(files[run]), str(run)))


def _written(file: Path) -> float:
    """Return when a file was written; 0 for one that was removed since."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def list_runs(root: Path) -> list[dict[str, object]]:
    """Return the runs and launched jobs of a folder as values of JSON."""
    folders = find_runs(root)
    jobs = newest(folders)
    rows = []
    for folder in folders:
        run: JsonObject = {"folder": str(folder)}
        if (folder / "recipe.yaml").is_file():
            try:
                run = RunState.of(folder).as_json()
            except (WhetError, OSError) as error:  # also of a run that can't be read, or is being removed
                run |= {"state": "damaged", "problem": str(error)}
        if folder in jobs:
            record, job = jobs[folder]
            run["state"] = _state(run.get("state"), job)
            run["job"] = {"id": record.id, "kind": record.kind, "profile": record.profile_name, "state": job.phase,
                          "detail": job.detail, "exit_code": job.code, "command": record.command}  # fmt: skip
        rows.append(run)
    return rows


def _state(run: str | None, job: State) -> str:
    """Return the state of a launched run: that of its job, and once the job has ended, that of its folder."""
    return run if job.phase == "ended" and run is not None else job.phase


def print_runs(root: Path, console: Console | None = None) -> None:
    """Print a table of the runs in a folder."""
    console = console or Console()
    folders = find_runs(root)
    if not folders:
        console.print(f"no runs in {root}")
        return
    jobs = newest(folders)
    table = Table(Column("run", overflow="fold"), "state", "step", "algorithm", "model", "task", "held out")
    for folder in (folder for folder in folders if (folder / "recipe.yaml").is_file()):
        try:
            run = RunState.of(folder)
        except (WhetError, OSError) as error:
            table.add_row(_name(folder, root), f"damaged: {escape_controls(str(error))}")
            continue
        steps = f"{run.summary.steps} of {run.facts.steps}" if run.facts.steps else str(run.summary.steps)
        facts, state = run.facts, _state(run.state, jobs[folder][1]) if folder in jobs else run.state
        table.add_row(_name(folder, root), state, steps, facts.algorithm, facts.model, facts.task, _measured(run))
    if console.width < _NARROW:
        del table.columns[3:]  # otherwise no column has room for a character
    if table.row_count:
        console.print(table)
    if jobs:
        console.print(_jobs_table(jobs))
    for kind, why in dict.fromkeys((each.kind, job.detail) for each, job in jobs.values() if job.phase == "unknown"):
        text = f"the state of jobs of kind {kind} is unknown: {why}"
        console.print(escape_controls(text), soft_wrap=True, markup=False)


def _name(folder: Path, root: Path) -> str:
    return escape_controls(str(folder.relative_to(root)))


def _jobs_table(jobs: Mapping[Path, tuple[Record, State]]) -> Table:
    table = Table("launched", "job", "profile", "state")
    for folder, (record, job) in jobs.items():
        job_id = f"{record.kind} {record.id}"
        table.add_row(*map(escape_controls, (folder.name, job_id, record.profile_name, _outcome(job))))
    return table


def _outcome(job: State) -> str:
    """Return a job's state, the scheduler's word for it and its exit code."""
    detail = f" ({job.detail})" if job.detail and job.phase != "unknown" else ""
    return f"{job.phase}{detail}{'' if job.code is None else f', exit code {job.code}'}"


def accuracies(run: RunState) -> str:
    """Return the held-out accuracies before and after."""
    results: Sequence[Measured | None] = (run.summary.whole.before, run.summary.whole.after)
    return " → ".join(show(result.accuracy, "percent") for result in results if result is not None)


def losses(run: RunState) -> str:
    """Return the held-out losses before and after."""
    return " → ".join(show(each.loss) for each in run.summary.losses)


def _measured(run: RunState) -> str:
    """Return the accuracies, or the held-out losses of a run that has none."""
    loss = losses(run)
    return accuracies(run) or (loss and f"loss {loss}")
