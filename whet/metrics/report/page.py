"""Puts the report together from a run folder: ``recipe.yaml``, ``metrics.jsonl`` and ``rollouts/``. Takes what is
there; only the metrics are required."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from whet.errors import DataError
from whet.metrics.atomic import write_atomically
from whet.metrics.catalog import CATALOG, PHASES, Entry, duration, phases, show
from whet.metrics.facts import RunFacts
from whet.metrics.report.charts import Line, line_chart, stacked_chart
from whet.metrics.report.rollouts import browser, safe, sample_rollouts
from whet.metrics.report.style import SCRIPT, STYLE
from whet.metrics.sinks.jsonl import FILE, read_metrics
from whet.metrics.summary import Measured, Summary

_Lines = Sequence[Mapping[str, Any]]


def write_report(run_folder: Path, most_rollouts: int = 60) -> Path:
    """Write ``report.html`` into the run folder and return its path. Raises DataError where there are no metrics."""
    lines = read_metrics(run_folder / FILE)
    if not lines:
        raise DataError(f"No metrics in {run_folder / FILE}. Is {run_folder} the folder of a run that has started?")
    recipe_file = run_folder / "recipe.yaml"
    recipe_text = recipe_file.read_text("utf-8", "replace") if recipe_file.exists() else ""
    path = run_folder / "report.html"
    page = _page(run_folder, lines, recipe_text, browser(sample_rollouts(run_folder, most_rollouts)))
    write_atomically(path, page.encode("utf-8", "replace"))
    return path


def _page(folder: Path, lines: _Lines, recipe_text: str, rollouts: str) -> str:
    recipe = _parsed(recipe_text)
    told = {key: value for line in lines for key, value in line.items() if key.startswith("run/")}
    facts = RunFacts.of(folder, recipe, told)
    summary = Summary.of(lines)
    train = [line for line in lines if line.get("kind", "train") == "train"]
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    policy = f"default-src 'none'; style-src '{_digest(STYLE)}'; script-src '{_digest(SCRIPT)}'"
    recipe_part = (
        '<h2>Recipe</h2><details class="recipe box"><summary>recipe.yaml</summary>'
        f"<pre>{safe(recipe_text)}</pre></details>"
        if recipe_text
        else ""
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{safe(facts.name)} · whet</title>
<style>{STYLE}</style></head><body><main>
<header><div><span class="mark">WHET</span><h1>{safe(facts.name)}</h1>
<p class="sub">{safe(" · ".join(facts.line()))}</p></div>
<button id="theme" type="button">Light / dark</button></header>
<section class="hero"><div class="box">{_outcome(summary, train)}</div>
<div class="box">{_facts(facts, summary, train)}</div></section>
{_warnings(train)}
<h2>Learning</h2><p class="sub note">Faint: single steps. Bold: mean over neighbouring steps.</p>
<section class="charts">{_charts(train, evaluations)}</section>
<h2>Time per step</h2><section class="box">{_time(train)}</section>
<h2>Rollouts</h2>{rollouts}
{recipe_part}
<footer>What each number means, and when to worry, is in docs/metrics.md of whet.</footer>
</main><script>{SCRIPT}</script></body></html>
"""


def _outcome(summary: Summary, train: _Lines) -> str:
    before, after = summary.before, summary.after
    if before is None:
        entry, values = _headline(train)
        if not values:
            return '<p class="label">outcome</p><p class="none">Nothing was evaluated.</p>'
        return (
            f'<p class="label">{entry.label}, first and last step</p><div class="turn"><span class="from">'
            f'{entry.text(values[0])}</span><span class="arrow">→</span>'
            f'<span class="to">{entry.text(values[-1])}</span></div>'
        )
    big = (
        f'<span class="from">{show(before.accuracy, "percent")}</span><span class="arrow">→</span>'
        f'<span class="to">{show(after.accuracy, "percent")}</span>'
        if after
        else f'<span class="to">{show(before.accuracy, "percent")}</span>'
    )
    rows = "".join(_row(name, m) for name, m in (("before", before), ("after", after)) if m)
    if difference := summary.difference():
        mean, low, high = difference
        style = "up" if low > 0 else "down" if high < 0 else ""
        note = "" if style else " (may be chance)"
        rows += (
            f'<tr><td>difference{note}</td><td class="n"></td><td class="n {style}">{100 * mean:+.1f} points</td>'
            f'<td class="n">{100 * low:+.1f} to {100 * high:+.1f}</td></tr>'
        )
    return (
        f'<p class="label">accuracy on held-out tasks</p><div class="turn">{big}</div><table><tr><th></th>'
        f'<th class="n">answers</th><th class="n">accuracy</th><th class="n">95% interval</th></tr>{rows}</table>'
    )


