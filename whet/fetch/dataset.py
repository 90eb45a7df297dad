"""Rows of data sets on the Hugging Face Hub."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.base.errors import DataError
from whet.base.extras import extra
from whet.fetch.download import check_allowed

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_COLON = re.compile(r":(?![^\[]*\])")  # not one of a slice, as in train[:1000]


def fetch_rows(path: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of ``hf:name:config:split`` or ``hf:name:split``, each with its origin; ``name@revision`` pins a
    commit, a branch or a tag. With ``:streaming`` at the end each row is downloaded when it is read and nothing is kept
    on disk; otherwise the whole split is downloaded first, and kept. Images are objects with ``bytes`` and ``path``.
    Raises ``DataError`` for a data set that can't be loaded."""
    whole = path.removeprefix("hf:").removesuffix(":streaming")
    streaming = path.endswith(":streaming")
    parts = _COLON.split(whole)
    if len(parts) not in (2, 3) or not all(parts):
        raise DataError(
            f"{path!r} does not name a data set: write hf:name:config:split, as in hf:openai/gsm8k:main:train, or "
            "hf:name:split for one without configurations"
        )
    check_allowed(path)
    with extra("data", f"the data set {path}"):
        from datasets import load_dataset

    name, _, revision = parts[0].partition("@")
    config = parts[1] if len(parts) == 3 else None
    number, rows = 0, None
    try:
        rows = load_dataset(name, config, split=parts[-1], revision=revision or None, streaming=streaming)
        for row in _with_bytes_of_images(rows):
            number += 1
            yield f"{whole}:{number}", dict(row)
    except Exception as error:  # of many types: no network, an unknown data set, a broken cache
        what = "can't be loaded from" if rows is None else f"can't be read after row {number} from"
        raise DataError(
            f"the data set {path} {what} the Hugging Face Hub ({type(error).__name__}: {error}). "
            f"Give its files instead of its name: where there's a network, `hf download {name} --repo-type dataset "
            "--local-dir DIR`; then the path is DIR/FILE, or a pattern such as DIR/data/train-*.parquet"
        ) from error
    if not number:
        raise DataError(f"{path} has no rows")


def _with_bytes_of_images(rows: "Dataset | IterableDataset") -> "Dataset | IterableDataset":
    """Return the rows with images as they are stored."""
    from datasets import Image, List

    for column, feature in (rows.features or {}).items():  # a stream may not know them
        if isinstance(feature, Image):
            rows = rows.cast_column(column, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            rows = rows.cast_column(column, List(Image(decode=False)))
    return rows
