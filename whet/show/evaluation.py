"""The results of ``whet eval``: a table of measures, or of sets, and the comparison of two models."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Column, Table

from whet.base.strict_json import JsonObject
from whet.run.scores import Report

Reports = Mapping[str, Report]  # by set; the recipe's own tasks have an empty name


def as_values(target: str, reports: Reports, against: str | None, others: Reports | None) -> Mapping[str, object]:
    """Return the results as values of JSON: flat for the recipe's own tasks, by set otherwise."""
    if set(reports) == {""}:
        return _compared(reports[""], others[""] if others else None)
    sets = {name: _compared(report, others[name] if others else None) for name, report in reports.items()}
    values: JsonObject = {"target": target, "sets": sets}
    if others is not None:
        values |= {"against": against, "all": _pooled(reports).compare(_pooled(others))}
    return values


def print_reports(target: str, reports: Reports, against: str | None, others: Reports | None) -> None:
    """Print the results for people."""
    if set(reports) != {""}:
        _print_sets(target, reports, against, others)
        return
    report = reports[""]
    measures = _compared(report, others[""] if others else None)
    print_measures(f"{target}: {report.n} tasks, {report.samples} per task", measures)
    print(f"accuracy {report.accuracy:.1%}, 95% interval {report.low:.1%} to {report.high:.1%} (over tasks)")
    if others is not None:
        other = others[""]
        print(f"against {against}: {_difference(report.compare(other))} (same tasks)")
        for name in (name for name in report.sets if name in other.sets):
            print(f"{name}, against {against}: {_difference(report.sets[name].compare(other.sets[name]))}")


def print_measures(title: str, measures: Mapping[str, float]) -> None:
    """Print a table of measures."""
    print(title)  # not the table's title, which rich wraps to the table's width
    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


def _compared(report: Report, other: Report | None) -> dict[str, float]:
    measures = _measures(report)
    if other is not None:
        measures |= {f"against/{name}": value for name, value in _measures(other).items()} | report.compare(other)
    return measures


def _measures(report: Report) -> dict[str, float]:
    values = {name.removeprefix("evaluation/"): value for name, value in report.metrics().items()}
    return values | ({f"avg_at_{report.samples}": report.accuracy} if report.samples > 1 else {})


def _print_sets(target: str, reports: Reports, against: str | None, others: Reports | None) -> None:
    counts = {report.samples for report in reports.values()}
    most, differ = max(counts), len(counts) > 1
    k = "k" if differ else str(most)
    votes = {"pass": lambda r: r.pass_at, "maj": lambda r: r.majority_at, "cons": lambda r: r.consensus_at}
    head = ["tasks", *(["k"] if differ else []), f"avg@{k}" if most > 1 else "accuracy", "95%"]
    head += [f"{name}@{k}" for name in votes] if most > 1 else []
    table = Table(Column("set", no_wrap=True), *head, "tokens", "cut")
    for name, report in reports.items():
        row = [name, str(report.n), *([str(report.samples)] if differ else []), f"{report.accuracy:.1%}"]
        row.append(f"{report.low:.0%}-{report.high:.0%}")
        if most > 1:
            values = [vote(report).get(report.samples) for vote in votes.values()]
            row += ["" if value is None else f"{value:.1%}" for value in values]
        table.add_row(*row, f"{report.length_mean:.0f}", f"{report.truncated:.0%}")
    print(target)
    Console().print(table)
    if len(reports) > 1:
        mean = sum(report.accuracy for report in reports.values()) / len(reports)
        print(f"mean over sets: {mean:.1%}")
    if others is not None:
        for name, report in reports.items():
            print(f"{name}, against {against}: {_difference(report.compare(others[name]))}")
        if len(reports) > 1:
            print(f"all tasks, against {against}: {_difference(_pooled(reports).compare(_pooled(others)))}")


def _pooled(reports: Reports) -> Report:
    """Return a report of the tasks of all sets, for comparisons."""
    per_task = [share for report in reports.values() for share in report.per_task]
    samples = max(report.samples for report in reports.values())
    return Report(len(per_task), samples, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, per_task=per_task)


def _difference(values: Mapping[str, float]) -> str:
    points, low, high = (100 * values[name] for name in ("difference", "difference_low", "difference_high"))
    return f"{points:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"
