"""Checkpoints of a run: the weights of all policies that learn, and the state of the run."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from whet.base.errors import WhetError
from whet.checkpoint.background import BackgroundSave
from whet.checkpoint.crash_points import crash_point
from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.mirror import Mirror
from whet.checkpoint.store import CheckpointStore
from whet.learner.state import FACTS
from whet.metrics import Metrics
from whet.run.folder import Place
from whet.run.policy import Policy


class Saver:
    """Writes checkpoints into the store, and copies them to the mirror, if there is one."""

    def __init__(self, place: Place, store: CheckpointStore, mirror: Mirror | None, policies: Sequence[Policy]) -> None:
        self._place, self._store, self._mirror, self._policies = place, store, mirror, policies
        self._background = BackgroundSave()  # the checkpoint that is being written
        self._metrics = Metrics()

    async def save(self, step: int, state: dict[str, object], metric: float | None) -> None:
        """Write a checkpoint; with asynchronous checkpoints, return when a copy exists. ``metric`` is the best metric,
        if measured."""
        self._place.check()
        if self._store.config.asynchronous:
            await self._background.begin(step, lambda copied: self._save(step, copied, state, metric))
        else:
            await self._save(step, None, state, metric)

    def check(self) -> None:
        """Raise the error of a save in the background, if it has failed."""
        self._background.check()

    async def finish(self) -> None:
        """Wait until the last checkpoint is complete. Raises the error of its save."""
        await self._background.finish()

    async def close(self) -> None:
        """End a save in progress, when the run ends, perhaps by an error."""
        await self._background.close()

    def tally(self) -> Metrics:
        """Return the metrics since the last call."""
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    async def _save(
        self, step: int, copied: asyncio.Event | None, state: dict[str, object], metric: float | None
    ) -> None:
        try:
            await self._store.save(step, partial(self._write, copied), state, metric)
        except WhetError:
            self._place.check()  # says why, if the folder was moved meanwhile
            raise
        if self._mirror is not None and not await self._mirror.copy(self._place.folder, step, self._store.steps()):
            self._metrics.sum("checkpoint/mirror_failed", 1)

    async def _write(self, copied: asyncio.Event | None, folder: Path) -> None:
        """Write into the folder of a checkpoint. With ``copied``, write in the background; it is set when training may
        continue."""
        learners = {
            policy.place(folder) / role: policy.learners[role] for policy in self._policies for role in policy.trained
        }
        for place, learner in learners.items():
            place.mkdir(parents=True)
            await (learner.save if copied is None else learner.begin_save)(place)
        if copied is not None:
            copied.set()
            crash_point("step.copied")
            for learner in learners.values():
                await learner.finish_save()
        for place in learners:
            if not (place / FACTS).is_file():
                raise CheckpointError(
                    f"the learner of {place.relative_to(folder)} reports that it has saved, but {place} has no "
                    f"{FACTS}; the run folder must be one that all nodes see"
                )
