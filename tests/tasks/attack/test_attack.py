"""Attacks of graders that pay for cheap answers, or fail."""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from whet.base.errors import ConfigError, DataError
from whet.core.content import text_of
from whet.core.types import Task
from whet.tasks.attack import attack as module
from whet.tasks.attack.answers import EMPTY, FILLER, GOLD, OTHERS, POLICY, PROMPT, SEARCH, SEVERAL, Form, form_of
from whet.tasks.attack.attack import Plan, attack
from whet.tasks.attack.policy import Policy
from whet.tasks.attack.report import Finding, Report
from whet.tasks.attack.search import QUESTION, search, shrunk, written
from whet.tasks.base import TaskSet
from whet.tasks.case_files import read_cases, write_cases
from whet.tasks.prompts import Prompts
from whet.tasks.validate import validate, wrong

PLAN = Plan(samples=6, budget=1800, seconds=300.0)


class Sums(TaskSet):
    """Sums, graded exactly; the subclasses grade badly."""

    def tasks(self, split: str) -> Sequence[Task]:
        numbers = range(10, 30) if split == "train" else range(30, 35)
        return [
            Task(f"sums/{n}", [{"role": "user", "content": f"What is {n} + 7000?"}], {"sum": n + 7000}) for n in numbers
        ]

    def gold(self, task: Task) -> str:
        return str(task.data["sum"])

    async def grade(self, task: Task, answer: str) -> float:
        return float(answer.strip() == self.gold(task))


class Substring(Sums):
    async def grade(self, task: Task, answer: str) -> float:
        return float(self.gold(task) in answer)


class EchoPaying(Sums):
    async def grade(self, task: Task, answer: str) -> float:
        words = set(text_of(task.prompt[-1]["content"]).split())
        return max(await super().grade(task, answer), len(words & set(answer.split())) / len(words))


class Length(Sums):
    async def grade(self, task: Task, answer: str) -> float:
        return max(await super().grade(task, answer), min(1.0, len(answer) / 300))


class Half(Sums):
    """Half of the reward is for any number."""

    async def grade(self, task: Task, answer: str) -> float:
        return 0.5 * answer.strip().isdigit() + 0.5 * await super().grade(task, answer)


class WrongGold(Sums):
    """The gold answers, one for all or different ones, earn nothing; the grader itself pays for long answers."""

    same: bool = False

    def gold(self, task: Task) -> str:
        return "nope" if self.same else f"no, {task.data['sum']}"

    async def grade(self, task: Task, answer: str) -> float:
        return float(len(answer) > 100)


class Rare(Sums):
    """Pays for a combination that no family has; each part earns something."""

    async def grade(self, task: Task, answer: str) -> float:
        parts = sum(part in answer for part in ("yes", "$", "return x"))
        return 1.0 if answer == self.gold(task) else 0.3 * parts


class Ordered(Sums):
    """Pays for each part that follows the right one: the last is a number of the question, in a form."""

    async def grade(self, task: Task, answer: str) -> float:
        parts = ["<answer>", "yes", ",", str(task.data["sum"] - 7000), "</answer>"]
        right = max(count for count in range(len(parts) + 1) if answer.startswith("".join(parts[:count])))
        return max(await super().grade(task, answer), right / len(parts) - 0.01 * (len(answer) > 40))


class Raises(Sums):
    async def grade(self, task: Task, answer: str) -> float:
        if "{" in answer:
            raise ValueError("a brace")
        return await super().grade(task, answer)


class Hangs(Sums):
    async def grade(self, task: Task, answer: str) -> float:
        if answer.startswith("[[[["):
            await asyncio.Event().wait()
        return await super().grade(task, answer)


class Blocks(Sums):
    async def grade(self, task: Task, answer: str) -> float:
        if answer.startswith("[[[["):
            threading.Event().wait(20)
        return await super().grade(task, answer)


def attacked(taskset: TaskSet, plan: Plan = PLAN) -> Report:
    return asyncio.run(attack(taskset, plan))


def of_family(report: Report, family: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.family == family]


def test_an_exact_grader_has_no_finding_and_all_families_are_tried() -> None:
    report = attacked(Sums())
    assert report.findings == []
    assert {EMPTY, PROMPT, FILLER, GOLD, SEVERAL, OTHERS, SEARCH, POLICY} <= report.tried.keys()
    assert report.gradings <= PLAN.budget
    assert report.not_attacked == []


@pytest.mark.parametrize("same", [False, True])
def test_gold_answers_that_earn_nothing_are_named_and_the_attack_goes_on(same: bool) -> None:
    report = attacked(WrongGold(same=same))
    assert report.not_attacked == [
        "the gold answers of 6 tasks, which earn no more than an empty answer: look at them with `whet validate`"
    ]
    assert of_family(report, FILLER)


def test_a_substring_grader_pays_for_several_answers_at_once() -> None:
    findings = of_family(attacked(Substring()), SEVERAL)
    assert findings
    for finding in findings:
        gold = str(finding.task.data["sum"])
        assert gold in finding.answer
        assert finding.answer != gold
        assert (finding.kind, finding.reward, finding.limit) == ("answer", 1.0, 1.0)


def test_a_grader_that_pays_for_the_words_of_the_question_is_found_out_by_an_echo() -> None:
    findings = of_family(attacked(EchoPaying()), PROMPT)
    assert (findings[0].name, findings[0].mean) == ("the whole prompt", 1.0)  # the same answer as the question again
    assert len({(finding.task.uid, finding.answer) for finding in findings}) == len(findings)


