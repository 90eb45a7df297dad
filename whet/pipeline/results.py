"""The key result of a finished stage, as a line for people and as numbers, read from its folder."""

import json
from pathlib import Path

from whet.base.files import format_bytes
from whet.data.files import iterate_file
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.pipeline.commands import RESULT
from whet.pipeline.config import Eval, Prep, RowsOfAnswers, Train
from whet.pipeline.job import Job
from whet.prep.manifest import Manifest
from whet.show.facts import Summary
from whet.show.metric_catalog import show

Result = tuple[str, dict[str, float]]


def result_of(job: Job, place: Path) -> Result:
    """Return the result of a job whose folder is ``place``."""
    stage = job.stage
    if isinstance(stage, Train):
        return _of_run(place)
    if isinstance(stage, Eval):
        return _of_evaluation(json.loads((place / RESULT).read_text(encoding="utf-8")))
    if isinstance(stage, Prep) and (manifest := Manifest.read(place)) is not None:
        values = {f"{split}_rows": float(manifest.rows(split)) for split in manifest.splits}
        return ", ".join(f"{count:,.0f} {name.removesuffix('_rows')} rows" for name, count in values.items()), values
    if isinstance(stage, RowsOfAnswers):
        count = sum(1 for _ in iterate_file(stage.path(place, "rows")))
        return f"{count:,} rows", {"rows": float(count)}
    size = sum(path.stat().st_size for path in stage.files(place, ""))
    return format_bytes(size), {"bytes": float(size)}


def _of_run(place: Path) -> Result:
    summary = Summary.of(read_metrics(place / FILE))
    values, parts = {"steps": float(summary.steps)}, [f"{summary.steps} step{'s' * (summary.steps != 1)}"]
    ends = [each for each in (summary.whole.before, summary.whole.after) if each]
    if ends:
        parts.append("accuracy " + " → ".join(show(each.accuracy, "percent") for each in ends))
        values |= {"accuracy_before": ends[0].accuracy, "accuracy": ends[-1].accuracy}
    elif summary.losses:
        parts.append("loss " + " → ".join(show(each.loss) for each in summary.losses))
        values |= {"loss_before": summary.losses[0].loss, "loss": summary.losses[-1].loss}
    return ", ".join(parts), values


def _of_evaluation(values: dict[str, float]) -> Result:
    if "accuracy" not in values or "low" not in values:
        return ", ".join(f"{name} {show(value)}" for name, value in list(values.items())[:3]), values
    text = f"accuracy {values['accuracy']:.1%} (95% {values['low']:.1%} to {values['high']:.1%})"
    if "difference" in values:
        points, low, high = (100 * values[name] for name in ("difference", "difference_low", "difference_high"))
        text += f", against {values['against/accuracy']:.1%}: {points:+.1f} points ({low:+.1f} to {high:+.1f})"
    return text, values
