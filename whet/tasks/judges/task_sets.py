"""Environments of another task set with a judge beside them."""

from whet.tasks.base import Environments, TaskSet, called
from whet.tasks.judges.judge import Judge, JudgeClient


class JudgeEnvironments(Environments):
    """Base of those that ask a judge. The client is made by the first question, in the loop that asks."""

    def __init__(self, taskset: TaskSet, judge: Judge) -> None:
        self.inner, self.judge = taskset.open(), judge
        self._client: JudgeClient | None = None

    @property
    def client(self) -> JudgeClient:
        """What asks."""
        self._client = self._client or JudgeClient(self.judge)
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await called(self.inner.close)
