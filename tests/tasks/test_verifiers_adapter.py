"""Environments of verifiers: their own rollouts over the endpoint, scored by their own rubrics. verifiers needs other
versions of libraries, so tests with it run in a separate interpreter (`make install-adapters`)."""

import asyncio
import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.endpoint.agents import call, first_episode
from whet.base.errors import ConfigError
from whet.core.types import Episode, Status
from whet.rollouts.sampling import Sampling
from whet.tasks.adapters.verifiers import Verifiers, _record_errors

INSTALLED = importlib.util.find_spec("verifiers") is not None
real = pytest.mark.skipif(not INSTALLED, reason="verifiers<0.4 is not installed here (make install-adapters)")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "installed")


def played(taskset: Verifiers, answer: Callable[[str], str] | str, split: str = "train", turns: int = 4) -> Episode:
    """Play the first task."""
    sampling = Sampling(max_turns=turns, max_new_tokens=100, max_prompt_tokens=1000)
    return first_episode(taskset, answer, sampling, split=split)


def toy(**arguments: Any) -> Verifiers:
    return Verifiers(environment="whet-toy-sums", arguments=arguments, test_size=5)


def solve(text: str) -> str:
    number = text.rsplit("+ 1?", 1)[0].split()[-1]
    return str(int("".join(c for c in number if c.isdigit())) + 1)


@real
def test_rows_become_tasks_in_two_splits_and_signal_handlers_stay_unchanged() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    taskset = toy()
    train, test = taskset.tasks("train"), taskset.tasks("test")
    assert (len(train), len(test)) == (15, 5)
    assert not {str(task.prompt) for task in train} & {str(task.prompt) for task in test}
    assert [message["role"] for message in train[0].prompt] == ["system", "user"]
    assert len(toy(evaluation=True).tasks("test")) == 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@real
def test_one_turn_is_scored_by_the_rubric_and_its_tokens_are_recorded() -> None:
    episode = played(toy(), solve)
    assert episode.status is Status.COMPLETED, episode.error
    assert episode.reward == 1.5
    assert (episode.scores["correct"], episode.scores["brevity"], episode.scores["num_turns"]) == (1, 1, 1)
    assert [span.trained for span in episode.spans] == [False, True]
    assert played(toy(), "123456").reward == 0


@real
def test_an_answer_that_a_reward_function_cannot_read_is_zero_and_a_failure_is_no_reward() -> None:
    unreadable = played(toy(), "six")
    assert (unreadable.status, unreadable.reward, unreadable.scores["scorer_error"]) == (Status.COMPLETED, 0.5, 1)
    failed = played(toy(fault="network"), solve)
    assert failed.status is Status.FAILED
    assert "no judge" in str(failed.error)


@real
def test_several_turns_are_one_line_and_an_error_of_the_environment_fails_the_episode() -> None:
    episode = played(toy(kind="hints"), solve)
    assert episode.status is Status.COMPLETED, episode.error
    assert [span.trained for span in episode.spans] == [False, True, False, True]
    assert episode.messages[-2]["content"] == "Think again."
    assert played(toy(kind="hints"), solve, turns=1).status is Status.TRUNCATED
    failed = played(toy(kind="hints", fault="world"), solve)
    assert failed.status is Status.FAILED
    assert "the world is gone" in str(failed.error)


@real
def test_tools_are_declared_and_called() -> None:
    def answer(text: str) -> str:
        if "<tool_response>" in text:
            return text.rsplit("<tool_response>", 1)[1].split()[0]
        return call("add", a=int(solve(text)) - 1, b=1)

    episode = played(toy(kind="tool"), answer)
    assert episode.status is Status.COMPLETED, episode.error
    assert (episode.reward, episode.scores["add_calls"], episode.usage.tool_calls) == (1.5, 1, 1)
    assert episode.branches[0].tools is not None
    assert len(episode.branches) == 1


@real
def test_unusable_environments_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no-such-thing"):
        Verifiers(environment="no-such-thing").open()
    with pytest.raises(ConfigError, match="group"):
        toy(fault="group").open()


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_package_the_error_names_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'verifiers<0\.4'"):
        toy().tasks("train")


def test_rewards_and_failures_pass_through_also_with_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that the adapter makes, against the least that answers them."""

    async def correct(completion: str) -> float:
        return float(int(completion) == 2)

    class Rubric(SimpleNamespace):
        async def score_rollout(self, state: dict[str, Any]) -> None:
            try:
                state["reward"] = await self.funcs[0](state["said"])
            except Exception:  # as verifiers does
                state["reward"] = 0.0
            state["metrics"] = {"correct": state["reward"]}

        async def cleanup(self, state: dict[str, Any]) -> None:
            state["clean"] = True

    class Loaded(SimpleNamespace):
        async def rollout(self, row: dict[str, Any], client: Any, model: str, sampling: Any) -> dict[str, Any]:
            chat = await client.chat.completions.create(model=model, messages=row["prompt"])
            return {"said": chat.choices[0].message.content, "error": self.error}

        async def _teardown(self) -> None:
            self.closed = True

    rows = [{"prompt": [{"role": "user", "content": f"1 + {n}?"}], "answer": "2"} for n in range(1, 9)]
    loaded = Loaded(
        rubric=Rubric(funcs=[correct], has_group_rewards=False), error=None, build_dataset=lambda: rows,
        build_eval_dataset=lambda: None,
    )  # fmt: skip
    parts: dict[str, dict[str, Any]] = {
        "": {}, "envs": {}, "utils": {}, "envs.environment": {"signal": signal},
        "utils.env_utils": {"load_environment": lambda name: loaded},
        "clients": {"OpenAIChatCompletionsClient": lambda client: client}, "errors": {"ToolError": KeyError},
    }  # fmt: skip
    for name, content in parts.items():
        module = ModuleType(f"verifiers.{name}".rstrip("."))
        module.__dict__.update(content | {"__path__": []})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["verifiers"], "envs", sys.modules["verifiers.envs"], raising=False)
    monkeypatch.setattr(sys.modules["verifiers.envs"], "environment", sys.modules["verifiers.envs.environment"], False)

    def episode(answer: str) -> Episode:
        loaded.rubric.funcs[:] = [correct]
        return played(Verifiers(environment="stand-in", test_size=2), answer)

    assert (episode("2").reward, episode("3").reward, loaded.closed) == (1, 0, True)
    assert episode("two").scores == {"correct": 0, "scorer_error": 1}
    loaded.error = RuntimeError("a sandbox is lost")
    assert "a sandbox is lost" in str(episode("2").error)
    loaded.error = KeyError("the model's fault")
    assert episode("2").reward == 1


def test_the_errors_of_all_functions_of_a_group_of_rubrics_are_recorded() -> None:
    inner = SimpleNamespace(funcs=[len])
    _record_errors(SimpleNamespace(funcs=[], rubrics=[inner]))
    assert asyncio.run(inner.funcs[0]("abc")) == 3
    assert inner.funcs[0].__name__ == "len"
