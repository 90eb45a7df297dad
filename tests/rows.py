"""Rows on disk and recipes over them, for tests of the algorithms that learn from a data set."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.toy import read_settings, toy_settings
from whet.run.recipe import Recipe


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"say {i}", "completion": f"{'abcdefgh'[i % 8] * 3}{i}"} for i in range(count)]


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The chosen answer is of capitals, the rejected one of lower-case letters, which the toy model likes better."""
    dice = random.Random(seed)
    rows = []
    for i in range(count):
        word = "".join(dice.choice("abcdefgh") for _ in range(4))
        rows.append({"prompt": f"word {i}", "chosen": word[::-1].upper(), "rejected": word})
    return rows


def labelled(count: int) -> list[dict[str, Any]]:
    """Both answers of each pair, each on its own row: capitals are good, lower-case letters are bad."""
    rows = []
    for pair in pairs(count):
        rows.append({"prompt": pair["prompt"], "completion": pair["chosen"], "label": True})
        rows.append({"prompt": pair["prompt"], "completion": pair["rejected"], "label": False})
    return rows


def rows_recipe(tiny_model: Path, kind: str, path: Path, algorithm: dict[str, Any], **changes: Any) -> Recipe:
    """A toy recipe over rows: ``kind`` is a name of the registry of rows."""
    settings = toy_settings(tiny_model, **changes)
    settings["evaluation"] |= {"limit": None} | changes.get("evaluation", {})
    settings["data"] |= {"type": kind, "path": str(path)}
    for unread in {"sampling", "rollouts", "generator"} - changes.keys():
        del settings[unread]
    return read_settings(settings | {"algorithm": algorithm})
