"""Sessions of real servers of nemo-gym 0.7.0 that whet plays itself: their state, tools over MCP, and their end."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.gym.play import Recorder, calls, over, play, says
from tests.tasks.gym.real import gym_folder, needs_gym, resources, running
from whet.core.types import Message

pytestmark = needs_gym
COUNTER, WEATHER, MCP = "example_session_state_mgmt", "example_single_tool_call", "example_mcp_weather"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    servers = {
        COUNTER: resources(COUNTER),
        WEATHER: resources(WEATHER),
        MCP: resources(MCP, expose_tools_over_mcp=True),
    }
    with running(tmp_path_factory.mktemp("gym"), servers) as found:
        yield found


def example(server: str) -> dict[str, Any]:
    first: dict[str, Any] = json.loads(
        (gym_folder() / f"resources_servers/{server}/data/example.jsonl").read_text().splitlines()[0]
    )
    return first


def played(folder: Path, url: str, row: dict[str, Any], *replies: Message) -> tuple[float, list[str], Recorder]:
    """Return the reward, the results of the tools, and the requests."""
    path, recorder = folder / "rows.jsonl", Recorder()
    path.write_text(json.dumps(row) + "\n")

    async def go() -> tuple[float, list[str]]:
        environments = over(str(path), url, recorder)
        try:
            return await play(environments, environments.tasks.tasks("train")[0], replies)
        finally:
            await environments.close()

    return *asyncio.run(go()), recorder


def test_each_episode_has_its_state_and_ends_its_session(tmp_path: Path, urls: dict[str, str]) -> None:
    steps = [calls("increment_counter", count=1), calls("increment_counter", count=2), calls("get_counter_value")]
    for _ in range(2):
        reward, said, recorder = played(tmp_path, urls[COUNTER], example(COUNTER), *steps, says("6"))
        assert (reward, said[-1]) == (1.0, '{"count":6}')
        assert recorder.exchanges[-1]["path"] == "/close_session"
        assert recorder.exchanges[-1]["cookie"] is not None


def test_a_materialized_row_is_seeded_and_closed_under_one_name(tmp_path: Path, urls: dict[str, str]) -> None:
    row = {"task_id": {"taskset": "weather:train", "task_id": "0"}, "task_input": example(WEATHER)}
    reward, said, recorder = played(tmp_path, urls[WEATHER], row, calls("get_weather", city="Rome"), says("Cold."))
    assert (reward, said) == (1.0, ['{"city":"Rome","weather_description":"The weather in Rome is cold."}'])
    seed, *_, close = recorder.exchanges
    names = ("resources_session_id", "episode_id")
    assert json.loads(seed["answer"])["resources_session_id"] == seed["body"]["resources_session_id"]
    assert [close["path"], close["status"]] == ["/close_session", 200]
    assert {name: close["body"][name] for name in names} == {name: seed["body"][name] for name in names}


@pytest.mark.parametrize("materialized", [False, True])
def test_tools_that_a_server_offers_over_mcp_are_shown_and_called(
    tmp_path: Path, urls: dict[str, str], materialized: bool
) -> None:
    row = example(MCP)
    if materialized:
        row = {"task_id": {"taskset": "weather:mcp", "task_id": "0"}, "task_input": row}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")

    async def offered() -> list[str]:
        environments = over(str(path), urls[MCP], None)
        environment = environments.make(environments.tasks.tasks("train")[0])
        try:
            return [tool["function"]["name"] for tool in (await environment.start()).tools or []]
        finally:
            await environment.close()
            await environments.close()

    assert asyncio.run(offered()) == ["get_weather"]
    answer = "The weather in Paris is sunny and 72 F."
    reward, said, _ = played(tmp_path, urls[MCP], row, calls("get_weather", city="Paris"), says(answer))
    assert (reward, [json.loads(text) for text in said]) == (1.0, [{"weather": answer}])
    guessed, said, _ = played(tmp_path, urls[MCP], row, calls("verify"), says(answer))
    assert (guessed, said) == (0.0, ["Error: there is no tool 'verify'"])
