"""``report.html``: a run on one page that opens anywhere, complete in one file, without network or server.

It is made from ``recipe.yaml``, ``metrics.jsonl`` and ``rollouts/`` of a run folder; only the metrics are required. The
page is ``assets/report.html.j2``. Every text that the template puts in passes through ``visible`` and is escaped.
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
from whet.config import RecipeError, parse_mapping
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.show import charts
from whet.show.charts import Chart, Line, line_chart, stacked_chart
from whet.show.facts import Measured, RunFacts, Summary
from whet.show.metric_catalog import CATALOG, ENTRIES, PHASES, Entry, drawn, duration, phases, show
from whet.show.rollouts import cards, sample_rollouts

_ASSETS = Path(__file__).parent / "assets"
_Lines = Sequence[Mapping[str, Any]]
_WAITS = {"idle/generator": "c1", "idle/learner": "c2", "tokens/goodput": "c3"}


def write_report(run_folder: Path, most_rollouts: int = 60) -> Path:
    """Write ``report.html`` into the run folder and return its path. Raises DataError where there are no metrics."""
    lines = read_metrics(run_folder / FILE)
    if not lines:
        raise DataError(f"no metrics in {run_folder / FILE}: the run has done no step, or writes no jsonl")
    recipe_file = run_folder / "recipe.yaml"
    recipe = recipe_file.read_text("utf-8", "replace") if recipe_file.exists() else ""
    reported = {key: value for line in lines for key, value in line.items() if key.startswith("run/")}
    facts, summary = RunFacts.of(run_folder, _parsed(recipe), reported), Summary.of(lines)
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
    found = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: (
            escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
    found.filters |= {"g": lambda value: f"{value:g}", "number": show, "percent": lambda value: show(value, "percent")}
    return found


def _escaped(value: object) -> object:
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _headline(train: _Lines) -> dict[str, str] | None:
    """Return the first metric of the catalog that this run reports, for runs that evaluate nothing; ``first`` is empty
    where it is the last value, too."""
    for entry in CATALOG:
        if values := [line[entry.key] for line in train if line.get(entry.key) is not None]:
            first, last = entry.text(values[0]), entry.text(values[-1])
            return {"label": entry.label, "first": "" if first == last else first, "last": last}
    return None


def _chosen(lines: _Lines) -> tuple[list[Entry], list[str]]:
    """Choose what is drawn; return it with the names and last values of what is not, because nothing happens there."""
    names = [name for entry in CATALOG for name in (entry.key, entry.held_out) if name]
    found = {name: [line[name] for line in lines if name in line] for name in names}
    chosen = drawn({name: [math.inf if v is None else v for v in values] for name, values in found.items()})
    silent = [entry for entry in CATALOG if entry.silent is not None and found[entry.key] and entry not in chosen]
    return chosen, [f"{entry.label} {entry.text(found[entry.key][-1])}" for entry in silent]


def _warnings(train: _Lines) -> list[tuple[str, str]]:
    """List the metrics that were out of bounds, and when."""
    found = []
    for entry in CATALOG:
        odd = [line for line in train if entry.key in line and entry.worrying(line[entry.key])]
        if odd:
            last = odd[-1]["step"]
            when = f"at step {last}" if len(odd) == 1 else f"in {len(odd)} steps, last at step {last}"
            found.append((entry.label, f"{when}: {entry.text(odd[-1][entry.key])}"))
    return found


def _of_set(name: str) -> Entry:
    """Return the entry of a set's accuracy: an environment's pass rate, and what was evaluated."""
    return Entry(f"env/{name}/pass_rate", name, style="percent")


def _learning(
    train: _Lines, evaluations: _Lines, entries: Sequence[tuple[Entry, str]]
) -> list[tuple[Entry, Chart | None, float | None, list[Line]]]:
    """Draw a chart for each metric that was reported, each with the name of its set, or none; return it with its last
    value and its curves."""
    found = []
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
            found.append((entry, line_chart(lines, entry.text, limits, entry.style), last, lines))
    return found


def _line(train: _Lines, key: str, name: str = "training", colour: str = "c1") -> Line:
    found = [line for line in train if line.get(key) is not None]
    broken = [line["step"] for line in train if key in line and line[key] is None]
    steps, values = [line["step"] for line in found], [float(line[key]) for line in found]
    return Line(name, steps, values, colour, smooth=True, broken=broken)


def _evaluation(evaluations: _Lines, name: str = "") -> Line:
    found = [m for line in evaluations if (m := Measured.of(line, name))]
    band = [(m.low, m.high) for m in found] if all(m.n for m in found) else None
    return Line("evaluation", [m.step for m in found], [m.accuracy for m in found], "c2", band=band, dots=True)


def _time(train: _Lines) -> tuple[Chart | None, list[tuple[str, str, str]]]:
    """Draw where the seconds of each step went; return the chart and, of all steps, (phase, share, seconds)."""
    timed = [(line["step"], phases(line)) for line in train if line.get("time/step")]
    layers = {name: [split.get(name, 0.0) for _, split in timed] for name in PHASES}
    layers = {name: seconds for name, seconds in layers.items() if any(seconds)}
    sums = {name: sum(seconds) for name, seconds in layers.items()}
    total = sum(sums.values()) or 1.0
    shares = [(name, f"{100 * seconds / total:.0f}%", duration(seconds)) for name, seconds in sums.items()]
    return stacked_chart([step for step, _ in timed], layers), shares


def _waits(train: _Lines) -> tuple[Chart | None, list[Line]]:
    """Draw who waited for whom in each step, and what of the work was of use; None without two steps to compare."""
    lines = [_line(train, key, ENTRIES[key].label, colour) for key, colour in _WAITS.items()]
    lines = [line for line in lines if len(line.x) > 1]
    return line_chart(lines, partial(show, style="percent"), style="percent"), lines


def _parsed(recipe: str) -> Mapping[str, Any]:
    try:
        return parse_mapping(recipe, "recipe.yaml")
    except RecipeError:
        return {}  # the page still shows the text


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
