"""Gym's own agent and environment server play the tasks of ``whet gym``, and its grader rewards them."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tasks.gym.real import PORT, agent, environment, episode_of, needs_gym, running
from whet.cli.arguments import recipe_of
from whet.core.types import Status
from whet.tasks.gym.rows import write_rows

pytestmark = needs_gym
SETTINGS = ["train_size=3", "test_size=1"]
TASKS = recipe_of("arithmetic", SETTINGS).taskset


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    command = [sys.executable, "-m", "whet", "gym", "arithmetic", *SETTINGS, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            assert found, line
            servers = {"sums_agent": agent("sums"), "sums_turns": environment("sums", "sums_agent")}
            ports = {"sums": int(found[1])}
            where = tmp_path_factory.mktemp("gym")
            with running(where, servers, policy=PORT, elsewhere=ports, observability_enabled=True) as urls:
                yield urls
        finally:
            server.terminate()


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "written.jsonl"
    write_rows(TASKS, "train", "sums_agent", path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_agent_of_gym_is_rewarded_by_a_grader_of_whet(tmp_path: Path, urls: dict[str, str]) -> None:
    right = str(TASKS.gold(TASKS.tasks("train")[0]))
    for answer, reward in [(right, 1.0), ("no idea", 0.0)]:
        episode = episode_of(tmp_path, lambda _, answer=answer: answer, *rows(tmp_path), agents=urls)
        assert (episode.status, episode.reward, episode.error) == (Status.COMPLETED, reward, None)
        assert [span.trained for span in episode.branches[0].spans] == [False, True]


def test_an_environment_server_of_gym_is_rewarded_by_a_grader_of_whet(tmp_path: Path, urls: dict[str, str]) -> None:
    right, row = str(TASKS.gold(TASKS.tasks("train")[0])), rows(tmp_path)[0]
    whole = {"task_id": {"taskset": "sums:train", "task_id": row["whet_task"]}, "task_input": row}
    for answer, reward in [(right, 1.0), ("no idea", 0.0)]:
        agents = {"sums:train": urls["sums_turns"]}
        episode = episode_of(tmp_path, lambda _, answer=answer: answer, whole, agents=agents)
        assert (episode.status, episode.reward, episode.error) == (Status.COMPLETED, reward, None)


def test_the_agent_gets_the_mean_reward(urls: dict[str, str]) -> None:
    answers = [{"reward": 1.0, "_ng_task_index": 0}, {"reward": 0.0, "_ng_task_index": 1}]
    told = httpx.post(f"{urls['sums_agent']}/aggregate_metrics", json={"verify_responses": answers}, timeout=60)
    assert told.json()["key_metrics"] == {"mean/reward": 0.5}
