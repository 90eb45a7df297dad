"""whet as a client of NeMo Gym: requests and answers equal recorded ones of real servers of nemo-gym 0.7.0."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.groups import episode
from tests.tasks.gym.play import Replayer, calls, over, play, says
from whet.base.errors import DataError
from whet.core.types import Group
from whet.tasks.gym.client import GymError
from whet.tasks.gym.tasks import NemoGym

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "2 + 2?"}], "tools": [ADD]},
    "agent_ref": {"type": "responses_api_agents", "name": "sums_simple_agent"},
    "expected": 4,
}


def row_file(folder: Path, row: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return str(path)


@pytest.mark.parametrize("recorded", RECORDED, ids=[f"{i}-{r['server']}" for i, r in enumerate(RECORDED)])
def test_an_episode_goes_over_the_wire_as_recorded(recorded: dict[str, Any], tmp_path: Path) -> None:
    replayer = Replayer(recorded["exchanges"])

    async def go() -> tuple[float, list[str]]:
        environments = over(row_file(tmp_path, recorded["row"]), "http://gym.test", replayer)
        return await play(environments, environments.tasks.tasks("train")[0], recorded["replies"])

    assert asyncio.run(go()) == (recorded["reward"], recorded["said"])
    assert replayer.left == []


def server(tmp_path: Path, answers: Callable[[str, Any], httpx.Response], row: Any = ROW, **settings: Any) -> Any:
    """Play one episode on a server that answers so; what it was sent comes in ``server.seen``."""
    seen: list[tuple[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return answers(*seen[-1])

    environments = over(row_file(tmp_path, row), "http://gym.test", httpx.MockTransport(handle), **settings)
    return environments, seen


def verified(path: str, _: Any, **extra: Any) -> httpx.Response:
    return httpx.Response(200, json={"reward": 0.5} | extra if path == "/verify" else {})


def run(environments: Any, *replies: Any) -> tuple[float, list[str]]:
    return asyncio.run(play(environments, environments.tasks.tasks("train")[0], replies))


def test_the_whole_row_is_sent_with_the_answer_as_items(tmp_path: Path) -> None:
    environments, seen = server(tmp_path, verified)
    assert run(environments, {**says("4"), "reasoning_content": "easy"}) == (0.5, [])
    assert [path for path, _ in seen] == ["/seed_session", "/verify", "/close_session"]
    assert seen[0][1] == ROW
    body = seen[1][1]
    assert {name: body[name] for name in ROW} == ROW
    assert [item["type"] for item in body["response"]["output"]] == ["reasoning", "message"]


def test_a_tool_that_the_row_does_not_declare_is_not_called(tmp_path: Path) -> None:
    environments, seen = server(tmp_path, verified)
    _, said = run(environments, calls("verify", reward=1), calls("../verify"), says("4"))
    assert said == ["Error: there is no tool 'verify'", "Error: there is no tool '../verify'"]
    assert [path for path, _ in seen] == ["/seed_session", "/verify", "/close_session"]


def test_calls_have_unique_ids_in_the_whole_conversation(tmp_path: Path) -> None:
    environments, seen = server(tmp_path, verified)
    run(environments, calls("add", a=1), calls("add", a=2), says("4"))
    output = seen[-2][1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output"] * 2 + ["message"]
    ids = [item["call_id"] for item in output if item["type"] == "function_call"]
    assert len(set(ids)) == 2
    assert [item["call_id"] for item in output if item["type"] == "function_call_output"] == ids


def test_an_episode_that_only_calls_is_verified_in_the_end(tmp_path: Path) -> None:
    environments, seen = server(tmp_path, verified, max_steps=2)
    reward, _ = run(environments, calls("add"), calls("add"))
    assert (reward, seen[-2][0]) == (0.5, "/verify")


def test_components_are_scores(tmp_path: Path) -> None:
    parts = {"right": 1.0, "short": 0.0}
    environments, _ = server(tmp_path, lambda path, body: verified(path, body, reward_components=parts))

    async def go() -> dict[str, float]:
        environment = environments.make(environments.tasks.tasks("train")[0])
        await environment.start()
        return (await environment.step(says("4"))).scores

    assert asyncio.run(go()) == parts


@pytest.mark.parametrize(
    ("answer", "says_so"),
    [
        (
            httpx.Response(200, json={"reward": 1.0, "mask_sample": True, "failure_kind": "judge"}),
            "not measured: judge",
        ),
        (httpx.Response(500, text="ValueError()"), "HTTP 500: ValueError"),
        (httpx.Response(200, text="<html>"), "not JSON"),
        (httpx.Response(200, json={}), "gave no reward"),
        (httpx.Response(200, json=[1]), "gave no reward"),
        (httpx.Response(200, content=b" " * 20_000_000), "longer than"),
    ],
    ids=range(6),
)
def test_a_failure_of_the_server_is_never_a_reward(tmp_path: Path, answer: httpx.Response, says_so: str) -> None:
    environments, _ = server(tmp_path, lambda path, body: answer if path == "/verify" else verified(path, body))
    with pytest.raises(GymError, match=says_so):
        run(environments, says("4"))


def test_a_reward_that_is_not_a_number_is_an_error(tmp_path: Path) -> None:
    environments, _ = server(tmp_path, lambda path, body: verified(path, body, reward="high"))
    with pytest.raises(DataError, match="must be a finite number"):
        run(environments, says("4"))


@pytest.mark.parametrize(("status", "detail"), [(404, "Not Found"), (405, "Method Not Allowed")])
def test_a_declared_tool_that_the_server_lacks_is_a_failure_of_the_server(
    tmp_path: Path, status: int, detail: str
) -> None:
    def lacking(path: str, body: Any) -> httpx.Response:
        return httpx.Response(status, json={"detail": detail}) if path == "/add" else verified(path, body)

    environments, _ = server(tmp_path, lacking)
    with pytest.raises(GymError, match=rf"/add: HTTP {status}: .*{detail}"):
        run(environments, calls("add"))


def test_a_tool_may_answer_that_it_found_nothing(tmp_path: Path) -> None:
    def empty(path: str, body: Any) -> httpx.Response:
        return httpx.Response(404, json={"detail": "no such sum"}) if path == "/add" else verified(path, body)

    async def go() -> object:
        environment = environments.make(environments.tasks.tasks("train")[0])
        await environment.start()
        return (await environment.step(calls("add"))).messages[0]["content"]

    environments, _ = server(tmp_path, empty)
    assert "no such sum" in str(asyncio.run(go()))


def test_a_seed_is_tried_again_and_a_tool_is_not(tmp_path: Path) -> None:
    count = dict.fromkeys(["/seed_session", "/add", "/verify", "/close_session"], 0)

    def shaky(path: str, body: Any) -> httpx.Response:
        count[path] += 1
        return httpx.Response(503) if count[path] == 1 and path != "/verify" else verified(path, body)

    tasks = NemoGym(path=row_file(tmp_path, ROW), servers={"sums": "http://gym.test"}, test_size=0, retries=2)
    environments, _ = server(tmp_path, shaky)
    environments.tasks = tasks
    with pytest.raises(GymError, match=r"gym.test/add: HTTP 503"):
        run(environments, calls("add"))
    assert count == {"/seed_session": 2, "/add": 1, "/verify": 0, "/close_session": 2}


def test_a_group_is_compared_in_one_request(tmp_path: Path) -> None:
    environments, seen = server(tmp_path, lambda *_: httpx.Response(200, json={"rewards": [3.5, 1.0]}), compare=True)
    task = environments.tasks.tasks("train")[0]
    rows = [episode([], messages=[*task.prompt, says(text)]) for text in ("four", "five")]
    group = Group("g", task, rows)
    asyncio.run(environments.score_group(task, group))
    assert [one.reward for one in rows] == [3.5, 1.0]
    (path, body) = seen[0]
    assert path == "/compare"
    assert body["conversation_history"] == [{"role": "user", "content": "2 + 2?"}]
    texts = [answer["output"][0]["content"][0]["text"] for answer in body["response_objs"]]
    assert texts == ["four", "five"]
    group.episodes.pop()
    with pytest.raises(GymError, match="for 1 answers"):
        asyncio.run(environments.score_group(task, group))


def test_each_episode_has_its_session(tmp_path: Path) -> None:
    """Episodes in parallel share the connections and not the cookies."""
    cookies: list[str | None] = []

    def handle(request: httpx.Request) -> httpx.Response:
        cookies.append(request.headers.get("cookie"))
        headers = {"set-cookie": f"session={len(cookies)}"} if request.url.path == "/seed_session" else {}
        return httpx.Response(200, json={"reward": 1.0}, headers=headers)

    async def go() -> None:
        environments = over(row_file(tmp_path, ROW), "http://gym.test", httpx.MockTransport(handle))
        first, second = (environments.make(environments.tasks.tasks("train")[0]) for _ in range(2))
        await first.start()
        await second.start()
        await first.step(says("4"))
        await second.step(says("4"))

    asyncio.run(go())
    assert cookies == [None, None, "session=1", "session=2"]
