"""The lineage of what is made from a run: exported models, with their list in the run's folder, and rows of its
answers."""

import logging
from pathlib import Path

from whet.base.digests import digest
from whet.base.errors import WhetError
from whet.base.files import append
from whet.lineage.record import FILE, Input, Record, Session, read_record

log = logging.getLogger(__name__)

EXPORTS = "exports.txt"  # in the run folder: the absolute path of an export on each line


def of_export(run: Path, checkpoint: Path, step: int, out: Path) -> Record:
    """Return the record of an export before its files are written. A run without a record has only its folder."""
    maker = read_record(run) or Record(kind="run", folder=str(run.resolve()))
    manifest = checkpoint / "manifest.json"
    source = Input(setting="checkpoint", name=str(checkpoint.resolve()), revision=digest(manifest), maker=maker)
    return Record(kind="export", folder=str(out.resolve()), sessions=(Session.now(),), step=step, inputs=(source,))


def of_answers(run: Path, rows: Path) -> Record:
    """Return the record of a file of rows that were made from the recorded answers of a run."""
    answers = {str(path.resolve()): digest(path) for path in sorted((run / "rollouts").iterdir()) if path.is_file()}
    source = Input(setting="answers", name=str(run.resolve()), files=answers, maker=read_record(run))
    outputs = {rows.name: digest(rows)}
    return Record(
        kind="files", folder=str(rows.parent.resolve()), sessions=(Session.now(),), inputs=(source,), outputs=outputs
    )


def with_files(record: Record, folder: Path) -> Record:
    """Return the record with the digests of the files in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE)
    outputs = {path.relative_to(folder).as_posix(): digest(path, whole=False) for path in files}
    return record.model_copy(update={"outputs": outputs})


def note_export(run: Path, out: Path) -> None:
    """Add an export to the list in the folder of its run, unless that can't be written."""
    if str(out.resolve()) in exports_of(run):
        return
    try:
        append(run / EXPORTS, f"{out.resolve()}\n")
    except WhetError as error:
        log.warning("%s; `whet lineage` finds the export only with --within", error)


def exports_of(run: Path) -> list[str]:
    """Return the paths to which a run was exported."""
    try:
        return (run / EXPORTS).read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []
