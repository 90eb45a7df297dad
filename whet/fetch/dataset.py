"""Rows of data sets on the Hugging Face Hub."""

from typing import Any

from whet.base.errors import DataError
from whet.base.extras import extra


def fetch_rows(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows of ``hf:name:config:split``, each with the place where it stands. Raises ``DataError`` for what can't be
    loaded."""
    parts = path.removeprefix("hf:").split(":")
    if len(parts) != 3 or not all(parts):
        raise DataError(
            f"{path!r} does not name a data set: write hf:name:config:split, as in hf:openai/gsm8k:main:train"
        )
    with extra("data", f"the data set {path}"):
        from datasets import load_dataset

    name, config, split = parts
    try:
        rows = [dict(row) for row in load_dataset(name, config, split=split)]
    except Exception as error:  # of many kinds: no network, no such data set, a broken cache
        raise DataError(
            f"the data set {path} can't be loaded from the Hugging Face Hub ({type(error).__name__}: {error}). "
            "Give a JSONL file instead: data.path=train.jsonl"
        ) from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    return [(f"{path.removeprefix('hf:')}:{number}", row) for number, row in enumerate(rows, start=1)]
