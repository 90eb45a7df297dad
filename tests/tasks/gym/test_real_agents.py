"""Agents of nemo-gym 0.7.0 play episodes against a model at whet's endpoint, and are rewarded by its servers."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.endpoint.agents import call
from tests.ports import reserved_ports
from tests.tasks.gym.real import (
    PORT,
    agent,
    environment,
    episode_of,
    gym_folder,
    needs_gym,
    resources,
    running,
)
from whet.core.types import Status

pytestmark = needs_gym
COUNTER, WEATHER = "example_session_state_mgmt", "example_single_tool_call"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Servers that call the policy at ``PORT``."""
    unverified = agent(COUNTER, skip_verification=True, skip_verification_reward=1.0)
    servers = {
        COUNTER: resources(COUNTER), "counting": agent(COUNTER, max_steps=8), "unverified": unverified,
        WEATHER: resources(WEATHER), "turns": agent(WEATHER), "environment": environment(WEATHER, "turns"),
    }  # fmt: skip
    with running(tmp_path_factory.mktemp("gym"), servers, policy=PORT, observability_enabled=True) as found:
        yield found


def row(number: int = 0, name: str = "counting") -> dict[str, Any]:
    """Return a row of a counter that starts at 3 and must reach 6."""
    lines = (gym_folder() / f"resources_servers/{COUNTER}/data/example.jsonl").read_text().splitlines()
    return json.loads(lines[number]) | {"agent_ref": {"type": "responses_api_agents", "name": name}}


def count(*steps: str, then: str = "The count is 6.") -> Callable[[str], str]:
    """Return a model that makes one call after the other."""

    def answer(prompt: str) -> str:
        done = prompt.count("</tool_response>")
        return steps[done] if done < len(steps) else then

    return answer


RIGHT = count(call("increment_counter", count=1), call("increment_counter", count=2), call("get_counter_value"))


def test_an_agent_of_gym_is_rewarded_for_what_the_policy_did_in_one_branch(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    episode = episode_of(tmp_path, RIGHT, row(), agents={"counting": urls["counting"]})
    assert (episode.status, episode.reward, episode.error) == (Status.COMPLETED, 1.0, None)
    [branch] = episode.branches
    assert [span.trained for span in branch.spans] == [False, True] * 4
    roles = [message["role"] for message in branch.messages]
    assert roles == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert branch.messages[6]["content"] == '{"count":6}'


def test_a_policy_that_leaves_the_counter_is_not_rewarded(tmp_path: Path, urls: dict[str, str]) -> None:
    episode = episode_of(tmp_path, lambda _: "The count is 6.", row(), agents={"counting": urls["counting"]})
    assert (episode.status, episode.reward) == (Status.COMPLETED, 0.0)


@pytest.mark.parametrize("route", ["verify", "seed_session", "close_session", "aggregate_metrics", "../verify"])
def test_a_policy_can_not_reach_the_routes_of_its_grader(tmp_path: Path, urls: dict[str, str], route: str) -> None:
    """Gym's simple agent posts each call to the resources server under its name, where /verify tells the reward."""
    forged = count(call(route, initial_count=6, expected_count=6))
    episode = episode_of(tmp_path, forged, row(), agents={"counting": urls["counting"]})
    assert (episode.status, episode.reward) == (Status.COMPLETED, 0.0)
    [branch] = episode.branches
    assert branch.messages[1]["tool_calls"][0]["function"]["name"] == route, "the policy trains on its own words"
    assert branch.messages[2]["content"] == '{"detail":"Not Found"}'


def test_a_used_up_budget_is_verified_as_it_is(tmp_path: Path, urls: dict[str, str]) -> None:
    short = episode_of(tmp_path, RIGHT, row(), agents={"counting": urls["counting"]}, max_turns=1)
    assert (short.status, short.limit, short.reward) == (Status.TRUNCATED, "turns", 0.0)
    enough = episode_of(tmp_path, RIGHT, row(), agents={"counting": urls["counting"]}, max_turns=2)
    assert (enough.status, enough.limit, enough.reward) == (Status.TRUNCATED, "turns", 1.0)


@pytest.mark.parametrize("case", ["unverified", "unreachable", "server error"])
def test_a_failure_of_an_agent_or_its_grader_is_never_a_reward(tmp_path: Path, urls: dict[str, str], case: str) -> None:
    """Even the cheapest agent, which rewards every episode with 1, earns nothing."""
    name, asked = "counting", row()
    agents = {"counting": urls["counting"], "unverified": urls["unverified"]}
    if case == "unverified":
        name, why = case, "gave a constant reward: remove skip_verification"
    elif case == "unreachable":
        agents, why = {"counting": f"http://127.0.0.1:{reserved_ports(1)[0]}"}, "/run gave no answer in 1 attempts"
    else:
        del asked["expected_count"]  # verification needs it
        why = "/run: HTTP 500: .*expected_count"
    episode = episode_of(tmp_path, RIGHT, asked | {"agent_ref": {"name": name}}, agents=agents)
    assert (episode.status, episode.reward, episode.branches) == (Status.FAILED, 0.0, [])
    assert re.search(why, str(episode.error)), episode.error


def test_an_agent_without_the_id_of_the_episode_is_told_how_to_send_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, urls: dict[str, str]
) -> None:
    ports = {COUNTER: int(urls[COUNTER].rpartition(":")[2])}
    settings = {"counting": agent(COUNTER)}
    with running(tmp_path_factory.mktemp("plain"), settings, policy=PORT, elsewhere=ports) as plain:
        episode = episode_of(tmp_path, RIGHT, row(), agents=plain)
    assert episode.status == Status.FAILED
    assert "set observability_enabled: true in Gym" in str(episode.error)


def weather(taskset: str) -> dict[str, Any]:
    """Return a materialized row."""
    example = gym_folder() / f"resources_servers/{WEATHER}/data/example.jsonl"
    task_input = json.loads(example.read_text().splitlines()[0])
    return {"task_id": {"taskset": taskset, "task_id": "0"}, "task_input": task_input}


def test_an_environment_server_plays_a_materialized_row(tmp_path: Path, urls: dict[str, str]) -> None:
    agents = {"weather:train": urls["environment"]}
    asks = count(call("get_weather", city="San Francisco"), then="Cold.")
    episode = episode_of(tmp_path, asks, weather("weather:train"), agents=agents)
    assert (episode.status, episode.reward, episode.error) == (Status.COMPLETED, 1.0, None)
    assert "The weather in San Francisco is cold." in str(episode.branches[0].messages)
    silent = episode_of(tmp_path, lambda _: "Cold.", weather("weather:train"), agents=agents)
    assert (silent.status, silent.reward) == (Status.COMPLETED, 0.0)


def test_a_failure_that_an_environment_server_reports_is_no_reward(tmp_path: Path, urls: dict[str, str]) -> None:
    wrong = weather("weather:train")
    wrong["task_id"]["task_id"] = ""  # the server refuses it
    episode = episode_of(tmp_path, RIGHT, wrong, agents={"weather:train": urls["environment"]})
    assert (episode.status, episode.branches) == (Status.FAILED, [])
    assert "/run: HTTP 422" in str(episode.error)
