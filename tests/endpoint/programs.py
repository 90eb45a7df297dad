"""Programs for tests of episodes that call the model themselves."""

import asyncio
import contextlib
import json
import threading
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI, RateLimitError

from whet.core.types import Task

TOOL: Any = {
    "type": "function",
    "function": {"name": "count", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
_shared = OpenAI(base_url="http://localhost", api_key="none", timeout=60)  # creating a client takes 70 ms
tries: dict[str, int] = {}
threads: set[str] = set()
released = threading.Event()  # by a test, once nothing waits for the program that hangs


def client(base_url: str, api_key: str) -> OpenAI:
    return _shared.with_options(base_url=base_url, api_key=api_key)


def team(task: Task, base_url: str, api_key: str) -> str:
    """Write a draft, let a sub-agent with a separate history comment on it, use a tool, and answer."""
    threads.add(threading.current_thread().name)
    model = client(base_url, api_key).chat.completions
    messages: list[Any] = [*task.prompt]
    draft = model.create(model="gpt-x", messages=messages).choices[0].message
    critic: list[Any] = [{"role": "system", "content": "judge"}, {"role": "user", "content": draft.content}]
    comment = model.create(model="gpt-x", messages=critic).choices[0].message
    again = [*critic, comment.model_dump(), {"role": "user", "content": "sure?"}]
    model.create(model="gpt-x", messages=again)
    count = str(len(draft.content or ""))  # the result of a tool
    messages += [draft.model_dump(), {"role": "tool", "tool_call_id": "1", "content": count}]
    return model.create(model="gpt-x", messages=messages).choices[0].message.content or ""


async def ask(task: Task, base_url: str, api_key: str) -> dict[str, float]:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
        answer = await model.responses.create(model="m", input=task.prompt[0]["content"])
    return {"reward": len(answer.output_text) / 10, "asked": 1.0}


async def late(task: Task, base_url: str, api_key: str) -> float:
    """Take too long before the first call."""
    await asyncio.sleep(60)
    return 1.0


async def right(task: Task, base_url: str, api_key: str) -> bool:
    await ask(task, base_url, api_key)
    return True


def silent(task: Task, base_url: str, api_key: str) -> float:
    return 1.0


def clumsy(task: Task, base_url: str, api_key: str) -> float:
    """Fail in the first attempt, and ask for another temperature in each."""
    tries[task.uid] = tries.get(task.uid, 0) + 1
    asked: Any = {"messages": task.prompt, "temperature": 0.2}
    client(base_url, api_key).chat.completions.create(model="m", **asked)
    if tries[task.uid] == 1:
        raise ConnectionError("the weather service is away")
    return 1.0


def talkative(task: Task, base_url: str, api_key: str) -> float:
    """Call the model without end."""
    model = client(base_url, api_key)
    while True:
        model.chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]


def unlucky(task: Task, base_url: str, api_key: str) -> float:
    """Call the model, then fail because of a tool."""
    client(base_url, api_key).chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]
    raise ConnectionError("the weather service is away")


def stubborn(task: Task, base_url: str, api_key: str) -> float:
    """Continue without the model after a refused call, then fail because of a tool."""
    with contextlib.suppress(RateLimitError):
        talkative(task, base_url, api_key)
    raise ConnectionError("the weather service is away")


async def persistent(task: Task, base_url: str, api_key: str) -> float:
    """Repeat a call that fails, as many libraries do, and return a reward in the end."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as model:
        for _ in range(50):
            tries[task.uid] = tries.get(task.uid, 0) + 1
            with contextlib.suppress(RateLimitError):
                await model.chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]
            await asyncio.sleep(0.02)
    return 1.0


async def parallel(task: Task, base_url: str, api_key: str) -> float:
    """Make two calls at once, with one turn left; raise the refusal after the other call is answered."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as model:
        request: Any = {"model": "m", "messages": task.prompt}
        answers = await asyncio.gather(
            *(model.chat.completions.create(**request) for _ in range(2)), return_exceptions=True
        )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return 1.0


http_client = "openai"


def plain(task: Task, base_url: str, api_key: str) -> float:
    """Call the model without end, with ``http_client``."""
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    url, body = f"{base_url}/chat/completions", {"model": "m", "messages": task.prompt}
    while True:
        if http_client == "openai":
            try:
                talkative(task, base_url, api_key)
            except RateLimitError:
                raise RuntimeError("the agent failed") from None
        elif http_client == "httpx":
            httpx.post(url, headers=headers, json=body, timeout=60).raise_for_status()
        elif http_client == "urllib":
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            urllib.request.urlopen(request, timeout=60).close()
        else:
            try:
                talkative(task, base_url, api_key)
            except RateLimitError as error:
                raise ExceptionGroup("of all tasks", [ValueError("another"), error]) from None


def deaf(task: Task, base_url: str, api_key: str) -> float:
    """Ignore all errors of the model."""
    try:
        return clumsy(task, base_url, api_key)
    except Exception:
        return 1.0


def hanging(task: Task, base_url: str, api_key: str) -> float:
    client(base_url, api_key).chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]
    released.wait(240)
    return 1.0


def wrong(task: Task, base_url: str, api_key: str) -> Any:
    client(base_url, api_key).chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]
    return {"score": 1.0}


def summarising(task: Task, base_url: str, api_key: str, turns: int = 12, every: int = 4) -> str:
    """Work for many turns; after each ``every`` of them the history becomes a summary. Return the last reply."""
    model = client(base_url, api_key).chat.completions
    history: list[Any] = [*task.prompt]
    for turn in range(1, turns + 1):
        reply = model.create(model="m", messages=history).choices[0].message
        history += [reply.model_dump(), {"role": "user", "content": str(turn)}]
        if turn % every == 0:
            history = [*task.prompt, {"role": "user", "content": f"{turn} done"}]
    return reply.content or ""


def summarising_for_long(task: Task, base_url: str, api_key: str) -> str:
    return summarising(task, base_url, api_key, 300, 50)


async def yielding(task: Task, base_url: str, api_key: str) -> AsyncIterator[str]:
    yield "7"


def of_one_argument(task: Task) -> str:
    return "7"
