"""reasoning-gym's problems, scored by its own scorers, which never get to run a model's answer as code."""

import asyncio
import inspect
import re
import sys

import pytest

from whet.base.errors import ConfigError, DataError
from whet.processes.pool import WorkerLimits
from whet.tasks.adapters.reasoning_gym import SCREENS, TRUSTED, ReasoningGym, check_generator, extract

pytestmark = pytest.mark.usefixtures("forked_children")


def make(dataset="chain_sum", **settings):
    return ReasoningGym(dataset=dataset, **{"train_size": 12, "test_size": 4, "answer": "whole", **settings})


def grades(taskset, *answers):
    """The scores of the answers to the first training task; ``...`` stands for the right one."""

    async def all_of_them():
        task = taskset.tasks("train")[0]
        right = taskset._entries["train"][task.uid]["answer"]
        grading = taskset.open()
        try:
            return [await grading.grade(task, right if answer is ... else answer) for answer in answers]
        finally:
            await grading.close()

    return asyncio.run(all_of_them())


def test_right_wrong_and_missing_answers():
    right, wrong, missing = grades(make(), ..., "no number at all", "   ")
    assert right == {"reward": 1, "correct": 1, "score": 1, "format": 1}
    assert wrong["correct"] == 0
    assert missing == {"reward": 0, "correct": 0, "score": 0, "format": 0}


def test_splits_share_no_question_and_depend_on_the_seed_alone():
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    taskset = make(settings=few, train_size=300, test_size=20)
    train, test = ([task.prompt[-1]["content"] for task in taskset.tasks(split)] for split in ("train", "test"))
    assert train
    assert test
    assert not set(train) & set(test)
    assert len(set(train)) == len(train) < 300
    again = make(settings=few, train_size=300, test_size=20)
    assert [task.prompt[-1]["content"] for task in again.tasks("train")] == train
    other = make(settings=few, train_size=300, test_size=20, seed=1)
    assert [task.prompt[-1]["content"] for task in other.tasks("train")] != train


@pytest.mark.parametrize(
    ("kind", "reply", "answer"),
    [
        ("boxed", "so \\boxed{7}", "7"),
        ("boxed", "so 7", None),
        ("tag", "<answer>1</answer> no <answer> 2\n3 </answer>", "2\n3"),
        ("tag", "<answer>1</answer> <answer>2", None),
        ("tag", "7", None),
        ("last_line", "thinking\n\n 7 \n\n", "7"),
        ("last_line", "", None),
        ("whole", " 7 ", "7"),
        ("whole", "7" * 30_000, None),
    ],
)
def test_where_the_answer_is_looked_for(kind, reply, answer):
    assert extract(reply, kind) == answer


def test_the_instruction_asks_for_the_place_where_the_answer_is_looked_for():
    assert "<answer>" in make(answer="tag").tasks("test")[0].prompt[-1]["content"]
    assert make(answer="tag", instruction="Go.").tasks("test")[0].prompt[-1]["content"].endswith("\n\nGo.")


