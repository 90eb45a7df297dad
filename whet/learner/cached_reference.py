"""Reference log-probs that are computed once and cached in a file, so that no reference model stays in memory.

The reference never changes, so its log-probs are a function of a sequence's tokens alone. The cache key is a hash of
the tokens and of the loss mask: a row whose text or rendering has changed is not in the cache, and is computed. The
conditions of the computation are stored too: if they differ, the whole file is computed again.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.base.files import load_tensors, save_tensors
from whet.core.batch import Batch
from whet.learner.base import Learner, LearnerFacts, Top
from whet.processes.compute import compute

log = logging.getLogger(__name__)

COLUMN = "reference_logprobs"
SAVE_EVERY_S = 60.0  # a run that is killed while it fills the file loses no more than this
_HASH = 16  # bytes


class CachedReference:
    """A ``Scorer`` that reads ``reference_logprobs`` from the cache and delegates all other columns to ``learner``."""

    def __init__(self, learner: Learner, path: Path, conditions: Mapping[str, str], read_only: bool = False) -> None:
        """Load the entries of ``path`` that were computed under the same ``conditions``; differences are logged. With
        ``read_only`` the file is not changed."""
        self.learner, self.path, self.conditions, self.read_only = learner, path, dict(conditions), read_only
        self.cached = self._load()  # hash -> [trained tokens of the sequence]
        self.computed = 0  # sequences that were not in the file
        self._saved = len(self.cached)
        self._saved_at = time.monotonic()
        self._filling = False

    @property
    def facts(self) -> LearnerFacts:
        return self.learner.facts

    @contextmanager
    def filling(self) -> Iterator[None]:
        """In this context, ``score`` computes and caches missing sequences, and returns 0 for all other columns: a run
        that scores its batches here first has their reference log-probs when it trains on them. The cache is written
        periodically and at the end, even after an error."""
        self._filling, self._saved_at = True, time.monotonic()
        try:
            yield
        finally:
            self._filling = False
            self._save()

    async def finish(self) -> None:
        """Write the cache and free the reference model. May be called twice."""
        await self.learner.release_reference()
        self._save()
        if 0 < self.computed < len(self.cached):
            log.warning(
                "%s lacked %d sequences, because rows, their tokens or the number of steps changed, or because it "
                "was not finished: they were computed now",
                self.path,
                self.computed,
            )
        if self.computed:
            log.info("%s holds the reference log-probs of %d sequences", self.path, len(self.cached))

    async def score(self, batch: Batch, columns: set[str], top: Top | None = None) -> dict[str, Tensor]:
        """See ``Scorer``."""
        rest = columns - {COLUMN}
        if self._filling:
            scored = {name: torch.zeros(len(batch)) for name in rest}
        else:
            scored = await self.learner.score(batch, rest, top) if rest else {}
        if COLUMN in columns:
            scored[COLUMN] = await self._reference(batch)
        return scored

    async def _reference(self, batch: Batch) -> Tensor:
        sequences = await compute(_sequences, batch)
        missing = {name: trained for name, trained in sequences if name not in self.cached}
        if missing:
            await self._score(batch, missing)
        return await compute(self._column, sequences, len(batch))

    async def _score(self, batch: Batch, missing: dict[bytes, Tensor]) -> None:
        """Score the batch with the reference model, and cache the columns of the ``missing`` sequences."""
        if not self._filling:
            log.warning("%s lacks %d sequences of this step, so the reference model is loaded", self.path, len(missing))
        column = (await self.learner.score(batch, {COLUMN}))[COLUMN]
        self.cached |= {name: column[trained] for name, trained in missing.items()}
        self.computed += len(missing)
        if not self._filling:
            await self.learner.release_reference()
        if not self._filling or time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self._save()

    def _column(self, sequences: list[tuple[bytes, Tensor]], size: int) -> Tensor:
        if not sequences:
            return torch.zeros(size)
        column = self.cached[sequences[0][0]].new_zeros(size)
        for name, trained in sequences:
            column[trained] = self.cached[name]
        return column

    def _load(self) -> dict[bytes, Tensor]:
        if not self.path.exists():
            return {}
        try:
            tensors = load_tensors(self.path)
            conditions = json.loads(bytes(tensors["facts"].tolist()))
            columns = tensors["logprobs"].split(tensors["lengths"].tolist())
            names = bytes(tensors["sequences"].tolist())
            if len(names) != _HASH * len(columns):
                raise ValueError(f"{len(names) / _HASH:g} hashes of {len(columns)} sequences")
        except (WhetError, KeyError, ValueError, RuntimeError) as error:
            log.warning("%s is damaged (%s), so reference log-probs are computed again", self.path, error)
            return {}
        changed = [name for name, value in self.conditions.items() if conditions.get(name) != value]
        if changed:
            names_changed = ", ".join(changed)
            log.warning(
                "%s was made with another %s, so reference log-probs are computed again", self.path, names_changed
            )
            return {}
        return {names[_HASH * i : _HASH * (i + 1)]: column for i, column in enumerate(columns)}

    def _save(self) -> None:
        """Write all entries, atomically, unless the file already has them."""
        if len(self.cached) == self._saved or self.read_only:
            return
        names = sorted(self.cached)
        columns = [self.cached[name] for name in names]
        save_tensors(
            self.path,
            {
                "facts": torch.tensor(list(json.dumps(self.conditions).encode()), dtype=torch.uint8),
                "sequences": torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8),
                "lengths": torch.tensor([len(column) for column in columns]),
                "logprobs": torch.cat(columns),
            },
        )
        self._saved, self._saved_at = len(self.cached), time.monotonic()


def _sequences(batch: Batch) -> list[tuple[bytes, Tensor]]:
    """Return a hash of each sequence with trained tokens, and the indices of these tokens."""
    hashed = []
    for path in batch.paths():
        trained = batch.trained[path]
        if bool(trained.any()):
            content = hashlib.blake2b(batch.tokens[path].long().numpy().tobytes(), digest_size=_HASH)
            content.update(trained.numpy().tobytes())
            hashed.append((content.digest(), path[trained]))
    return hashed
