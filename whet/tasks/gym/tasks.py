"""Tasks and rewards of NeMo Gym's resources servers. whet takes the part of Gym's simple agent, so that it trains on
the sampled tokens: seed the session, sample and call tools until a reply calls none, then verify."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from whet.base.errors import ConfigError, DataError
from whet.core.content import text_of
from whet.core.types import Group, Message, Task, ToolCall
from whet.data.row import read_rows
from whet.fetch.http import HttpClient
from whet.tasks.base import Environment, Environments, Observation, Step, finite
from whet.tasks.cases import Case
from whet.tasks.gym.client import MAX_BYTES, GymError, GymSession, servers_of
from whet.tasks.gym.items import response, template_tools
from whet.tasks.gym.rows import GymRow
from whet.tasks.task_source import SourcedTasks

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A row as the servers get it, and its place in the file."""

    row: dict[str, Any]
    where: str


class NemoGym(SourcedTasks[ServedRow]):
    """Rows of NeMo Gym, and the servers that grade them."""

    name: ClassVar[str] = "nemo_gym"

    path: str = Field()
    """A JSONL file of rows with ``responses_create_params``, as published for Gym."""
    servers: dict[str, str] = Field(default={})
    """The URL of each resources server by its name, or by the agent's name in the rows' ``agent_ref``. A single server
    serves all rows."""
    head: str | None = None
    """The URL of Gym's head server, which lists the resources servers."""
    max_steps: int = Field(8, gt=0)
    """Replies after which an episode ends and is verified. ``sampling.max_turns`` must be at least this."""
    compare: bool = False
    """Reward a group by the server's ``/compare`` (genrm_compare), which takes all its answers at once."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one request."""
    retries: int = Field(2, ge=0)
    """Repeats of a request that a server did not answer. Calls of tools, which change the server's state, are not
    repeated."""

    @model_validator(mode="after")
    def _has_servers(self) -> "NemoGym":
        if not self.servers and self.head is None:
            raise ValueError("give servers (name: URL), or the head server that lists them")
        return self

    def read(self, path: str) -> list[Task[ServedRow]]:
        tasks = []
        for row in read_rows(path, GymRow, self.columns):
            if row.conversation is None:
                raise DataError(f"{row.where}: field 'responses_create_params' is missing")
            tasks.append(Task("", row.conversation, ServedRow(row.given, row.where)))
        return tasks

    def unearned(self, tasks: Sequence[Task[ServedRow]]) -> Iterable[Case]:
        """Return no cases, because only the servers know what an answer earns."""
        return ()

    def draw(self, rng: random.Random) -> Task[ServedRow]:
        raise ConfigError("data.path is missing: rows of NeMo Gym are read from a file")

    def open(self) -> "GymEnvironments":
        return GymEnvironments(self)


class GymEnvironments(Environments[ServedRow]):
    """The resources servers, and a client of them."""

    def __init__(self, tasks: NemoGym, transport: "httpx.AsyncBaseTransport | None" = None) -> None:
        """``transport`` replaces the network in tests."""
        self.tasks = tasks
        self._http = HttpClient(tasks.deadline, MAX_BYTES, transport=transport)
        self._servers = dict(tasks.servers) or servers_of(tasks.head or "")

    def make(self, task: Task[ServedRow]) -> Environment:
        return GymEpisode(self.session(task), task, self.tasks)

    def session(self, task: Task[ServedRow]) -> GymSession:
        """Return the session of an episode. Raises ``DataError`` for a row whose server is not listed."""
        agent = (task.data.row.get("agent_ref") or {}).get("name", "")
        urls = list(self._servers.values())
        url = self._servers.get(agent) or (urls[0] if len(urls) == 1 else None)
        if url is None:  # mcqa_simple_agent is the agent of mcqa, and mcqa_v2_simple_agent of mcqa_v2 rather than mcqa
            names_of = [name for name in self._servers if name and agent.startswith(f"{name}_")]
            url = self._servers[max(names_of, key=len)] if names_of else None
        if url is None:
            names = ", ".join(self._servers)
            raise DataError(f"{task.data.where}: no server for the agent {agent!r}; data.servers has: {names}")
        return GymSession(self._http, url, self.tasks.retries, task.uid)

    async def score_group(self, task: Task[ServedRow], group: Group) -> None:
        if not self.tasks.compare:
            return
        row = task.data.row
        parameters, start = row["responses_create_params"], len(task.prompt)
        body = {
            "conversation_history": [
                {"role": message["role"], "content": text_of(message["content"])} for message in task.prompt
            ],
            "response_objs": [response(episode.messages[start:], parameters) for episode in group.episodes],
            "principle": row.get("principle"),
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


class GymEpisode(Environment):
    """One episode on a resources server. Verification ends the server's session."""

    def __init__(self, session: GymSession, task: Task[ServedRow], tasks: NemoGym) -> None:
        self.session, self.task, self.tasks = session, task, tasks
        self.conversation: list[Message] = []  # after the prompt
        self.steps = 0

    async def start(self) -> Observation:
        await self.session.post("seed_session", self.task.data.row)
        tools = self.task.data.row["responses_create_params"].get("tools") or []
        return Observation(list(self.task.prompt), template_tools(tools))

    async def step(self, reply: Message) -> Step:
        self.steps += 1
        calls: list[ToolCall] = [  # with ids that are unique in the whole conversation
            {**call, "id": f"{self.steps}_{number}"} for number, call in enumerate(reply.get("tool_calls", []))
        ]
        self.conversation.append({**reply, "tool_calls": calls} if calls else reply)
        declared = {tool.get("name") for tool in self.task.data.row["responses_create_params"].get("tools") or []}
        results: list[Message] = []
        for call in calls:
            function = call["function"]
            if function["name"] in declared:  # the model must not call other paths, such as /verify
                text = await self.session.call(function["name"], function["arguments"])
            else:
                text = f"Error: there is no tool {function['name']!r}"
            results.append({"role": "tool", "name": function["name"], "tool_call_id": call["id"], "content": text})
        self.conversation += results
        if calls and self.steps < self.tasks.max_steps:
            return Step(done=False, messages=results)
        return Step() if self.tasks.compare else await self._verified()

    async def _verified(self) -> Step:
        row = self.task.data.row
        body = row | {"response": response(self.conversation, row["responses_create_params"])}
        answer = await self.session.post("verify", body, once=True)
        if not isinstance(answer, dict) or "reward" not in answer:
            raise GymError(f"/verify of {self.task.uid} gave no reward: {str(answer)[:200]}")
        if answer.get("mask_sample"):
            kind, reason = answer.get("failure_kind"), answer.get("failure_reason")
            raise GymError(f"/verify of {self.task.uid} reports that the episode was not measured: {kind}: {reason}")
        components = answer.get("reward_components") or {}
        return Step(finite(answer["reward"], f"the reward of {self.task.uid}"), scores=dict(components))
