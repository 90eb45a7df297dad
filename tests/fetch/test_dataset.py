"""Rows of data sets are read by the library of the Hub, here from a folder in place of a data set's name."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from whet.base.errors import DataError
from whet.fetch.dataset import fetch_rows

datasets = pytest.importorskip("datasets")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a data set of two files with three rows each."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for number in range(2):
        rows = datasets.Dataset.from_list([{"n": 3 * number + row} for row in range(3)])
        rows.to_parquet(tmp_path / "set" / f"train-{number}.parquet")
    datasets.disable_progress_bars()
    yield f"hf:{tmp_path / 'set'}"
    datasets.enable_progress_bars()


@pytest.mark.parametrize("split", ["train", "default:train", "train:streaming", "default:train:streaming"])
def test_a_split_is_read_with_and_without_a_configuration_also_as_a_stream(hub: str, split: str) -> None:
    rows = list(fetch_rows(f"{hub}:{split}"))
    assert [values["n"] for _, values in rows] == [*range(6)]
    assert rows[1][0].endswith(f"{split.removesuffix(':streaming')}:2")


def test_a_part_of_a_split(hub: str) -> None:
    assert [values["n"] for _, values in fetch_rows(f"{hub}:train[1:3]")] == [1, 2]


def test_a_stream_reads_no_more_than_is_asked_for(hub: str, tmp_path: Path) -> None:
    (tmp_path / "set" / "train-1.parquet").write_bytes(b"damaged")
    rows = fetch_rows(f"{hub}:train:streaming")
    assert [values["n"] for _, values in islice(rows, 3)] == [0, 1, 2]
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    with pytest.raises(DataError, match="can't be read after row 3 from the Hugging Face Hub"):
        next(rows)
    with pytest.raises(DataError, match="can't be loaded from the Hugging Face Hub"):
        next(fetch_rows(f"{hub}:train"))


@pytest.mark.parametrize("path", ["hf:one", "hf:one:streaming", "hf:a:b:c:d"])
def test_what_names_no_data_set_is_refused(path: str) -> None:
    with pytest.raises(DataError, match="write hf:name:config:split"):
        next(fetch_rows(path))
