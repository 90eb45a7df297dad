"""An endpoint in front of a scripted model, for tests with agents."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.tiny import tiny_tokenizer
from whet.chat.renderer import Renderer
from whet.core.types import Episode
from whet.endpoint.config import EndpointConfig
from whet.endpoint.conversations import Conversations
from whet.endpoint.server import Endpoint
from whet.engines.base import Completion, SamplingParams
from whet.metrics.clock import Timing
from whet.rollouts.episode import play
from whet.rollouts.failures import Failures
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording
from whet.tasks.base import Address, TaskSet
from whet.tasks.isolated import IsolatedEnvironments

RENDERER = Renderer(tiny_tokenizer(), tools_as_text=True)


def call(name: str, **arguments: Any) -> str:
    """Return the text with which the model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Scripted:
    """A model that replies with ``answer(prompt)``. While ``gate`` is not set, it does not reply."""

    answer: Callable[[str], str]
    requests: list[SamplingParams] = field(default_factory=list)
    sampling: int = 0
    cancelled: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        self.requests.append(params)
        self.sampling += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.sampling -= 1
        text = RENDERER.encode_text(self.answer(RENDERER.decode(prompt)))
        tokens = [*text, RENDERER.stop_token_ids[0]][: params.max_new_tokens]
        logprobs = [-0.5 - i / 8 for i in range(len(tokens))]
        return Completion(tokens, logprobs, (3, 3), "stop" if len(tokens) > len(text) else "length", cached=2)


@dataclass
class Streaming(Scripted):
    """A model that hands out its tokens one at a time, and after ``before`` of them only when ``rest`` is set."""

    before: int = 0
    rest: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(
        self, prompt: list[int], params: SamplingParams, session: str, sampled: Callable[[list[int]], None]
    ) -> Completion:
        completion = await self.sample(prompt, params, session)
        for number, token in enumerate(completion.tokens):
            if number == self.before:
                try:
                    await self.rest.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            sampled([token])
            await asyncio.sleep(0)
        return completion


def first_episode(
    taskset: TaskSet, answer: Callable[[str], str] | str, sampling: Sampling, *, split: str = "train", retries: int = 0
) -> Episode:
    """Play the first task of a task set whose episodes call the model over HTTP."""

    async def go() -> Episode:
        model: Any = Scripted(answer if callable(answer) else lambda _: answer)
        model.gate.set()
        environments, endpoint = IsolatedEnvironments(taskset.open()), Endpoint(RENDERER)
        task = taskset.tasks(split)[0]
        more: dict[str, Any] = {"seed": 0, "session": "e", "timing": Timing(), "endpoint": endpoint}
        more["failures"] = Failures()
        try:
            return await play(environments, task, model, RENDERER, sampling, retries=retries, **more)
        finally:
            await endpoint.close()
            await environments.close()

    return asyncio.run(go())


@dataclass
class Scene:
    """An endpoint with its model, episode and clients."""

    endpoint: Endpoint
    address: Address
    conversations: Conversations
    model: Scripted
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    @property
    def recording(self) -> Recording:
        return self.conversations.recording

    async def chat(self, *messages: Any, **changes: Any) -> httpx.Response:
        """POST a chat request; texts are alternately messages of the user and the assistant."""
        roles = ("user", "assistant")
        conversation = [
            m if isinstance(m, dict) else {"role": roles[i % 2], "content": m} for i, m in enumerate(messages)
        ]
        return await self.http.post("/chat/completions", json={"model": "any", "messages": conversation, **changes})


@contextlib.asynccontextmanager
async def scene(
    answer: Callable[[str], str] | str,
    *,
    name: str | None = None,
    config: EndpointConfig | None = None,
    kind: type[Scripted] = Scripted,
    **sampling: Any,
) -> AsyncIterator[Scene]:
    """Yield an endpoint with one open episode, of a model of a ``kind``."""
    model = kind(answer if callable(answer) else lambda _: str(answer))
    model.gate.set()
    settings = Sampling(**({"max_turns": 20, "max_new_tokens": 200, "max_prompt_tokens": 1000} | sampling))
    conversations = Conversations(Recording(model, RENDERER, settings, "episode", seed=0))  # type: ignore[arg-type]
    endpoint = Endpoint(RENDERER, config, model=name)
    endpoint.start()
    try:
        with endpoint.open(conversations) as address:
            headers = {"authorization": f"Bearer {address.api_key}"}
            async with (
                httpx.AsyncClient(base_url=address.base_url, headers=headers, timeout=60) as http,
                AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=1, timeout=60) as client,
            ):
                yield Scene(endpoint, address, conversations, model, http, client)
    finally:
        await conversations.close()
        await endpoint.close()
