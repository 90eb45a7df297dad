"""Episodes with a simulated user: the policy helps a user with tools, and the state of the tools at the end decides, as
in tau-bench (arXiv 2406.12045).

    reply with calls ──► results of the tools
    reply without    ──► the user's next message, or the user ends the conversation and the final state is scored

The user's script is private, topics in the order in which the user raises them, with the facts that the user knows:
the policy learns it bit by bit. What the user says are messages of an environment, so they are never trained on. A
failure of the user is an infrastructure failure, never a reward.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Annotated, Generic, NotRequired, TypedDict

from pydantic import Field

from whet.base.extras import require
from whet.config import Component, Config
from whet.core.types import D, Task
from whet.tasks.base import AskPolicy, Environment, Step
from whet.tasks.tools.base import SeededToolTasks, ToolEnvironments, ToolEpisode, ToolTasks
from whet.tools.source import ToolServer

USERS = {
    "model": "whet.tasks.users.model:ModelUser",
    "scripted": "whet.tasks.users.scripted:ScriptedUser",
}
"""The built-in users: their names in a recipe, and their classes."""


class Fact(TypedDict):
    """One fact that a user reveals when it is asked for."""

    words: list[str]  # a question with one of these words, in lower case, asks for the fact
    text: str  # the user's sentence


class Topic(TypedDict):
    """One request of a user."""

    say: str  # the sentence that raises it, without its facts
    facts: list[Fact]
    correction: NotRequired[Fact]  # said after the first reply after the last fact; replaces the fact of its words


def instructions(topics: Sequence[Topic]) -> str:
    """Return the topics as private instructions for a model that plays the user."""
    lines = list[str]()
    for number, topic in enumerate(topics, 1):
        lines.append(f"{number}. You say: {topic['say']}")
        lines += [f"   If you are asked, you say: {fact['text']}" for fact in topic["facts"]]
        if correction := topic.get("correction"):
            lines.append(f"   Once this is said to be done, you correct yourself: {correction['text']}")
    return "\n".join(lines)


class Speaker(ABC):
    """The user of one episode."""

    @abstractmethod
    async def answer(self, reply: str) -> str | None:
        """Return the user's answer to a reply of the policy; None if the user ends the conversation. An exception is an
        infrastructure failure."""


class Users(ABC):
    """The users of all episodes, and what they share, such as a connection."""

    @abstractmethod
    def speaker(self, task: Task, topics: Sequence[Topic]) -> Speaker:
        """Return the user of a new episode, who wants these topics and has said the last message of the task's
        prompt."""

    def use_policy(self, ask: AskPolicy) -> None:
        """Take the way to the run's generator, if a user is the policy's model under a frozen adapter."""
        return

    async def close(self) -> None:
        """Release what the users share. By default nothing."""
        return


class User(Config, ABC):
    """Base of the settings of users."""

    max_turns: int = Field(default=30, ge=1)
    """Most messages of the user in an episode, the first included. After the reply to the last one the user leaves, and
    the final state is scored."""

    @abstractmethod
    def open(self) -> Users:
        """Return the users of a task set."""


class UserTasks(SeededToolTasks[D], Generic[D], ABC):
    """Base of seeded tool tasks with a user. Subclasses define ``draw``, which returns the user's first message and the
    data; ``script``; ``state``; and ``score`` by the final state."""

    user: Annotated[User, Component(USERS)] = Field(default="scripted", validate_default=True)
    """The user: ``scripted``, by rules, or ``model``, a language model."""

    @property
    def score_names(self) -> Collection[str]:
        """Return the declared scores, the counts of calls, and the scores of the conversation."""
        return [*super().score_names, "user_turns", "user_left"] if self.named_scores else ()

    @abstractmethod
    def script(self, task: Task[D]) -> Sequence[Topic]:
        """Return the topics of the task's user. The first has been raised by the task's prompt."""

    def open(self) -> "UserEnvironments":
        require("tools", "a task set with tools", "docstring_parser")
        return UserEnvironments(self)


class UserEnvironments(ToolEnvironments):
    """Episodes with a user."""

    def __init__(self, tasks: UserTasks) -> None:
        super().__init__(tasks)
        self.users, self.script, self.max_turns = tasks.user.open(), tasks.script, tasks.user.max_turns

    def make(self, task: Task) -> Environment:
        speaker = self.users.speaker(task, self.script(task))
        return UserEpisode(self.tasks, task, self.servers, speaker, self.max_turns)

    def use_policy(self, ask: AskPolicy) -> None:
        self.users.use_policy(ask)

    async def close(self) -> None:
        await self.users.close()
        await super().close()


class UserEpisode(ToolEpisode):
    """An episode of a policy with tools and a user."""

    def __init__(
        self, tasks: ToolTasks, task: Task, servers: Sequence[ToolServer], speaker: Speaker, max_turns: int
    ) -> None:
        super().__init__(tasks, task, servers)
        self.speaker, self.max_turns, self.turns = speaker, max_turns, 1

    async def answered(self, reply: str) -> Step:
        message = await self.speaker.answer(reply) if self.turns < self.max_turns else None
        if message is not None:
            self.turns += 1
            scores = self.counts() | {"user_turns": float(self.turns)}
            return Step(done=False, messages=[{"role": "user", "content": message}], scores=scores)
        step = await super().answered(reply)
        step.scores |= {"user_turns": float(self.turns), "user_left": float(self.turns >= self.max_turns)}
        return step
