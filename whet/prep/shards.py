"""The checked rows of all sources become the shards of train, validation and test, without duplicates."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from whet.base.digests import sha256
from whet.base.errors import DataError
from whet.base.files import replacing
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.core.content import image_urls
from whet.core.words import words_in
from whet.data.row_kinds import as_messages
from whet.fetch.images import fingerprint
from whet.prep.contamination import compared_fields, texts_of
from whet.prep.duplicates import comparable, key_of, seen_before
from whet.prep.manifest import Manifest

if TYPE_CHECKING:
    from whet.data.row_kinds import Example
    from whet.prep.config import PrepConfig

SPLITS = ("train", "validation", "test")
_SEEDS = 1 << 63  # derived seeds are smaller


def write_splits(config: "PrepConfig", stages: dict[str, Path], folder: Path, manifest: Manifest) -> None:
    """Write the rows of all stages into shards, without duplicates."""
    seen = seen_before(config.duplicates, config.near, sum(tally.kept for tally in manifest.sources.values()))
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_Shards(folder, split, config.shard_rows)) for split in SPLITS}
        for name, stage in stages.items():
            tally, share = manifest.sources[name], config.sources[name].share
            kind = config.sources[name].rows.kind
            for where, question, whole, row in _staged(stage / "rows.tsv"):
                # A row that is not in the share is in no output, so that an equal row of a later source is kept.
                copies = _copies(share, config.seed, name, whole)
                if not copies or seen(question, whole, partial(_texts, kind, row)):
                    tally.kept -= 1
                    tally.drop("duplicate" if copies else "not in the share", where)
                    continue
                tally.copies += copies - 1
                for _ in range(copies):
                    writers[_split(question, config)].write(row + "\n")
        if not writers["train"].rows:
            accounts = [f"{name}: {tally.reasons} of {tally.read:,} rows" for name, tally in manifest.sources.items()]
            raise DataError(f"no row is left to train on; dropped: {'; '.join(accounts)}")
    manifest.splits = {split: writer.files for split, writer in writers.items() if writer.files}


def _texts(kind: "type[Example]", row: str) -> str:
    """Return the texts of a staged row, for a comparison with other rows. Rows with different images have no word in
    common."""
    compared = compared_fields(kind, json.loads(row))
    words = [word for text in texts_of(comparable(compared)) for word in words_in(text)]
    items = [item for field in compared.values() if isinstance(field, list) for item in field]
    urls = image_urls(as_messages([item for item in items if isinstance(item, dict) and "content" in item]))
    images = key_of(" ".join(map(fingerprint, urls)))
    return " ".join(f"{word}/{images}" for word in words) if urls else " ".join(words)


def _staged(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield place, key of the question, key of the whole and JSON of each row of a stage."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            where, question, whole, row = line.rstrip("\n").split("\t")
            yield json.loads(where), question, whole, row


def _copies(share: float, seed: int, source: str, whole: str) -> int:
    """Return the copies of a row; equal rows of a source have equally many."""
    fraction = derive_seed(seed, "share", source, whole) / _SEEDS
    return int(share) + (fraction < share - int(share))


def _split(question: str, config: "PrepConfig") -> str:
    """Return the split of a question; equal questions are in the same one."""
    position = derive_seed(config.seed, "split", question) / _SEEDS
    if position < config.test:
        return "test"
    return "validation" if position < config.test + config.validation else "train"


class _Shards:
    """The files of one split, each published when it is full, the last one unless an error ends the block."""

    def __init__(self, folder: Path, split: str, shard_rows: int) -> None:
        self._folder, self._split, self._size = folder, split, shard_rows
        self.files: dict[str, JsonObject] = {}
        self.rows = 0
        self._open = ExitStack()  # the file that is being written
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._publish()
        else:
            self._open.__exit__(kind, error, traceback)

    def write(self, line: str) -> None:
        if self._file is None:
            self._name = f"{self._split}-{len(self.files):05d}.jsonl"
            staging = self._open.enter_context(replacing(self._folder / self._name))
            self._file = self._open.enter_context(staging.open("w", encoding="utf-8"))
            self._in_file = 0
        self._file.write(line)
        self.rows += 1
        self._in_file += 1
        if self._in_file == self._size:
            self._publish()

    def _publish(self) -> None:
        if self._file is not None:
            self._file = None
            self._open.close()
            self.files[self._name] = {"rows": self._in_file, "sha256": sha256(self._folder / self._name)}
