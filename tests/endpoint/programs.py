"""Programs for tests of episodes that call the model themselves. Each does what its name says."""

import threading
import time
from typing import Any

from openai import AsyncOpenAI, OpenAI

from whet.types import Task

TOOL: Any = {
    "type": "function",
    "function": {"name": "count", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
_shared = OpenAI(base_url="http://localhost", api_key="none", timeout=20)  # making a client takes 70 ms
tries: dict[str, int] = {}
threads: set[str] = set()


def client(base_url: str, api_key: str) -> OpenAI:
    return _shared.with_options(base_url=base_url, api_key=api_key)


def team(task: Task, base_url: str, api_key: str) -> str:
    """Drafts, has a sub-agent with a history of its own comment on it, uses a tool, and answers."""
    threads.add(threading.current_thread().name)
    model = client(base_url, api_key).chat.completions
    messages: list[Any] = [*task.prompt]
    draft = model.create(model="gpt-x", messages=messages).choices[0].message
    critic: list[Any] = [{"role": "system", "content": "judge"}, {"role": "user", "content": draft.content}]
    comment = model.create(model="gpt-x", messages=critic).choices[0].message
    again = [*critic, comment.model_dump(), {"role": "user", "content": "sure?"}]
    model.create(model="gpt-x", messages=again)
    count = str(len(draft.content or ""))  # a tool of its own
    messages += [draft.model_dump(), {"role": "tool", "tool_call_id": "1", "content": count}]
    return model.create(model="gpt-x", messages=messages).choices[0].message.content or ""


async def ask(task: Task, base_url: str, api_key: str) -> dict[str, float]:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
        answer = await model.responses.create(model="m", input=task.prompt[0]["content"])
    return {"reward": len(answer.output_text) / 10, "asked": 1.0}


def silent(task: Task, base_url: str, api_key: str) -> float:
    return 1.0


def clumsy(task: Task, base_url: str, api_key: str) -> float:
    """Fails at its first try."""
    tries[task.uid] = tries.get(task.uid, 0) + 1
    client(base_url, api_key).chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]
    if tries[task.uid] == 1:
        raise ConnectionError("the weather service is away")
    return 1.0


def talkative(task: Task, base_url: str, api_key: str) -> float:
    """Never stops asking."""
    model = client(base_url, api_key)
    while True:
        model.chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]


def deaf(task: Task, base_url: str, api_key: str) -> float:
    """Takes no error for an answer."""
    try:
        return clumsy(task, base_url, api_key)
    except Exception:
        return 1.0


def hanging(task: Task, base_url: str, api_key: str) -> float:
    client(base_url, api_key).chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]
    time.sleep(2)
    return 1.0


def wrong(task: Task, base_url: str, api_key: str) -> Any:
    client(base_url, api_key).chat.completions.create(model="m", messages=task.prompt)  # type: ignore[arg-type]
    return {"score": 1.0}
