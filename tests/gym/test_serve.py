"""A task set as a resources server: what Gym's agents send to it, and our own client beside it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tests.gym.play import over, play, says
from whet.environments.arithmetic import Arithmetic
from whet.gym.serve import application, write_rows

TASKS = Arithmetic(train_size=3, test_size=1)


def test_rows_written_for_gym_are_rewarded_as_here(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_rows(TASKS, "train", "sums_agent", path) == 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["agent_ref"] == {"type": "responses_api_agents", "name": "sums_agent"}

    async def go() -> list[float]:
        environments = over(str(path), "http://whet.test", httpx.ASGITransport(application(TASKS)))
        tasks = environments.tasks.tasks("train")
        answers = [str(TASKS.gold(TASKS.tasks("train")[0])), "no idea"]
        return [(await play(environments, tasks[0], [says(answer)]))[0] for answer in answers]

    assert asyncio.run(go()) == [1.0, 0.0]


async def ask(application: Any, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://w") as client:
        return await client.post(path, json=body)


def test_wrong_requests_are_told_what_is_wrong() -> None:
    app = application(TASKS)
    assert asyncio.run(ask(app, "/verify", {"whet_task": "nobody"})).status_code == 422
    uid = TASKS.tasks("test")[0].uid
    answer = asyncio.run(ask(app, "/verify", {"whet_task": uid, "response": {"text": "4"}}))
    assert (answer.status_code, "is not an answer" in answer.text) == (422, True)
    assert asyncio.run(ask(app, "/verify", [1])).status_code == 422
    assert asyncio.run(ask(app, "/seed_session", {"resources_session_id": "s"})).json() == {"resources_session_id": "s"}


def test_a_grader_that_fails_is_no_measurement() -> None:
    class Broken(Arithmetic):
        async def grade(self, task: Any, answer: str) -> dict[str, float]:
            raise RuntimeError("out of disk")

    tasks = Broken(train_size=1, test_size=1)
    body = {"whet_task": tasks.tasks("train")[0].uid, "response": {"output": [{"type": "message", "content": "4"}]}}
    answer = asyncio.run(ask(application(tasks), "/verify", body)).json()
    assert answer["mask_sample"] is True
    assert "out of disk" in answer["failure_reason"]
