"""A task set as a resources server: requests of Gym's agents and of whet's client."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tasks.gym.play import over, play, says
from whet.base.errors import ConfigError
from whet.cli.main import main
from whet.endpoint.gym import application, serve
from whet.tasks.games import Guessing
from whet.tasks.gym.rows import write_rows
from whet.tasks.gym.single_turn import check_single_turn
from whet.tasks.instructions.task_set import InstructionFollowing
from whet.tasks.math.arithmetic import Arithmetic

TASKS = Arithmetic(train_size=3, test_size=1)
JSON = {"content-type": "application/json"}


def test_rows_written_for_gym_are_rewarded_as_here(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_rows(TASKS, "train", "sums_agent", path) == 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["agent_ref"] == {"type": "responses_api_agents", "name": "sums_agent"}

    async def go() -> list[float]:
        async with serving(TASKS) as transport:
            environments = over(str(path), "http://127.0.0.1", transport)
            tasks = environments.tasks.tasks("train")
            answers = [str(TASKS.gold(TASKS.tasks("train")[0])), "no idea"]
            return [(await play(environments, tasks[0], [says(answer)]))[0] for answer in answers]

    assert asyncio.run(go()) == [1.0, 0.0]


def verifying(text: Any, tasks: Any = TASKS) -> dict[str, Any]:
    """A request to verify an answer to the first task."""
    item = {"type": "message", "role": "assistant", "content": text}
    return {"whet_task": tasks.tasks("train")[0].uid, "response": {"output": [item]}}


@asynccontextmanager
async def serving(tasks: Any, host: str = "127.0.0.1") -> AsyncIterator[httpx.ASGITransport]:
    """The way to a server, which is closed at the end."""
    served = application(tasks, host)
    async with served.router.lifespan_context(served):
        yield httpx.ASGITransport(served)


def ask(tasks: Any, path: str, body: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with (
            serving(tasks) as transport,
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            return await client.post(path, json=body)

    return asyncio.run(go())


def test_wrong_requests_get_an_error_message() -> None:
    assert ask(TASKS, "/verify", {"whet_task": "unknown"}).status_code == 422
    uid = TASKS.tasks("test")[0].uid
    answer = ask(TASKS, "/verify", {"whet_task": uid, "response": {"text": "4"}})
    assert (answer.status_code, "is not an answer" in answer.text) == (422, True)
    assert ask(TASKS, "/verify", [1]).status_code == 422
    assert ask(TASKS, "/seed_session", {"resources_session_id": "s"}).json() == {"resources_session_id": "s"}


def test_an_episode_with_a_failed_grader_is_masked() -> None:
    class Broken(Arithmetic):
        async def grade(self, task: Any, answer: str) -> dict[str, float]:
            raise RuntimeError("out of disk")

    tasks = Broken(train_size=1, test_size=1)
    body = {"whet_task": tasks.tasks("train")[0].uid, "response": {"output": [{"type": "message", "content": "4"}]}}
    answer = ask(tasks, "/verify", body).json()
    assert answer["mask_sample"] is True
    assert "out of disk" in answer["failure_reason"]


def sent(content: bytes, served: str = "127.0.0.1", **headers: str) -> httpx.Response:
    """Return the answer to a request with an unparsed body."""
    given = {"content-type": "application/json", "host": "127.0.0.1:12000", **headers}

    async def go() -> httpx.Response:
        async with (
            serving(TASKS, served) as transport,
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:12000") as client,
        ):
            return await client.post("/verify", content=content, headers=given)

    return asyncio.run(go())


RIGHT = json.dumps(verifying(TASKS.gold(TASKS.tasks("train")[0]))).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"{", b"[1]", b"7", b"\xff", b"[" * 200_000, b'{"a":' * 200_000, b'{"a": NaN}', b'{"a": Infinity}', b"",
        b'{"a": 1e999}', b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}', b'{"whet_task": []}', b'{"whet_task": {}}',
        b'{"whet_task": null}',
        b'{"whet_task": 1}', b'{"a": ' + b"9" * 5000 + b"}",
        RIGHT.replace(b'"response"', b'"a": ' + b"[" * 100 + b"]" * 100 + b', "response"'),
        RIGHT.replace(b'"output"', b'"no output"'), RIGHT.replace(b"[", b"7, \"x\": ["),
    ],
)  # fmt: skip
def test_every_request_gets_an_answer_in_words(content: bytes) -> None:
    answer = sent(content)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"]


def test_a_page_in_a_browser_can_not_have_answers_graded() -> None:
    assert sent(RIGHT).json()["reward"] == 1.0
    assert sent(RIGHT, "::1", host="[::1]:12000").status_code == 200
    assert sent(RIGHT, host="localhost:12000").status_code == 200
    assert sent(RIGHT, origin="http://evil.test").status_code == 403
    assert sent(RIGHT, host="evil.test").status_code == 403
    assert sent(RIGHT, **{"content-type": "text/plain"}).status_code == 415
    assert sent(RIGHT, "127.1", host="evil.test").status_code == 403
    for everywhere in ("0.0.0.0", "0"):
        assert sent(RIGHT, everywhere, host="gym.cluster.local:12000").status_code == 200


def test_a_body_beyond_16_mib_is_refused_before_it_is_read() -> None:
    refused = sent(b"{}", **{"content-length": str(10**9)})
    assert refused.status_code == 413
    assert "16,777,216" in refused.json()["detail"]
    assert sent(b'{"a": "' + b"x" * 17 * 2**20 + b'"}').status_code == 413


def test_tasks_of_several_turns_are_refused_or_masked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Guessing can't be served to NeMo Gym"):
        asyncio.run(check_single_turn(Guessing()))
    asyncio.run(check_single_turn(TASKS))
    turn = {"prompt": "Say a.", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"turns": [turn, turn]}) + "\n")
    tasks = InstructionFollowing(path=str(path), test_size=0)
    answer = ask(tasks, "/verify", verifying('"a"', tasks)).json()
    assert (answer["mask_sample"], answer["failure_kind"], answer["reward"]) == (True, "whet:not_done", 0.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1"])
def test_an_episode_with_an_invalid_reward_is_masked(reward: Any) -> None:
    class Broken(Arithmetic):
        async def grade(self, task: Any, answer: str) -> Any:
            return {"reward": 1.0, "other": reward}

    tasks = Broken(train_size=1, test_size=1)
    answer = ask(tasks, "/verify", verifying("4", tasks)).json()
    assert answer["mask_sample"] is True


def test_it_listens_until_it_is_ended() -> None:
    async def go() -> tuple[float, str]:
        ready = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(TASKS, "127.0.0.1", 0, ready.set_result))
        try:
            address = await asyncio.wait_for(ready, 60)
            async with httpx.AsyncClient(timeout=60) as client:
                reward = (await client.post(f"{address}/verify", content=RIGHT, headers=JSON)).json()["reward"]
                foreign = await client.post(f"{address}/verify", content=RIGHT, headers=JSON | {"origin": "http://x"})
            with pytest.raises(ConfigError, match=r"can't listen on 127\.0\.0\.1"):
                await serve(TASKS, "127.0.0.1", int(address.rpartition(":")[2]), print)
        finally:
            server.cancel()
            await asyncio.wait([server], timeout=60)
        return reward, foreign.json()["detail"]

    assert asyncio.run(go()) == (1.0, "requests of web pages are refused")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_session_has_a_cookie_and_ends(tmp_path: Path) -> None:
    session = {"resources_session_id": "s", "episode_id": {"rollout_id": "r", "attempt": 0}}
    seeded = ask(TASKS, "/seed_session", session)
    assert seeded.json() == {"resources_session_id": "s"}
    assert seeded.cookies.get("whet_session")
    assert ask(TASKS, "/close_session", session).json() == {"resources_session_id": "s"}


def test_the_mean_of_measured_rewards_is_told() -> None:
    answers = [{"reward": 1.0}, {"reward": 0.0, "mask_sample": False}, {"reward": 0.0, "mask_sample": True}]
    told = ask(TASKS, "/aggregate_metrics", {"verify_responses": answers}).json()
    assert told["key_metrics"] == {"mean/reward": 0.5}
    assert ask(TASKS, "/aggregate_metrics", {"verify_responses": 7}).status_code == 422


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split", "test"], "--split and --agent describe the rows of --rows"),
        (["--agent", "mine"], "--split and --agent describe the rows of --rows"),
        (["--rows", "rows.jsonl", "--port", "5"], "--rows starts no server; leave out --host and --port"),
        (["--rows", "rows.jsonl", "--host", "::1"], "--rows starts no server; leave out --host and --port"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["gym", "arithmetic", *words])
    assert f"error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
