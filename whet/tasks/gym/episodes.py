"""Episodes on NeMo Gym's servers: whet plays Gym's simple agent with a resources server, or an agent server of Gym
plays against the policy at whet's endpoint."""

import logging
from uuid import uuid4

from whet.base.errors import DataError
from whet.core.types import Message, Task, ToolCall
from whet.tasks.base import Address, Environment, Observation, Program, Step, checked_score
from whet.tasks.gym.client import GymError, GymSession
from whet.tasks.gym.items import response, template_tools
from whet.tasks.gym.mcp_tools import MCPTools
from whet.tasks.gym.served_row import ServedRow

log = logging.getLogger(__name__)

_SANDBOX = ("sandbox_access", "sandbox_handle")  # in the answer of a server that hands a sandbox to the agent
_UNKNOWN_TOKEN = "the request needs a valid token"  # of whet's endpoint, in the agent's report


class GymEpisode(Environment):
    """One episode on a resources server, played as Gym's simple agent does, so that the sampled tokens are trained."""

    def __init__(self, session: GymSession, task: Task[ServedRow], max_steps: int, compare: bool) -> None:
        self.session, self.task, self.row, self.max_steps, self.compare = (
            session,
            task,
            task.data,
            max_steps,
            compare,
        )
        self.declared = {str(tool.get("name")) for tool in self.row.tools}
        self.conversation: list[Message] = []  # after the prompt
        self.steps = 0
        self.mcp: MCPTools | None = None
        self._seeded = False
        episode_id = {"rollout_id": uuid4().hex, "attempt": 0}
        self._names = {"resources_session_id": f"whet-{uuid4().hex}", "episode_id": episode_id}

    async def start(self) -> Observation:
        """Seed the session: with the row itself, or as Gym 0.7's environment servers do if the row is materialized."""
        row = self.row
        typed = {**self._names, "task_id": row.row.get("task_id"), "task_data": row.fields}
        self._seeded = True  # also if the answer is lost
        seed = await self.session.post("seed_session", typed if row.materialized else row.row)
        seed = seed if isinstance(seed, dict) else {}
        if any(seed.get(name) is not None for name in _SANDBOX):
            raise DataError(
                f"{row.where}: {self.session.url} gives the agent of this row a sandbox, which whet's own simple agent "
                "can't use; start an agent of Gym that can, and name it in data.agents"
            )
        if access := seed.get("resources_tools") or seed.get("mcp"):
            self.mcp = await MCPTools.listed(self.session, access, besides=self.declared)
        return Observation(list(self.task.prompt), template_tools([*row.tools, *(self.mcp.tools if self.mcp else ())]))

    async def step(self, reply: Message) -> Step:
        self.steps += 1
        calls: list[ToolCall] = [  # with ids that are unique in the whole conversation
            {**call, "id": f"{self.steps}_{number}"} for number, call in enumerate(reply.get("tool_calls", []))
        ]
        self.conversation.append({**reply, "tool_calls": calls} if calls else reply)
        results: list[Message] = []
        for call in calls:
            function = call["function"]
            text = await self._result(function["name"], function["arguments"])
            results.append({"role": "tool", "name": function["name"], "tool_call_id": call["id"], "content": text})
        self.conversation += results
        if calls and self.steps < self.max_steps:
            return Step(done=False, messages=results)
        return Step() if self.compare else await self._verified()

    async def close(self) -> None:
        """Have the server release the session; a failure to do so does not change the episode's reward."""
        if not self._seeded:
            return
        try:
            await self.session.close(self._names if self.row.materialized else {})
        except GymError as error:
            log.warning("the session of %s was not closed: %s", self.task.uid, error)

    async def _result(self, name: str, arguments: dict[str, object]) -> str:
        if name in self.declared:  # never another path, such as /verify
            return await self.session.call(name, arguments)
        if self.mcp is not None and name in self.mcp.names:
            return await self.mcp.call(name, arguments)
        return f"Error: there is no tool {name!r}"

    async def _verified(self) -> Step:
        parameters = self.row.parameters
        body = {
            "responses_create_params": parameters,
            **self.row.fields,
            "response": response(self.conversation, parameters),
        }
        return verified(await self.session.post("verify", body, once=True), "/verify", self.task)


class AgentEpisode(Program):
    """One episode that an agent server of Gym, or an environment server, plays from seeding to verification. It calls
    the policy at whet's endpoint under ``/ng-rollout/TOKEN``."""

    def __init__(self, session: GymSession, task: Task[ServedRow], number: int) -> None:
        self.session, self.task, self.row, self.number = session, task, task.data, number

    async def run(self, address: Address) -> Step:
        """Return the reward. Raises ``GymError`` if the agent fails, or reports a reward that measures nothing."""
        row = self.row.row
        if self.row.materialized:
            episode_id = {"rollout_id": address.api_key, "attempt": 0}
            task = {"task_id": row["task_id"], "task_input": row["task_input"]}
            answer = await self._run({"episode_id": episode_id, "task": task}, address)
            if not isinstance(answer, dict) or (failure := answer.get("failure")) is not None:
                raise GymError(f"/run of {self.task.uid} reports a failure: {str(failure)[:1000]}")
            return verified(answer.get("result"), "/run", self.task)
        names = {"_ng_rollout_id": address.api_key, "_ng_task_index": self.number, "_ng_rollout_index": 0}
        return verified(await self._run(row | names, address), "/run", self.task)

    async def _run(self, body: dict[str, object], address: Address) -> object:
        try:
            return await self.session.post("run", body, once=True)
        except GymError as error:
            if _UNKNOWN_TOKEN in str(error):
                where = address.base_url.removesuffix("/v1")
                raise GymError(
                    "set observability_enabled: true in Gym's settings (docs/environments/nemo_gym.md): the agent "
                    f"called whet's endpoint ({where}) without the episode's ID. {error}"
                ) from None
            raise


def verified(answer: object, path: str, task: Task[ServedRow]) -> Step:
    """Return the reward and scores in the answer of a verification. Raises ``GymError`` for an answer without a
    reward, and for one whose reward was not measured."""
    if not isinstance(answer, dict) or "reward" not in answer:
        raise GymError(f"{path} of {task.uid} gave no reward: {str(answer)[:200]}")
    if answer.get("mask_sample"):
        kind, reason = answer.get("failure_kind"), answer.get("failure_reason")
        raise GymError(f"{path} of {task.uid} reports that the episode was not measured: {kind}: {reason}")
    if (failure := answer.get("_ng_failure_class")) is not None:  # with it, agents of Gym report a reward of 0
        raise GymError(f"{path} of {task.uid} reports a failure: {failure}: {str(answer.get('error'))[:1000]}")
    if answer.get("verification_skipped"):
        raise GymError(
            f"{path} of {task.uid} gave a constant reward: remove skip_verification from the agent's settings"
        )
    scores = answer.get("reward_components") or {}
    checked = {name: checked_score(name, value, f"of {task.uid}") for name, value in dict(scores).items()}
    return Step(checked_score("reward", answer["reward"], f"of {task.uid}"), scores=checked)