@pytest.mark.parametrize("dataset", sorted(SCREENS))
def test_answers_that_would_run_as_code_do_not_reach_the_scorer(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "__import__('os').system('touch pwned')"
    hostile = [code, f"[{code}]", "().__class__.__base__.__subclasses__()", f"(lambda: {code})()", f"f'{{{code}}}'"]
    right, *scores = grades(make(dataset), ..., *hostile)
    assert right["correct"] == 1
    assert all(score == {"reward": 0, "correct": 0, "score": 0, "format": 0} for score in scores)
    assert not list(tmp_path.iterdir())


def test_an_answer_that_hangs_the_scorer_is_killed():
    taskset = make("countdown", limits=WorkerLimits(workers=1, cpu_s=1))
    right, hanging = grades(taskset, ..., "9**9**9**9")
    assert right["correct"] == 1
    assert hanging["reward"] == 0
    assert hanging.get("grading_timeout", 0) + hanging.get("grading_crash", 0) == 1


def test_unknown_generators_and_settings_are_errors_that_name_the_valid_ones():
    with pytest.raises(ConfigError, match="Did you mean 'chain_sum'"):
        make("chain_sums").tasks("train")
    with pytest.raises(ConfigError, match=r"no setting 'max_term'; it has: .*max_terms"):
        make(settings={"max_term": 3}).tasks("train")
    with pytest.raises(ConfigError, match="train_size"):
        make(settings={"seed": 3}).tasks("train")
    with pytest.raises(ConfigError, match="rejects its settings"):
        make(settings={"min_terms": 5, "max_terms": 2}).tasks("train")
    other = make("leg_counting").tasks("train")[0]
    with pytest.raises(DataError, match="is not a task of"):
        asyncio.run(make().open().grade(other, "1"))


def test_a_generator_that_evaluates_text_and_was_not_reviewed_is_refused():
    with pytest.raises(ConfigError, match="may run a model's answer as code"):
        check_generator("composite", {})
    from reasoning_gym.factory import DATASETS

    refused = []
    for name, (kind, _) in DATASETS.items():
        source = inspect.getsource(sys.modules[kind.__module__])
        if any(call in source for call in (" eval(", "(eval(", "parse_expr(", "sympify(")):
            assert name in SCREENS or name in TRUSTED, name
        try:
            check_generator(name, {})
        except ConfigError:
            refused.append(name)
    assert refused == ["composite"]


CONSTANTS = (
    "0",
    "1",
    "0.",
    "nan",
    "inf",
    "nan+nanj",
    "6*4*1*1",
    "True",
    "False",
    "yes",
    "no",
    "A",
    "[]",
    "{}",
    "abc",
    "-1",
)


@pytest.mark.parametrize("dataset", ["puzzle24", "complex_arithmetic", "game_of_life_halting", "coin_flip"])
def test_no_constant_is_right_for_most_problems(dataset):
    taskset = make(dataset, train_size=12)

    tasks = taskset.tasks("train")

    async def right():
        grading = taskset.open()
        try:
            return {c: sum([(await grading.grade(task, c))["correct"] for task in tasks]) for c in CONSTANTS}
        finally:
            await grading.close()

    golds = [str(taskset.entry(task)[0]["answer"]) for task in tasks]
    for constant, count in asyncio.run(right()).items():
        assert count <= golds.count(constant), constant


@pytest.mark.parametrize(
    "dataset",
    [
        "puzzle24",
        "complex_arithmetic",
        "game_of_life_halting",
        "coin_flip",
        "gsm_symbolic",
        "letter_jumble",
        "spell_backward",
        "time_intervals",
        "word_sorting",
    ],
)
def test_right_answers_pass_the_additional_checks_of_a_scorer(dataset):
    (right,) = grades(make(dataset), ...)
    assert right["correct"] == 1


@pytest.mark.parametrize(
    ("dataset", "more"),
    [
        ("spell_backward", "not"),
        ("time_intervals", " not"),
        ("word_sorting", ", lamp"),
        ("gsm_symbolic", " or 3"),
        ("gsm_symbolic", "/25"),
        ("letter_jumble", " not"),
    ],
)
def test_text_after_the_right_answer_earns_nothing(dataset, more):
    taskset = make(dataset)
    (scores,) = grades(taskset, f"{taskset.entry(taskset.tasks('train')[0])[0]['answer']}{more}")
    assert scores["reward"] == 0


def test_a_scorers_partial_credit_is_paid_only_if_asked_for():
    (case,) = [case for case in make("game_of_life").cases() if case.name == "a board of zeros"]
    assert (case.expected, case.kind) == (0.0, "adversarial")
    zeros = re.sub("[1-9]", "0", case.answer)
    (exact,), (partial,) = grades(make("game_of_life"), zeros), grades(make("game_of_life", exact=False), zeros)
    assert (exact["reward"], exact["correct"]) == (0.0, 0.0)
    assert exact["score"] == partial["score"] == partial["reward"] > 0.9
    assert "a board of zeros" not in {case.name for case in make("game_of_life", exact=False).cases()}


def test_the_negative_of_the_right_number_is_wrong():
    taskset = make("gsm_symbolic")
    gold = taskset.entry(taskset.tasks("train")[0])[0]["answer"]
    negative, dollars = grades(taskset, f"-{gold}", f"${gold}.0")
    assert (negative["reward"], dollars["reward"]) == (0, 1)
