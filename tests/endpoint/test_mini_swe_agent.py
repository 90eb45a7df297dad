"""mini-swe-agent from PyPI, unchanged, as the program of episodes on toy repositories: ``make test-agents``."""

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.mini.repairs import RECIPE, rows
from tests.endpoint.agents import RENDERER, call, first_episode
from tests.toy import toy_recipe
from whet.base.errors import ConfigError
from whet.core.types import Episode, Status
from whet.data.row_kinds import Conversation
from whet.data.rows import render_conversation
from whet.metrics.rollout_file import read_rollouts
from whet.metrics.sinks.jsonl import read_metrics
from whet.rollouts.sampling import Sampling
from whet.run import run
from whet.shells.local import Local
from whet.shells.runtime import ShellLimits
from whet.tasks.program import AgentTasks
from whet.tasks.shell.repositories import Repositories

COMMAND = os.environ.get("WHET_MINI", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMMAND, reason="WHET_MINI names no command of mini-swe-agent (make test-agents)"),
    pytest.mark.skipif(sys.platform != "linux", reason="the runtime of the shell needs Linux"),
]
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
TASKS = Repositories(train_size=2, test_size=1, functions=2)


def agent(folder: Path, api: str = "openai") -> dict[str, Any]:
    """Return the settings of the agent, as the page on agents has them; ``folder`` keeps its files."""
    words = (COMMAND, "-y", "--exit-immediately", "-m", f"{api}/policy", "-t", "{prompt}")
    variables = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    variables["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # or it asks the network
    return {"program": words, "environment": {**variables, "MSWEA_GLOBAL_CONFIG_DIR": str(folder)}}


def episode(folder: Path, *replies: str, api: str = "openai", deadline: float = 600.0, **limits: int) -> Episode:
    """Play the first task with a model that gives these replies."""
    left = iter(replies)
    limits = {
        "max_turns": 8,
        "max_new_tokens": 1000,
        "max_prompt_tokens": 20_000,
        "max_episode_tokens": 40_000,
    } | limits
    tasks = AgentTasks(taskset=TASKS, deadline=deadline, **agent(folder, api))
    return first_episode(tasks, lambda _: next(left), Sampling(**limits))


def gold() -> str:
    data = TASKS.tasks("train")[0].data
    return call("bash", command=f"cat > {data.path} <<'END'\n{data.repaired}END")


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_the_agent_earns_its_reward_by_the_files_that_it_leaves(tmp_path: Path, api: str) -> None:
    done = episode(tmp_path, call("bash", command="ls"), gold(), SUBMIT, api=api)
    assert (done.status, done.reward) == (Status.COMPLETED, 1.0), done.error
    assert (done.scores["fail_to_pass"], done.scores["pass_to_pass"]) == (1.0, 1.0)
    [branch] = done.branches
    assert [span.trained for span in branch.spans] == [False, True] * 3


def runtime() -> Local:
    """Return a runtime that has the agent's programs, and the Python that they were installed with."""
    environment = Path(COMMAND).parents[1]
    lines = (environment / "pyvenv.cfg").read_text().splitlines()
    python = Path(next(line.partition("=")[2].strip() for line in lines if line.startswith("home"))).parent
    limits = ShellLimits(deadline_s=60, memory_mib=1024, processes=128)
    return Local(limits=limits, readable=(str(environment), *(() if python == Path("/usr") else (str(python),))))


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_in_the_runtime_of_its_tasks_it_earns_the_same(api: str) -> None:
    kind = runtime()
    try:
        kind.check()
    except ConfigError as problem:
        pytest.skip(str(problem))
    more: Any = {"runtime": kind, "limits": {"deadline_s": 90}}
    tasks = Repositories(train_size=2, test_size=1, functions=2, **more)
    data, left = tasks.tasks("train")[0].data, iter([call("bash", command="ls"), gold(), SUBMIT])
    settings = agent(Path("/tmp/mini"), api)
    limits = Sampling(max_turns=8, max_new_tokens=1000, max_prompt_tokens=20_000, max_episode_tokens=40_000)
    done = first_episode(AgentTasks(taskset=tasks, in_runtime=True, **settings), lambda _: next(left), limits)
    assert (done.status, done.reward) == (Status.COMPLETED, 1.0), done.error
    assert (done.scores["fail_to_pass"], done.scores["pass_to_pass"]) == (1.0, 1.0)
    [branch] = done.branches
    assert [span.trained for span in branch.spans] == [False, True] * 3
    assert data.path in str(branch.messages[3]["content"]), "its own tool listed the files of the task"


def test_without_a_repair_it_earns_nothing(tmp_path: Path) -> None:
    done = episode(tmp_path, SUBMIT)
    assert (done.status, done.reward) == (Status.COMPLETED, 0.0), done.error


def test_a_reply_that_it_can_not_read_leaves_the_history_and_so_begins_a_branch(tmp_path: Path) -> None:
    done = episode(tmp_path, "I would look at the files first.", gold(), SUBMIT)
    assert (done.status, done.reward) == (Status.COMPLETED, 1.0), done.error
    unread, rest = done.branches
    assert [message["role"] for message in unread.messages] == ["system", "user", "assistant"]
    assert "No tool calls found" in str(rest.messages[2]["content"])
    assert [span.trained for span in rest.spans] == [False, True] * 2


@pytest.mark.parametrize(
    ("limit", "settings"),
    [("turns", {"max_turns": 1}), ("tokens", {"max_prompt_tokens": 7000, "max_episode_tokens": 7500})],
)
def test_a_used_up_budget_ends_it_at_once(tmp_path: Path, limit: str, settings: dict[str, int]) -> None:
    """The agent repeats a failed call for minutes, but the episode has a deadline of one."""
    done = episode(tmp_path, gold(), call("bash", command="seq 3000"), SUBMIT, deadline=60.0, **settings)
    assert (done.status, done.limit, done.reward) == (Status.TRUNCATED, limit, 0.0), done.error


def test_the_rows_of_the_example_have_the_tokens_of_its_episodes(tmp_path: Path) -> None:
    [row] = rows("train", 1)
    conversation = Conversation.of("row", row)
    expected = render_conversation(conversation, conversation.answers[0], RENDERER, "assistant")
    calls = [message["tool_calls"][0]["function"] for message in row["messages"] if message["role"] == "assistant"]
    replies = iter([call("bash", **function["arguments"]) for function in calls])
    settings = RECIPE["data"]
    taskset = Repositories(**{name: value for name, value in settings["taskset"].items() if name != "type"})
    words = (COMMAND, *settings["program"][1:])
    variables = settings["environment"] | {"MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    tasks = AgentTasks(taskset=taskset, program=words, environment=variables)
    limits = {name: 4 * value for name, value in RECIPE["sampling"].items()}  # the tokenizer of tests has longer texts
    done = first_episode(tasks, lambda _: next(replies), Sampling(**limits))
    assert (done.status, done.reward) == (Status.COMPLETED, 1.0), done.error
    [branch] = done.branches
    assert [span.tokens for span in branch.spans] == [span.tokens for span in expected.spans]
    assert [span.trained for span in branch.spans] == [span.trained for span in expected.spans]


def test_what_is_sampled_is_learned_with_the_same_log_probs(tiny_model: Path, tmp_path: Path) -> None:
    """In float32, so that a difference is more than rounding. The reward is 0, and the entropy bonus a gradient."""
    recipe = toy_recipe(
        tiny_model,
        steps=1,
        data={"type": "agent", **agent(tmp_path), "taskset": {"type": "repositories", "functions": 2}},
        algorithm={"type": "grpo", "group_size": 2, "filters": [], "loss": {"entropy_coefficient": 0.01}},
        sampling={"max_turns": 2, "max_new_tokens": 24, "max_prompt_tokens": 9000, "max_episode_tokens": 10_000},
        rollouts={"prompts_per_step": 1},
        generator={"max_context": 12_000},
        learner={"precision": "float32", "max_tokens": 12_000},
        tools_as_text=True,
        evaluation={"enabled": False},
    )
    folder = run.start(recipe, tmp_path / "run")
    [line] = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train" and line["step"] == 1]
    assert line["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
    assert line["gradient_norm"] > 0
    assert math.isfinite(line["loss"])
    assert all(record.reward == 0 for record in read_rollouts(folder, 1))
