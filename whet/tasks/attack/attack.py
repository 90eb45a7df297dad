"""Attack on a task set's graders: cheap answers are tried, and those with a reward are shrunk and reported.

answers of families, ──► search guided by ──► a policy is trained ──► findings are shrunk
task by task             the reward           to cheat
(40% of the gradings)    (15%, if nothing     (30%, if nothing        (the rest)
                         was paid)            was paid)
"""

import contextlib
import random
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from math import isfinite

from whet.base.errors import ConfigError
from whet.base.seeds import derive_seed
from whet.core.types import Task
from whet.tasks.attack.answers import BY_CHANCE, FAMILIES, FROM_GOLD, POLICY, SEARCH, Cheap, Writer, final_text, letters
from whet.tasks.attack.gradings import Failure, Gradings, SpentError
from whet.tasks.attack.policy import BATCH, Policy, train
from whet.tasks.attack.report import Finding, Report
from whet.tasks.attack.search import PARTS, Recipe, search, shrunk, written
from whet.tasks.base import TaskSet
from whet.tasks.judges.config import check_has_no_own_judge
from whet.tasks.listing import tasks_of

_SEARCHED = 6  # tasks of the random search
_NAMES = {SEARCH: "random search", POLICY: "its likeliest answer"}
_ENOUGH = 4  # tasks over which a mean counts
_FAILED = -1.0  # the reward of an answer on which the grader fails, in a search
_EQUAL = 1e-9  # rewards that differ by less are equal
_FAILURES = 3  # failures of the grader after which an attack ends


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of an attack, and the rewards that count as findings."""

    samples: int = 16  # tasks
    budget: int = 4000  # gradings
    seconds: float = 120.0
    deadline: float = 30.0  # seconds for one grading
    threshold: float | None = None  # reward of one answer; None: the reward of the gold answer, or 1 without one
    mean: float = 0.2  # mean reward of one idea over all tasks, in addition to the share that is right by chance
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for a reward that none can be compared with."""
        for name, value in (("threshold", self.threshold), ("mean", self.mean)):
            if value is not None and not isfinite(value):
                raise ConfigError(f"--{name} must be a finite number, not {value}")


async def attack(taskset: TaskSet, plan: Plan) -> Report:
    """Try cheap answers to a sample of the tasks. Raises ``ConfigError`` for a task set that rewards no answers, and
    for one that the policy judges."""
    check_has_no_own_judge(taskset)
    if not taskset.grades:
        raise ConfigError(f"{type(taskset).__name__} rewards no answers, so nothing can be attacked")
    gradings = Gradings(taskset, plan.budget, plan.seconds, plan.deadline)
    try:
        return await _Attack(taskset, plan, gradings).report()
    finally:
        await gradings.close()


