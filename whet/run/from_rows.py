"""The recipe of ``whet.train``: rows, and perhaps a function that rewards answers, become its data and algorithm."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import ConfigError
from whet.base.files import expanded
from whet.base.strict_json import JsonObject
from whet.data.files import is_of_texts, read_file
from whet.data.forms import conversation
from whet.data.in_memory import as_rows, write_rows
from whet.data.jsonl import Placed
from whet.data.row import Row, naming_prep
from whet.data.row_kinds import Conversation, Labelled, Preference
from whet.tasks.functions import name_of
from whet.tasks.prompts import PromptRow

RowData = Iterable[Mapping[str, Any]] | str | Path
"""A list of dicts, a ``datasets.Dataset``, a ``pandas.DataFrame``, the path of a data file, or ``hf:name:split``."""

_KEYS = {"data": "path", "test": "test_path"}  # argument of whet.train -> key of a recipe's data
_FILES = {"data": "rows.jsonl", "test": "test.jsonl"}  # in the run folder
_WEB = ("hf:", "http:", "https:")
_NUMBERED = ("0", "1", "-1", "0.0", "1.0", "-1.0")  # labels that may say which answers are good
_MOST_HELD_OUT = 100  # each is answered before and after training


@dataclass(frozen=True, slots=True)
class Training:
    """A kind of training that ``whet.train`` knows, by the columns of the rows."""

    columns: frozenset[str]
    row: type[Row]
    data: str  # the type in recipes
    algorithm: str


_REWARDED = Training(frozenset({"prompt"}), PromptRow, "function", "grpo")
_LABELLED = Training(frozenset({"label"}), Labelled, "labelled", "kto")
_FROM_ROWS = (
    Training(frozenset({"chosen", "rejected"}), Preference, "preference", "dpo"),
    Training(frozenset({"messages"}), Conversation, "supervised", "sft"),
    Training(frozenset({"prompt", "completion"}), Conversation, "supervised", "sft"),
)


class RowFiles:
    """The data of ``whet.train``: checked at once, and written into the run's folder when the recipe is known to be
    valid, so that the run can be resumed and evaluated."""

    def __init__(self, data: RowData, test: RowData | None, reward: Callable[..., object] | None) -> None:
        self._sources = {"data": data} if test is None else {"data": data, "test": test}
        self._rows = {name: _read(source, name) for name, source in self._sources.items()}
        self._name = None if reward is None else name_of(reward)
        self.training = _training_of(self._rows["data"]) if reward is None else _REWARDED
        for name, rows in self._rows.items():
            source = self._sources[name]
            from_files = isinstance(source, str | Path)
            with naming_prep() if from_files else nullcontext():
                for where, row in rows or ():
                    self.training.row.of(where, row, from_files and is_of_texts(where))

    def recipe(self, folder: Path) -> JsonObject:
        """Return the sections of a recipe, with the paths of the files that ``write`` writes."""
        data: JsonObject = {"type": self.training.data}
        sections: JsonObject = {"data": data, "algorithm": {"type": self.training.algorithm}}
        for name, key in _KEYS.items():
            if name in self._sources:
                data[key] = _path(self._sources[name], folder / _FILES[name])
        rows, test = self._rows["data"], self._rows.get("test")
        if test is not None:
            data["test_size"] = len(test)
        elif "test" not in self._sources and rows is not None:
            tasks = len(rows) if self._name is None else len({_as_json(row.get("prompt", row)) for _, row in rows})
            data["test_size"] = min(_MOST_HELD_OUT, tasks // 10)
            if not data["test_size"]:
                sections["evaluation"] = {"enabled": False}
        if self._name is None:
            sections["checkpoints"] = {"best_metric": "evaluation/loss", "mode": "min"}
        else:
            data["reward"] = self._name
            sections["checkpoints"] = {"best_metric": "evaluation/reward"}  # the accuracy, if each reward is 0 or 1
        return sections

    def write(self, folder: Path) -> None:
        """Write the rows that were given in memory. Raises ``DataError`` for a value that JSON does not have."""
        for name, rows in self._rows.items():
            if rows is not None and not isinstance(self._sources[name], str | Path):
                folder.mkdir(parents=True, exist_ok=True)
                write_rows(folder / _FILES[name], rows)


def _read(data: RowData, name: str) -> list[Placed] | None:
    """Return the rows, each with its place; None if they are on the web."""
    if not isinstance(data, str | Path):
        return as_rows(data, name)
    with naming_prep():
        return None if str(data).startswith(_WEB) else read_file(data)


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _path(data: RowData, written: Path) -> str:
    if not isinstance(data, str | Path):
        return str(written.absolute())
    return str(data) if str(data).startswith(_WEB) else str(expanded(data).absolute())


def _training_of(rows: list[Placed] | None) -> Training:
    first = conversation(rows[0][1]) if rows else {}
    columns = set(first)
    for training in _FROM_ROWS:
        if training.columns <= columns:
            if training.row is not Conversation:
                return training
            labels = [str(row.get("label")).lower() for _, row in rows or ()]  # of a table, texts
            if labels[0] not in ("true", "false") and (number := next((x for x in labels if x in _NUMBERED), None)):
                raise ConfigError(
                    f"data has a 'label' {number}: write true for a good answer and false for a bad one, from which "
                    "KTO learns, or leave the column out to imitate all answers (SFT)"
                )
            return _LABELLED if labels[0] in ("true", "false") else training
    raise ConfigError(
        "whet.train needs a reward, a function of the model's answer; without one, rows with the columns 'messages' or "
        "'prompt' and 'completion' (SFT), with a 'label' true or false (KTO), or 'chosen' and 'rejected' (DPO). These "
        f"have: {', '.join(sorted(map(str, columns))) or 'unknown columns'}. For other data, start from a recipe: "
        "whet.start('kto-gsm8k', ...); `whet recipes` lists them"
    )
