"""The tasks of another task set, graded by a judge: by a rubric, whose grade is scaled to a reward from 0 to 1, by
equivalence to the gold answer, or by a choice among a few words, each with a reward.

The reward of a choice with ``verdict: logprobs`` is the mean of the rewards under the judge's probabilities, as in
G-Eval (arXiv 2303.16634): it has an order where the likeliest word of a small model is nearly always the same.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from whet.base.errors import ConfigError, DataError
from whet.config.issues import did_you_mean
from whet.core.types import Task
from whet.fetch.http import UnansweredError
from whet.tasks.base import MORE_REPLIES
from whet.tasks.episodes import graded
from whet.tasks.judges.config import Judge
from whet.tasks.judges.judge import AnswerRefusedError, JudgeEnvironments
from whet.tasks.judges.prompts import CHOICE, EQUAL, RUBRIC, asked, conversation, mark
from whet.tasks.wrapped import WrappedTaskSet, inside

T = TypeVar("T")
_MARKS = r"[\s*_`\"'()\[\]<>]*"  # Markdown and brackets; not a sign or a point, which belong to the number
_GRADE = re.compile(
    rf"^[^\w\n]*Grade:{_MARKS}([-+−]?\d+(?:\.\d+)?)(?:\.?{_MARKS}|{_MARKS}\.)$", re.MULTILINE | re.IGNORECASE
)
_TAKEN = ("grade", "judged", "judge_refused")  # names of the judge's scores
_EQUAL = re.compile(r"\[\[A(!?)=B\]\]")


class Judged(WrappedTaskSet):
    """Tasks of ``taskset``, graded by ``judge``."""

    judge: Judge
    """The judge that grades."""
    by: Literal["rubric", "reference", "choice"] = "rubric"
    """The criterion. ``reference``: the judge must find the answer equivalent to the gold answer, in both orders.
    ``choice``: the judge answers the question ``rubric`` with one of ``choices``."""
    rubric: str = "Is it correct, complete and clear?"
    """The description of a good answer; with ``by: choice`` the question about the answer."""
    choices: dict[str, float] = Field(default={})
    """With ``by: choice`` the words that answer the question, each with its reward, as in ``{Yes: 1, No: 0}``."""
    may_name_choice: bool = True
    """With ``by: choice``: False gives the least reward to an answer that says one of ``choices``, which small judges
    repeat."""
    template: str = CHOICE
    """With ``by: choice`` the text that the judge reads, in which {rubric}, {choices}, {question}, {answer} and {mark}
    are replaced; braces are doubled. Small models understand short ones best."""
    low: int = 1
    """The worst grade."""
    high: int = 5
    """The best grade."""
    gate: str | None = None
    """A score of the task set's own grader that must be 1; other answers get the least reward without a question. It
    keeps out what pleases a small judge although it is not an answer, such as a single strong word."""
    only_if_wrong: bool = False
    """Ask the judge only about answers that the task set's own grader calls wrong, for example for their format."""

    @field_validator("template")
    @classmethod
    def _can_be_filled(cls, template: str) -> str:
        try:
            filled = template.format(rubric="", choices="", question="", answer="<answer>", mark="")
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"can't be filled in: {type(error).__name__}: {error}; double other braces") from None
        if "<answer>" not in filled:
            raise ValueError("has no {answer}, so the judge would not see what it judges")
        return template

    @model_validator(mode="after")
    def _fits_together(self) -> "Judged":
        if self.by == "choice":
            self._check_choices()
        elif self.judge.verdict == "logprobs":
            raise ValueError(f"judge.verdict = logprobs needs by = choice, not {self.by}, whose verdicts are texts")
        else:
            for name in ("choices", "template", "may_name_choice"):
                if dict(self)[name] != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is read only where by = choice; leave it out")
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if not self.taskset.one_reply:
            raise ValueError(MORE_REPLIES.format(type(self.taskset).__name__))
        name, declared = type(self.taskset).__name__, self.taskset.score_names
        for setting, value in (("only_if_wrong", self.only_if_wrong), ("gate", self.gate)):
            if value and not self.taskset.grades:
                raise ValueError(f"{setting} needs a task set that grades answers, which {name} does not")
        if self.gate is not None and declared and self.gate not in declared:
            hint = did_you_mean(self.gate, declared)
            raise ValueError(f"gate: {name} has no score {self.gate!r}; it has {', '.join(declared)}.{hint}")
        return self

    def _check_choices(self) -> None:
        if len(set(self.choices.values())) < 2 or any(word != word.strip() or not word for word in self.choices):
            raise ValueError(
                "by = choice needs at least two choices: words without space around them, with different rewards, as "
                f"in choices = {{Yes: 1, No: 0}}; they are {self.choices}"
            )

    @property
    def score_names(self) -> Collection[str]:
        """Return the scores of the judge, and of the task set where its grader is asked as well."""
        chooses = self.by == "choice" and self.taskset.grades
        graders = self.taskset.score_names if chooses or self.only_if_wrong or self.gate else ("correct",)
        inner = inside(dict.fromkeys(graders, 0.0), _TAKEN)
        judges = ("correct", "judged", "judge_refused", *(("grade",) if chooses else ()))
        return list(dict.fromkeys([*inner, *judges])) if graders else ()

    def open(self) -> "JudgedEnvironments":
        return JudgedEnvironments(self)


