"""Tasks and rewards of NeMo Gym's servers. Rows of Gym's simple agent are played by whet, so that it trains on the
sampled tokens: seed the session, sample and call tools until a reply calls none, then verify. Rows of other agents are
played by Gym's agent servers, with the policy at whet's endpoint."""

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from whet.base.addresses import HttpAddress
from whet.base.errors import ConfigError, DataError
from whet.base.extras import require
from whet.core.content import text_of
from whet.core.types import Group, Task
from whet.data.row import read_rows
from whet.fetch.http import HttpClient
from whet.tasks.base import Environment, Environments, finite
from whet.tasks.cases import Case
from whet.tasks.gym.client import MAX_BYTES, GymError, GymSession
from whet.tasks.gym.episodes import AgentEpisode, GymEpisode
from whet.tasks.gym.items import response
from whet.tasks.gym.routing import Servers, servers_of
from whet.tasks.gym.served_row import ServedRow, WrittenRow
from whet.tasks.splits import question_key
from whet.tasks.task_source import SourcedTasks

if TYPE_CHECKING:
    import httpx


class NemoGym(SourcedTasks[ServedRow]):
    """Rows of NeMo Gym, and the servers that grade them."""

    name: ClassVar[str] = "nemo_gym"

    path: str = Field()
    """A JSONL file of rows with ``responses_create_params``, as published for Gym."""
    servers: dict[str, HttpAddress] = Field(default={})
    """The URL of each resources server by its name; whet plays the rows of its simple agent, NAME_simple_agent. Other
    rows of the simple agent are found by the agent's name, or the taskset of a materialized row."""
    agents: dict[str, HttpAddress] = Field(default={})
    """The URL of each agent server of Gym by the agent's name in the rows' ``agent_ref``, or of each environment server
    by the taskset in the rows' ``task_id``. It plays these rows against the policy."""
    head: HttpAddress | None = None
    """The URL of Gym's head server, which lists resources servers and agent servers; ``servers`` and ``agents`` precede
    its list."""
    max_steps: int = Field(8, gt=0)
    """Replies after which an episode ends and is verified. ``sampling.max_turns`` must be at least this."""
    compare: bool = False
    """Reward a group by the server's ``/compare`` (genrm_compare), which takes all its answers at once."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one request to a resources server."""
    agent_deadline: float = Field(1800.0, gt=0)
    """Seconds for one episode of an agent server."""
    retries: int = Field(2, ge=0)
    """Repeats of a request that a server did not answer. Calls of tools, which change the server's state, are not
    repeated."""

    @model_validator(mode="after")
    def _has_servers(self) -> "NemoGym":
        if not self.servers and not self.agents and self.head is None:
            raise ValueError("give servers or agents (name: URL), or the head server that lists them")
        if self.agents and self.compare:
            raise ValueError(
                "compare is for rows that whet plays; agents are rewarded by the server that verifies them"
            )
        return self

    def read(self, path: str) -> list[Task[ServedRow]]:
        tasks = [row.task() for row in read_rows(path, WrittenRow, self.columns)]
        if self.head is None:  # otherwise once it has answered
            self._check(tasks, Servers(self.servers, self.agents))
        return tasks

    def key(self, task: Task[ServedRow]) -> int:
        """Return a number that is equal for two rows with the same question for the same player."""
        return question_key(f"{task.data.player} {super().key(task)}")

    def listed(self) -> Servers:
        """Return all servers. Raises ``ConfigError`` if the head server doesn't answer, and ``DataError`` naming a row
        whose agent is not known."""
        listed = servers_of(self.head) if self.head is not None else Servers({}, {})
        agents = {**listed.agents, **self.agents}
        servers = Servers({**listed.resources, **self.servers}, agents)
        self._check([*self.tasks("train"), *self.tasks("test")], servers)
        return servers

    def _check(self, tasks: Sequence[Task[ServedRow]], servers: Servers) -> None:
        for task in tasks:
            servers.route(task.data)

    def unearned(self, tasks: Sequence[Task[ServedRow]]) -> Iterable[Case]:
        """Return no cases, because only the servers know what an answer earns."""
        return ()

    def draw(self, rng: random.Random) -> Task[ServedRow]:
        raise ConfigError("data.path is missing: rows of NeMo Gym are read from a file")

    def open(self) -> "GymEnvironments":
        if self.agents:
            require("serve", "data.agents of NeMo Gym", "starlette", "uvicorn")
        return GymEnvironments(self)


class GymEnvironments(Environments[ServedRow]):
    """The resources servers, and a client of them."""

    def __init__(self, tasks: NemoGym, transport: "httpx.AsyncBaseTransport | None" = None) -> None:
        """``transport`` replaces the network in tests."""
        self.tasks, self.servers = tasks, tasks.listed()
        self._http = HttpClient(tasks.deadline, MAX_BYTES, transport=transport, setting="data.deadline")
        self._agents = HttpClient(tasks.agent_deadline, MAX_BYTES, transport=transport, setting="data.agent_deadline")
        self._episodes = 0  # of agents

    def make(self, task: Task[ServedRow]) -> Environment:
        row = task.data
        if self.servers.route(row).by_agent:
            raise DataError(
                f"{row.where}: the agent {row.player!r} plays whole episodes against a model, not given replies"
            )
        return GymEpisode(self.session(task), task, self.tasks.max_steps, self.tasks.compare)

    def program_for(self, task: Task[ServedRow]) -> AgentEpisode | None:
        if not self.servers.route(task.data).by_agent:
            return None
        self._episodes += 1
        return AgentEpisode(self.session(task), task, self._episodes)

    def session(self, task: Task[ServedRow]) -> GymSession:
        """Return the session of an episode with the server of its row."""
        route = self.servers.route(task.data)
        return GymSession(self._agents if route.by_agent else self._http, route.url, self.tasks.retries, task.uid)

    async def score_group(self, task: Task[ServedRow], group: Group) -> None:
        if not self.tasks.compare:
            return
        row, start = task.data, len(task.prompt)
        parameters = row.parameters
        body = {
            "conversation_history": [
                {"role": message["role"], "content": text_of(message["content"])} for message in task.prompt
            ],
            "response_objs": [response(episode.messages[start:], parameters) for episode in group.episodes],
            "principle": row.fields.get("principle"),
        }
        answer = await self.session(task).post("compare", body)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(group.episodes):
            raise GymError(
                f"/compare gave {len(rewards or ())} rewards for {len(group.episodes)} answers of {task.uid}"
            )
        for episode, reward in zip(group.episodes, rewards, strict=True):
            episode.reward = finite(reward, f"the reward of /compare for {task.uid}")

    async def close(self) -> None:
        await self._http.close()
        await self._agents.close()
