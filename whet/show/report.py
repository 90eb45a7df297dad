"""``report.html``: a run on one self-contained page that needs no network or server.

It is generated from ``recipe.yaml``, ``metrics.jsonl`` and ``rollouts/`` of a run folder; only the metrics are
required. The template is ``assets/report.html.j2``. Every string in it passes through ``escape_controls`` and is
escaped for HTML.
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from whet.base.errors import DataError
from whet.base.escaping import escape_controls
from whet.base.files import write_atomically
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.show import charts
from whet.show.charts import Chart, Line, line_chart, stacked_chart
from whet.show.facts import Measured, RunFacts, Summary, read_recipe
from whet.show.metric_catalog import CATALOG, ENTRIES, PHASES, Entry, drawn, duration, phases, scores, show
from whet.show.rollouts import cards, sample_rollouts

_ASSETS = Path(__file__).parent / "assets"
_Lines = Sequence[Mapping[str, Any]]
_WAITS = {"idle/generator": "c1", "idle/learner": "c2", "tokens/goodput": "c3"}


def write_report(run_folder: Path, most_rollouts: int = 60) -> Path:
    """Write ``report.html`` to the run folder and return its path. Raises DataError without metrics."""
    lines = read_metrics(run_folder / FILE)
    if not lines:
        raise DataError(f"no metrics in {run_folder / FILE}: the run has completed no step, or has no jsonl sink")
    recipe, settings = read_recipe(run_folder)
    reported = {key: value for line in lines for key, value in line.items() if key.startswith("run/")}
    facts, summary = RunFacts.of(run_folder, settings, reported), Summary.of(lines)
    train = [line for line in lines if line.get("kind", "train") == "train"]
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    style, script = ((_ASSETS / name).read_text("utf-8") for name in ("report.css", "report.js"))
    records = sample_rollouts(run_folder, most_rollouts)
    templates = _templates()
    rollouts = cards(records, templates.get_template("rollout.html.j2"))
    time, shares = _time(train)
    charts_of, silent = _chosen(lines)
    page = templates.get_template("report.html.j2").render(
        facts=facts,
        rows=facts.rows() + summary.rows(facts.steps),
        summary=summary,
        headline=_headline(train),
        warnings=_warnings(train),
        learning=_learning(train, evaluations, [(entry, "") for entry in charts_of]),
        silent=silent,
        samples=any("answer/length_mean" in line for line in train),
        sets=_learning(train, evaluations, [(_of_set(name), name) for name in summary.sets]),
        time=time,
        shares=shares,
        waits=_waits(train),
        cards=rollouts,
        steps=sorted({record.step for record in records[: len(rollouts)]}),
        recipe=recipe,
        size=charts,
        style=Markup(style),
        script=Markup(script),
        policy=Markup(f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"),
    )
    path = run_folder / "report.html"
    write_atomically(path, page.encode("utf-8", "replace"))
    return path


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_escaped,
    )
    environment.filters |= {
        "g": lambda value: f"{value:g}",
        "number": show,
        "percent": lambda value: show(value, "percent"),
    }
    return environment


def _escaped(value: object) -> object:
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _headline(train: _Lines) -> dict[str, str] | None:
    """Return the first metric of the catalog that this run reports, for runs without evaluations. ``first`` is empty if
    it equals the last value."""
    for entry in CATALOG:
        if values := [line[entry.key] for line in train if line.get(entry.key) is not None]:
            first, last = entry.text(values[0]), entry.text(values[-1])
            return {"label": entry.label, "first": "" if first == last else first, "last": last}
    return None


def _chosen(lines: _Lines) -> tuple[list[Entry], list[str]]:
    """Return the entries to draw, and the labels and last values of metrics that stayed below their threshold."""
    names = [name for entry in CATALOG for name in (entry.key, entry.held_out) if name]
    series = {name: [line[name] for line in lines if name in line] for name in names}
    chosen = drawn({name: [math.inf if v is None else v for v in values] for name, values in series.items()})
    silent = [entry for entry in CATALOG if entry.silent is not None and series[entry.key] and entry not in chosen]
    return chosen + scores(lines), [f"{entry.label} {entry.text(series[entry.key][-1])}" for entry in silent]


def _warnings(train: _Lines) -> list[tuple[str, str]]:
    """Return the metrics that were out of bounds, each with the steps."""
    warnings = []
    for entry in CATALOG:
        odd = [line for line in train if entry.key in line and entry.worrying(line[entry.key])]
        if odd:
            last = odd[-1]["step"]
            when = f"at step {last}" if len(odd) == 1 else f"in {len(odd)} steps, last at step {last}"
            warnings.append((entry.label, f"{when}: {entry.text(odd[-1][entry.key])}"))
    return warnings


def _of_set(name: str) -> Entry:
    """Return the entry for a set's accuracy: the pass rate in training, and the evaluations."""
    return Entry(f"env/{name}/pass_rate", name, style="percent")


