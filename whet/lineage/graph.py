"""The records around a target: what it was made from is in its record; what was made from it is found by reading the
records of the folders nearby."""

from collections.abc import Iterable
from pathlib import Path

from whet.base.digests import digest
from whet.base.errors import ConfigError, DataError
from whet.base.files import expanded
from whet.lineage.exports import exports_of
from whet.lineage.reading import model_files
from whet.lineage.record import Input, Record, maker_of, read_record


def target_record(path: Path) -> Record:
    """Return the record of a run, an export, prepared data or a checkpoint (its run, with the step), or one that
    is made for another file or model folder. Raises ``ConfigError`` if there is no such file or folder."""
    path = expanded(path).absolute()
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder")
    if path.parent.name == "checkpoints" and path.name.startswith("step-") and path.name[5:].isdecimal():
        run = target_record(path.parent.parent)
        return run.model_copy(update={"step": int(path.name[5:])})
    record = read_record(path) if path.is_dir() else None
    if record is not None:
        return record
    if (path / "recipe.yaml").is_file():
        return Record(kind="run", folder=str(path))
    files = [path] if path.is_file() else model_files(path)
    if not files:
        raise ConfigError(
            f"{path} has no lineage: name a run, the folder of an export or of prepared data, a checkpoint or a file"
        )
    maker = maker_of(files)
    read = Input(setting="files", name=str(path), files={str(f): digest(f, whole=False) for f in files}, maker=maker)
    return Record(kind="files", folder=str(path), inputs=(read,))


def records_near(target: Record, within: Iterable[Path]) -> list[Record]:
    """Return the records in the ``within`` folders, and of the exports of the runs there. By default the folders are
    those in which the target and the things that it was made from lie, and ``runs``. Damaged records don't count.
    Raises ``ConfigError`` for a ``within`` that is not a folder."""
    given = list(within)
    for each in given:
        if not each.is_dir():
            raise ConfigError(f"--within {each}: there is no such folder")
    roots = given or [*(Path(each.folder).parent for each in target.history()), Path("runs")]
    folders = [folder for root in dict.fromkeys(roots) if root.is_dir() for folder in sorted(root.iterdir())]
    exported = [Path(out) for folder in folders for out in exports_of(folder)]
    records = []
    for folder in dict.fromkeys(path.resolve() for path in [*folders, *exported]):
        try:
            record = read_record(folder)
        except DataError:
            continue
        if record is not None:
            records.append(record)
    return records


def made_from(target: Record, records: Iterable[Record]) -> list[Record]:
    """Return the records of everything that was made directly from the target."""
    return [record for record in records if any(_reads(each, record, target) for each in record.inputs)]


def _reads(source: Input, record: Record, target: Record) -> bool:
    if target.kind == "files":
        return not target.inputs[0].files.keys().isdisjoint(source.files)
    if target.kind == "run" and target.step is not None and record.kind == "export" and record.step != target.step:
        return False
    return source.maker is not None and source.maker.same(target)
