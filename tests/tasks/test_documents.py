"""Questions over several documents: the answer equals a simple parser's, no single document gives it away, and texts of
32k and 256k tokens are built, tokenised and graded within bounds."""

import asyncio
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.grids import taking_turns
from tests.limits import run_limited
from tests.tiny import tiny_llama
from tests.toy import save_tiny_model, toy_recipe
from whet.config import SettingsError
from whet.core.types import Task
from whet.metrics.sinks.jsonl import read_metrics
from whet.run import run
from whet.tasks.documents import KINDS, MOST_DOCUMENTS, guesses, towns
from whet.tasks.long_context import Items, LongContext
from whet.tasks.validate import validate, wrong

FACT = {
    "river": r"on the river (\w+)",
    "founded": r"founded in (\d+)\.",
    "twin": r"twin town is (\w+)",
    "mayor": r"mayor is ([\w ]+)",
}


def posed(kind: Any, **settings: Any) -> LongContext:
    return LongContext(kinds=(kind,), **{"train_size": 60, "test_size": 10, "words": 400, **settings})


def question_and_documents(task: Task[Items]) -> tuple[str, dict[str, dict[str, str]]]:
    """The question, and what each document states, by its title."""
    *documents, question = str(task.prompt[-1]["content"]).split("\n\n")
    stated = {}
    for number, document in enumerate(documents, 1):
        title, text = document.split("\n")
        stated[title.removeprefix(f"Document {number}: ")] = {
            name: re.search(pattern, text)[1]  # type: ignore[index]
            for name, pattern in FACT.items()
            if len(re.findall(pattern, text)) == 1
        }
    return question.split("\n")[0], stated


def solve(task: Task[Items]) -> str:
    question, stated = question_and_documents(task)
    names = [word for word in re.findall(r"\w+", question) if word in stated]
    if question.startswith("How many"):
        river, limit = re.findall(r"river (\w+) and were founded before (\d+)", question)[0]
        return str(sum(town["river"] == river and int(town["founded"]) < int(limit) for town in stated.values()))
    if question.startswith("Which"):
        return stated[min(names, key=lambda name: int(stated[name]["founded"]))]["mayor"]
    name = names[0]
    for _ in range(question.count("twin town of")):
        name = stated[name]["twin"]
    return stated[name]["mayor"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("items", "documents"), [(1, 4), (2, 10), (4, 7)])
def test_the_answer_equals_that_of_a_simple_parser(kind: str, items: int, documents: int) -> None:
    for task in posed(kind, items=items, documents=documents).tasks("train"):
        _, stated = question_and_documents(task)
        assert len(stated) == documents
        assert all(len(facts) == 4 for facts in stated.values()), "every document states every fact once"
        assert [solve(task)] == task.data.answer


def test_towns_are_different_and_their_twins_form_one_circle() -> None:
    drawn = towns(random.Random(0), MOST_DOCUMENTS)
    for values in ([t.name for t in drawn], [t.mayor for t in drawn], [t.founded for t in drawn]):
        assert len(set(values)) == MOST_DOCUMENTS
    twin, seen = {town.name: town.twin for town in drawn}, [drawn[0].name]
    while (name := twin[seen[-1]]) != seen[0]:
        seen.append(name)
    assert len(seen) == MOST_DOCUMENTS


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_earn_1_and_the_cheats_of_the_cases_0(kind: str) -> None:
    graded = asyncio.run(validate(posed(kind), 20))
    assert wrong(graded) == []
    names = {answer.name for answer in graded}
    assert "the most frequent name" in names
    assert names & {"the mayor of the first document", "the mayor of the last document"}


@pytest.mark.parametrize("kind", taking_turns(KINDS, ["chain"]))
def test_answers_that_need_no_more_than_one_document_earn_little(kind: str) -> None:
    taskset = posed(kind, train_size=400, documents=20)
    tasks, earned = taskset.tasks("train"), Counter[str]()
    for task in tasks:
        for name, guess in guesses(str(task.prompt[-1]["content"])).items():
            earned[name] += asyncio.run(taskset.grade(task, f"Final Answer: [{guess}]"))["reward"]
    chance = {"the mayor of the first town in the question": 0.32 if kind == "comparison" else 0.1}
    assert {name for name, total in earned.items() if total / len(tasks) > chance.get(name, 0.1)} == set()
    constant = Counter(task.data.answer[0] for task in tasks).most_common(1)[0][1]
    assert constant / len(tasks) < 0.1


def test_the_number_of_documents_is_bounded() -> None:
    for number in (3, MOST_DOCUMENTS + 1):
        with pytest.raises(SettingsError, match="documents"):
            LongContext(kinds=("count",), documents=number)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "megabytes", "cpu_s"), [(32_000, 200, 30), (256_000, 1000, 120)])
def test_long_texts_are_built_tokenised_and_graded_within_bounds(
    tokens: int, megabytes: int, cpu_s: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.tasks.long_texts", str(tokens)]
    done = run_limited(command, tmp_path, seconds=500)
    assert done.returncode == 0, done.stdout
    used = json.loads(done.stdout.splitlines()[-1])
    assert all(0.9 * tokens < length < 1.1 * tokens for length in used["tokens"])
    assert used["megabytes"] < megabytes
    assert used["cpu_s"] < cpu_s


class LongLetters(LongContext):
    """Long texts with a reward that a tiny random model can learn: the share of lower-case letters."""

    async def grade(self, task: Task[Items], answer: str) -> dict[str, float]:
        share = sum("a" <= letter <= "z" for letter in answer) / max(len(answer), 1)
        return {"reward": share, "correct": float(share > 0.5)}


@pytest.mark.slow
def test_a_tiny_model_samples_and_learns_with_8k_tokens_of_documents_in_the_prompt(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", lambda: tiny_llama(max_position_embeddings=9216))
    data = {
        "type": f"{__name__}:LongLetters", "kinds": ["chain", "comparison", "count"], "words": 1350, "documents": 12,
        "train_size": 12, "test_size": 4,
    }  # fmt: skip
    recipe = toy_recipe(
        model,
        steps=8,
        data=data,
        algorithm={"type": "grpo", "group_size": 32},
        sampling={"max_new_tokens": 8, "max_prompt_tokens": 8900},
        rollouts={"prompts_per_step": 1},
        generator={"type": "torch", "dtype": "float32", "max_batch": 32, "max_context": 9216},
        learner={"matmul_precision": "highest", "max_tokens": 9216},
        optimizer={"lr": 1e-2},
        evaluation={"limit": 1},
        checkpoints={"every": 0},
    )
    folder = run.start(recipe, tmp_path / "run")
    trained = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"][1:]
    rewards = [line["reward/mean"] for line in trained if "reward/mean" in line]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    prompts = [tokens for line in trained if (tokens := line.get("time/generator/prompt_tokens"))]
    assert min(prompts) > 8000 * 32, "each of 32 answers has a prompt of more than 8,000 tokens"