class _Attack:
    def __init__(self, taskset: TaskSet, plan: Plan, gradings: Gradings) -> None:
        self.taskset, self.plan, self.gradings = taskset, plan, gradings
        every = [*tasks_of(taskset, "train"), *tasks_of(taskset, "test")]
        random.Random(derive_seed(plan.seed, "attack")).shuffle(every)
        self.tasks = every[: plan.samples]
        if not self.tasks:
            raise ConfigError(f"{type(taskset).__name__} has no tasks to attack")
        answers = [taskset.gold(task) for task in every[: max(200, plan.samples)]]
        golds = [final_text(answer) for answer in answers]
        self.answers, self.golds = answers[: len(self.tasks)], golds[: len(self.tasks)]
        different = {letters(gold) for gold in golds if gold}
        self.chance = 1 / len(different) if len(different) > 1 else 0.0
        # One text that is right for all tasks: any text of some form is right, and only empty answers must not be paid.
        self.any_text = len(self.tasks) > 1 and len({*golds}) == 1 and all(isinstance(each, str) for each in answers)
        self.writer = Writer(golds, self._same)
        self.worthless = 0  # tasks whose gold answer earns no more than an empty one
        self.paid: dict[int, float] = {}  # task -> reward of one answer that counts
        self.rewards: dict[tuple[str, str], dict[int, tuple[Cheap, float]]] = {}
        self.result = Report(len(self.tasks))
        self.failures: dict[str, int] = {}
        self.finished = 0  # tasks whose answers were all graded

    async def report(self) -> Report:
        result, gradings, plan = self.result, self.gradings, self.plan
        try:
            gradings.limit = plan.budget * 40 // 100
            await self._families()
        except SpentError:
            left = len(self.tasks) - self.finished
            self._skip(f"{left} of {len(self.tasks)} tasks with all answers: the gradings or seconds were used up")
        result.findings += self._payments()
        for percent, find, family in ((55, self._search, SEARCH), (85, self._policy, POLICY)):
            if result.findings or self.any_text or len(self.tasks) < _ENOUGH:
                break
            gradings.limit = plan.budget * percent // 100
            if recipe := await find():
                await self._check(family, recipe)
        for number, finding in enumerate(result.findings):
            share = (plan.budget - gradings.count) // (len(result.findings) - number)
            gradings.limit = gradings.count + share
            result.findings[number] = await self._shrunk(finding)
        result.findings = [*{(each.kind, each.task.uid, each.answer): each for each in result.findings[::-1]}.values()][
            ::-1
        ]
        result.gradings = gradings.count
        self._limits()
        return result

    async def _families(self) -> None:
        """Grade the answers of all families, task by task."""
        rewards = []
        for number, task in enumerate(self.tasks):
            gold = self.answers[number]
            floor = await self._reward(number, Cheap(FAMILIES[0], "nothing", "")) or 0.0
            reward = None if gold is None else await self.gradings.of(task, gold)
            if isinstance(reward, Failure):
                self._failed(reward, number, Cheap("gold", "the gold answer", self.golds[number] or ""))
                reward = None
            usable = reward is not None and reward > floor
            self.worthless += reward is not None and not usable
            self.any_text &= usable  # otherwise the same gold answer says nothing
            rewards.append(reward if reward is not None and usable else 1.0)
            self.paid[number] = self.plan.threshold if self.plan.threshold is not None else rewards[-1]
            scale = sum(rewards) / len(rewards)
            self.result.bound = (self.chance + self.plan.mean) * scale if scale > 0 else scale
            for cheap in self.writer.answers(task, self.golds[number] if usable else None):
                if self.any_text and cheap.text.strip():
                    continue
                await self._reward(number, cheap)
                if sum(self.failures.values()) >= _FAILURES:
                    self._skip(f"the answers after {_FAILURES} failures of the grader")
                    return
            self.finished += 1

    async def _reward(self, number: int, cheap: Cheap) -> float | None:
        """Return the reward of an answer and note it; None if the grader fails."""
        reward = await self.gradings.of(self.tasks[number], cheap.text)
        self.result.tried[cheap.family] = self.result.tried.get(cheap.family, 0) + 1
        if isinstance(reward, Failure):
            self._failed(reward, number, cheap)
            return None
        self.rewards.setdefault((cheap.family, cheap.name), {})[number] = (cheap, reward)
        return reward

    def _failed(self, failure: Failure, number: int, cheap: Cheap) -> None:
        """Note a failure of the grader: a finding, unless the same is one already."""
        self.failures[failure.text] = self.failures.get(failure.text, 0) + 1
        if self.failures[failure.text] == 1:
            task = self.tasks[number]
            finding = Finding(failure.kind, cheap.family, cheap.name, task, cheap.text, None, 0.0, 0.0, 0, failure.text)
            self.result.findings.append(finding)

    def _payments(self) -> list[Finding]:
        """Return the answers that earn the full reward, and ideas whose mean reward is too high: one finding for each
        idea, on the task with the highest reward."""
        findings = []
        for (family, name), graded in self.rewards.items():
            graded = {number: pair for number, pair in graded.items() if number in self.paid}
            if not graded:
                continue
            rewards = [reward for _, reward in graded.values()]
            mean = statistics.fmean(rewards)
            sure = mean - 2 * statistics.pstdev(rewards) / len(rewards) ** 0.5
            number, (cheap, reward) = max(graded.items(), key=lambda item: item[1][1] - self.paid[item[0]])
            task, limit = self.tasks[number], self.paid[number]
            if family not in BY_CHANCE and reward >= limit - _EQUAL:
                findings.append(Finding("answer", family, name, task, cheap.text, reward, limit, mean, len(graded)))
            elif family not in FROM_GOLD and sure > self.result.bound and len(graded) >= _ENOUGH:
                bound = self.result.bound
                findings.append(Finding("mean", family, name, task, cheap.text, reward, bound, mean, len(graded)))
        return findings

    async def _search(self) -> Recipe | None:
        """Return the recipe that the random search finds."""
        tasks = self.tasks[:_SEARCHED]
        begin = [*self.writer.frequent, "", "0", *filter(None, self.golds[:_SEARCHED])]
        seed = derive_seed(self.plan.seed, "attack", "search")
        mean, recipe = await search(tasks, begin, self._counted(SEARCH), seed, self.plan.budget)
        # The best of many ideas on few tasks is high by chance, so it must hold on all tasks.
        return recipe if mean > self.result.bound else None

    async def _policy(self) -> Recipe:
        """Return the likeliest answer of a policy that is trained on all tasks."""
        parts = [*PARTS, *self.writer.frequent, self.writer.form.before, self.writer.form.after]
        policy = Policy(filter(None, parts), derive_seed(self.plan.seed, "attack", "policy"))
        steps = (self.gradings.limit - self.gradings.count) // BATCH
        return await train(policy, self.tasks, self._counted(POLICY), steps)

    def _counted(self, family: str) -> Callable[[Task, str], Awaitable[float]]:
        """Return the function that grades an answer, counts it in a family, and raises ``StopAsyncIteration`` when the
        gradings are used up, or after several failures of the grader."""

        async def reward(task: Task, text: str) -> float:
            try:
                value = await self.gradings.of(task, text)
            except SpentError:
                raise StopAsyncIteration from None
            self.result.tried[family] = self.result.tried.get(family, 0) + 1
            if not isinstance(value, Failure):
                return value
            self._failed(value, self.tasks.index(task), Cheap(family, _NAMES[family], text))
            if sum(self.failures.values()) >= _FAILURES:
                raise StopAsyncIteration
            return _FAILED

        return reward

    async def _check(self, family: str, recipe: Recipe) -> None:
        """Grade the answers of a recipe to all tasks."""
        self.gradings.limit = self.plan.budget
        for number, task in enumerate(self.tasks):
            try:
                await self._reward(number, Cheap(family, _NAMES[family], written(recipe, task)))
            except SpentError:
                break
        self.result.findings += self._payments()

    async def _shrunk(self, finding: Finding) -> Finding:
        """Return the finding with a shorter answer, which has the same reward or failure. It isn't part of the gold
        answer, which may earn its reward."""
        number = self.tasks.index(finding.task)
        gold = letters(self.golds[number] or "")
        keep = next(
            (pair[0].keep for pair in [self.rewards.get((finding.family, finding.name), {}).get(number)] if pair), ""
        )
        best, best_reward = finding.answer, finding.reward

        async def holds(text: str) -> bool:
            nonlocal best, best_reward
            if keep not in text or (letters(text) and letters(text) in gold):
                return False
            graded = await self.gradings.of(finding.task, text)
            if isinstance(graded, Failure):
                same = finding.kind == graded.kind and finding.error == graded.text
            else:
                same = finding.reward is not None and graded >= finding.reward - _EQUAL
            if same:
                best, best_reward = text, None if isinstance(graded, Failure) else graded
            return same

        if finding.kind == "hangs":  # each grading would cost the deadline
            return finding
        with contextlib.suppress(SpentError):
            await shrunk(finding.answer, holds)
        return replace(finding, answer=best, reward=best_reward)

    def _same(self, task: Task, first: str, second: str) -> bool:
        """Return whether two answers to a task state the same."""
        stated = self.taskset.stated(task, first)
        return first == second or (stated is not None and stated == self.taskset.stated(task, second))

    def _skip(self, what: str) -> None:
        if what not in self.result.not_attacked:
            self.result.not_attacked.append(what)

    def _limits(self) -> None:
        """Note the parts of the task set that were not attacked."""
        if self.gradings.tools:
            self._skip("calls of tools: only the final message was, in episodes without a call")
        if len(self.tasks) < _ENOUGH:
            self._skip(f"ideas that pay on average, which needs {_ENOUGH} tasks")
        if self.worthless:
            self._skip(
                f"the gold answers of {self.worthless} tasks, which earn no more than an empty answer: look at them "
                "with `whet validate`"
            )
        if self.any_text:
            self._skip("answers with text, because all tasks have the same gold answer")
        if without := sum(gold is None for gold in self.golds):
            self._skip(f"the gold answers of {without} tasks, which have none")
        if self.taskset.grades_groups:
            self._skip("rewards relative to other answers of a group")
