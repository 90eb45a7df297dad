"""Reference log-probs that are computed once and kept in a file, so that no reference model stays in memory.

The reference never changes, so its log-probs are a function of a sequence's tokens alone. They are kept by a hash of
the tokens and of which of them train: a row whose text or rendering has changed isn't found, and is computed anew.
``facts`` say under what they were computed: where these differ, the whole file is.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whet.batch import Batch
from whet.errors import WhetError
from whet.files import load_tensors, save_tensors
from whet.learner.base import Learner, Top, Update
from whet.losses.base import Loss
from whet.models.config import ModelConfig
from whet.weights.parcel import Opening, Parcel, Sending

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

COLUMN = "reference_logprobs"
SAVE_EVERY_S = 60.0  # a run that is killed while it fills the file loses no more than this


class CachedReference:
    """A ``Learner`` that looks ``reference_logprobs`` up and leaves all else to ``learner``."""

    def __init__(self, learner: Learner, path: Path, facts: Mapping[str, str], read_only: bool = False) -> None:
        """What ``path`` holds is used as far as it was computed under the same ``facts``; what isn't is said. With
        ``read_only`` the file stays as it is."""
        self.learner, self.path, self.facts, self.read_only = learner, path, dict(facts), read_only
        self.found = self._load()  # hash -> [trained tokens of the sequence]
        self._loaded, self._computed = len(self.found), 0
        self._unsaved, self._saved_at = 0, time.monotonic()
        self._filling = False

    @contextmanager
    def filling(self) -> "Iterator[None]":
        """Inside, ``score`` computes and keeps what is not known yet, and answers 0 for all other columns: who scores
        the batches of a run here has their reference log-probs when it comes to learning from them. What is known is
        written now and then, and at the end, whatever ends it."""
        self._filling, self._saved_at = True, time.monotonic()
        try:
            yield
        finally:
            self._filling = False
            self._save()

    async def finish(self) -> None:
        """Write what was computed and let go of the reference model. To be called again is harmless."""
        await self.learner.release_reference()
        self._save()
        if not self._computed:
            return
        if self._loaded:
            log.warning(
                "%s lacked %d sequences, because rows, their tokens or the number of steps changed, or because it "
                "was not finished: they were computed",
                self.path,
                self._computed,
            )
        log.info("%s holds the reference log-probs of %d sequences", self.path, len(self.found))

    def _save(self) -> None:
        """Write all that is known, atomically, unless the file holds it already."""
        if not self._unsaved or self.read_only:
            return
        names = sorted(self.found)
        columns = [self.found[name] for name in names]
        save_tensors(
            self.path,
            {
                "facts": torch.frombuffer(bytearray(json.dumps(self.facts).encode()), dtype=torch.uint8),
                "sequences": torch.from_numpy(np.frombuffer(b"".join(names), dtype=np.uint8).copy()),
                "lengths": torch.tensor([len(column) for column in columns]),
                "logprobs": torch.cat(columns) if columns else torch.zeros(0),
            },
        )
        self._unsaved, self._saved_at = 0, time.monotonic()

    @property
    def model(self) -> ModelConfig:
        return self.learner.model

    async def score(self, batch: Batch, columns: set[str], top: Top | None = None) -> dict[str, Tensor]:
        """See ``Learner``."""
        rest = columns - {COLUMN}
        if self._filling:
            scored = {name: torch.zeros(len(batch)) for name in rest}
        else:
            scored = await self.learner.score(batch, rest, top) if rest else {}
        if COLUMN in columns:
            scored[COLUMN] = await self._reference(batch)
        return scored

    async def _reference(self, batch: Batch) -> Tensor:
        paths = [path for path in batch.paths() if bool(batch.trained[path].any())]
        sequences = [(_name(batch.tokens[p], batch.trained[p]), p[batch.trained[p]]) for p in paths]
        missing = {name: tokens for name, tokens in sequences if name not in self.found}
        if missing:
            if not self._filling:
                log.warning("%s lacks %d sequences of this step: the reference is loaded", self.path, len(missing))
            computed = (await self.learner.score(batch, {COLUMN}))[COLUMN]
            self.found |= {name: computed[tokens] for name, tokens in missing.items()}
            self._computed += len(missing)
            self._unsaved += len(missing)
            if not self._filling:
                await self.learner.release_reference()
            if not self._filling or time.monotonic() - self._saved_at >= SAVE_EVERY_S:
                self._save()
        if not sequences:
            return torch.zeros(len(batch))
        column = self.found[sequences[0][0]].new_zeros(len(batch))
        for name, tokens in sequences:
            column[tokens] = self.found[name]
        return column

    def _load(self) -> dict[bytes, Tensor]:
        if not self.path.exists():
            return {}
        try:
            tensors = load_tensors(self.path)
            facts = json.loads(bytes(tensors["facts"].tolist()))
            columns = tensors["logprobs"].split(tensors["lengths"].tolist())
            names = bytes(tensors["sequences"].tolist())
            if len(names) != 16 * len(columns):
                raise ValueError(f"{len(names) / 16:g} names of {len(columns)} sequences")
        except (WhetError, KeyError, ValueError, RuntimeError) as error:
            log.warning("%s is damaged (%s): reference log-probs are computed anew", self.path, error)
            return {}
        changed = [name for name, value in self.facts.items() if facts.get(name) != value]
        if changed:
            what = ", ".join(changed)
            log.warning("%s was made with another %s: reference log-probs are computed anew", self.path, what)
            return {}
        return {names[16 * i : 16 * i + 16]: column for i, column in enumerate(columns)}

    async def release_reference(self) -> None:
        await self.learner.release_reference()

    async def update(self, batch: Batch, loss: Loss) -> Update:
        return await self.learner.update(batch, loss)

    async def begin_weights(self, sending: Sending) -> Opening:
        return await self.learner.begin_weights(sending)

    async def next_weights(self) -> Parcel | None:
        return await self.learner.next_weights()

    async def end_weights(self) -> None:
        await self.learner.end_weights()

    async def save(self, folder: Path) -> None:
        await self.learner.save(folder)

    async def begin_save(self, folder: Path) -> None:
        await self.learner.begin_save(folder)

    async def finish_save(self) -> None:
        await self.learner.finish_save()

    async def load(self, folder: Path) -> None:
        await self.learner.load(folder)

    async def close(self) -> None:
        await self.learner.close()

    def describe(self) -> dict[str, Any]:
        return self.learner.describe()


def _name(tokens: Tensor, trained: Tensor) -> bytes:
    """16 bytes for a sequence. [n] each"""
    content = hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16)
    content.update(trained.numpy().tobytes())
    return content.digest()
