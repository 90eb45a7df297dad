"""Scores of conversations by a reward model in a worker process: what is waiting when the process becomes free is
scored as one batch. Knows no torch, no task and no reward.

Why a process and not a frozen learner of the run: episodes are paid after every turn, while generation holds the
devices, and filters wait for the rewards; a learner gets the devices only when generation is over.

Who waits for whom: one caller of ``score`` at a time has the turn and waits for the batch that begins with its own
conversation; the others wait for their turn, and find their score or have the next batch. A process that dies or is
too slow is replaced, and its batch is tried once more; after that its callers get the error. No caller ever gets a
score that the model didn't give.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from whet.base.errors import CallError, DataError, WhetError
from whet.config import Config
from whet.core.types import Message
from whet.processes.pool import CallCrash, CallTimeout, Pool, WorkerLimits

log = logging.getLogger(__name__)
MODULE = "whet.models.reward_model"  # by name, because it imports torch


class RewardModelProcess(Config):
    """The settings of a reward model's process."""

    threads: int = Field(1, ge=1)
    """Of the process; the learner keeps the other cores."""
    batch_size: int = Field(32, ge=1)
    """Conversations that are scored at once, at most. 1: scores are the same to the last bit in every run."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    deadline_s: float = Field(120.0, gt=0)
    """Seconds that one batch may take."""
    start_s: float = Field(600.0, gt=0)
    """Seconds until the model is loaded; a download counts."""


class CutScore(float):
    """The score of a conversation that was too long for the model: of the beginnings of its replies."""


@dataclass(slots=True, eq=False)
class _Request:
    conversation: dict[str, Any]
    found: float | str | WhetError | None = None  # the score, or why there is none


class RewardModelClient:
    """One reward model, which starts at the first call. All calls must come from one event loop."""

    def __init__(self, model: str, revision: str | None, config: RewardModelProcess) -> None:
        self.model, self.config = model, config
        self.batches = 0  # scored so far
        self._warned = False  # of conversations that are too long
        self._settings = (model, revision, config.device, config.dtype, config.threads)
        limits = WorkerLimits(
            workers=1, cpu_s=None, memory_gib=None, deadline_s=config.deadline_s, start_s=config.start_s
        )
        self.pool = Pool(f"{MODULE}:load", limits, arguments=self._settings, threads=config.threads)
        self._waiting: list[_Request] = []
        self._turn = asyncio.Lock()

    async def score(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> float:
        """Return the score of a finished conversation. Raises ``DataError`` where the model can't read this one,
        ``CallError`` where its process failed, ``WhetError`` where it doesn't start."""
        request = _Request({"messages": list(messages), "tools": tools})
        self._waiting.append(request)
        try:
            async with self._turn:
                if request.found is None:
                    await self._score(self._waiting[: self.config.batch_size])
        finally:
            self._waiting.remove(request)
        if isinstance(request.found, WhetError):
            raise request.found
        if not isinstance(request.found, float):
            raise DataError(str(request.found))
        return request.found

    async def _score(self, batch: list[_Request]) -> None:
        self.batches += 1
        restarts = self.pool.restarts
        try:
            conversations = [request.conversation for request in batch]
            given = await self.pool.call(f"{MODULE}:scores", self._settings, conversations)
            found = [CutScore(*one) if isinstance(one, list) else one for one in given]
            if len(found) != len(batch):
                raise WhetError(f"it gave {len(found)} scores for {len(batch)} conversations")
        except (CallTimeout, CallCrash) as error:
            problem = f"it failed twice on {len(batch)} conversations; the last time: {error}"
            problem = f"{problem}. Lower its batch_size, or raise its deadline_s"
            found = [CallError(f"the reward model {self.model}: {problem}")] * len(batch)
        except WhetError as error:
            kind = CallError if isinstance(error, CallError) else WhetError
            found = [kind(f"the reward model {self.model}: {error}")] * len(batch)
        if lost := self.pool.restarts - restarts:
            log.warning("the process of the reward model %s was lost %d times and started again", self.model, lost)
        if not self._warned and any(isinstance(one, CutScore) for one in found):
            self._warned = True
            log.warning(
                "a conversation is longer than the reward model %s can read: its replies are cut (score "
                "reward_model_cut). Lower the limits of sampling, or take a model with a longer context",
                self.model,
            )
        for request, one in zip(batch, found, strict=True):
            request.found = one

    def close(self) -> None:
        """Kill the process. Pending calls raise ``WhetError``."""
        self.pool.close()