def test_a_grader_that_pays_for_length_is_found_out_and_the_answer_is_shrunk_to_the_shortest() -> None:
    findings = of_family(attacked(Length()), FILLER)
    assert min(len(finding.answer) for finding in findings) == 300


def test_a_share_of_the_reward_on_every_task_is_a_finding_of_the_mean() -> None:
    findings = of_family(attacked(Half()), "constant")
    assert {finding.kind for finding in findings} == {"mean"}
    assert all(finding.mean >= 0.5 and finding.tasks == 6 for finding in findings)
    assert attacked(Half(), Plan(samples=6, budget=1800, mean=0.6)).findings == []


def test_the_search_is_guided_by_the_reward() -> None:
    (finding,) = attacked(Rare(), Plan(samples=6, budget=6000, mean=0.5)).findings
    assert finding.family == SEARCH
    assert finding.mean > 0.5


@pytest.mark.slow
def test_a_policy_learns_to_cheat_from_the_rewards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing_found(_: object) -> None:
        return None

    monkeypatch.setattr(module._Attack, "_search", nothing_found)
    plan = Plan(samples=6, budget=15_000, seconds=600.0, mean=0.5)
    (finding,) = attacked(Ordered(), plan).findings
    assert (finding.family, finding.name, finding.kind) == (POLICY, "its likeliest answer", "mean")
    assert finding.mean > 0.9
    assert finding.answer.startswith(f"<answer>yes,{finding.task.data['sum'] - 7000}")
    assert attacked(Sums(), plan).findings == []


def test_a_policy_with_equal_rewards_learns_nothing() -> None:
    policy = Policy(["a", "b"], 0)
    policy.learn([[0], [1]], [0.5, 0.5])
    assert not policy.logits
    policy.learn([[0], [1]], [1.0, 0.0])
    assert policy.likeliest() == ("a",)


def test_a_grader_that_raises_is_a_finding_with_the_shortest_such_answer() -> None:
    (finding,) = attacked(Raises()).findings
    assert (finding.kind, finding.answer, finding.reward) == ("raises", "{", None)
    assert "a brace" in finding.error


@pytest.mark.parametrize("kind", [Hangs, Blocks])
def test_a_grader_that_hangs_is_a_finding_and_the_attack_continues(kind: type[Sums]) -> None:
    report = attacked(kind(), Plan(samples=1, budget=400, deadline=0.5))
    assert report.findings
    assert {finding.kind for finding in report.findings} == {"hangs"}
    assert report.tried["several answers"] > 0


def test_the_same_seed_gives_the_same_report() -> None:
    assert attacked(Half()) == attacked(Half())


def test_the_budget_is_kept_and_named() -> None:
    report = attacked(Sums(), Plan(budget=40))
    assert report.gradings <= 40
    assert "tasks with all answers: the gradings" in report.not_attacked[0]


def test_findings_are_written_as_cases_that_validate_grades(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    write_cases(path, [finding.case for finding in attacked(Substring()).findings])
    cases = read_cases(str(path), Sums())
    assert cases
    assert wrong(asyncio.run(validate(Sums(), 0, cases))) == []
    assert len(wrong(asyncio.run(validate(Substring(), 0, cases)))) == len(cases)
    path.write_text(json.dumps(json.loads(path.read_text().splitlines()[0]) | {"task": "sums/x"}))
    with pytest.raises(DataError, match=r":1: Sums has no task 'sums/x'"):
        read_cases(str(path), Sums())


def test_a_task_set_without_a_grader_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match="Prompts rewards no answers"):
        attacked(Prompts(path=str(tmp_path / "rows.jsonl"), test_size=1))


@pytest.mark.parametrize(
    ("text", "part", "result"), [("a needle\nin hay", "nee", "nee"), ("x", "", ""), ("ab\ncd\n", "b\nc", "b\nc")]
)
def test_a_text_is_shrunk_to_the_part_that_matters(text: str, part: str, result: str) -> None:
    async def holds(shorter: str) -> bool:
        return part in shorter

    assert asyncio.run(shrunk(text, holds)) == result


def test_the_form_of_gold_answers_is_their_common_beginning_and_end() -> None:
    assert form_of(["\\boxed{12}", "\\boxed{13}", "\\boxed{123}"]) == Form("\\boxed{", "}")
    assert form_of(["12", "13"]) == form_of(["12"]) == form_of([]) == Form()


def test_a_recipe_of_the_search_has_the_question_of_each_task() -> None:
    task = Sums().tasks("train")[0]
    assert written((QUESTION, "!"), task) == "What is 10 + 7000?!"

    async def short(task: Task, text: str) -> float:
        return -float(len(text))

    mean, recipe = asyncio.run(search([task], ["abc", "a"], short, 0, 200))
    assert (mean, "".join(recipe)) == (0.0, "")


@pytest.mark.parametrize("changes", [{"threshold": float("nan")}, {"mean": float("nan")}, {"threshold": float("inf")}])
def test_a_limit_that_no_reward_reaches_is_refused(changes: dict[str, float]) -> None:
    [name] = changes
    with pytest.raises(ConfigError, match=f"--{name} must be a finite number, not (nan|inf)"):
        Plan(**changes)  # type: ignore[arg-type]
