"""A run in words and tables, as values of JSON for a page: outcome, facts, warnings, held-out sets, alarms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from whet.base.errors import DataError
from whet.base.strict_json import JsonObject
from whet.checkpoint.lock import is_locked
from whet.lineage.record import read_record
from whet.show.alarms import State, alarms
from whet.show.charts import chosen, last, present
from whet.show.facts import Measured, RunFacts, Summary, read_recipe
from whet.show.history import History
from whet.show.metric_catalog import CATALOG, show

_TABLE = ["accuracy", "95% interval"]


@dataclass
class Overview:
    """The changing facts of a run. ``recipe`` is the text of ``recipe.yaml``, and ``settings`` its values."""

    folder: Path
    recipe: str
    settings: Mapping[str, object]

    @classmethod
    def of(cls, folder: Path) -> "Overview":
        return cls(folder, *read_recipe(folder))

    def facts(self, history: History) -> RunFacts:
        return RunFacts.of(self.folder, self.settings, history.reported)

    def state(self, history: History) -> State:
        """Return what the folder says about the process that trains."""
        if not self.folder.is_dir():
            return "gone"
        if is_locked(self.folder):
            return "running"
        steps, planned = history.train.steps, self.facts(history).steps
        return "finished" if planned is not None and len(steps) and steps[-1] >= planned else "stopped"

    def as_json(self, history: History, state: State | None = None, now: float = 0.0) -> JsonObject:
        """Return everything except charts and rollouts. ``state``: None for a page that does not follow the run, which
        has no alarms."""
        facts, summary = self.facts(history), summary_of(history)
        rows = facts.without_rates().rows() + _more_facts(self.folder, self.settings, history)
        return {
            "name": facts.name,
            "folder": self.folder.resolve().name,
            "short": facts.short(),
            "state": state,
            "step": summary.steps,
            "steps": facts.steps,
            "rows": rows + summary.rows(facts.steps),
            "outcome": _outcome(history, summary),
            "alarms": [] if state is None else alarms(history, state, facts.steps, now),
            "warnings": _warnings(history) + [("metrics.jsonl", notice) for notice in history.notices()],
            "sets": _sets(summary),
            "silent": chosen(history)[1],
            "samples": "answer/length_mean" in history.train.names,
            "recipe": self.recipe,
        }


def summary_of(history: History) -> Summary:
    """Return the summary of a run."""
    train = history.train
    seconds, rates = (present(train.column(name)) for name in ("time/step", "time/tokens_per_second"))
    rates = rates[np.isfinite(rates) & (rates > 0)]
    return replace(
        Summary.of(history.evaluations),
        steps=int(train.steps[-1]) if len(train) else 0,
        seconds=float(seconds[np.isfinite(seconds)].sum()),
        tokens_per_second=float(np.sort(rates)[len(rates) // 2]) if len(rates) else None,
    )


def _more_facts(folder: Path, settings: Mapping[str, object], history: History) -> list[tuple[str, str]]:
    """Return what is needed to make the run again."""
    rows = [(name, str(settings[name])) for name in ("seed",) if settings.get(name) is not None]
    named = (("learning rate", "lr"), ("entropy", "entropy/approximate"))
    rows += [(label, show(value)) for label, key in named if (value := last(history, key)) is not None]
    try:
        record = read_record(folder)
    except DataError:
        record = None
    for session in record.sessions[-1:] if record else ():
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in session.versions.items())))
        commit, dirty, _ = session.commit.partition("+")
        rows += [("commit", commit[:12] + dirty)] if commit else []
        rows.append(("command", session.command))
    return rows


def _outcome(history: History, summary: Summary) -> dict[str, object]:
    """Return the headline of a run (label, first and last value) with the table below it."""
    whole, rows = summary.whole, "rows" if summary.losses else "tasks"
    if whole.before:
        measured = [("before", whole.before)] + ([("after", whole.after)] if whole.after else [])
        table: list[list[Any]] = [["", "rows" if summary.losses else "answers", *_TABLE]]
        table += [[f"{name} (step {each.step})", str(each.n or "-"), *_accuracy(each)] for name, each in measured]
        if change := whole.change():
            chance = "" if change.style else " (may be chance)"
            table.append([f"difference{chance}", "", [change.points, change.style], change.interval])
        texts = [show(each.accuracy, "percent") for _, each in measured]
        return {"label": f"accuracy on held-out {rows}", "values": texts, "table": table}
    if losses := summary.losses:
        table = [["", "rows", "loss"]]
        names = ("before", "after")
        table += [[f"{name} (step {loss.step})", str(loss.n or "-"), show(loss.loss)]
                  for name, loss in zip(names, losses, strict=False)]  # fmt: skip
        return {"label": "loss on held-out rows", "values": [show(loss.loss) for loss in losses], "table": table}
    for entry in CATALOG:
        values = present(history.train.column(entry.key))
        if len(values):
            texts = list(dict.fromkeys(entry.text(float(value)) for value in (values[0], values[-1])))
            which = "first and last step" if len(texts) > 1 else "last step"
            return {"label": f"{entry.label}, {which}", "values": texts, "table": []}
    return {"label": "Nothing was evaluated.", "values": [], "table": []}


def _warnings(history: History) -> list[tuple[str, str]]:
    """Return the metrics that were out of bounds, each with the steps."""
    warnings, steps = [], history.train.steps
    for entry in CATALOG:
        values = history.train.column(entry.key)
        odd = np.isinf(values)
        odd |= False if entry.low is None else values < entry.low
        odd |= False if entry.high is None else values > entry.high
        if odd.any():
            at = np.flatnonzero(odd)
            step = int(steps[at[-1]])
            when = f"at step {step}" if len(at) == 1 else f"in {len(at)} steps, last at step {step}"
            warnings.append((entry.label, f"{when}: {entry.text(float(values[at[-1]]))}"))
    return warnings


def _sets(summary: Summary) -> list[list[object]]:
    """Return the table of the environments of a blend and of additional held-out sets; empty without any."""
    if not summary.sets:
        return []
    names = ["", "tasks", "before", "95% interval", "after", "95% interval", "difference", "95% interval"]
    rows: list[list[Any]] = [names]
    for name, outcome in summary.sets.items():
        change = outcome.change()
        ends = [text for measured in (outcome.before, outcome.after) for text in _accuracy(measured)]
        changed = [[change.points, change.style], change.interval] if change else ["-", "-"]
        rows.append([name, str(outcome.before.n if outcome.before else "-"), *ends, *changed])
    return rows


def _accuracy(measured: Measured | None) -> list[str]:
    return [show(measured.accuracy, "percent"), measured.interval] if measured else ["-", "-"]
