"""A real reward model in a real child process: its scores are what transformers gives, and its failures are loud."""

import asyncio
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.checkpoint.test_export_reward_model import make_run
from tests.contracts.worker_contract import same_in_a_worker
from tests.tiny import tiny_llama
from whet.base.errors import DataError, WhetError
from whet.checkpoint.export import export
from whet.core.types import Group, Message, Task
from whet.models.config import check_models
from whet.models.reward_model import RewardModel
from whet.processes.child import Child
from whet.tasks.base import Observation, Step, TaskSet
from whet.tasks.episodes import play as replay
from whet.tasks.isolated import IsolatedEnvironments
from whet.tasks.math.arithmetic import Arithmetic
from whet.tasks.preference.reward_model import RewardModelTasks
from whet.tasks.preference.reward_model_process import CutScore, RewardModelClient, RewardModelProcess

TOLERANCE = 1e-5  # scores of size 1, float32 on a CPU, however they are batched
T = TypeVar("T")


pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported reward model."""
    folder = tmp_path_factory.mktemp("judge")
    run, _ = make_run(folder, tiny_llama(max_position_embeddings=512))
    export(run, folder / "model")
    return folder / "model"


def talk(answer: str, question: str = "how much?") -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ANSWERS = ["5", "five " * 30, "\\boxed{5}", *(f"it is {i}, " * (i + 1) for i in range(20))]


def expected(model: Path, answers: list[str]) -> list[float]:
    classifier = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        rows = [tokenizer.apply_chat_template(talk(a), return_tensors="pt", return_dict=True) for a in answers]
        return [classifier(**row).logits.item() for row in rows]


def with_client(
    model: Path | str, calls: Callable[[RewardModelClient], Awaitable[T]], **settings: Any
) -> tuple[T, RewardModelClient]:
    """The result of ``calls(client)`` and the client, closed."""
    client = RewardModelClient(str(model), None, RewardModelProcess(**settings))
    try:
        return asyncio.run(calls(client)), client  # type: ignore[arg-type]
    finally:
        client.close()


def pid_of(client: RewardModelClient) -> int:
    (child,) = client.pool.children
    return child.process.pid


async def all_at_once(client: RewardModelClient) -> list[float]:
    return await asyncio.gather(*(client.score(talk(answer)) for answer in ANSWERS))


def test_scores_equal_the_scores_of_transformers_in_any_batching(model: Path) -> None:
    alone = expected(model, ANSWERS)
    assert max(alone) - min(alone) > 0.1
    for size, most in ((16, 4), (4, 12), (1, 23)):
        scores, client = with_client(model, all_at_once, batch_size=size)
        assert scores == pytest.approx(alone, abs=TOLERANCE), size
        assert len(ANSWERS) / size <= client.batches <= most, "what waits is scored together"
        assert client.pool.restarts == 0


def test_in_batches_of_one_scores_are_the_same_to_the_last_bit(model: Path) -> None:
    async def one_by_one(client: RewardModelClient) -> list[float]:
        return [await client.score(talk(answer)) for answer in reversed(ANSWERS)]

    assert with_client(model, all_at_once, batch_size=1)[0] == with_client(model, one_by_one, batch_size=1)[0][::-1]


def test_a_process_that_dies_is_replaced_with_a_warning_and_no_reward_is_lost(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def calls(client: RewardModelClient) -> list[float]:
        first = await client.score(talk("5"))
        os.kill(pid_of(client), signal.SIGKILL)
        return [first, await client.score(talk("5"))]

    with caplog.at_level(logging.WARNING, "whet"):
        (before, after), client = with_client(model, calls)
    assert before == after
    assert client.pool.restarts == 1
    assert "the process of the reward model" in caplog.text
    assert "was lost 1 times and started again" in caplog.text


def test_a_process_that_is_too_slow_twice_is_an_error_and_never_a_reward(model: Path) -> None:
    async def calls(client: RewardModelClient) -> list[Any]:
        return await asyncio.gather(*(client.score(talk(a)) for a in ANSWERS[:3]), return_exceptions=True)

    results, client = with_client(model, calls, deadline_s=1e-4)
    assert all(isinstance(result, WhetError) and not isinstance(result, DataError) for result in results)
    assert "failed twice" in str(results[0])
    assert client.pool.restarts >= 2


def test_a_model_that_is_not_a_reward_model_is_refused_before_it_scores(model: Path, tmp_path: Path) -> None:
    from tests.toy import save_tiny_model

    for path, why in ((save_tiny_model(tmp_path / "policy"), r"is not a reward model: it lacks score\.weight"),
                      (tmp_path / "nothing", "there is no such folder")):  # fmt: skip
        with pytest.raises(WhetError, match=why):
            with_client(path, lambda client: client.score(talk("5")))
    with pytest.raises(WhetError, match=r"could not start: no reply within 0\.001 s"):
        with_client(model, lambda client: client.score(talk("5")), start_s=0.001)


def test_a_reward_model_with_damaged_weights_is_refused_with_their_name(model: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(WhetError, match=r"damaged can't be used .*: 1 of its weights hold NaN .* model\.norm\.weight"):
        RewardModel(str(damaged), None, "cpu", "float32", 1)


def test_a_reward_model_that_is_missing_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(WhetError, match="'no-such-judge': there is no such folder"):
        check_models(RewardModelTasks(taskset=Arithmetic(), model="no-such-judge"))


@pytest.mark.parametrize(("label", "kind"), [(None, "reward model"), ("good", "classifier")])
def test_a_policy_in_the_place_of_a_reward_model_is_refused_at_reading(
    model: Path, tmp_path: Path, label: str | None, kind: str
) -> None:
    from tests.toy import save_tiny_model

    check_models(RewardModelTasks(taskset=Arithmetic(), model=str(model)))
    for policy in (save_tiny_model(tmp_path / "policy"), "smollm2-135m-instruct"):
        with pytest.raises(WhetError, match=f"{policy} is a language model and not a {kind}"):
            check_models(RewardModelTasks(taskset=Arithmetic(), model=str(policy), label=label))


def test_replies_that_are_too_long_are_scored_by_their_beginnings(model: Path) -> None:
    async def calls(client: RewardModelClient) -> list[Any]:
        answers = ["5", "x" * 600, "6", "x" * 900]
        return await asyncio.gather(*(client.score(talk(answer)) for answer in answers), return_exceptions=True)

    (first, long, last, longer), _ = with_client(model, calls)
    assert [isinstance(one, CutScore) for one in (first, long, last, longer)] == [False, True, False, True]
    assert [first, last] == pytest.approx(expected(model, ["5", "6"]), abs=TOLERANCE)
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {n: len(tokenizer.apply_chat_template(talk("x" * n), return_dict=True)["input_ids"]) for n in range(600)}
    most = max(n for n, size in sizes.items() if size <= 512)
    assert [long, longer] == pytest.approx(expected(model, ["x" * most] * 2), abs=TOLERANCE)


def test_earlier_replies_are_cut_too_and_a_task_that_is_too_long_itself_is_bad_data(model: Path) -> None:
    again: list[Message] = [*talk("x" * 700), *talk("y" * 700, "sure?")]

    async def calls(client: RewardModelClient) -> list[Any]:
        asked = [again, talk("5"), talk("5", "z" * 600)]
        return await asyncio.gather(*map(client.score, asked), return_exceptions=True)

    (both, short, long), _ = with_client(model, calls)
    assert isinstance(both, CutScore)
    assert short == pytest.approx(expected(model, ["5"])[0], abs=TOLERANCE)
    assert isinstance(long, DataError)
    assert "reads at most 512, and without the replies it is still too long" in str(long)


def test_an_episode_with_a_cut_reply_is_marked(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (step,) = play(tasks(model, "Five"), "x" * 600)
    assert step.scores["reward_model_cut"] == 1.0
    assert caplog.text.count("is longer than the context of the reward model") == 1


def test_closing_fails_waiting_callers_and_leaves_no_process(model: Path) -> None:
    async def calls(client: RewardModelClient) -> tuple[int, list[Any]]:
        await client.score(talk("5"))
        pid = pid_of(client)
        os.kill(pid, signal.SIGSTOP)  # it hangs
        waiting = [asyncio.create_task(client.score(talk(answer))) for answer in ANSWERS]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(client.close)
        return pid, await asyncio.gather(*waiting, return_exceptions=True)

    (pid, results), _ = with_client(model, calls)
    assert all(isinstance(result, WhetError) for result in results)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_conversation_that_a_template_fails_on_is_bad_data_and_not_an_error_of_the_model(model: Path) -> None:
    from whet.models.reward_model import RewardModel

    served = RewardModel(str(model), None, "cpu", "float32", 1)
    served.chat.text = "{% if messages[1]['content'] == '5' %}{{ 1 + 'a' }}{% endif %}a fine text"
    failed, score = served.scores([{"messages": talk(answer), "tools": None} for answer in ("5", "6")])
    assert re.fullmatch(
        r"the reward model can't read .*: the chat template can't .*: unsupported operand .*", str(failed)
    )
    assert isinstance(score, float)


def test_a_wrong_number_of_scores_is_an_error_for_all_waiting_callers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def calls(client: RewardModelClient) -> list[Any]:
        await client.score(talk("5"))

        async def call(*_: Any) -> list[float]:
            return [1.0] * 9

        monkeypatch.setattr(client.pool, "call", call)
        waiting = asyncio.gather(*(client.score(talk(answer)) for answer in ("5", "6")), return_exceptions=True)
        return await asyncio.wait_for(waiting, 20)

    results, _ = with_client(model, calls)
    assert ["gave 9 scores for" in str(result) for result in results] == [True, True]


def test_closing_a_client_while_it_starts_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = RewardModelClient(str(model), None, RewardModelProcess())
    started = []

    def starting(*arguments: Any, **settings: Any) -> Child:
        child = Child(*arguments, **settings)
        started.append(child)
        closing = threading.Thread(target=client.close)
        closing.start()
        while not client.pool.closed:
            closing.join(0.01)
        return child

    monkeypatch.setattr("whet.processes.pool.Child", starting)
    with pytest.raises(WhetError, match="pool of worker processes was closed"):
        asyncio.run(client.score(talk("5")))
    assert not started[0].alive


def test_callers_that_give_up_leave_the_scores_of_others_alone(model: Path) -> None:
    async def calls(client: RewardModelClient) -> list[float]:
        await client.score(talk("5"))
        asked = [asyncio.create_task(client.score(talk(answer))) for answer in ANSWERS[:6]]
        await asyncio.sleep(0)
        for given_up in (asked[0], asked[3]):  # the one that has the turn, and one that waits
            given_up.cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in found] == [i in (0, 3) for i in range(6)]
        return [one for one in found if isinstance(one, float)]

    scores, _ = with_client(model, calls, batch_size=2)
    wanted = [answer for index, answer in enumerate(ANSWERS[:6]) if index not in (0, 3)]
    assert scores == pytest.approx(expected(model, wanted), abs=TOLERANCE)


# The task set


class Poses(TaskSet):
    """Only poses tasks."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"poses/{split}/0", [{"role": "user", "content": "how much?"}])]


