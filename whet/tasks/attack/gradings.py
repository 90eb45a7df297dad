"""Gradings of an attack: counted, cached, and with a deadline."""

import asyncio
import time
from dataclasses import dataclass

from whet.core.types import Message, Task
from whet.processes.loop_thread import format_error
from whet.tasks.base import TaskSet
from whet.tasks.cases import Answer
from whet.tasks.episodes import play
from whet.tasks.isolated import IsolatedEnvironments

_TURNS = 8  # replies of an episode of several turns, which are all the same


class SpentError(Exception):
    """The gradings or the time of an attack are used up."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The grader raised an error or didn't end."""

    kind: str  # "raises" or "hangs"
    text: str


class Gradings:
    """Grades answers until ``budget`` gradings are made or ``seconds`` have passed."""

    def __init__(self, taskset: TaskSet, budget: int, seconds: float, deadline: float) -> None:
        self.taskset, self.budget, self.deadline = taskset, budget, deadline
        self.count, self.tools, self.limit = 0, False, budget
        self._seconds, self._until = seconds, 0.0  # counted from the first grading
        self._environments = IsolatedEnvironments(taskset.open())
        self._graded: dict[tuple[str, str], float | Failure] = {}

    async def of(self, task: Task, answer: Answer) -> float | Failure:
        """Return the reward of an answer. A text is the reply of each turn. Raises ``SpentError`` at a limit."""
        key = (task.uid, repr(answer))
        if key not in self._graded:
            self._until = self._until or time.monotonic() + self._seconds
            if self.count >= self.limit or time.monotonic() >= self._until:
                raise SpentError
            self.count += 1
            self._graded[key] = await self._play(task, answer)
        return self._graded[key]

    async def _play(self, task: Task, answer: Answer) -> float | Failure:
        replies: Answer = answer
        if isinstance(answer, str):
            reply: Message = {"role": "assistant", "content": answer}
            replies = [reply] * _TURNS
        seconds = min(self.deadline, self._until - time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                observation, episode = await play(self._environments.make(task), replies)
        except TimeoutError:
            blocked = self._environments.blocked_at()
            if blocked is not None:
                await self._environments.close()
                self._environments = IsolatedEnvironments(self.taskset.open())
            if seconds < self.deadline:
                raise SpentError from None
            return Failure(
                "hangs", f"no grade within {self.deadline:g} s" + (f": it is at {blocked}" if blocked else "")
            )
        except Exception as error:
            return Failure("raises", format_error(error))
        self.tools = self.tools or bool(observation.tools)
        return episode.reward

    async def close(self) -> None:
        await self._environments.close()
