"""Rows of data files in the usual formats, each with its place: JSONL, JSON arrays, CSV, TSV, Parquet and Arrow, single
or several, plain or compressed by gzip. Independent of the fields. A table has every field in every row, so a null
there is an absent field.
"""

import csv
import gzip
import io
import json
import logging
import math
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.base.errors import DataError
from whet.base.extras import extra
from whet.base.files import expanded
from whet.base.strict_json import STRICT, TABLES
from whet.config.issues import did_you_mean
from whet.data.jsonl import LeaveOut, Placed, WrongRowError, iterate_jsonl

log = logging.getLogger(__name__)

TEXT_TABLES = (".csv", ".tsv")
"""Formats in which each value is a text."""

_OFFICE = (".xlsx", ".xls", ".ods")
_PACKED = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")
_FORMATS = (".arrow", ".feather", ".parquet", ".jsonl", ".ndjson", *TEXT_TABLES, ".json")
_OF_DATASETS = {"dataset_info.json", "state.json", "dataset_dict.json"}  # written by ``Dataset.save_to_disk``
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|dev|eval)(?![a-z])")
_PYTHON_LIST = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")
_DELIMITERS = ",;\t"
_LONGEST_CELL = 1 << 27  # characters


def read_file(path: str | Path) -> list[Placed]:
    """Return the rows of a data file, of all data files in a folder, or of all files that match a pattern such as
    ``rows/train-*.parquet``, in the order of their names. The place of a row is its line or, in Parquet, Arrow and JSON
    arrays, its number, counted from 1.

    Raises ``DataError`` for a file that can't be read, for one or several files that hold no rows, and, with its place,
    for a row that is damaged.
    """
    return list(iterate_file(path))


def iterate_file(path: str | Path, nan_is_null: bool = False, leave_out: LeaveOut | None = None) -> Iterator[Placed]:
    """Yield the rows of ``read_file`` one by one. Only JSON arrays are read as a whole. ``nan_is_null``: see
    ``iterate_jsonl``. ``leave_out`` is called for each damaged line of JSONL or CSV, which otherwise is an error."""
    empty = True

    def left_out(problem: DataError) -> None:
        nonlocal empty
        empty = False
        if leave_out is None:
            raise problem
        leave_out(problem)

    files = data_files(path)
    without = [file for file in files if file.is_file() and not file.stat().st_size] if len(files) > 1 else []
    if without:  # Spark writes such files, and so do downloads that fail
        log.warning("%s: %d of %d files are empty, such as %s", path, len(without), len(files), without[0].name)
    for file in files:
        if file in without:
            continue
        for row in _rows(file, nan_is_null, left_out):
            empty = False
            yield row
    if empty:
        raise DataError(f"{path} holds no rows")


def is_of_texts(where: str) -> bool:
    """Return whether all values of a row are texts, so that numbers and truth values must be read from texts.
    ``where``: the place of the row, which begins with its file."""
    return _is_text_table(where.rpartition(":")[0])


@lru_cache(maxsize=8)
def _is_text_table(file: str) -> bool:
    return _format(Path(file)) in TEXT_TABLES


def data_files(path: str | Path) -> list[Path]:
    """Return the files that a path, a folder or a pattern names. Raises ``DataError`` if it is not clear which."""
    path = expanded(path)
    try:
        exists = path.exists()
    except OSError as problem:  # no permission for a folder of it, or a name that is too long
        raise DataError(f"can't read {path}: {problem.strerror}") from None
    if any(sign in path.name for sign in "*?[") and not exists:
        if not (matches := [file for file in _visible(path.parent.glob(path.name)) if file.is_file()]):
            raise DataError(f"no file matches {path}")
        return matches
    if not path.is_dir():
        return [path]
    files = [file for file in _visible(path.iterdir()) if file.is_file() and file.name not in _OF_DATASETS]
    formats = {_format(file): file for file in files if _format(file) in _FORMATS}
    if not formats:
        splits = [folder.name for folder in sorted(path.iterdir()) if folder.is_dir()]
        hint = f"; name one of its folders: {', '.join(splits)}" if splits else ""
        raise DataError(f"can't read {path}: the folder holds no data file{hint}")
    if len(formats) > 1:
        raise DataError(f"can't read {path}: the folder holds files of several formats ({', '.join(sorted(formats))}); "
                        f"name those to read by a pattern: {path}/*{sorted(formats)[0]}")  # fmt: skip
    files = [file for file in files if _format(file) in formats]
    if packed := next((file for file in files if file.with_name(f"{file.name}.gz") in files), None):
        raise DataError(f"can't read {path}: the folder holds {packed.name} and {packed.name}.gz, the same rows twice; "
                        "move one of them away")  # fmt: skip
    splits = sorted({match.group(1) for file in files if (match := _SPLIT.search(file.name.lower()))})
    if len(splits) > 1:
        raise DataError(
            f"can't read {path}: the folder holds several splits ({', '.join(splits)}); name one by a pattern: "
            f"{path}/{splits[0]}*{next(iter(formats))}"
        )
    return files


