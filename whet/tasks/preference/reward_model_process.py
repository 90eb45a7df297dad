"""Scores of conversations by a reward model in a worker process. Conversations that wait while the process is busy are
scored as the next batch. This module doesn't import torch.

Why a process, not a frozen model in the learner: rewards are needed after every turn, while generation occupies the
devices, and filters wait for them; the learner gets the devices only when generation has ended.

Who waits for what: one caller of ``score`` at a time holds the lock and waits for a batch that includes its own
conversation; the other callers wait for the lock, and then have their score or start the next batch. A process that
dies or is too slow is replaced and its batch is tried once more; after that its callers get the error. A caller never
gets a score that the model didn't give.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from whet.base.errors import CallError, DataError, WhetError
from whet.base.strict_json import JsonObject
from whet.config import Config
from whet.core.types import Message
from whet.processes.pool import CallCrash, CallTimeout, Pool, WorkerLimits

log = logging.getLogger(__name__)
MODULE = "whet.models.reward_model"  # by name, because it imports torch
CLASSIFIER = "whet.models.classifier"


class RewardModelProcess(Config):
    """The settings of a reward model's process."""

    threads: int = Field(1, ge=1)
    """Threads of the process. The learner uses the other cores."""
    batch_size: int = Field(32, ge=1)
    """Most conversations in a batch. With 1, scores are identical to the last bit in every run."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    deadline_s: float = Field(120.0, gt=0)
    """Seconds for one batch."""
    start_s: float = Field(600.0, gt=0)
    """Seconds to load the model, including its download."""


class CutScore(float):
    """The score of a conversation whose replies were cut, because it was too long for the model."""


@dataclass(slots=True, eq=False)
class _Request:
    conversation: JsonObject
    result: float | str | WhetError | None = None  # the score, or the reason why there is none


class RewardModelClient:
    """A client of a reward model. Its process starts at the first call. All calls must come from one event loop."""

    def __init__(
        self, model: str, revision: str | None, config: RewardModelProcess, label: tuple[str | int, str] | None = None
    ) -> None:
        """``label``: with a classifier the label that is scored, and ``probability`` or ``logit``."""
        self.model, self.config = model, config
        self._module = MODULE if label is None else CLASSIFIER
        self.batches = 0  # scored so far
        self._warned = False  # about conversations that are too long
        self._settings = (model, revision, config.device, config.dtype, config.threads, *(label or ()))
        limits = WorkerLimits(
            workers=1, cpu_s=None, memory_gib=None, deadline_s=config.deadline_s, start_s=config.start_s
        )
        self.pool = Pool(f"{self._module}:load", limits, arguments=self._settings, threads=config.threads)
        self._waiting: list[_Request] = []
        self._scoring = asyncio.Lock()

    async def score(self, messages: Sequence[Message], tools: list[JsonObject] | None = None) -> float:
        """Return the score of a finished conversation. Raises ``DataError`` if the model can't read the conversation,
        ``CallError`` if its process failed, and ``WhetError`` if the process doesn't start."""
        request = _Request({"messages": list(messages), "tools": tools})
        self._waiting.append(request)
        try:
            async with self._scoring:
                if request.result is None:
                    await self._score(self._waiting[: self.config.batch_size])
        finally:
            self._waiting.remove(request)
        if isinstance(request.result, WhetError):
            raise request.result
        if not isinstance(request.result, float):
            raise DataError(str(request.result))
        return request.result

    async def _score(self, batch: list[_Request]) -> None:
        """Set the results of the requests of a batch."""
        self.batches += 1
        restarts = self.pool.restarts
        try:
            conversations = [request.conversation for request in batch]
            scores = await self.pool.call(f"{self._module}:scores", self._settings, conversations)
            results = [CutScore(*score) if isinstance(score, list) else score for score in scores]
            if len(results) != len(batch):
                raise WhetError(f"it gave {len(results)} scores for {len(batch)} conversations")
        except (CallTimeout, CallCrash) as error:
            problem = f"it failed twice on {len(batch)} conversations; the last time: {error}"
            problem = f"{problem}. Lower its batch_size, or raise its deadline_s"
            results = [CallError(f"the reward model {self.model}: {problem}")] * len(batch)
        except WhetError as error:
            kind = CallError if isinstance(error, CallError) else WhetError
            results = [kind(f"the reward model {self.model}: {error}")] * len(batch)
        if lost := self.pool.restarts - restarts:
            log.warning("the process of the reward model %s was lost %d times and started again", self.model, lost)
        if not self._warned and any(isinstance(result, CutScore) for result in results):
            self._warned = True
            log.warning(
                "a conversation is longer than the context of the reward model %s: its replies are cut (score "
                "reward_model_cut). Lower the limits of sampling, or use a model with a longer context",
                self.model,
            )
        for request, result in zip(batch, results, strict=True):
            request.result = result

    def close(self) -> None:
        """Kill the process. Pending calls raise ``WhetError``."""
        self.pool.close()
