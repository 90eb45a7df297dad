"""Rows as typed values. A subclass of ``Row`` declares the fields that it needs, and a wrong row is a ``DataError``
with its file, line and field."""

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from whet.base.errors import DataError
from whet.base.files import expanded
from whet.base.strict_json import STRICT, JsonObject
from whet.config.issues import did_you_mean
from whet.data.files import is_of_texts, iterate_file, without_bytes, without_nulls
from whet.data.jsonl import LeaveOut, WrongRowError, folder_of
from whet.fetch.dataset import fetch_rows
from whet.fetch.download import fetch_file

log = logging.getLogger(__name__)


@contextmanager
def naming_prep() -> Iterator[None]:
    """Say in errors about a wrong row of a file how to leave such rows out."""
    try:
        yield
    except WrongRowError as error:
        text = str(error)
        text = text if text.endswith("...") else text.removesuffix(".")  # three dots: the value was cut
        raise DataError(f"{text}; `whet prep` leaves out and counts wrong rows (docs/prep.md)") from None


_WRONG = {
    "string_type": "must be a text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "float_parsing": "must be a finite number",
    "float_type": "must be a finite number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "dict_type": "must be an object",
}


def unicode(text: str) -> str:
    """Return the text. Raises ``ValueError`` for half a surrogate pair, which JSON can contain but tokenizers
    reject."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, without half of a surrogate pair") from None
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must be a text that is not empty")
    return text


Text = Annotated[str, AfterValidator(unicode), AfterValidator(_not_blank)]


class Row(BaseModel):
    """One object of a file or data set. Fields that the class doesn't declare are kept unchanged.

    >>> class Question(Row):
    ...     question: Text
    >>> Question.of("train.jsonl:3", {"question": " "})
    Traceback (most recent call last):
    whet.base.errors.DataError: train.jsonl:3: field 'question' must be a text that is not empty, not " "
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    json_columns: ClassVar[tuple[str, ...]] = ()
    """Columns that hold lists or objects, where the class has other fields."""

    _where: str = PrivateAttr("")
    _given: JsonObject = PrivateAttr(default_factory=dict)

    @property
    def where(self) -> str:
        """Return the place of the row, e.g. ``train.jsonl:17``."""
        return self._where

    @property
    def given(self) -> JsonObject:
        """Return the object of the file, before the fields were validated."""
        return self._given

    @classmethod
    def of(
        cls,
        where: str,
        values: JsonObject,
        as_texts: bool = False,
        columns: Mapping[str, str] | None = None,
        image_folder: str | None = None,
    ) -> Self:
        """Return the row at ``where``. With ``as_texts``, numbers and truth values are read from texts, and lists and
        objects from their JSON. ``columns``: the column that each renamed field comes from. ``image_folder``: the
        folder of its images; None: that of its file. Raises ``DataError`` naming the first field that is wrong."""
        folder = folder_of(where) if image_folder is None else expanded(image_folder)
        try:
            fields = cls.prepared(cls._of_texts(values) if as_texts else values, folder)
            row = cls.model_validate(fields, strict=False if as_texts else None)
        except ValidationError as error:
            raise WrongRowError(f"{where}: {_problem(error, values, columns or {})}") from None
        except ValueError as error:
            raise WrongRowError(f"{where}: {error}") from None
        row._where, row._given = where, fields
        return row

    @classmethod
    def _of_texts(cls, values: JsonObject) -> JsonObject:
        """Return the values of a table, with the JSON of lists and objects decoded."""
        read = dict(values)
        json_columns = {*cls.json_columns, *(name for name, field in cls.model_fields.items() if _holds_json(field))}
        for name in json_columns & values.keys():
            value = values[name]
            if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
                with suppress(ValueError):  # the field refuses the text
                    read[name] = STRICT.decode(value)
        return read

    @classmethod
    def prepared(cls, values: JsonObject, folder: Path | None) -> dict[str, object]:
        """Return the fields to validate, by default all except bytes. ``folder``: the folder of the images."""
        return without_bytes(values)


R = TypeVar("R", bound=Row)


def _holds_json(field: FieldInfo) -> bool:
    """Return whether a field is an object, or a list without an annotation that reads texts, as messages have."""
    kind = field.annotation
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    plain = {get_origin(each) or each for each in kinds}
    lists = list in plain and not field.metadata
    return str not in plain and (lists or bool(plain & {dict, object}))


def read_rows(
    path: str,
    kind: type[R],
    columns: Mapping[str, str] | None = None,
    nan_is_null: bool = False,
    image_folder: str | None = None,
) -> list[R]:
    """Return the rows of a data file, a folder or a pattern (see ``read_file``), of a JSONL file on the web
    (``https://...#sha256=...``, with its hash) or, as ``hf:name:config:split``, of a data set on the Hugging Face Hub.
    ``columns`` maps fields to the file's columns, and replaces columns with the name of such a field; ``nan_is_null``:
    see ``iterate_jsonl``; ``image_folder``: see ``Row.of``.

    Raises ``DataError`` for a file that can't be read, and for the first wrong row.
    """
    return [kind.of(*placed, columns, image_folder) for placed in placed_rows(path, columns, nan_is_null)]


