"""Rows of several sources become files to train on: checked, without duplicates and evaluation text, split, counted.

Each source is read, checked and written to a separate stage, which a later call reuses if neither its settings nor
its files have changed; so a call after a kill continues with the first source that was not finished. Then the stages
are merged into shards, and the manifest is written last.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import __version__
from whet.base.digests import sha256
from whet.base.errors import DataError
from whet.base.files import check_writable, remove_leftovers, replacing, write_atomically
from whet.base.progress import PROGRESS
from whet.base.strict_json import JsonObject
from whet.config.issues import did_you_mean
from whet.data.files import absent, data_files
from whet.data.image_rows import image_column
from whet.data.row import placed_rows
from whet.prep.contamination import Contamination, compared_fields, texts_of
from whet.prep.duplicates import key_of
from whet.prep.manifest import FILE, Manifest, SourceTally
from whet.prep.shards import SPLITS, write_splits
from whet.prep.thoughts import changes

if TYPE_CHECKING:
    from whet.chat.renderer import Renderer
    from whet.prep.config import PrepConfig, Source


log = logging.getLogger(__name__)

_STAGE = ".stage"  # the folder of the rows that are read, until they are merged
_WEB = ("hf:", "http://", "https://")
_SHARDS = "{split}-[0-9][0-9][0-9][0-9][0-9].jsonl"  # the names of the files of a split
_EARLY = 1000  # rows after which too many wrong ones stop a source
_NO_LIMIT = 1 << 63  # rows


def prepare(config: "PrepConfig", folder: Path, *, sample: int | None = None, force: bool = False) -> Manifest:
    """Write train, validation and test shards and their manifest into ``folder``. ``sample``: read only the first rows
    of each source. Does nothing if the folder is up to date, unless ``force``.

    Raises ``DataError`` for a source that can't be read or has too many wrong rows, and for a folder that holds other
    files or other data, which only ``force`` replaces."""
    check_writable(folder)
    files = {
        name: {file: digest for path in source.rows.paths for file, digest in _inputs(path).items()}
        for name, source in config.sources.items()
    }
    settings = config.model_dump(mode="json")
    versions = {"whet": __version__, "transformers": version("transformers")}
    against = [_inputs(path) for path in config.decontamination.against]
    key = _digest(settings, versions, files, sample, against)
    present = Manifest.read(folder, force)
    if present is not None and not force:
        if present.key == key and not (problems := present.problems(folder)):
            return present
        why = problems[0] if present.key == key else present.difference(settings, versions, files)
        raise DataError(f"{folder}: {why}; replace it with --force, or choose another --out")
    remove_leftovers(folder)
    if present is None and _holds_other_files(folder) and not force:
        raise DataError(f"{folder} is not empty and has no {FILE}; choose another --out, or replace it with --force")
    _check_kept(folder, [file for inputs in (*files.values(), *against) for file in inputs])
    renderer = _renderer(config)
    contamination = Contamination.of_files(config.decontamination.against, config.decontamination.ngram)
    manifest, stages = Manifest(key, settings, versions), dict[str, Path]()
    for name, source in config.sources.items():
        PROGRESS.begin(f"reading {name}")
        digest = _digest(settings, versions, files[name], sample, against)
        stage = stages[name] = folder / _STAGE / f"{name}-{digest[:16]}"
        if not (stage / "tally.json").is_file():
            with replacing(stage) as staging:
                staging.mkdir()
                tally = _read(name, source, config, renderer, contamination, staging / "rows.tsv", sample)
                tally.licence = source.licence
                write_atomically(staging / "tally.json", json.dumps(asdict(tally)))
        manifest.sources[name] = SourceTally(**json.loads((stage / "tally.json").read_text(encoding="utf-8")))
        manifest.sources[name].files = {_absolute(file): digest for file, digest in files[name].items()}
    PROGRESS.begin("writing the splits")
    (folder / FILE).unlink(missing_ok=True)  # a folder without a manifest is incomplete
    for old in _shards(folder):
        old.unlink()
    write_splits(config, stages, folder, manifest)
    for name, tally in manifest.sources.items():
        tally.check(name)
    manifest.write(folder)
    shutil.rmtree(folder / _STAGE)
    return manifest


def _shards(folder: Path) -> set[Path]:
    return {path for split in SPLITS for path in folder.glob(_SHARDS.format(split=split))}


def _holds_other_files(folder: Path) -> bool:
    """Return whether a folder without a manifest holds more than a call that was killed, or failed, has left."""
    stage = folder / _STAGE
    left = {stage, *_shards(folder)} if stage.is_dir() else set()
    return folder.is_dir() and any(path not in left for path in folder.iterdir())


def _check_kept(folder: Path, inputs: Sequence[str]) -> None:
    """Raise ``DataError`` if a file that is read would be replaced."""
    for path in (Path(file).resolve() for file in inputs if not file.startswith(_WEB)):
        replaced = (FILE, *(_SHARDS.format(split=split) for split in SPLITS))
        if path.parent == folder.resolve() and any(path.match(name) for name in replaced):
            raise DataError(f"{path} is read, and would be replaced by data in {folder}; choose another --out")


def _inputs(path: str) -> dict[str, str]:
    """Return the files of a source with their hashes. Data sets of the Hub have their name in place of a hash."""
    if path.startswith(_WEB):
        return {path: path}
    files = data_files(path)
    if missing := next((file for file in files if not file.is_file()), None):
        raise DataError(f"can't read {missing}: not a file" if missing.exists() else absent(missing))
    return {str(file): sha256(file) for file in files}


def _absolute(file: str) -> str:
    return file if file.startswith(_WEB) else str(Path(file).absolute())


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _renderer(config: "PrepConfig") -> "Renderer | None":
    if config.model is None:
        return None
    from whet.chat.renderer import Renderer
    from whet.models.loading import load_images, load_tokenizer

    images = None if config.model.vision is None else load_images(config.model)
    return Renderer(load_tokenizer(config.model), config.chat_template, images=images)


def _read(
    name: str,
    source: "Source",
    config: "PrepConfig",
    renderer: "Renderer | None",
    contamination: Contamination,
    out: Path,
    sample: int | None,
) -> SourceTally:
    """Check the rows of a source one by one and write the good ones."""
    tally, rows = SourceTally(), source.rows
    change = changes(config.thoughts, config.seed, renderer)
    limit = min(source.limit or _NO_LIMIT, sample or _NO_LIMIT)

    def wrong(problem: DataError) -> None:
        tally.drop("wrong", str(problem))
        if tally.read >= _EARLY:
            _check_share(name, tally, config.max_dropped)

    def damaged(problem: DataError) -> None:
        tally.read += 1
        wrong(problem)

    with out.open("w", encoding="utf-8") as file:
        for where, values, as_texts in placed_rows(rows.path, rows.columns, leave_out=damaged):
            if tally.read >= limit:
                break
            tally.read += 1
            try:
                row = rows.row(where, values, as_texts)
                others = row.model_extra or {}
                reason = _outside(source.where, where, values)
                output = row.output()
                keys = key_of(row.question), key_of(compared_fields(rows.kind, output))
                if changed := change(where, output):
                    row = rows.row(where, output)
                if renderer is not None and reason is None:
                    reason = rows.unusable(rows.group(row, renderer))
            except DataError as error:
                wrong(error)
                continue
            rewards = [answer.reward for answer in row.answers]
            if len(rewards) > len(set(rewards)):
                reason = reason or "no answer is preferred"
            compared = compared_fields(rows.kind, output)
            if reason is None and contamination.found_in(texts_of(compared)):
                reason = "text of an evaluation set"
            if reason is not None:
                tally.drop(reason, where)
                continue
            tally.kept += 1
            if changed:
                tally.changed[changed] = tally.changed.get(changed, 0) + 1
            output = with_columns(output, others, source.keep_columns, tally)
            count_bytes(values, tally)
            output.setdefault("source", name)
            file.write("\t".join((json.dumps(where), *keys, _as_json(output))) + "\n")  # JSON has no tabs
    _check_share(name, tally, config.max_dropped)
    for column in (column for column in source.keep_columns or () if column not in tally.columns):
        problem = f"no row has the column {column!r}.{did_you_mean(column, [*tally.columns, *tally.left_out])}"
        if column in tally.left_out:
            problem = f"the column {column!r} is left out, because JSON can't hold its values"
        log.warning("sources.%s.keep_columns: %s", name, problem)
    return tally


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _outside(ranges: Mapping[str, tuple[float, float]], where: str, values: Mapping[str, Any]) -> str | None:
    """Return the reason to drop a row if a column is outside of its range. Raises ``DataError`` if it has no number."""
    for column, (least, greatest) in ranges.items():
        try:
            number = float(values[column])
        except (KeyError, TypeError, ValueError):
            shown = f"is {values[column]!r}" if column in values else "is missing"
            raise DataError(f"{where}: field {column!r} {shown}, and where.{column} needs a number") from None
        if not least <= number <= greatest:
            return f"{column} outside {least:g} to {greatest:g}"
    return None


def _check_share(name: str, tally: SourceTally, most: float) -> None:
    wrong = tally.dropped.get("wrong", 0)
    if wrong > most * tally.read:
        raise DataError(
            f"{name}: {wrong} of the first {tally.read} rows are wrong, more than max_dropped = {most:g} allows; the "
            f"first one is {tally.examples['wrong']}"
        )


def with_columns(
    fields: JsonObject, others: Mapping[str, object], keep: Sequence[str] | None, tally: SourceTally
) -> JsonObject:
    """Return the fields of a row and its other columns. Count the rows of each column that is kept or left out,
    because it is not in ``keep`` (None: all are) or because JSON can't hold its value."""
    kept = {}
    for name, value in others.items():
        if (keep is None or name in keep) and _is_json(value):
            kept[name] = value
            tally.columns[name] = tally.columns.get(name, 0) + 1
        else:
            tally.left_out[name] = tally.left_out.get(name, 0) + 1
    return {name: value for name, value in fields.items() if name not in others} | kept


def count_bytes(values: Mapping[str, object], tally: SourceTally) -> None:
    """Count the columns of bytes, such as sounds, in the values of a file's row. Rows are read without these, unless
    they are images."""
    images = image_column(values)
    for name, value in values.items():
        if isinstance(value, bytes | bytearray) and name != images:
            tally.left_out[name] = tally.left_out.get(name, 0) + 1


def _is_json(value: object) -> bool:
    if isinstance(value, bool | int | None):
        return True
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):  # also of half a surrogate pair
        return False
    return True
