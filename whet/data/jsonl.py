"""Rows of JSONL files, checked, and the account of what became of them. Knows no tokenizer and no environment."""

import codecs
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Row:
    """One JSON object and where it stands, for messages."""

    where: str  # "train.jsonl:17"
    values: dict[str, Any]

    def text(self, name: str) -> str:
        """The field as a string that is not blank. Raises ``DataError`` naming the row and the field."""
        value = self.values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.problem(name, "must be a text that is not empty", value)
        if not is_unicode(value):
            raise self.problem(name, "must be valid Unicode, without half of a surrogate pair", value)
        return value

    def number(self, name: str) -> float:
        """The field as a finite number. Raises ``DataError`` naming the row and the field."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.problem(name, "must be a finite number", value)
        return float(value)

    def flag(self, name: str) -> bool:
        """The field as true or false. Raises ``DataError`` naming the row and the field."""
        value = self.values.get(name)
        if not isinstance(value, bool):
            raise self.problem(name, "must be true or false", value)
        return value

    def problem(self, name: str, what: str, value: Any) -> DataError:
        """The error that says what is wrong with a field."""
        if name not in self.values:
            known = ", ".join(self.values) or "none"
            return DataError(f"{self.where}: field {name!r} is missing (fields of this row: {known})")
        shown = json.dumps(value, ensure_ascii=not is_unicode(str(value)), default=str)
        return DataError(f"{self.where}: field {name!r} {what}, not {shown[:80]}{'...' if len(shown) > 80 else ''}")


def read_jsonl(path: str | Path) -> list[Row]:
    """The objects of a JSONL file; blank lines and a byte order mark are allowed.

    Raises ``DataError`` for a file that is missing or holds no row, and, naming the line, for one that is no object.
    """
    path = Path(path)
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    rows.append(Row(f"{path}:{number}", _parse(line, f"{path}:{number}")))
    except OSError as problem:
        raise DataError(f"can't read {path}: {problem.strerror}") from None
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def read_rows(path: str) -> list[Row]:
    """The rows of a JSONL file or, as ``hf:name:config:split``, of a data set on the Hugging Face Hub.

    Raises ``DataError`` for what can't be read.
    """
    if not path.startswith("hf:"):
        return read_jsonl(path)
    parts = path.split(":")[1:]
    if len(parts) != 3 or not all(parts):
        raise DataError(f"{path!r} names no data set: write hf:name:config:split, as in hf:openai/gsm8k:main:train")
    from datasets import load_dataset

    try:
        return rows_of(load_dataset(parts[0], parts[1], split=parts[2]), path.removeprefix("hf:"))
    except Exception as error:  # of many kinds: no network, no such data set, a broken cache
        raise DataError(
            f"the data set {path} can't be loaded from the Hugging Face Hub ({type(error).__name__}: {error}). "
            "Give a JSONL file instead"
        ) from error


def rows_of(values: Iterable[Mapping[str, Any]], name: str) -> list[Row]:
    """Rows that come from elsewhere, such as a Hugging Face dataset; ``name`` stands where the file would."""
    rows = [Row(f"{name}:{number}", dict(value)) for number, value in enumerate(values, start=1)]
    if not rows:
        raise DataError(f"{name} holds no rows")
    return rows


def is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can write and no tokenizer or file can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as problem:
        raise DataError(f"{where}: no UTF-8 text: {problem.reason} at byte {problem.start + 1} of the line") from None
    except json.JSONDecodeError as problem:
        raise DataError(f"{where}: no valid JSON: {problem.msg} at column {problem.colno}") from None
    except (ValueError, RecursionError) as problem:  # a number of thousands of digits, thousands of brackets
        raise DataError(f"{where}: no JSON that can be read: {problem}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, not {type(value).__name__}")
    return value


@dataclass(slots=True)
class Tally:
    """Rows in = rows kept + rows dropped, with the reasons."""

    name: str
    rows: int
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> rows

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[reason] += count

    @property
    def kept(self) -> int:
        return self.rows - self.dropped.total()

    def report(self, kept: int) -> None:
        """Log the account. Raises ``DataError`` when it doesn't add up to ``kept`` or nothing is left."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        account = f"{self.name}: {self.rows} rows, {kept} kept" + (f", dropped: {reasons}" if reasons else "")
        if kept != self.kept:
            raise DataError(f"{account}: {self.rows - kept - self.dropped.total()} rows are unaccounted for")
        if not kept:
            raise DataError(f"{account}: nothing is left")
        logger.info(account)
