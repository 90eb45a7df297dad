"""Calls of the policy by agents of NeMo Gym. Gym's agents send no token; they call the model of a rollout at
``/ng-rollout/ID/v1/...``, and whet gives an episode the token as its ID.

Two things differ from other agents. Gym's agents execute each call of the model as a request of this name to the
resources server, where ``verify`` would grade and ``seed_session`` would start again: calls of tools that the request
does not declare are renamed on the way to the agent, and their names restored in its next request. And a used-up budget
is an empty, incomplete reply, after which Gym's agents let the episode be verified as it is.
"""

from collections.abc import Callable
from dataclasses import replace

from pydantic import JsonValue

from whet.core.types import Message, ToolCall
from whet.endpoint.conversations import Responder
from whet.endpoint.request import Answer, ApiError, Question
from whet.endpoint.responses import ResponsesRequest
from whet.rollouts.session import USED_UP
from whet.rollouts.watched import Watch

ROLLOUT = "rollout"  # the parameter of the paths
PREFIXES = (f"/ng-rollout/{{{ROLLOUT}}}", f"/ng-rollout/{{{ROLLOUT}}}/training-token-capture")
_UNDECLARED = "undeclared_"


class GymResponsesRequest(ResponsesRequest):
    """A request of Gym, which may leave out the model. Gym's agents make calls one after the other in any case."""

    model: str = "policy"
    parallel_tool_calls: JsonValue = None


class GymResponder:
    """Answers the calls of an agent of Gym in one episode."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    @property
    def longest(self) -> int:
        return self._responder.longest

    async def answer(self, question: Question, repeated: bool, watch: Watch | None = None) -> Answer:
        """See ``Responder``."""
        declared = {tool["function"]["name"] for tool in question.tools or ()}
        history = [_renamed(message, declared, _restored) for message in question.messages]
        try:
            answer = await self._responder.answer(replace(question, messages=history), repeated, watch)
        except ApiError as refused:
            if USED_UP not in str(refused):
                raise
            return Answer({"role": "assistant", "content": ""}, [], [], [], complete=False)
        return replace(answer, message=_renamed(answer.message, declared, _hidden))


def _hidden(name: str) -> str:
    """Return a name at which no resources server has a route, for any text."""
    return _UNDECLARED + name.encode().hex()


def _restored(name: str) -> str:
    try:
        return bytes.fromhex(name.removeprefix(_UNDECLARED)).decode() if name.startswith(_UNDECLARED) else name
    except ValueError:
        return name


def _renamed(message: Message, declared: set[str], rename: Callable[[str], str]) -> Message:
    """Return the message with new names of undeclared tools, in calls and in results."""
    changed = message
    if calls := message.get("tool_calls"):
        changed = {**changed, "tool_calls": [_call(call, declared, rename) for call in calls]}
    if (name := message.get("name")) is not None and name not in declared:
        changed = {**changed, "name": rename(name)}
    return changed


def _call(call: ToolCall, declared: set[str], rename: Callable[[str], str]) -> ToolCall:
    function = call["function"]
    if function["name"] in declared:
        return call
    return {**call, "function": {**function, "name": rename(function["name"])}}
