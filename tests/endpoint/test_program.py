"""Episodes of programs: their trained tokens, rewards and failures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.endpoint import programs
from tests.endpoint.agents import first_episode
from tests.toy import Lowercase, read_settings, toy_settings
from whet.base.errors import ConfigError, DataError, GeneratorError
from whet.config import SettingsError
from whet.core.types import Episode, Status
from whet.rollouts.sampling import Sampling
from whet.tasks.program import AgentTasks
from whet.tasks.prompts import Prompts


def episode_of(
    program: str, answer: Callable[[str], str] | str = "ok", deadline: float = 20.0, **sampling: Any
) -> Episode:
    """Play the first task with a program of ``programs``."""
    tasks = AgentTasks(program=f"tests.endpoint.programs:{program}", taskset=Lowercase(size=4), deadline=deadline)
    limits = Sampling(**({"max_turns": 10, "max_new_tokens": 50} | sampling))
    programs.released.clear()
    try:
        return first_episode(tasks, answer, limits, retries=1)
    finally:
        programs.released.set()


def test_the_branches_of_a_program_share_the_grade_of_its_text() -> None:
    episode = episode_of("team", "aB")
    assert episode.status == Status.COMPLETED
    assert (episode.reward, episode.scores) == (0.5, {"correct": 0.0})
    shapes = [[span.trained for span in branch.spans] for branch in episode.branches]
    assert shapes == [[False, True, False, True]] * 2
    assert episode.branches[1].messages[0] == {"role": "system", "content": "judge"}
    assert episode.usage.turns == 4
    assert "MainThread" not in programs.threads
    assert "whet-environments" not in programs.threads, "it would block all other episodes"


def test_an_async_program_may_return_its_reward_and_scores() -> None:
    episode = episode_of("ask", "x" * 8)
    assert (episode.reward, episode.scores) == (0.8, {"asked": 1.0})


def test_a_truth_value_is_the_reward_and_whether_the_answer_is_right() -> None:
    episode = episode_of("right")
    assert (episode.reward, episode.scores) == (1.0, {"correct": 1.0})


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("silent", "e: the program ended without calling the model at its base_url"),
        ("wrong", "the dict that tests.endpoint.programs:wrong returned for toy/train/0 has no 'reward', only score"),
        ("hanging", r"tests.endpoint.programs:hanging took more than data.deadline = 0.5 s for toy/train/0"),
    ],
)
def test_a_misbehaving_program_fails_the_episode(program: str, problem: str) -> None:
    episode = episode_of(program, deadline=0.5 if program == "hanging" else 20.0)
    assert episode.status == Status.FAILED
    assert str(episode.error).startswith(problem)
    assert "program.py" not in str(episode.error)  # the place in whet helps no user
    assert episode.branches == []


def test_after_an_exception_the_episode_is_retried_and_the_first_attempt_discarded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs.tries.clear()
    episode = episode_of("clumsy")
    assert (episode.reward, len(episode.branches), episode.usage.turns) == (1.0, 1, 1)
    assert "the weather service is away" in caplog.text
    assert caplog.text.count("the agent requested temperature = 0.2") == 1, "once for all episodes"


def test_a_program_that_exhausts_a_budget_is_truncated_with_reward_0() -> None:
    episode = episode_of("talkative", max_turns=3)
    assert (episode.status, episode.limit, episode.reward) == (Status.TRUNCATED, "turns", 0.0)
    assert len(episode.branches) == 3


@pytest.mark.parametrize(("program", "limits"), [("unlucky", {"max_new_tokens": 3}), ("stubborn", {"max_turns": 1})])
def test_a_failure_after_a_budget_is_a_failure(program: str, limits: dict[str, int]) -> None:
    episode = episode_of(program, "a long answer", **limits)
    assert episode.status == Status.FAILED
    assert "the weather service is away" in str(episode.error)


def test_a_call_that_ends_later_does_not_hide_an_exhausted_budget() -> None:
    episode = episode_of("parallel", max_turns=1)
    assert (episode.status, episode.limit, episode.reward) == (Status.TRUNCATED, "turns", 0.0)


def test_a_program_that_repeats_a_refused_call_is_ended() -> None:
    programs.tries.clear()
    episode = episode_of("persistent", max_turns=1)
    assert (episode.status, episode.limit, episode.reward) == (Status.TRUNCATED, "turns", 0.0)
    [tries] = programs.tries.values()
    assert 4 <= tries < 50, "an answer and three refusals"


@pytest.mark.parametrize("http_client", ["openai", "httpx", "urllib", "group"])
def test_a_refusal_is_recognized_through_any_client(http_client: str) -> None:
    programs.http_client = http_client
    episode = episode_of("plain", max_turns=1)
    assert (episode.status, episode.limit) == (Status.TRUNCATED, "turns")


def test_time_is_a_budget_too() -> None:
    episode = episode_of("hanging", max_seconds=0.5)
    assert (episode.status, episode.limit) == (Status.TRUNCATED, "seconds")


def test_a_program_that_times_out_before_its_first_call_is_truncated() -> None:
    episode = episode_of("late", max_seconds=0.2)
    assert (episode.status, episode.limit, episode.reward) == (Status.TRUNCATED, "seconds", 0.0)
    assert episode.branches == []


@pytest.mark.parametrize("program", ["talkative", "deaf"])
def test_an_error_of_the_generator_is_raised_even_if_the_program_catches_it(program: str) -> None:
    def broken(_: str) -> str:
        raise GeneratorError("the engine is gone")

    with pytest.raises(GeneratorError, match="the engine is gone"):
        episode_of(program, broken)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("tests.endpoint.programs:slove", "has no 'slove'. Did you mean 'solve'|has no 'slove'"),
        ("no_such_module:solve", "there is no module 'no_such_module'"),
        ("tests.endpoint.programs:TOOL", "is not a function"),
        ("tests.endpoint.programs:yielding", "contains `yield`"),
        ("tests.endpoint.programs:of_one_argument", r"must take \(task, base_url, api_key\): too many positional"),
    ],
)
def test_a_missing_program_is_an_error_when_the_recipe_is_read(program: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        AgentTasks(program=program, taskset=Lowercase())


TOYS, JUDGE = {"type": "tests.toy:Lowercase"}, {"url": "http://127.0.0.1:1/v1", "model": "j"}
AGENT = {"type": "agent", "program": "tests.endpoint.programs:team", "taskset": TOYS}
BLEND = {"type": "blend", "of": {"a": {"taskset": TOYS, "weight": 3}}}


@pytest.mark.parametrize(
    "around",
    [
        {"type": "agent", "program": "tests.endpoint.programs:team"},
        {"type": "judge", "judge": JUDGE},
        {"type": "genrm", "judge": JUDGE},
        {"type": "reward_model", "model": "./m"},
        {"type": "workers"},
    ],
    ids=lambda each: each["type"],
)
@pytest.mark.parametrize(
    ("inside", "why"),
    [(AGENT, "AgentTasks can't be inside .* an agent, put it around"), (BLEND, "put .* inside, around each")],
    ids=["agent", "blend"],
)
def test_what_would_be_left_out_of_a_wrapped_task_set_is_refused(
    around: dict[str, Any], inside: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """The program of an agent; the weights, limits and filters of a blend."""
    with pytest.raises(ConfigError, match=why):
        read_settings(toy_settings(tmp_path, data={**around, "taskset": inside}))


def test_prompts_in_a_file_are_tasks_and_their_other_fields_are_data(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "answer": i} for i in range(10)]
    rows[3]["prompt"] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = Prompts(path=str(path), test_size=3)
    train, test = tasks.tasks("train"), tasks.tasks("test")
    assert (len(train), len(test)) == (7, 3)
    assert sorted(task.data["answer"] for task in [*train, *test]) == list(range(10))
    assert {len(task.prompt) for task in [*train, *test]} == {1, 2}
    assert not tasks.grades
    path.write_text('{"prompt": " "}\n')
    with pytest.raises(DataError, match=r"tasks.jsonl:1: field 'prompt'"):
        Prompts(path=str(path)).tasks("train")
