"""Task sets of questions with a mathematical answer: the common part of GSM8K, MATH and arithmetic."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, field_validator

from whet.core.types import Message, Task
from whet.tasks.base import Environments
from whet.tasks.cases import Case, Kind, unearned
from whet.tasks.math.grader import GoldAnswer, MathGrader, MathGrading, canonical, compare_numbers
from whet.tasks.prompts import Example, messages
from whet.tasks.splits import Split, SplitTasks, question_key

BOXED = "Reason step by step and put the final answer in \\boxed{}."


@dataclass(slots=True, frozen=True)
class Problem:
    """A question and the answer that replies are graded by."""

    uid: str
    question: str
    answer: str
    difficulty: float | None = None  # as the data set rates it

    def key(self) -> int:
        """Return a number that is the same for two problems with the same question."""
        return question_key(self.question)


class BoxedProblems(SplitTasks[GoldAnswer], ABC):
    """Base of task sets whose replies are graded by ``MathGrader``. Subclasses define ``problems``."""

    named_scores = MathGrading.named_scores

    prompt: str = "{question}\n\n" + BOXED
    """The user message. ``{question}`` is replaced by the question."""
    system: str | None = None
    examples: tuple[Example, ...] = ()
    """Problems solved before the question, as earlier turns of the conversation."""
    limit: int | None = Field(default=None, ge=1)
    """The most training tasks to use, the first ones."""
    grader: MathGrader = MathGrader()

    @field_validator("prompt")
    @classmethod
    def _has_question(cls, prompt: str) -> str:
        if "{question}" not in prompt:
            raise ValueError("must contain {question}, which the question replaces")
        return prompt

    @abstractmethod
    def problems(self) -> dict[Split, list[Problem]]:
        """Return the problems of both splits. No question is in both."""

    def splits(self) -> dict[Split, list[Task[GoldAnswer]]]:
        problems = self.problems()
        chosen = {"train": problems["train"][: self.limit], "test": problems["test"]}
        return {split: [self._task(problem) for problem in chosen[split]] for split in problems}

    def open(self) -> Environments[GoldAnswer]:
        """Return a ``MathGrading``; the task set itself if the subclass defines ``grade`` or ``make``."""
        return self if self.own_episodes else self.grader.open()

    def gold(self, task: Task[GoldAnswer]) -> str:
        return f"\\boxed{{{task.data.answer}}}"

    def stated(self, task: Task[GoldAnswer], answer: str) -> str | None:
        given = self.grader.extract(answer)
        return None if given is None else canonical(given, task.data.answer)

    def cases(self) -> Sequence[Case]:
        """Return cases of the first training task."""
        tasks = self.tasks("train")
        task = tasks[0]
        gold, box = task.data.answer, self.gold(task)
        wrong = f"\\boxed{{{gold} + 1}}"
        answers: list[tuple[Kind, str, str, float]] = [
            ("good", "boxed", box, 1.0),
            ("good", "boxed after reasoning", f"First I thought it was 7. So the answer is ${box}$.", 1.0),
            ("good", "the last of two boxes is right", f"{wrong} no, {box}", 1.0),
            ("bad", "another answer", wrong, 0.0),
            ("bad", "the last of two boxes is wrong", f"{box} no, {wrong}", 0.0),
            ("boundary", "nothing", "", 0.0),
            ("boundary", "an empty box", "\\boxed{}", 0.0),
            ("boundary", "a box that is not closed", f"\\boxed{{{gold}", 0.0),
            ("adversarial", "several answers in one box", f"\\boxed{{{gold}, {gold} + 1, {gold} + 2}}", 0.0),
            ("adversarial", "code", "\\boxed{__import__('os')._exit(0)}", 0.0),
            ("adversarial", "an endless tower", f"\\boxed{{{'9^{' * 200}9{'}' * 200}}}", 0.0),
        ]
        if self.grader.require_box:
            answers.append(("boundary", "without a box", f"The answer is {gold}.", 0.0))
        declared = [Case(name, task, answer, expected, kind) for kind, name, answer, expected in answers]
        others = [self.gold(other) for other in tasks[1:4] if compare_numbers(other.data.answer, gold) is False]
        return [*declared, *unearned(task, box, others, form=lambda text: f"\\boxed{{{text}}}")]

    def _messages(self, question: str) -> list[Message]:
        examples = [Example(question=self._asked(example.question), answer=example.answer) for example in self.examples]
        return messages(self.system, self._asked(question), examples)

    def _asked(self, question: str) -> str:
        return self.prompt.replace("{question}", question)

    def _task(self, problem: Problem) -> Task[GoldAnswer]:
        gold = GoldAnswer(problem.answer, problem.difficulty)
        return Task(problem.uid, self._messages(problem.question), gold)
