"""Servers of OpenEnv as task sets: an episode is a session of messages over a WebSocket.

{"type": "reset" | "step" | "close", "data": ...} ──► /ws ──► {"type": "observation" | "error", "data": ...}
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field, field_validator

from whet.base.addresses import checked_address
from whet.base.errors import ConfigError
from whet.base.extras import extra
from whet.base.seeds import derive_seed
from whet.base.strict_json import STRICT, JsonObject
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.tasks.base import Environment, Observation, Step, finite
from whet.tasks.prompts import messages
from whet.tasks.scores import NamedScore, NamedScores
from whet.tasks.splits import MAX_SIZE, DrawnTasks, Split

with extra("tasks", "data.type=openenv"):
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import WebSocketException


class OpenEnvError(Exception):
    """A server failed, or its answer can't be read. Never a reward: the episode is repeated or its group dropped."""


class InvalidAction(Exception):
    """The server rejects an action, which is the model's fault."""


@dataclass(frozen=True, slots=True)
class Seed:
    """The seed of an episode's reset."""

    seed: int


class OpenEnv(DrawnTasks[Seed]):
    """Episodes of one server; a task is a seed of its ``reset``."""

    named_scores: ClassVar[NamedScores] = {"malformed_action": NamedScore()}

    url: str
    """The address of the server, as ``ws://127.0.0.1:8000`` or ``.../ws``."""
    prompt: str = "{observation}"
    """The first user message. ``{observation}`` is replaced by the observation of the reset."""
    system: str | None = None
    """The system message. It should describe the task, because OpenEnv's observations seldom do."""
    action: str | None = None
    """The field of an action that holds the text of the reply. None: the reply is the whole action, a JSON object."""
    observation: str | None = None
    """The field of an observation that is shown to the model. None: the whole observation, as JSON."""
    reset: JsonObject = Field(default={})
    """Further arguments of a reset, in addition to the seed."""
    train_size: int = Field(default=1000, ge=1, le=MAX_SIZE)
    test_size: int = Field(default=100, ge=0, le=MAX_SIZE)
    max_steps: int = Field(20, gt=0)
    """Actions after which an episode ends. ``sampling.max_turns`` must be at least this."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for an answer of the server."""

    @field_validator("url")
    @classmethod
    def _is_websocket(cls, url: str) -> str:
        url = checked_address(url, ("ws", "wss"))
        return url if url.rstrip("/").endswith("/ws") else f"{url.rstrip('/')}/ws"

    def splits(self) -> dict[Split, list[Task[Seed]]]:
        return {split: [self._task(split, number) for number in range(size)] for split, size in self.sizes.items()}

    def _task(self, split: Split, number: int) -> Task[Seed]:
        seed = derive_seed(self.seed, "openenv", split, number) % 2**31
        return Task(f"openenv/{split}/{number}", messages(self.system, self.prompt), Seed(seed))

    def make(self, task: Task[Seed]) -> Environment:
        return OpenEnvEpisode(self, task)


class OpenEnvEpisode(Environment):
    """An episode: one session of the server."""

    def __init__(self, settings: OpenEnv, task: Task[Seed]) -> None:
        self.settings, self.task, self.steps = settings, task, 0
        self.connection: ClientConnection | None = None

    async def start(self) -> Observation:
        """Connect, and return the first messages. Raises ``OpenEnvError`` if the server doesn't answer."""
        try:
            self.connection = await connect(
                self.settings.url, open_timeout=self.settings.deadline, close_timeout=5, max_size=16_000_000
            )
        except (OSError, WebSocketException) as problem:
            raise OpenEnvError(f"{self.settings.url} does not answer: {problem}") from None
        shown = await self._ask("reset", self.settings.reset | {"seed": self.task.data.seed})
        asked = self.settings.prompt.replace("{observation}", self._text(shown))
        return Observation(messages(self.settings.system, asked))

    async def step(self, reply: Message) -> Step:
        """Return the reward of an action. An invalid action earns nothing, and its error is shown to the model."""
        self.steps += 1
        last = self.steps >= self.settings.max_steps
        try:
            shown = await self._ask("step", self._action(text_of(reply["content"])))
        except InvalidAction as problem:
            text = f"Error: that is not a valid action: {problem}"
            return Step(done=last, messages=messages(None, text), scores={"malformed_action": 1.0})
        reward = finite(shown.get("reward") or 0.0, f"the reward of {self.task.uid}")
        return Step(reward, done=last or bool(shown.get("done")), messages=messages(None, self._text(shown)))

    async def close(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(Exception):  # the server may have gone
                await self.connection.send('{"type": "close"}')
            await self.connection.close()

    def _action(self, text: str) -> dict[str, object]:
        """Return the action in a reply. Raises ``InvalidAction``."""
        if self.settings.action is not None:
            return {self.settings.action: text}
        with contextlib.suppress(ValueError):
            action = STRICT.decode(text.strip().removeprefix("```json").removesuffix("```"))
            if isinstance(action, dict):
                return action
        raise InvalidAction("it must be a JSON object, and nothing else")

    def _text(self, shown: JsonObject) -> str:
        observation = shown.get("observation")
        if self.settings.observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or self.settings.observation not in observation:
            field = self.settings.observation
            raise ConfigError(f"data.observation: the observation has no field {field!r}: {str(observation)[:200]}")
        return str(observation[self.settings.observation])

    async def _ask(self, kind: str, data: JsonObject) -> dict[str, object]:
        assert self.connection is not None
        where = f"{self.settings.url}: {kind} of {self.task.uid}"
        try:
            async with asyncio.timeout(self.settings.deadline):
                await self.connection.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self.connection.recv())
            data, answered = dict(answer["data"]), answer["type"]
        except TimeoutError:
            raise OpenEnvError(f"{where}: no answer within data.deadline = {self.settings.deadline:g} s") from None
        except Exception as problem:
            raise OpenEnvError(f"{where} failed: {type(problem).__name__}: {problem}") from None
        if answered == "error" and kind == "step" and data.get("code") == "VALIDATION_ERROR":
            raise InvalidAction(str(data.get("errors") or data.get("message"))[:500])
        if answered != "observation":
            raise OpenEnvError(f"{where}: {str(data)[:300]}")
        return data
