"""Rows of data sets on the Hugging Face Hub."""

from collections.abc import Iterator

from whet.base.errors import DataError
from whet.base.extras import extra
from whet.fetch.download import check_allowed


def fetch_rows(path: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of ``hf:name:config:split`` or ``hf:name:split``, each with its origin; ``name@revision`` pins a
    commit, a branch or a tag. Images are objects with ``bytes`` and ``path``. Raises ``DataError`` for a data set that
    can't be loaded."""
    parts = path.removeprefix("hf:").split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise DataError(
            f"{path!r} does not name a data set: write hf:name:config:split, as in hf:openai/gsm8k:main:train, or "
            "hf:name:split for one without configurations"
        )
    check_allowed(path)
    with extra("data", f"the data set {path}"):
        from datasets import Image, List, load_dataset

    name, _, revision = parts[0].partition("@")
    config = parts[1] if len(parts) == 3 else None
    try:
        rows = load_dataset(name, config, split=parts[-1], revision=revision or None)
    except Exception as error:  # of many types: no network, an unknown data set, a broken cache
        raise DataError(
            f"the data set {path} can't be loaded from the Hugging Face Hub ({type(error).__name__}: {error}). "
            f"Give its files instead of its name: where there's a network, `hf download {name} --repo-type dataset "
            "--local-dir DIR`; then the path is DIR/FILE, or a pattern such as DIR/data/train-*.parquet"
        ) from error
    if not len(rows):
        raise DataError(f"{path} has no rows")
    for column, feature in rows.features.items():
        if isinstance(feature, Image):
            rows = rows.cast_column(column, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            rows = rows.cast_column(column, List(Image(decode=False)))
    for number, row in enumerate(rows, start=1):
        yield f"{path.removeprefix('hf:')}:{number}", dict(row)
