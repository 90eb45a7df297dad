"""Rows of NeMo Gym find the server that plays them, or are refused."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from whet.base.errors import ConfigError, DataError
from whet.tasks.gym.routing import Route, servers_of
from whet.tasks.gym.tasks import NemoGym

PARAMETERS = {"input": [{"role": "user", "content": "2 + 2?"}]}


def row(agent: str | None = "sums_simple_agent") -> dict[str, Any]:
    reference = {} if agent is None else {"agent_ref": {"type": "responses_api_agents", "name": agent}}
    return {"responses_create_params": PARAMETERS, "expected": 4, **reference}


def materialized(taskset: str = "sums:train") -> dict[str, Any]:
    task_input = {"responses_create_params": PARAMETERS, "task_data": {"expected": 4}, "level": 2}
    return {"task_id": {"taskset": taskset, "task_id": "7"}, "task_input": task_input}


def tasks_of(folder: Path, *rows: dict[str, Any], **settings: Any) -> NemoGym:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return NemoGym(path=str(path), test_size=0, **settings)


def route(tasks: NemoGym) -> Route:
    return tasks.listed().route(tasks.tasks("train")[0].data)


def test_rows_of_a_simple_agent_are_played_with_its_resources_server(tmp_path: Path) -> None:
    servers = {"sums": "http://a.test", "other": "http://b.test"}
    assert route(tasks_of(tmp_path, row(), servers=servers)) == Route("http://a.test", by_agent=False)
    by_agent = {"sums_simple_agent": "http://c.test", "other": "http://b.test"}
    assert route(tasks_of(tmp_path, row(), servers=by_agent)).url == "http://c.test"
    assert route(tasks_of(tmp_path, row(None), servers={"sums": "http://a.test"})).url == "http://a.test"
    longer = servers | {"sums_v2": "http://d.test"}
    assert route(tasks_of(tmp_path, row("sums_v2_simple_agent"), servers=longer)).url == "http://d.test"


def test_rows_of_another_agent_are_played_by_its_server(tmp_path: Path) -> None:
    settings: Any = {"servers": {"sums": "http://a.test"}, "agents": {"sums_react_agent": "http://r.test"}}
    tasks = tasks_of(tmp_path, row("sums_react_agent"), row(), **settings)
    assert route(tasks) == Route("http://r.test", by_agent=True)
    assert tasks.listed().route(tasks.tasks("train")[1].data) == Route("http://a.test", by_agent=False)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the agent 'sums_react_agent' plays whole episodes"):
        tasks.open().make(tasks.tasks("train")[0])


def test_rows_with_the_same_question_are_one_task_for_each_player(tmp_path: Path) -> None:
    settings: Any = {"servers": {"sums": "http://a.test"}, "agents": {"sums_react_agent": "http://r.test"}}
    rows = [row(), row("sums_react_agent"), row(), row("sums_react_agent")]
    players = [task.data.player for task in tasks_of(tmp_path, *rows, **settings).tasks("train")]
    assert players == ["sums_simple_agent", "sums_react_agent"]


@pytest.mark.parametrize("agent", ["sums_react_agent", "sum_simple_agent", "sums_v2_simple_agent", "swe_agents"])
def test_a_row_of_an_unknown_agent_is_named_and_never_played_as_a_simple_one(tmp_path: Path, agent: str) -> None:
    tasks = tasks_of(tmp_path, row(), row(agent), servers={"sums": "http://a.test"}, agents={"x": "http://x.test"})
    with pytest.raises(DataError, match=rf"rows.jsonl:2: no server for the agent '{agent}'.*servers has: sums.*: x"):
        tasks.tasks("train")


def test_a_row_without_an_agent_needs_a_single_server(tmp_path: Path) -> None:
    two = {"sums": "http://a.test", "other": "http://b.test"}
    with pytest.raises(DataError, match=r"rows.jsonl:1: no server for a row without agent_ref"):
        tasks_of(tmp_path, row(None), servers=two).tasks("train")


def test_a_materialized_row_is_found_by_its_taskset(tmp_path: Path) -> None:
    played = tasks_of(tmp_path, materialized(), servers={"sums:train": "http://a.test"})
    assert route(played) == Route("http://a.test", by_agent=False)
    assert played.tasks("train")[0].data.fields == {"expected": 4, "level": 2}
    by_server = tasks_of(tmp_path, materialized(), agents={"sums:train": "http://e.test"})
    assert route(by_server) == Route("http://e.test", by_agent=True)
    with pytest.raises(DataError, match=r"rows.jsonl:1: no server for the taskset 'sums:train'"):
        tasks_of(tmp_path, materialized(), servers={"sums": "http://a.test"}).tasks("train")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"a": 1}, "field 'responses_create_params' is missing"),
        (row() | {"agent_ref": "sums"}, "field 'agent_ref' must be an object with the name of an agent"),
        (materialized() | {"task_id": 7}, "field 'task_id' must be an object with a taskset"),
        (materialized() | {"task_input": {"input": "2 + 2?"}}, "field 'task_input' must be an object whose 'input'"),
    ],
    ids=range(4),
)
def test_a_row_in_neither_form_is_named(tmp_path: Path, wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:1: {problem}"):
        tasks_of(tmp_path, wrong, servers={"sums": "http://a.test"}).tasks("train")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="give servers or agents"):
        NemoGym(path="rows.jsonl")
    with pytest.raises(ValueError, match="compare is for rows that whet plays"):
        NemoGym(path="rows.jsonl", agents={"a": "http://a.test"}, compare=True)


SETTINGS = """
observability_enabled: true
sums: {resources_servers: {sums: {host: 127.0.0.1, port: 7}}}
sums_simple_agent: {responses_api_agents: {simple_agent: {resources_server: {name: sums}, host: h, port: 8}}}
sums_react_agent: {responses_api_agents: {langgraph_agent: {resources_server: {name: sums}, host: h, port: 9}}}
policy_model: {responses_api_models: {m: {host: h, port: 10}}}
"""


def head(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"http://head.test/global_config_dict_yaml": httpx.Response(200, json=SETTINGS)}

    def get(url: str, **_: Any) -> httpx.Response:
        answer = answers.get(url, httpx.Response(404))
        answer.request = httpx.Request("GET", url)
        return answer

    monkeypatch.setattr(httpx, "get", get)


def test_a_head_server_names_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    head(monkeypatch)
    found = servers_of("http://head.test/")
    assert found.resources == dict.fromkeys(["sums", "sums_simple_agent"], "http://127.0.0.1:7")
    assert found.agents == {"sums_react_agent": "http://h:9"}
    with pytest.raises(ConfigError, match=r"data.head: http://unknown.test/global_config_dict_yaml doesn't list"):
        servers_of("http://unknown.test")


def test_an_agent_that_the_head_server_lacks_is_named_before_the_first_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head(monkeypatch)
    tasks_of(tmp_path, row(), row("sums_react_agent"), head="http://head.test").open()
    with pytest.raises(DataError, match=r"rows.jsonl:2: no server for the agent 'swe_agents'"):
        tasks_of(tmp_path, row(), row("swe_agents"), head="http://head.test").open()
