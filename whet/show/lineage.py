"""The lineage of a run or a model as a tree: back to the files that it was made from, and forward to what was made
from it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from whet.base.escaping import escape_controls
from whet.fetch.artifacts import names_of
from whet.lineage.graph import made_from
from whet.lineage.record import Input, Record

_MOST_PROBLEMS = 3  # that are listed in one place
_UNRECORDED = "[dim]lineage.json is missing: an earlier version made the run; its recipe.yaml names model and data[/]"


def as_json(target: Record, near: Sequence[Record]) -> dict[str, object]:
    """Return the lineage as values of JSON."""
    return {"target": target.model_dump(), "problems": problems_of(target), "made": _made(target, near, [])}


def problems_of(target: Record) -> list[str]:
    """Return a line for each file in the history of the target that is missing or was changed."""
    lines = [line for record in target.history() for line in record.problems()]
    return list(dict.fromkeys(lines))


def print_lineage(target: Record, near: Sequence[Record], console: Console | None = None) -> None:
    """Print the tree."""
    console = console or Console()
    tree = Tree(_title(target))
    _add_inputs(tree, target)
    forward = tree.add("[bold]made from it[/]")
    if target.kind == "run" and (steps := _checkpoints(Path(target.folder))):
        forward.add(f"checkpoints of steps {', '.join(map(str, steps))}")
    _add_made(forward, target, near, [target])
    if not forward.children:
        forward.add("nothing that was found")
    console.print(tree)


def _title(record: Record) -> str:
    step = f", step {record.step}" if record.step is not None else ""
    seed = f", seed {record.seed}" if record.seed is not None else ""
    names = ", ".join(names_of(Path(record.folder))) if record.kind == "export" else ""
    title = f"[bold]{record.kind}[/] {_shown(record.folder)}{step}{seed}{f' ({_safe(names)})' if names else ''}"
    for number, session in enumerate(record.sessions):
        commit = f", commit {session.commit[:10]}" if session.commit else ""
        when = f"{session.began[:16].replace('T', ' ')}{', resumed' if number else ''}{commit}: {session.command}"
        title += f"\n[dim]{_safe(when)}[/]"
    return title


def _add_inputs(tree: Tree, record: Record) -> None:
    if record.kind == "run" and not record.sessions:
        tree.add(_UNRECORDED)
    _add_problems(tree, record.changed_outputs())
    for source in record.inputs:
        branch = tree.add(_describe(source))
        _add_problems(branch, source.problems(record.kind))
        if source.maker is not None:
            _add_inputs(branch.add(_title(source.maker)), source.maker)


def _add_problems(tree: Tree, lines: Sequence[str]) -> None:
    for line in lines[:_MOST_PROBLEMS]:
        tree.add(f"[red]{_safe(line)}[/]")
    if len(lines) > _MOST_PROBLEMS:
        tree.add(f"[red]and {len(lines) - _MOST_PROBLEMS} more[/]")


def _describe(source: Input) -> str:
    count = len(source.files)
    files = f"{count} file{'s' if count > 1 else ''}" if count else ""
    digest = source.digest or source.revision
    short = f"{digest[:19]}…" if len(digest) > 20 else digest
    facts = ", ".join(fact for fact in (source.licence, files, short) if fact)
    return f"{_safe(source.setting)}: {_shown(source.name)}" + (f" [dim]({_safe(facts)})[/]" if facts else "")


def _add_made(tree: Tree, target: Record, near: Sequence[Record], above: list[Record]) -> None:
    for record in made_from(target, near):
        if not any(record.same(each) for each in above):
            branch = tree.add(_title(record))
            _add_problems(branch, record.changed_outputs())
            _add_made(branch, record, near, [*above, record])


def _made(target: Record, near: Sequence[Record], above: list[Record]) -> list[dict[str, object]]:
    above = [*above, target]
    return [
        {"kind": each.kind, "folder": each.folder, "step": each.step, "made": _made(each, near, above)}
        for each in made_from(target, near)
        if not any(each.same(other) for other in above)
    ]


def _checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-*") if path.name[5:].isdecimal())


def _shown(path: str) -> str:
    """Return a path relative to the working folder if it is below it."""
    full = Path(path)
    return _safe(str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) and full.is_absolute() else path)


def _safe(text: str) -> str:
    return escape(escape_controls(text))