def placed_rows(
    path: str,
    columns: Mapping[str, str] | None = None,
    nan_is_null: bool = False,
    leave_out: LeaveOut | None = None,
) -> Iterator[tuple[str, dict[str, object], bool]]:
    """Yield the rows of ``read_rows`` one by one as the arguments of ``Row.of``: place, values, and whether they are
    all texts. ``leave_out``: see ``iterate_file``."""
    columns = columns or {}
    first = ("", dict[str, object]())
    with_column, with_field = dict[str, str](), dict[str, str]()  # field -> the first row with its column, or itself

    def renamed(where: str, values: dict[str, object]) -> dict[str, object]:
        fields = {name: values[column] for name, column in columns.items() if column in values}
        replaced = fields.keys() | set(columns.values())
        for name in columns:
            if name in fields:
                with_column.setdefault(name, where)
            elif name in values and name not in replaced:
                with_field.setdefault(name, where)
            if name in with_column and name in with_field:
                raise DataError(
                    f"{with_field[name]}: the row has no {columns[name]!r} (columns.{name}), which "
                    f"{with_column[name]} has, but a {name!r}; write all rows in the same columns, or, if {name!r} is "
                    f"something else, set columns={{other: {name}}}"
                )
        return fields | {name: value for name, value in values.items() if name not in replaced}

    if path.startswith(("https://", "http://")):
        path = str(fetch_file(path))
    rows: Iterable[tuple[str, dict[str, object]]]
    if path.startswith("hf:"):
        rows = ((where, without_nulls(values)) for where, values in fetch_rows(path))
    else:
        rows = iterate_file(path, nan_is_null, leave_out)
    for where, values in rows:
        fields = renamed(where, values)
        first = first if first[0] else (where, fields)
        yield where, fields, is_of_texts(where)
    for name in columns.keys() - with_column:
        if name not in with_field:
            raise DataError(f"{first[0]}: {missing(name, first[1], columns)} No other row has it either")
        log.warning("%s: no row has %r (columns.%s), so the field %r itself is read", path, columns[name], name, name)


_USUAL = {  # what the fields are often called
    "prompt": ("question", "instruction", "problem", "query", "input", "text"),
    "completion": ("answer", "response", "output", "solution", "reply", "target"),
    "problem": ("prompt", "question", "query", "input"),
    "question": ("prompt", "problem", "query", "input"),
    "answer": ("expected_answer", "solution", "completion", "response", "output", "target"),
    "chosen": ("preferred", "accepted", "winner", "better"),
    "rejected": ("dispreferred", "loser", "worse"),
}


_LISTED = 1000  # characters of the fields in an error


def missing(name: str, fields: Collection[str], columns: Mapping[str, str] | None = None) -> str:
    """Return the error text for a row with these fields that lacks one, or lacks the column that it comes from."""
    if isinstance(fields, Mapping) and isinstance(fields.get(name), bytes):
        return f"field {name!r} holds bytes, and must be a text"
    if columns and name in columns:
        column, here = columns[name], [columns.get(field, field) for field in fields]
        present = f"it has {', '.join(here)}" if here else "it has no value at all"
        return f"the row has no {column!r} (columns.{name}); {present}.{did_you_mean(column, here)}"
    usual = (field for field in _USUAL.get(name, ()) if field in fields)
    alike = (field for field in fields if field.strip().casefold() == name)
    objects = [key for key in fields if isinstance(fields, Mapping) and isinstance(fields[key], Mapping)]
    others = min((field for field in fields if field not in objects), default=None)
    meant = next(chain(alike, get_close_matches(name, fields, 1), usual), others)
    rename = "" if meant is None else f"; if {meant!r} is meant, set columns={{{name}: {meant}}}"
    if meant in (columns or {}):
        rename = f"; if this is the {name}, name its column in columns.{name} instead of columns.{meant}"
    if isinstance(fields, Mapping) and (rows := next((key for key in fields if _are_rows(fields[key])), None)):
        rename = f"; if the list {rows!r} has the rows, write it alone into a file"
    if isinstance(fields, Mapping) and (holder := next((key for key in objects if name in fields[key]), None)):
        rename = f"; {holder!r} has it: write what is in {holder!r} as columns of the row"
    listed = ", ".join(fields) or "none"
    shown = listed if len(listed) <= _LISTED else f"{listed[:_LISTED]}... ({len(fields)} fields)"
    return f"field {name!r} is missing (fields of this row: {shown}{rename})"


def _are_rows(value: object) -> bool:
    """Return whether a value is a list of objects other than messages."""
    objects = value if isinstance(value, list) else []
    return bool(objects) and all(isinstance(each, dict) and not {"role", "from"} & each.keys() for each in objects)


def _problem(error: ValidationError, values: Mapping[str, object], columns: Mapping[str, str]) -> str:
    text = _text(error, values, columns)
    absent = re.match(r"field '(\w+)' is missing \(", text)
    return missing(absent[1], values, columns) if absent else text


def _text(error: ValidationError, values: Mapping[str, object], columns: Mapping[str, str]) -> str:
    detail = error.errors(include_url=False)[0]
    what = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else _WRONG.get(detail["type"], detail["msg"])
    if not detail["loc"]:  # of the row as a whole
        return what
    first, *rest = detail["loc"]
    name = f"{first}" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    if detail["type"] == "missing":
        return missing(name, values)
    shown = json.dumps(detail["input"], default=str)
    column = f" (column {columns[str(first)]!r})" if first in columns else ""
    return f"field {name!r}{column} {what}, not {shown[:80]}{'...' if len(shown) > 80 else ''}"
