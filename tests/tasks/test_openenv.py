"""Sessions of OpenEnv over a WebSocket: with recorded frames of a real server, and with a real server."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve

from whet.base.errors import ConfigError, DataError
from whet.cluster.rendezvous import LOOPBACK, Reservation
from whet.config import SettingsError
from whet.tasks.adapters.openenv import OpenEnv, OpenEnvError

SERVER = Path(__file__).parent / "installed" / "whet_toy_openenv.py"
real = pytest.mark.skipif(not find_spec("openenv"), reason="openenv is not installed here (make install-adapters)")


def observed(reward: Any = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


INVALID = {
    "type": "error",
    "data": {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": [{"loc": "n"}]},
}
BROKEN = {"type": "error", "data": {"message": "division by zero", "code": "EXECUTION_ERROR"}}


def played(*replies: str, url: str = "", frames: Any = (), **settings: Any) -> tuple[Any, list[Any], list[Any]]:
    """(what was shown first, the steps, what the server was sent)."""
    sent: list[Any] = []

    async def answer(connection: ServerConnection) -> None:
        left = iter(frames)
        async for message in connection:
            sent.append(json.loads(message))
            if sent[-1]["type"] != "close":
                frame = next(left, None)
                if frame is None:
                    await connection.close()
                    return
                await connection.send(frame if isinstance(frame, str) else json.dumps(frame))

    async def go(address: str) -> tuple[Any, list[Any]]:
        taskset = OpenEnv(url=address, train_size=3, test_size=1, **settings)
        episode = taskset.make(taskset.tasks("train")[0])
        try:
            shown = await episode.start()
            return shown, [await episode.step({"role": "assistant", "content": reply}) for reply in replies]
        finally:
            await episode.close()

    async def with_server() -> tuple[Any, list[Any]]:
        async with serve(answer, "127.0.0.1", 0) as server:
            return await go(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    shown, steps = asyncio.run(go(url) if url else with_server())
    return shown, steps, sent


def test_a_session_is_reset_with_the_tasks_seed_stepped_and_closed() -> None:
    frames = [observed(board="ab"), observed(0.5, board="b"), observed(1, done=True, board="")]
    settings = {"action": "move", "observation": "board", "prompt": "Play: {observation}", "system": "A game."}
    shown, steps, sent = played("a", "b", frames=frames, reset={"level": 2}, **settings)
    assert [message["content"] for message in shown.messages] == ["A game.", "Play: ab"]
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (1.0, True)]
    assert steps[0].messages == [{"role": "user", "content": "b"}]
    assert [frame["type"] for frame in sent] == ["reset", "step", "step", "close"]
    assert sent[0]["data"]["level"] == 2
    assert isinstance(sent[0]["data"]["seed"], int)
    assert [frame["data"] for frame in sent[1:3]] == [{"move": "a"}, {"move": "b"}]


def test_without_fields_the_reply_is_the_action_and_the_whole_observation_is_shown() -> None:
    shown, steps, sent = played('```json\n{"n": 3}\n```', frames=[observed(low=1), observed(high=2)])
    assert shown.messages[-1]["content"] == '{"low": 1}'
    assert (steps[0].reward, steps[0].messages[-1]["content"]) == (0, '{"high": 2}')
    assert sent[1]["data"] == {"n": 3}


def test_an_invalid_action_earns_nothing_and_its_error_is_shown_until_the_last_step() -> None:
    _, steps, sent = played("three", "[1]", '{"n": "x"}', frames=[observed(), INVALID], max_steps=3)
    assert [(step.reward, step.done, step.scores["malformed_action"]) for step in steps] == [
        (0, False, 1), (0, False, 1), (0, True, 1),
    ]  # fmt: skip
    assert "JSON object" in steps[0].messages[0]["content"]
    assert "loc" in steps[2].messages[0]["content"]
    assert [frame["type"] for frame in sent] == ["reset", "step", "close"]


@pytest.mark.parametrize(
    "second", [None, BROKEN, "no JSON", "[]", '{"type": "observation"}', '{"data": {}}', {"type": "state", "data": {}}]
)
def test_a_server_that_fails_is_never_a_reward(second: Any) -> None:
    with pytest.raises(OpenEnvError, match="step of openenv/train/0"):
        played("{}", frames=[observed(), second])


def test_an_invalid_reward_a_missing_field_and_a_silent_server_are_errors() -> None:
    with pytest.raises(DataError, match="the reward of openenv/train/0"):
        played("{}", frames=[observed(), observed("much")])
    with pytest.raises(ConfigError, match=r"data\.observation: .* no field 'board'"):
        played("{}", frames=[observed(text="x")], observation="board")
    with pytest.raises(OpenEnvError, match="does not answer"):
        played("{}", url="ws://127.0.0.1:9")
    with pytest.raises(SettingsError, match="ws://"):
        OpenEnv(url="http://127.0.0.1:8000")


def test_a_server_that_never_answers_has_a_deadline() -> None:
    async def silent(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def go() -> None:
        async with serve(silent, "127.0.0.1", 0) as server:
            taskset = OpenEnv(url=f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", deadline=0.2)
            episode = taskset.make(taskset.tasks("train")[0])
            with pytest.raises(OpenEnvError, match=r"no answer within data\.deadline = 0\.2 s"):
                await episode.start()
            await episode.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def test_seeds_are_the_same_in_every_run_and_not_shared_between_splits() -> None:
    seeds = [{task.data.seed for task in OpenEnv(url="ws://h").tasks(split)} for split in ("train", "test")]
    assert not seeds[0] & seeds[1]
    assert seeds[0] == {task.data.seed for task in OpenEnv(url="ws://h/ws").tasks("train")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server, with an environment that guesses numbers."""
    log = (tmp_path_factory.mktemp("openenv") / "log.txt").open("wb")
    reserved = Reservation(LOOPBACK)  # each worker of the tests has a server
    address, port = reserved.address, reserved.address.rpartition(":")[2]
    with subprocess.Popen([sys.executable, str(SERVER), port], stdout=log, stderr=log) as process:
        try:
            for _ in range(120):
                try:
                    httpx.get(f"http://{address}/health")
                    break
                except httpx.HTTPError:
                    assert process.poll() is None, Path(log.name).read_text()[-2000:]
                    time.sleep(0.5)
            yield f"ws://{address}"
        finally:
            process.terminate()


@real
def test_a_real_server_plays_an_episode(server: str) -> None:
    low, high, guesses = 1, 100, list[str]()
    while not guesses or not (last := played(*guesses, url=server, observation="hint")[1][-1]).done:
        if guesses:
            hint, middle = last.messages[0]["content"], (low + high) // 2
            low, high = (middle + 1, high) if hint == "higher" else (low, middle - 1)
        guesses.append(json.dumps({"number": (low + high) // 2}))
        assert len(guesses) < 9, "the seed makes the same number each time"
    assert last.reward == 1


@real
def test_a_real_server_reports_invalid_actions_and_failures(server: str) -> None:
    shown, steps, _ = played('{"number": "x"}', '{"nubmer": 1}', url=server, observation="hint")
    assert shown.messages[-1]["content"] == "guess a number from 1 to 100"
    assert [(step.reward, step.done, step.scores) for step in steps] == [(0, False, {"malformed_action": 1})] * 2
    with pytest.raises(OpenEnvError, match="division"):
        played('{"number": 0}', url=server, observation="hint")
