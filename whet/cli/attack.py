"""``whet attack``: searches for cheap answers that a task set's graders reward."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, TaskOverrides, print_json

if TYPE_CHECKING:
    from whet.tasks.attack.report import Finding, Report


def attack(
    target: Annotated[
        str, typer.Argument(metavar="TASKSET|RECIPE", help="A task set (its settings follow: path=...) or a recipe.")
    ],
    overrides: TaskOverrides = None,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Most gradings.")] = 4000,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Most seconds.")] = 120.0,
    samples: Annotated[int, typer.Option("--samples", min=1, help="How many tasks to attack.")] = 16,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            help="Reward of one answer that counts; by default the reward of the gold answer, or 1 without one.",
        ),
    ] = None,
    mean: Annotated[
        float,
        typer.Option(
            "--mean", min=0.0, help="Mean reward of one idea over the tasks that counts, in addition to chance."
        ),
    ] = 0.2,
    deadline: Annotated[float, typer.Option("--deadline", min=0.1, help="Seconds for one grading.")] = 30.0,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the choice of tasks, the random search and the policy.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the findings as cases, for `whet validate --cases FILE`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search for cheap answers that earn a reward they should not. Exit code 1 with findings."""
    from whet.base.files import check_writable
    from whet.cli.arguments import recipe_of
    from whet.processes.compute import run_computing
    from whet.tasks.attack.attack import Plan
    from whet.tasks.attack.attack import attack as search
    from whet.tasks.case_files import write_cases

    if out is not None:
        check_writable(out.absolute().parent)
    taskset = recipe_of(target, overrides or []).taskset
    plan = Plan(samples, budget, seconds, deadline, threshold, mean, seed)
    report = run_computing(search(taskset, plan))
    if as_json:
        print_json(_data(report))
    else:
        _print(report)
    if out is not None:
        write_cases(out, [finding.case for finding in report.findings])
        if not as_json:
            print(f"{len(report.findings)} cases in {out}; try them again: whet validate {target} --cases {out}")
    if report.findings:
        raise typer.Exit(1)


def _data(report: "Report") -> dict[str, object]:
    findings = [
        {
            "kind": each.kind, "family": each.family, "name": each.name, "task": each.task.uid, "answer": each.answer,
            "reward": each.reward, "limit": each.limit, "mean": each.mean, "tasks": each.tasks, "error": each.error,
        }
        for each in report.findings
    ]  # fmt: skip
    return {
        "tasks": report.tasks, "gradings": report.gradings, "bound": report.bound, "tried": report.tried,
        "not_attacked": report.not_attacked, "findings": findings,
    }  # fmt: skip


def _print(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.base.escaping import escape_controls
    from whet.tasks.attack.report import counted

    table, counts = Table("family", "answers", "findings"), counted(report.findings)
    for family in dict.fromkeys([*report.tried, *counts]):
        table.add_row(family, str(report.tried.get(family, 0)), str(counts.get(family, 0)))
    Console().print(table)
    for finding in report.findings:
        print(escape_controls(f"FOUND  {finding.family}, {finding.name}, on {finding.task.uid}: {_outcome(finding)}"))
        print(escape_controls(f"       {finding.answer[:1000]!r}"))
    for what in report.not_attacked:
        print(f"not attacked: {what}")
    total = f"{report.gradings} gradings on {report.tasks} tasks; mean rewards surely above {report.bound:.3g} count"
    findings = len(report.findings)
    print(f"{findings} finding{'' if findings == 1 else 's'} in {total}" if findings else f"no finding in {total}")


def _outcome(finding: "Finding") -> str:
    if finding.kind in ("raises", "hangs"):
        return f"the grader {finding.kind}: {finding.error}"
    mean = f"its mean over {finding.tasks} tasks is {finding.mean:.3g}"
    if finding.kind == "mean":
        return f"{mean}, more than {finding.limit:.3g}; this answer earns {finding.reward:g}"
    return f"earns {finding.reward:g} of {finding.limit:g}; {mean}"
