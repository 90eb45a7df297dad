"""Plays episodes of NeMo Gym with replies from a script."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.tasks.base import Environments
from whet.tasks.episodes import play as base_play
from whet.tasks.gym.tasks import GymEnvironments, NemoGym


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(name: str, **arguments: Any) -> Message:
    call: Any = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


async def play(environments: Environments, task: Task, replies: Sequence[Message]) -> tuple[float, list[str]]:
    """Return the reward, and the results of the tools."""
    _, episode = await base_play(environments.make(task), replies)
    assert episode.done, "the episode did not end"
    return episode.reward, [text_of(message["content"]) for message in episode.messages if message["role"] == "tool"]


class Recorder(httpx.AsyncBaseTransport):
    """Passes requests on and keeps them with their answers."""

    def __init__(self) -> None:
        self.inner = httpx.AsyncHTTPTransport()
        self.exchanges: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self.inner.handle_async_request(request)
        content = await answer.aread()
        cookie = request.headers.get("cookie")
        self.exchanges.append(
            {
                "path": request.url.path, "body": json.loads(request.content), "cookie": cookie,
                "status": answer.status_code, "answer": content.decode(), "sets": answer.headers.get("set-cookie"),
            }
        )  # fmt: skip
        headers = {"set-cookie": answer.headers["set-cookie"]} if "set-cookie" in answer.headers else {}
        return httpx.Response(answer.status_code, content=content, headers=headers)


class Replayer(httpx.AsyncBaseTransport):
    """Gives the recorded answers, in order. A request that differs from the recorded one fails."""

    def __init__(self, exchanges: list[dict[str, Any]]) -> None:
        self.left = list(exchanges)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/close_session":  # after the recorded end; its names are random
            assert not self.left
            return httpx.Response(200, json={})
        expected = self.left.pop(0)
        assert request.url.path == expected["path"]
        assert json.loads(request.content) == expected["body"]
        assert request.headers.get("cookie") == expected["cookie"]
        headers = {"set-cookie": expected["sets"]} if expected["sets"] else {}
        return httpx.Response(expected["status"], content=expected["answer"].encode(), headers=headers)


def over(path: str, server: str, transport: httpx.AsyncBaseTransport | None, **settings: Any) -> GymEnvironments:
    """Return the environments of a file whose rows are all played with one server."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    names = {name_of(row) for row in rows}
    tasks = NemoGym(path=path, servers=dict.fromkeys(names, server), test_size=0, retries=0, **settings)
    return GymEnvironments(tasks, transport)


def name_of(row: dict[str, Any]) -> str:
    """Return the name by which a row finds its server."""
    return str(row["task_id"]["taskset"] if "task_id" in row else row.get("agent_ref", {}).get("name", "it"))
