"""``whet prep``: makes training data from sources of rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import AsJson, changes, print_json

if TYPE_CHECKING:
    from whet.prep.manifest import Manifest


_RECIPES = {
    "rejected": ("dpo", ""),
    "label": ("dpo", " data.type=labelled algorithm=kto"),
    "score": ("reward-model", " data.type=scored algorithm.loss=score_regression"),
    "prompt": ("grpo", " data.reward=FILE.py:FUNCTION"),
}
"""The recipe that reads rows, and the settings that it needs for them, by the last field of the rows."""


def prep(
    blend: Annotated[Path, typer.Argument(metavar="BLEND", help="A YAML file that lists the sources of rows.")],
    overrides: Annotated[list[str] | None, changes("duplicates=keep")] = None,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")] = Path("prepared"),
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, help="Read only the first N rows of each source.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be written, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace data that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check, deduplicate and split rows of several sources. For example: whet prep blend.yaml --out prepared"""
    import sys

    from whet.base.errors import ConfigError
    from whet.base.scratch import Scratch
    from whet.config import load
    from whet.prep.config import PrepConfig
    from whet.prep.prepare import prepare
    from whet.show.heartbeat import Heartbeat

    if blend.is_dir():
        raise ConfigError(f"{blend} is a folder; name the YAML file that lists the sources of rows")
    config = load(PrepConfig, blend, overrides or []).value
    heartbeat = Heartbeat(f"{blend.stem}, into {out}", stream=sys.stderr if as_json else None)
    with Scratch("prep") as scratch, heartbeat:
        folder = scratch / "prepared" if dry_run else out
        manifest = prepare(config, folder, sample=sample, force=force)
    if as_json:
        from dataclasses import asdict

        print_json(asdict(manifest))
        return
    _print(manifest)
    for split, share in (("validation", config.validation), ("test", config.test)):
        if share and not manifest.rows(split):
            few = f"{split} = {share:g} of {manifest.rows('train'):,} rows is too little"
            print(f"warning: {split} has no rows: {few}; raise it, as in {split}=0.2")
    if not dry_run:
        train, validation = f"data.path='{out}/train-*.jsonl'", f"data.test_path='{out}/validation-*.jsonl'"
        test = validation if manifest.rows("validation") else "data.test_path=null"
        fields = next(iter(config.sources.values())).rows.kind.fields
        if fields == ("responses_create_params",):
            print(f"train on it: data: {{type: nemo_gym, path: '{out}/train-*.jsonl', servers: ...}} (docs/prep.md)")
            return
        recipe, more = _RECIPES.get(fields[-1], ("sft", ""))
        print(f"train on it: whet train {recipe} {train} {test}{more}")


def _print(manifest: "Manifest") -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.base.escaping import escape_controls

    table = Table("source", "read", "kept", "copies", "dropped")
    for name, tally in manifest.sources.items():
        counts = [f"{count:,}" for count in (tally.read, tally.kept, tally.copies)]
        table.add_row(name, *counts, escape_controls(tally.reasons))
    console = Console()
    console.print(table)
    for name, tally in manifest.sources.items():
        for what, count in tally.changed.items():
            print(f"{name}: {what} in {count:,} row{'s' * (count != 1)}")
        for what, columns in (("kept", tally.columns), ("left out", tally.left_out)):
            if columns:
                print(escape_controls(f"{name}: other columns {what}: {', '.join(columns)}"))
        for reason, example in tally.examples.items():
            print(escape_controls(f"{name}: the first row dropped as {reason!r}: {example[:300]}"))
    for split, files in manifest.splits.items():
        rows = manifest.rows(split)
        print(f"{split}: {rows:,} row{'s' * (rows != 1)} in {len(files)} file{'s' * (len(files) != 1)}")