def _row(name: str, measured: Measured) -> str:
    return (
        f'<tr><td>{name} (step {measured.step})</td><td class="n">{measured.n or "-"}</td><td class="n">'
        f'{show(measured.accuracy, "percent")}</td><td class="n">{100 * measured.low:.1f} to '
        f"{100 * measured.high:.1f}%</td></tr>"
    )


def _headline(train: _Lines) -> tuple[Entry, list[float]]:
    """The first metric of the catalog that this run reports."""
    for entry in CATALOG:
        if values := [line[entry.key] for line in train if line.get(entry.key) is not None]:
            return entry, values
    return CATALOG[0], []


def _facts(facts: RunFacts, summary: Summary, train: _Lines) -> str:
    rates = sorted(line["time/tokens_per_second"] for line in train if line.get("time/tokens_per_second"))
    steps = f"{summary.steps} of {facts.steps}" if facts.steps else str(summary.steps)
    known = {
        "model": facts.model,
        "parameters": show(facts.parameters, "count") if facts.parameters else "",
        "task": facts.task,
        "algorithm": facts.algorithm,
        "device": facts.device,
        "steps": steps,
        "training time": duration(summary.seconds) if summary.seconds else "",
        "tokens per second": f"{show(rates[len(rates) // 2], 'count')} (median)" if rates else "",
    }
    items = "".join(f"<dt>{name}</dt><dd>{safe(value)}</dd>" for name, value in known.items() if value)
    return f'<p class="label">run</p><dl class="facts-grid">{items}</dl>'


def _warnings(train: _Lines) -> str:
    found = []
    for entry in CATALOG:
        steps = [line["step"] for line in train if entry.key in line and entry.worrying(line[entry.key])]
        if steps:
            last = next(line[entry.key] for line in reversed(train) if line["step"] == steps[-1] and entry.key in line)
            when = f"at step {steps[-1]}" if len(steps) == 1 else f"in {len(steps)} steps, last at step {steps[-1]}"
            found.append(f"<li><b>{escape(entry.label)}</b> {when}: {entry.text(last)}</li>")
    return f'<div class="warnings"><b>Worth a look</b><ul>{"".join(found)}</ul></div>' if found else ""


def _charts(train: _Lines, evaluations: _Lines) -> str:
    parts = []
    for entry in CATALOG:
        curves = [_line(train, entry.key, "training", "c1")]
        if entry.key == "accuracy":
            curves.append(_evaluation(evaluations))
        curves = [curve for curve in curves if len(curve.x) or curve.broken]
        if not entry.plotted or not any(len(curve.x) for curve in curves):
            continue
        last = curves[-1].y[-1] if len(curves[-1].y) else None
        hot = ' class="hot"' if entry.worrying(last) else ""
        keys = ""
        if len(curves) > 1 or curves[0].band:
            names = {"training": "training", "evaluation": "evaluation, with 95% interval"}
            keys = "".join(f'<span><i class="{c.colour}"></i>{names[c.name]}</span>' for c in curves)
            keys = f'<div class="keys">{keys}</div>'
        limits = [limit for limit in (entry.low, entry.high) if limit is not None]
        chart = line_chart(curves, entry.text, limits, entry.style == "percent")
        parts.append(
            f'<div class="box"><h3>{escape(entry.label)}<span{hot}>{entry.text(last)}</span></h3>{chart}{keys}</div>'
        )
    return "".join(parts) or '<p class="none">No step is complete yet.</p>'


def _line(lines: _Lines, key: str, name: str, colour: str) -> Line:
    found = [line for line in lines if line.get(key) is not None]
    return Line(
        name, [line["step"] for line in found], [float(line[key]) for line in found], colour, smooth=True,
        broken=[line["step"] for line in lines if key in line and line[key] is None],
    )  # fmt: skip


def _evaluation(lines: _Lines) -> Line:
    found = [m for line in lines if (m := Measured.of(line))]
    band = [(m.low, m.high) for m in found] if all(m.n for m in found) else None
    return Line("evaluation", [m.step for m in found], [m.accuracy for m in found], "c2", band=band, dots=True)


def _time(train: _Lines) -> str:
    timed = [(line["step"], phases(dict(line))) for line in train if line.get("time/step")]
    names = [name for name in PHASES if any(name in split for _, split in timed)]
    layers = {name: [split.get(name, 0.0) for _, split in timed] for name in names}
    total = sum(sum(values) for values in layers.values()) or 1.0
    keys = "".join(
        f'<span><i class="p-{name}"></i>{name} <b>{100 * sum(values) / total:.0f}%</b> {duration(sum(values))}</span>'
        for name, values in layers.items()
    )
    return f'{stacked_chart([step for step, _ in timed], layers)}<div class="keys">{keys}</div>'


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # the page still shows the text
    return recipe if isinstance(recipe, Mapping) else {}


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