def _learning(
    train: _Lines, evaluations: _Lines, entries: Sequence[tuple[Entry, str]]
) -> list[tuple[Entry, Chart | None, float | None, list[Line]]]:
    """Draw a chart for each (metric, name of its set or "") that was reported; return each with its chart, last value
    and curves."""
    charts_of = []
    for entry, name in entries:
        lines = [_line(train, entry.key)]
        if name or entry.held_out == "evaluation/accuracy":
            lines.append(_evaluation(evaluations, name))
        elif entry.held_out:
            lines.append(replace(_line(evaluations, entry.held_out, "evaluation", "c2"), dots=True, smooth=False))
        lines = [line for line in lines if len(line.x) or line.broken]
        if entry.plotted and any(len(line.x) for line in lines):
            limits = [limit for limit in (entry.low, entry.high) if limit is not None]
            last = lines[-1].y[-1] if len(lines[-1].y) else None
            charts_of.append((entry, line_chart(lines, entry.text, limits, entry.style), last, lines))
    return charts_of


def _line(train: _Lines, key: str, name: str = "training", colour: str = "c1") -> Line:
    finite = [line for line in train if line.get(key) is not None]
    broken = [line["step"] for line in train if key in line and line[key] is None]
    steps, values = [line["step"] for line in finite], [float(line[key]) for line in finite]
    return Line(name, steps, values, colour, smooth=True, broken=broken)


def _evaluation(evaluations: _Lines, name: str = "") -> Line:
    points = [m for line in evaluations if (m := Measured.of(line, name))]
    band = [(m.low, m.high) for m in points] if all(m.n for m in points) else None
    return Line("evaluation", [m.step for m in points], [m.accuracy for m in points], "c2", band=band, dots=True)


def _time(train: _Lines) -> tuple[Chart | None, list[tuple[str, str, str]]]:
    """Draw the time of each step by phase; return the chart and, over all steps, (phase, share, seconds)."""
    timed = [(line["step"], phases(line)) for line in train if line.get("time/step")]
    layers = {name: [split.get(name, 0.0) for _, split in timed] for name in PHASES}
    layers = {name: seconds for name, seconds in layers.items() if any(seconds)}
    sums = {name: sum(seconds) for name, seconds in layers.items()}
    total = sum(sums.values()) or 1.0
    shares = [(name, f"{100 * seconds / total:.0f}%", duration(seconds)) for name, seconds in sums.items()]
    return stacked_chart([step for step, _ in timed], layers), shares


def _waits(train: _Lines) -> tuple[Chart | None, list[Line]]:
    """Draw the idle shares of generator and learner and the goodput per step; None with fewer than two steps."""
    lines = [_line(train, key, ENTRIES[key].label, colour) for key, colour in _WAITS.items()]
    lines = [line for line in lines if len(line.x) > 1]
    return line_chart(lines, partial(show, style="percent"), style="percent"), lines


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
