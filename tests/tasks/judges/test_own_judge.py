"""A judge that is the policy: asked across threads through every wrapper, patient while its engine is paused, and
refused where there is no policy."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import ValidationError

from tests.endpoint.agents import RENDERER, Scripted
from tests.engines.test_torch_generator import make
from tests.toy import toy_recipe
from whet.base.errors import ConfigError, GeneratorError
from whet.config import SettingsError, load
from whet.config.issues import RecipeError
from whet.core.types import Task
from whet.endpoint.judge_model import JudgeModel
from whet.engines.base import Completion, SamplingParams
from whet.rollouts.blend import Blend, Part
from whet.run.evaluate_model import evaluate_on
from whet.run.evaluation import EvaluationSet
from whet.run.recipe import Recipe
from whet.tasks.attack.attack import Plan, attack
from whet.tasks.base import TaskSet
from whet.tasks.episodes import play
from whet.tasks.gym.single_turn import check_single_turn
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.judges.config import Judge
from whet.tasks.judges.genrm import GenRM
from whet.tasks.judges.judge import JudgeError
from whet.tasks.judges.multichallenge import MultiChallenge
from whet.tasks.judges.rubric import Judged
from whet.tasks.math.arithmetic import Arithmetic
from whet.tasks.preference.reward_model import RewardModelTasks
from whet.tasks.program import AgentTasks
from whet.tasks.self_play import Nim
from whet.tasks.users.model import ModelUser
from whet.tasks.validate import validate
from whet.tasks.workers import WorkerTasks

T = TypeVar("T")
TASKS = Arithmetic(train_size=4, test_size=2)
POLICY = Judge(model="policy", retries=1)
OWN = Judged(taskset=TASKS, judge=POLICY)
BY_LOGPROBS = Judge(model="policy", verdict="logprobs")
CHOOSING = Judged(taskset=TASKS, judge=BY_LOGPROBS, by="choice", choices={"a": 1.0, "b": 0.0})


def verdict(prompt: str) -> str:
    return "Grade: 5" if "a good answer" in prompt else "Grade: 1"


def with_engine(tasks: TaskSet, engine: Any, use: Callable[[IsolatedEnvironments], Awaitable[T]]) -> T:
    """Return the result of ``use`` with environments that can ask the engine."""

    async def main() -> T:
        environments = IsolatedEnvironments(tasks.open())
        environments.use_policy(JudgeModel(engine, RENDERER, 4096).answer)
        try:
            return await use(environments)
        finally:
            await environments.close()

    return asyncio.run(main())


async def reward(environments: IsolatedEnvironments, task: Task, answer: str) -> float:
    _, episode = await play(environments.make(task), answer)
    return episode.reward


def test_a_policy_is_named_in_short_and_settings_of_other_models_are_refused() -> None:
    for judge in ("policy", {"model": "policy"}):
        assert Judged.model_validate({"taskset": TASKS, "judge": judge}).judge.is_policy
    assert not Judge(url="http://x/v1", model="policy").is_policy
    assert not Judge.model_validate("./policy").is_policy
    for name, value in (("deadline", 5.0), ("revision", "main"), ("process", {"threads": 2}), ("api_key_env", "K")):
        with pytest.raises(ValidationError, match=f"{name} is read only where another model is the judge"):
            Judge.model_validate({"model": "policy", name: value})


@pytest.mark.parametrize(
    "around",
    [
        lambda: OWN,
        lambda: Blend(of={"own": Part(taskset=OWN), "rule": Part(taskset=TASKS)}),
        lambda: AgentTasks(taskset=OWN, program="tests.endpoint.programs:team"),
        lambda: GenRM(taskset=OWN, judge=Judge(url="http://x/v1", model="j")),
    ],
    ids=["alone", "blend", "agent", "wrapped"],
)
def test_the_engine_of_another_event_loop_judges(around: Callable[[], TaskSet]) -> None:
    engine, tasks = Scripted(verdict), around()
    engine.gate.set()
    task = next(task for task in tasks.tasks("train") if task.environment in ("", "own"))

    async def use(environments: IsolatedEnvironments) -> tuple[float, float]:
        return await reward(environments, task, "a good answer"), await reward(environments, task, "a bad one")

    assert with_engine(tasks, engine, use) == (1.0, 0.0)
    assert len(engine.requests) == 2
    assert all(request.greedy and request.max_new_tokens == POLICY.max_tokens for request in engine.requests)


def test_a_reward_model_around_a_judge_gives_it_the_policy() -> None:
    environments = RewardModelTasks(taskset=OWN, model="m").open()
    asked: list[str] = []

    async def ask(request: str) -> tuple[int, str]:
        asked.append(request)
        return 200, '{"choices": [{"message": {"content": "Grade: 5"}}]}'

    environments.use_policy(ask)
    _, episode = asyncio.run(play(environments.inner.make(TASKS.tasks("train")[0]), "x"))
    assert episode.reward == 1.0
    assert len(asked) == 1


def test_more_questions_than_the_engine_takes_at_once_have_the_same_verdicts_as_alone() -> None:
    answers = [f"{number} is it" for number in range(12)]
    task = TASKS.tasks("train")[0]

    async def together(environments: IsolatedEnvironments) -> list[float]:
        return await asyncio.gather(*(reward(environments, task, answer) for answer in answers))

    async def alone(environments: IsolatedEnvironments) -> list[float]:
        return [await reward(environments, task, answer) for answer in answers]

    rewards = with_engine(CHOOSING, make(max_batch=2), together)
    assert rewards == with_engine(CHOOSING, make(max_batch=2), alone)
    assert len(set(rewards)) == len(answers)
    assert all(0 < value < 1 for value in rewards)


def test_a_question_to_a_paused_engine_waits_and_is_answered_with_the_new_weights() -> None:
    engine = make(max_batch=2)
    task = TASKS.tasks("train")[0]
    answered: list[Completion] = []
    sample = engine.sample

    async def recorded(prompt: list[int], params: SamplingParams, session: str = "") -> Completion:
        answered.append(await sample(prompt, params, session))
        return answered[-1]

    engine.sample = recorded  # type: ignore[method-assign]

    async def use(environments: IsolatedEnvironments) -> None:
        await engine.pause()
        asking = asyncio.create_task(reward(environments, task, "an answer"))
        while not engine._in_flight.requests:
            await asyncio.sleep(0.001)
        assert not asking.done()
        await engine.resume(7)
        assert 0 < await asking < 1

    with_engine(CHOOSING, engine, use)
    assert [completion.versions for completion in answered] == [(7, 7)]


def test_an_episode_that_is_cancelled_takes_its_question_from_the_engine() -> None:
    engine = Scripted(verdict)  # answers nothing

    async def use(environments: IsolatedEnvironments) -> None:
        asking = asyncio.create_task(reward(environments, TASKS.tasks("train")[0], "an answer"))
        while not engine.sampling:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while engine.sampling:
            await asyncio.sleep(0.001)

    with_engine(OWN, engine, use)
    assert engine.cancelled == 1


def test_an_error_of_the_engine_is_the_runs_and_a_missing_verdict_a_failure() -> None:
    class Broken(Scripted):
        async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
            raise GeneratorError("the engine died")

    def graded(engine: Any) -> float:
        return with_engine(OWN, engine, lambda environments: reward(environments, TASKS.tasks("train")[0], "x"))

    with pytest.raises(GeneratorError, match="the engine died"):
        graded(Broken(verdict))
    silent = Scripted(lambda _: "hm")
    silent.gate.set()
    with pytest.raises(JudgeError, match=r"the policy as the judge gave no verdict on .* in 2 attempts"):
        graded(silent)
    assert len({request.seed for request in silent.requests}) == 2


def test_a_question_that_leaves_no_room_in_the_context_gets_the_worst_grade() -> None:
    engine = Scripted(verdict)
    engine.gate.set()

    async def main() -> dict[str, float]:
        environments = OWN.open()
        environments.use_policy(JudgeModel(engine, RENDERER, 1024).answer)
        return await environments.grade(TASKS.tasks("train")[0], "a good answer " * 1000)

    scores = asyncio.run(main())
    assert (scores["reward"], scores["judge_refused"]) == (0.0, 1.0)
    assert len(engine.requests) == 1, "a short greeting, which it accepts"


def test_only_a_judge_may_be_the_policy() -> None:
    for read in (lambda: ModelUser(server=POLICY), lambda: Nim(opponent="model", server=POLICY)):
        with pytest.raises(SettingsError, match="only a judge may be the policy"):
            read()


def test_where_there_is_no_policy_it_is_refused_in_words(tmp_path: Path) -> None:
    no_policy = pytest.raises(ConfigError, match="a policy can be asked only in a run, and in an evaluation")
    with no_policy:
        asyncio.run(validate(OWN, 2))
    with no_policy:
        asyncio.run(attack(OWN, Plan(1, 1, 1.0, 1.0, None, 0.2, 0)))
    with no_policy:
        asyncio.run(check_single_turn(OWN))
    with no_policy:
        asyncio.run(OWN.open().grade(TASKS.tasks("train")[0], "x"))
    recipe, sets = toy_recipe(tmp_path), {"own": EvaluationSet(data=OWN)}
    with no_policy:
        asyncio.run(evaluate_on(recipe, sets, address=("http://x/v1", "m", None)))
    with pytest.raises(SettingsError, match="put the workers inside, as in"):
        WorkerTasks(taskset=OWN)
    WorkerTasks(taskset=Judged(taskset=TASKS, judge=Judge(url="http://x/v1", model="policy")))


SETTINGS = {"type": "judge", "judge": "policy", "taskset": {"type": "tests.toy:Lowercase"}}
CHOICE = {"by": "choice", "choices": {"a": 1.0, "b": 0.0}}
LOGPROBS = {**SETTINGS, **CHOICE, "judge": {"model": "policy", "verdict": "logprobs"}}
TOY = {"type": "tests.engines.toy_engine:ToyConfig", "max_context": 256}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": SETTINGS, "validation": {"required": True}}, "validation.required grades answers before the run"),
        ({"data": LOGPROBS, "generator": TOY}, "with generator = ToyConfig the engine does not report them"),
        ({"evaluation": {"sets": {"own": {"data": LOGPROBS}}}, "generator": TOY}, "set judge.verdict=text"),
        ({"data": LOGPROBS, "generator": {"type": "vllm", "speculative": "ngram"}}, "with generator.speculative"),
    ],
)
def test_a_recipe_that_can_not_ask_its_policy_is_refused_at_reading(
    tiny_model: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(RecipeError, match=why):
        toy_recipe(tiny_model, **changes)


def test_an_algorithm_that_samples_nothing_has_no_policy_that_judges() -> None:
    with pytest.raises(RecipeError, match="SFT has none: name another model as the judge"):
        load(Recipe, "tools-sft", ["data.taskset={type: judge, judge: policy, taskset: arithmetic}"])


def test_multichallenge_asks_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"QUESTION_ID": "a", "AXIS": "X", "CONVERSATION": [{"role": "user", "content": "hi"}], '
        '"TARGET_QUESTION": "Is it kind?", "PASS_CRITERIA": "YES"}\n'
    )
    tasks = MultiChallenge(path=str(path), judge=POLICY, test_size=0)
    engine = Scripted(lambda prompt: "[[YES]]" if "kind words" in prompt else "[[NO]]")
    engine.gate.set()
    task = tasks.tasks("train")[0]

    async def use(environments: IsolatedEnvironments) -> tuple[float, float]:
        return await reward(environments, task, "kind words"), await reward(environments, task, "rude ones")

    assert with_engine(tasks, engine, use) == (1.0, 0.0)
