"""A model that is not trained as the other player of Nim."""

from whet.core.types import Message, Task
from whet.tasks.base import AskPolicy, Environments
from whet.tasks.judges.config import Judge
from whet.tasks.judges.judge import JudgeClient
from whet.tasks.self_play import Heap, Nim, NimGame, legal_move, rules
from whet.tasks.users.model import spoken_text


class NimEnvironments(Environments[Heap]):
    """Games whose other seat may be played by a model."""

    named_scores = Nim.named_scores

    def __init__(self, server: Judge) -> None:
        self.server = server
        self._client: JudgeClient | None = None
        self._policy: AskPolicy | None = None

    @property
    def client(self) -> JudgeClient:
        """The client of the model, created in the event loop that asks first."""
        self._client = self._client or JudgeClient(self.server, role="opponent", policy=self._policy)
        return self._client

    def use_policy(self, ask: AskPolicy) -> None:
        self._policy = ask

    def make(self, task: Task[Heap]) -> NimGame:
        return NimGame(task, ModelPlayer(self, task) if task.data.opponent == "model" else None)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class ModelPlayer:
    """A model in one seat of one game. It sees what a policy in this seat would see."""

    def __init__(self, environments: NimEnvironments, task: Task[Heap]) -> None:
        self.environments, self.uid = environments, task.uid
        self.messages: list[Message] = []

    async def move(self, left: int, most: int, news: str) -> int:
        """Return the stones that the model takes: 1 if its reply is not a legal move. Raises
        ``JudgeError`` if the model gives no reply."""
        question = news if self.messages else rules(left, most)
        self.messages.append({"role": "user", "content": question})
        name = f"{self.uid}, move {len(self.messages) // 2 + 1}"
        text = await self.environments.client.ask(self.messages, spoken_text, name)
        taken = legal_move(text, min(left, most))
        self.messages.append({"role": "assistant", "content": text if taken else "1"})
        return taken or 1