def _visible(files: Iterable[Path]) -> list[Path]:
    """Return the files in order, without hidden ones, which editors, file systems and killed programs leave behind.
    Raises ``DataError`` for a link to a file that does not exist, whose rows would be missing."""
    visible = [file for file in sorted(files) if not file.name.startswith(".")]
    if broken := next((file for file in visible if file.is_symlink() and not file.exists()), None):
        raise DataError(absent(broken))
    return visible


def absent(path: Path) -> str:
    """Return the error text for a file that does not exist: where it was looked for, and what may have been meant."""
    if path.name.startswith("your-"):  # as the recipes for own data have it
        return f"set data.path to a file of yours ({path} stands for it), as in data.path=rows.parquet"
    if path.is_symlink():
        return f"can't read {path}: it is a link to {path.readlink()}, which does not exist"
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"can't read {path}: there is no folder {folder}"
    near = did_you_mean(path.name, [file.name for file in folder.iterdir() if _format(file) in _FORMATS])
    place = "" if path.is_absolute() else f" in {folder}"
    return f"can't read {path}: there is no such file{place}.{near}"


def _format(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _rows(path: Path, nan_is_null: bool, leave_out: LeaveOut) -> Iterator[Placed]:
    suffix = _format(path)
    if not path.exists():
        raise DataError(absent(path))
    if not path.is_file():
        raise DataError(f"can't read {path}: it is a device or a pipe, and a data file is needed")
    if suffix in _OFFICE:
        raise DataError(f"can't read {path}: spreadsheets are not read; save the sheet as CSV")
    if suffix in _PACKED:
        raise DataError(f"can't read {path}: of compressed files only gzip (.gz) is read; unpack it first")
    try:
        with path.open("rb") as file:
            if (head := file.read(23)) == b"version https://git-lfs":
                raise DataError(f"{path}:1: a pointer of Git LFS, not the data; fetch the file with: git lfs pull")
        if suffix in TEXT_TABLES:
            yield from _csv_rows(path, "\t" if suffix == ".tsv" else None, leave_out)
        elif suffix in (".parquet", ".arrow", ".feather"):
            yield from _columnar_rows(path, suffix)
        elif suffix == ".json" and (array := _json_array(path, nan_is_null)) is not None:
            yield from array
        else:
            named = suffix in (".jsonl", ".ndjson", ".json") or path.name.lower().endswith(".gz")
            if not named and (begins := head.removeprefix(BOM_UTF8).lstrip()) and begins[:1] not in b"{[":
                raise DataError(
                    f"{path}:1: not valid JSON, as which files are read whose names end in none of "
                    f"{', '.join(_FORMATS)}; name it by its format"
                )
            yield from iterate_jsonl(path, nan_is_null, leave_out)
    except (OSError, EOFError, zlib.error) as problem:  # the last two of gzip
        raise DataError(f"can't read {path}: {getattr(problem, 'strerror', None) or problem}") from None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.GzipFile(path) if path.name.lower().endswith(".gz") else path.open("rb")


def _csv_rows(path: Path, delimiter: str | None, leave_out: LeaveOut) -> Iterator[Placed]:
    """``delimiter``: without one it is a comma or, where the header has none, a semicolon, as spreadsheets write in
    many languages, or a tab. A first column without a name has the numbers of rows, which pandas writes."""
    csv.field_size_limit(_LONGEST_CELL)
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        line = 1
        try:
            first = text.readline()
            if not first:
                return
            if problem := _unlike_csv(first):
                raise DataError(f"{path}:1: {problem}")
            delimiter = delimiter or next((sign for sign in _DELIMITERS if sign in first), ",")
            reader = csv.reader(chain([first], text), delimiter=delimiter, strict=True)
            header = next(reader, [])
            named = [name for name in header if name.strip()]
            if len(set(named)) < len(named) or not named:
                raise DataError(f"{path}:1: the header must name each column once; it holds: {', '.join(header)}")
            line = reader.line_num + 1
            for cells in reader:
                where, line = f"{path}:{line}", reader.line_num + 1
                if not any(cells):  # a blank line, or one of delimiters alone, which spreadsheets write
                    continue
                if len(cells) != len(header):
                    leave_out(WrongRowError(f"{where}: the row has {len(cells)} cells, and the header {len(header)}"))
                    continue
                filled = [(name, cell) for name, cell in zip(header, cells, strict=True) if cell]
                if stray := [cell for name, cell in filled[1:] if not name.strip()]:
                    leave_out(WrongRowError(f"{where}: the cell {stray[0][:80]!r} has a column without a name"))
                    continue
                yield where, {name: _cell(cell, where, name) for name, cell in filled if name.strip()}
        except csv.Error as problem:
            raise DataError(f"{path}:{line}: not valid CSV: {problem}") from None
        except UnicodeDecodeError as problem:
            line = _not_utf8(path)
            raise DataError(f"{path}:{line}: not UTF-8 text: {problem.reason}; save the file as UTF-8") from None


def _unlike_csv(first: str) -> str:
    """Return what is wrong with the first line of a file of a table, or an empty text."""
    if re.fullmatch(r"sep=.\s*", first, re.IGNORECASE):
        return f"{first.strip()!r} is a note for Excel, not the header of the columns; delete this line"
    if "|" in first and not any(sign in first for sign in _DELIMITERS):
        return (
            "the columns are separated by '|', and must be by commas, semicolons or tabs; write the file again, as "
            "with pandas: read_csv(path, sep='|').to_csv(path, index=False)"
        )
    return ""


def _not_utf8(path: Path) -> int:
    """Return the number of the first line that is not UTF-8; 1 if all are."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _cell(text: str, where: str, name: str) -> object:
    """Return the messages that a cell holds as JSON, and any other text unchanged, also if it is JSON."""
    if _PYTHON_LIST.match(text):
        raise DataError(
            f"{where}: field {name!r} holds a list in Python's notation; write it as JSON (json.dumps), or the rows as "
            "Parquet or JSONL"
        )
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        value = STRICT.decode(text)
    except ValueError:
        return text
    turns = value if isinstance(value, list) else [value]
    return value if turns and all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in turns) else text


def _json_array(path: Path, nan_is_null: bool) -> list[Placed] | None:
    """Return the rows of a JSON array; None for a file of JSON lines, which some publish as ``.json``."""
    with _open(path) as file:
        content = file.read()
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        _check_lines(path, content)
        return None
    try:
        values = (TABLES if nan_is_null else STRICT).decode(content.decode("utf-8-sig"))
    except json.JSONDecodeError as problem:
        raise DataError(f"{path}:{problem.lineno}: not valid JSON: {problem.msg} at column {problem.colno}") from None
    except ValueError as problem:
        raise DataError(f"{path}: not JSON that can be read: {problem}") from None
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise DataError(f"{path}: element {number} must be a JSON object, not {type(value).__name__}")
    return [(f"{path}:{number}", value) for number, value in enumerate(values, start=1)]


def _check_lines(path: Path, content: bytes) -> None:
    """Raise ``DataError`` for a file that is a single object which holds the rows, or a table as pandas writes it."""
    try:
        whole = TABLES.decode(content.decode("utf-8-sig"))
    except ValueError:
        return
    if not isinstance(whole, dict):
        return
    nested = whole and all(isinstance(part, dict) and ("0" in part or "0" in whole) for part in whole.values())
    if nested or {"columns", "index", "data"} <= whole.keys():
        hint = "a whole table; with pandas write df.to_json(path, orient='records')"
    elif len(content.split(b"\n")) > 2 and (rows := [name for name, value in whole.items() if isinstance(value, list)]):
        hint = f"rows; write the list {rows[0]!r} alone into a file"
    else:
        return
    raise DataError(f"{path}: the file must be a list of rows, and is one object with {hint}")


def _columnar_rows(path: Path, suffix: str) -> Iterator[Placed]:
    with extra("data", f"reading {path}"):
        import pyarrow
        from pyarrow import ipc, parquet

    number = 0
    try:
        batches: Iterable[Any]
        if suffix == ".parquet":
            batches = parquet.ParquetFile(path).iter_batches()
        else:
            reader = _arrow_reader(path, ipc, pyarrow)
            batches = reader()
        for batch in batches:
            names = batch.schema.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"can't read {path}: it has several columns {', '.join(map(repr, twice))}; rename them")
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", without_nulls(row)
    except (pyarrow.ArrowException, OverflowError, UnicodeDecodeError, KeyError) as problem:  # the last of a time zone
        kind = "Parquet" if suffix == ".parquet" else "Arrow"
        raise DataError(f"can't read {path} as {kind}, after row {number}: {problem}") from None


def _arrow_reader(path: Path, ipc: ModuleType, pyarrow: ModuleType) -> Callable[[], Iterator[Any]]:
    """Return a reader of the batches of an Arrow file, or of an Arrow stream, as ``datasets`` writes."""
    source = pyarrow.memory_map(str(path))
    try:
        file = ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        return lambda: iter(ipc.open_stream(source))
    return lambda: (file.get_batch(index) for index in range(file.num_record_batches))


def without_nulls(row: Mapping[str, object]) -> dict[str, object]:
    """Return the row without fields, and fields of objects in it, that are null or NaN. Bytes (images, sounds) stay."""
    return {name: plain for name, value in row.items() if (plain := _plain(value)) is not None}


def without_bytes(row: Mapping[str, object]) -> dict[str, object]:
    """Return the row without fields, and fields of objects in it, that are bytes."""
    return {name: _json(value) for name, value in row.items() if not isinstance(value, bytes | bytearray)}


def _plain(value: Any) -> object:
    if isinstance(value, dict):
        return without_nulls(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return float(value) if isinstance(value, Decimal) else value


def _json(value: object) -> object:
    if isinstance(value, dict):
        return without_bytes(value)
    if isinstance(value, list):
        return [_json(item) for item in value]
    return None if isinstance(value, bytes | bytearray) else value