class JudgedEnvironments(JudgeEnvironments):
    """Grades answers by asking the judge."""

    def __init__(self, tasks: Judged) -> None:
        """Raise ``ConfigError`` for a task set that makes its own episodes, because a judge grades single answers."""
        super().__init__(tasks.taskset, tasks.judge)
        self.tasks, self._checked = tasks, False
        if not self.inner.one_reply:
            raise ConfigError(f"data.taskset: {MORE_REPLIES.format(type(tasks.taskset).__name__)}")

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        tasks = self.tasks
        if not self._checked:
            await self.inner.check_one_reply()
            self._checked = True
        if tasks.by == "choice":
            return await self._choice(task, answer)
        grade = await graded(self.inner, task, answer) if tasks.only_if_wrong or tasks.gate else {}
        scores = inside(grade, _TAKEN)
        if tasks.only_if_wrong and scores["reward"] > 0:
            return scores | {"judged": 0.0}
        if not answer.strip() or not self._passes(task, grade):
            return scores | {"reward": 0.0, "correct": 0.0, "judged": 0.0}
        try:
            value = await (self._equal(task, answer) if tasks.by == "reference" else self._rubric(task, answer))
        except AnswerRefusedError:
            return scores | {"reward": 0.0, "correct": 0.0, "judged": 1.0, "judge_refused": 1.0}
        return scores | {"reward": value, "correct": float(value >= 1.0), "judged": 1.0}

    async def _choice(self, task: Task, answer: str) -> dict[str, float]:
        """Return the reward of the judge's choice. The task set's own reward becomes the score ``grade`` and decides
        what is correct, so that it shows whether the judge is right."""
        tasks, grade, scores = self.tasks, dict[str, float](), dict[str, float]()
        if tasks.taskset.grades:
            grade = await graded(self.inner, task, answer)
            scores = inside(grade, _TAKEN)
            scores["grade"] = scores.pop("reward")
            scores.setdefault("correct", float(scores["grade"] > 0))
            if tasks.only_if_wrong and scores["grade"] > 0:
                return scores | {"reward": max(tasks.choices.values()), "judged": 0.0}
        worst = min(tasks.choices.values())
        named = not (tasks.may_name_choice or self._says_none(answer))
        if not answer.strip() or named or not self._passes(task, grade):
            return {"correct": 0.0, **scores, "reward": worst, "judged": 0.0}
        try:
            chosen = await self._chosen(task, answer)
        except AnswerRefusedError:
            return {"correct": 0.0, **scores, "reward": worst, "judged": 1.0, "judge_refused": 1.0}
        reward = math.fsum(share * tasks.choices[word] for word, share in chosen.items())
        likeliest = max(chosen, key=chosen.__getitem__)
        best = float(tasks.choices[likeliest] == max(tasks.choices.values()))
        return {"correct": best, **scores, "reward": reward, "judged": 1.0}

    def _passes(self, task: Task, scores: Mapping[str, float]) -> bool:
        """Return whether the score ``gate`` is 1. Raises ``DataError`` for a grade without this score."""
        gate = self.tasks.gate
        if gate is not None and gate not in scores:
            raise DataError(
                f"task {task.uid!r}: the grade has no score {gate!r}, which data.gate names: {dict(scores)}"
            )
        return gate is None or scores[gate] >= 1

    def _says_none(self, answer: str) -> bool:
        """Return whether the answer says none of the choices, in any letter case."""
        return not any(re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in self.tasks.choices)

    async def _chosen(self, task: Task, answer: str) -> dict[str, float]:
        """Return the probability of each choice; 1 of the written one where the verdict is a text."""
        tasks, question = self.tasks, conversation(task.prompt)
        text = tasks.template.format(
            rubric=tasks.rubric, choices=" or ".join(tasks.choices), mark=mark(question, answer), question=question,
            answer=answer,
        )  # fmt: skip
        if tasks.judge.verdict == "logprobs":
            return await self.client.choose(asked(text), tasks.choices, task.uid)

        def read(reply: str) -> dict[str, float] | None:
            word = reply.strip().strip("*_`\"'.").strip()
            return {word: 1.0} if word in tasks.choices else None

        return await self.client.ask(asked(text), read, task.uid)

    async def _rubric(self, task: Task, answer: str) -> float:
        tasks, question, gold = self.tasks, conversation(task.prompt), self.tasks.gold(task)
        reference = f"\nA right answer is: {gold}\n" if isinstance(gold, str) else ""
        text = RUBRIC.format(
            rubric=tasks.rubric, reference=reference, mark=mark(question, answer), question=question, answer=answer,
            low=tasks.low, high=tasks.high,
        )  # fmt: skip

        def read(reply: str) -> float | None:
            grade = _only([float(grade.replace("−", "-")) for grade in _GRADE.findall(reply)])
            if grade is not None and not tasks.low <= grade <= tasks.high:
                raise UnansweredError(f"its grade {grade:g} is not between {tasks.low:g} and {tasks.high:g}")
            return grade

        grade = await self.client.ask(asked(text), read, task.uid, whole=True)
        return (grade - tasks.low) / (tasks.high - tasks.low)

    async def _equal(self, task: Task, answer: str) -> float:
        gold = self.tasks.gold(task)
        if not isinstance(gold, str):
            raise DataError(f"task {task.uid!r} has no gold answer to compare with; set data.by=rubric")
        question = conversation(task.prompt)
        for first, second in ((answer, gold), (gold, answer)):
            key = mark(question, first, second)
            text = EQUAL.format(mark=key, question=question, first=first, second=second)
            if not await self.client.ask(asked(text), _same, f"{task.uid} {key}", whole=True):
                return 0.0
        return 1.0


def _same(reply: str) -> bool | None:
    return _only([negation == "" for negation in _EQUAL.findall(reply)])


def _only(verdicts: Sequence[T]) -> T | None:
    """Return the verdict of a reply. None if it gives several that differ, for one may be quoted from the answer."""
    return verdicts[0] if len(set(verdicts)) == 1 else None
