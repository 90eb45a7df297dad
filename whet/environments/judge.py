"""Scores of conversations by a reward model that runs in a child process: what is waiting when the process becomes free
is scored as one batch. Knows no torch, no task and no reward.

Who waits for whom: ``score`` waits for one thread, which owns the process and waits for its reply until the deadline.
A process that dies or is too slow is killed and started again, and its batch is tried once more; after that all who
wait are told. Nobody is ever told a score that the model didn't give.
"""

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from pydantic import Field

from whet.config import Config
from whet.environments.child_process import ChildProcess
from whet.errors import DataError, DeadlineError, WhetError
from whet.types import Message

log = logging.getLogger(__name__)
MODULE = "whet.models.judge"  # by name, because it imports torch


class JudgeProcess(Config):
    """How a reward model runs."""

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


class Judge:
    """One reward model. Starts when first asked; belongs to no event loop."""

    def __init__(self, model: str, revision: str | None, config: JudgeProcess) -> None:
        self.model, self.revision, self.config = model, revision, config
        self.batches = 0  # scored so far
        self.restarts = 0  # processes that were lost
        self._child: ChildProcess | None = None
        self._waiting: deque[tuple[dict[str, Any], Future[float]]] = deque()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="whet-judge")

    async def score(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> float:
        """The score of a finished conversation. Raises ``DataError`` where the model can't read this one,
        ``WhetError`` where it doesn't work at all."""
        future: Future[float] = Future()
        with self._lock:
            if self._thread is None:
                raise WhetError("the reward model is closed")
            self._waiting.append(({"messages": list(messages), "tools": tools}, future))
            self._thread.submit(self._next_batch)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Kill the process. Who still waits gets ``WhetError``."""
        with self._lock:
            thread, self._thread = self._thread, None
            child = self._child
        if child is not None:
            child.kill()
        if thread is not None:
            thread.shutdown(wait=True)
        if self._child is not None:  # it was being started
            self._child.kill()

    def _next_batch(self) -> None:
        with self._lock:
            count = min(len(self._waiting), self.config.batch_size)
            taken = [self._waiting.popleft() for _ in range(count)]
        batch = [(asked, future) for asked, future in taken if future.set_running_or_notify_cancel()]
        if not batch:  # an earlier call has taken them along, or nobody waits any more
            return
        try:
            scores = self._scores([asked for asked, _ in batch])
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), score in zip(batch, scores, strict=True):
            if isinstance(score, str):
                future.set_exception(DataError(score))
            else:
                future.set_result(score)

    def _scores(self, conversations: list[dict[str, Any]]) -> list[float | str]:
        if self._thread is None:
            raise WhetError("the reward model is closed")
        request, problem = json.dumps(conversations).encode(), ""
        self.batches += 1
        for _ in range(2):
            child = self._started()
            try:
                reply = child.exchange(request, self.config.deadline_s)
            except (EOFError, OSError, DeadlineError) as error:
                child.kill()
                self._child = None
                if self._thread is None:
                    raise WhetError("the reward model was closed while it scored") from None
                self.restarts += 1
                problem = str(error) or f"it died with exit status {child.exit_status}"
                log.warning("the process of the reward model %s is started again: %s", self.model, problem)
                continue
            if "error" in reply:
                raise WhetError(f"the reward model {self.model} failed:\n{reply['error']}")
            scores: list[float | str] = reply["scores"]
            if len(scores) != len(conversations):
                raise WhetError(
                    f"the reward model {self.model} gave {len(scores)} scores for {len(conversations)} conversations"
                )
            return scores
        raise WhetError(
            f"the reward model {self.model} failed twice on {len(conversations)} conversations; the last time: "
            f"{problem}. Lower its batch_size, or raise its deadline_s"
        )

    def _started(self) -> ChildProcess:
        if self._child is not None:
            return self._child
        config = self.config
        child = ChildProcess(MODULE, config.threads)
        with self._lock:
            closed = self._thread is None
            self._child = child
        if closed:
            child.kill()
        settings = {"model": self.model, "revision": self.revision, **config.model_dump(include=_SENT)}
        try:
            reply = child.exchange(json.dumps(settings).encode(), config.start_s)
            problem = reply.get("error")
        except (EOFError, OSError):
            problem = f"it died with exit status {child.exit_status}; see its messages above"
        except DeadlineError as error:
            problem = f"{error} (start_s)"
        if problem:
            child.kill()
            self._child = None
            if self._thread is None:
                raise WhetError("the reward model was closed while it started")
            raise WhetError(f"the reward model {self.model} could not start: {problem}")
        return child


_SENT = {"device", "dtype", "threads"}