class Five(Poses):
    """Two points for a 5."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": 2.0 * (answer == "5"), "correct": float(answer == "5"), "format": 1.0}


class TwoTurns(Poses):
    """Asks twice; pays half a point each time."""

    def make(self, task: Task) -> Any:
        class Episode:
            turns = 0

            async def start(self) -> Observation:
                return Observation(task.prompt)

            async def step(self, reply: Message) -> Step:
                self.turns += 1
                again: list[Message] = [{"role": "user", "content": "sure?"}]
                return Step(0.5, done=self.turns == 2, messages=[] if self.turns == 2 else again)

            async def close(self) -> None:
                pass

        return Episode()


class Relative(Five):
    async def score_group(self, task: Task, group: Group) -> None:
        """Relative rewards."""


HERE = "tests.tasks.test_reward_model"


def tasks(model: Path, taskset: str, **settings: Any) -> RewardModelTasks:
    return RewardModelTasks.model_validate({"taskset": {"type": f"{HERE}:{taskset}"}, "model": str(model), **settings})


def play(taskset: RewardModelTasks, *replies: str) -> list[Step]:
    async def go() -> list[Step]:
        environments = taskset.open()
        episode = environments.make(taskset.tasks("train")[0])
        await episode.start()
        try:
            return [await episode.step({"role": "assistant", "content": reply}) for reply in replies]
        finally:
            await episode.close()
            await environments.close()

    return asyncio.run(go())


def test_the_reward_is_the_scaled_score_and_the_grade_stays_visible(model: Path) -> None:
    right, wrong = expected(model, ["5", "six"])
    (step,) = play(tasks(model, "Five"), "5")
    assert step.reward == pytest.approx(right, abs=TOLERANCE)
    assert step.scores == {
        "reward_model": pytest.approx(right, abs=TOLERANCE), "correct": 1.0, "format": 1.0, "grade": 2.0
    }  # fmt: skip
    (step,) = play(tasks(model, "Five", shift=0.25, scale=-2.0, grade_weight=0.1), "5")
    assert step.reward == pytest.approx(-2 * (right - 0.25) + 0.2, abs=1e-4)
    (step,) = play(tasks(model, "Five", scale=1000.0, clamp=1.5), "six")
    assert step.reward == pytest.approx(1.5 if wrong > 0 else -1.5)
    assert step.scores["correct"] == step.scores["grade"] == 0


def test_each_of_two_reward_models_has_its_scores(model: Path) -> None:
    """The score of the outer one was replaced by that of the inner one, and the grade was lost."""
    inner = tasks(model, "Five", scale=2.0)
    taskset = RewardModelTasks(taskset=inner, model=str(model), scale=-1.0, grade_weight=0.25)
    (step,), (alone,) = play(taskset, "5"), play(inner, "5")
    score = alone.scores["reward_model"]
    assert step.reward == pytest.approx(-score + 0.25 * 2 * score, abs=1e-4)
    assert step.scores == {
        "reward_model": pytest.approx(score, abs=TOLERANCE), "grade": pytest.approx(2 * score, abs=1e-4),
        "inside/reward_model": pytest.approx(score, abs=TOLERANCE), "inside/grade": 2.0, "correct": 1.0, "format": 1.0,
    }  # fmt: skip
    declared = RewardModelTasks(taskset=RewardModelTasks(taskset=Arithmetic(), model="m"), model="m").score_names
    assert set(declared) >= step.scores.keys()
    assert len(declared) == len(set(declared))


def test_a_task_set_without_a_grader_can_be_wrapped(model: Path) -> None:
    (step,) = play(tasks(model, "Poses"), "5")
    assert step.scores == {"reward_model": pytest.approx(step.reward)}
    with pytest.raises(ValueError, match="Poses grades nothing"):
        tasks(model, "Poses", grade_weight=1.0)
    with pytest.raises(ValueError, match="Relative sets the rewards of whole groups"):
        tasks(model, "Relative")


def test_rewards_of_several_turns_add_up_to_the_score_of_the_conversation(model: Path) -> None:
    taskset = tasks(model, "TwoTurns", grade_weight=0.5)
    steps = play(taskset, "yes", "quite")
    whole = [*talk("yes"), *talk("quite", "sure?")]
    score = with_client(model, lambda client: client.score(whole))[0]
    assert [step.done for step in steps] == [False, True]
    assert sum(step.reward for step in steps) == pytest.approx(score + 0.5, abs=1e-4)
    assert steps[-1].scores["reward_model"] == pytest.approx(score, abs=TOLERANCE)
    assert (steps[-1].scores["grade"], steps[-1].scores["correct"]) == (1.0, 1.0)


def test_a_closed_task_set_can_be_used_again(model: Path) -> None:
    taskset = tasks(model, "Five")
    first, again = play(taskset, "5"), play(taskset, "5")
    assert first[0].reward == again[0].reward


@pytest.mark.slow
def test_a_reward_model_in_a_worker_gives_the_scores_that_it_gives_in_the_run(model: Path) -> None:
    taskset = tasks(model, "Five")

    async def use(environments: IsolatedEnvironments) -> list[Any]:
        return [await replay(environments.make(taskset.tasks("train")[0]), answer) for answer in ANSWERS[:3]]

    same_in_a_worker(taskset, use)
