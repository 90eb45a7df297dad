"""The runs of a folder in a table, with the jobs that were launched, and two runs side by side: the settings in which
they differ, and their results with the interval of the difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
from whet.metrics.statistics import newcombe
from whet.show.facts import Change, Measured, RunFacts, Summary, read_recipe
from whet.show.metric_catalog import show

_ELSEWHERE = {"description"}  # settings that change no result
_FINAL = (
    "loss",
    "reward/mean",
    "answer/length_mean",
    "entropy/approximate",
    "gradient_norm",
    "time/step",
)  # of the last step


@dataclass(frozen=True, slots=True)
class RunState:
    """A run as its folder shows it."""

    folder: Path
    state: str  # running, finished, stopped, or damaged
    facts: RunFacts
    summary: Summary
    settings: JsonObject  # dotted key -> value
    last: Mapping[str, Any]  # metrics of the last step

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
        whole = self.summary.whole
        return {
            "folder": str(self.folder), "state": self.state, "step": self.summary.steps, "steps": self.facts.steps,
            "algorithm": self.facts.algorithm, "model": self.facts.model, "task": self.facts.task,
            "accuracy_before": whole.before and whole.before.accuracy,
            "accuracy_after": whole.after and whole.after.accuracy, "seconds": self.summary.seconds,
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
    return sorted(files, key=lambda run: (files[run].stat().st_mtime, str(run)))


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
            except WhetError as error:
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
        except WhetError as error:
            table.add_row(_name(folder, root), f"damaged: {escape_controls(str(error))}")
            continue
        steps = f"{run.summary.steps} of {run.facts.steps}" if run.facts.steps else str(run.summary.steps)
        facts, state = run.facts, _state(run.state, jobs[folder][1]) if folder in jobs else run.state
        table.add_row(_name(folder, root), state, steps, facts.algorithm, facts.model, facts.task, _measured(run))
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


def compare(first: RunState, second: RunState) -> JsonObject:
    """Return the differing settings, the last metrics and the final accuracies of two runs as values of JSON."""
    keys = sorted(first.settings.keys() | second.settings.keys())
    values = {key: (first.settings.get(key), second.settings.get(key)) for key in keys if key not in _ELSEWHERE}
    change = _difference(first, second)
    return {
        "settings": {key: pair for key, pair in values.items() if pair[0] != pair[1]},
        "accuracy": [last and last.accuracy for last in (_final(first), _final(second))],
        "difference": change and {"mean": change.mean, "low": change.low, "high": change.high},
        "last step": {name: (first.last.get(name), second.last.get(name)) for name in _FINAL
                      if name in first.last or name in second.last},
    }  # fmt: skip


def print_comparison(first: RunState, second: RunState, console: Console | None = None) -> None:
    """Print two runs side by side."""
    console, comparison = console or Console(), compare(first, second)
    heads = ("", escape_controls(first.folder.name), escape_controls(second.folder.name))
    table = Table(*(Column(head, overflow="fold") for head in heads))  # two keys may begin alike
    for key, pair in comparison["settings"].items():
        table.add_row(key, *(escape_controls(_text(value)) for value in pair))
    table.add_section()
    table.add_row("steps", *(str(run.summary.steps) for run in (first, second)))
    table.add_row("accuracy", *(_accuracies(run) for run in (first, second)))
    if first.summary.losses or second.summary.losses:
        table.add_row("held-out loss", *(_losses(run) for run in (first, second)))
    for name, pair in comparison["last step"].items():
        table.add_row(f"{name} (last step)", *("" if value is None else show(value) for value in pair))
    console.print(table)
    if not comparison["settings"]:
        console.print("the settings are the same")
    if (change := _difference(first, second)) is not None:
        verdict = "" if change.style else "; the difference may be chance"
        console.print(f"accuracy of {second.folder.name} minus {first.folder.name}: {change.points} "
                      f"(95% {change.interval}, as of different tasks){verdict}")  # fmt: skip


def _final(run: RunState) -> Measured | None:
    return run.summary.whole.after or run.summary.whole.before


def _difference(first: RunState, second: RunState) -> Change | None:
    a, b = _final(first), _final(second)
    if a is None or b is None or not (a.n and b.n):
        return None
    return Change(*newcombe(a.accuracy * a.n, a.n, b.accuracy * b.n, b.n))


def _accuracies(run: RunState) -> str:
    results: Sequence[Measured | None] = (run.summary.whole.before, run.summary.whole.after)
    return " → ".join(show(result.accuracy, "percent") for result in results if result is not None)


def _losses(run: RunState) -> str:
    return " → ".join(show(each.loss) for each in run.summary.losses)


def _measured(run: RunState) -> str:
    """Return the accuracies, or the held-out losses of a run that has none."""
    losses = _losses(run)
    return _accuracies(run) or (losses and f"loss {losses}")


def _text(value: Any) -> str:
    return "default" if value is None else str(value)
