"""The tasks of another task set, rewarded by a generative reward model that compares the answers of a group in pairs
(Nemotron 3 Nano's RLHF). The reward is relative to the group; its parts are logged as scores."""

from typing import ClassVar

from pydantic import model_validator

from whet.base.closing import gather_or_cancel
from whet.core.content import text_of
from whet.core.types import Episode, Group, Message, Status, Task
from whet.tasks.base import Environment
from whet.tasks.judges.comparison import (
    Answer,
    Comparison,
    LengthControl,
    Pairs,
    base_rewards,
    length_rewards,
    pairs,
    read_comparison,
)
from whet.tasks.judges.config import Judge
from whet.tasks.judges.judge import AnswerRefusedError, JudgeEnvironments
from whet.tasks.judges.prompts import COMPARE, PREFER, PRINCIPLE, asked, conversation, mark
from whet.tasks.wrapped import Rewarded


class GenRM(Rewarded):
    """Tasks of ``taskset``, rewarded by comparisons of a group's answers."""

    rewarded_by: ClassVar[str] = "the comparison"
    own_scores: ClassVar[tuple[str, ...]] = ("genrm", "genrm_length")

    judge: Judge
    """The generative reward model."""
    pairs: Pairs = "circular"
    """The pairs: each answer with the next one, or all pairs."""
    principle: str = PRINCIPLE
    """The criterion by which the reward model compares answers."""
    roles: bool = False
    """Send the answers in messages of the roles ``response_1`` and ``response_2``, and the principle in one of the role
    ``principle``, for reward models whose chat template has these roles. False: one user message, for any model."""
    length: LengthControl = LengthControl()
    """Terms for short answers."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> "GenRM":
        if self.roles and self.judge.verdict == "logprobs":
            raise ValueError("judge.verdict = logprobs asks in one message which answer is better; leave roles out")
        return self

    def open(self) -> "ComparedEnvironments":
        return ComparedEnvironments(self)


class ComparedEnvironments(JudgeEnvironments):
    """The environments of the task set, whose groups are rewarded by comparison."""

    def __init__(self, tasks: GenRM) -> None:
        super().__init__(tasks.taskset, tasks.judge)
        self.tasks = tasks

    def make(self, task: Task) -> Environment:
        return self.inner.make(task) if self.tasks.taskset.grades else super().make(task)

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        return {"reward": 0.0}  # the group's comparison sets the reward

    async def score_group(self, task: Task, group: Group) -> None:
        tasks, episodes = self.tasks, group.episodes
        answers = [_answer(episode) for episode in episodes]
        compared = pairs(tasks.pairs, len(answers))
        verdicts = await gather_or_cancel(
            self._compare(task, answers[i], answers[j], f"{group.uid} {i} {j}") for i, j in compared
        )
        base = base_rewards(len(answers), compared, verdicts)
        extra = length_rewards(base, answers, tasks.length)
        for episode, value, length in zip(episodes, base, extra, strict=True):
            episode.scores = {**tasks.inner_scores(episode.scores), "genrm": value, "genrm_length": length}
            if tasks.taskset.grades:
                episode.scores["grade"] = episode.reward
            episode.reward = value + length + tasks.grade_weight * episode.reward

    async def _compare(self, task: Task, first: Answer, second: Answer, name: str) -> Comparison:
        """Return the verdict on two answers. The judge is not asked about an empty answer, which loses, or about two
        empty answers, which are equal."""
        full = [bool(answer.text.strip()) for answer in (first, second)]
        if not all(full):
            return _verdict(*full)
        try:
            return await self._ask(task, first.text, second.text, name)
        except AnswerRefusedError:
            accepted = [await self._accepts(task, answer.text, name) for answer in (first, second)]
            if all(accepted):  # they are too long together, so the shorter one wins
                accepted = [len(first.text) <= len(second.text), len(second.text) <= len(first.text)]
            return _verdict(*accepted)

    async def _ask(self, task: Task, first: str, second: str, name: str) -> Comparison:
        question = self._question(task, first, second)
        if self.tasks.judge.verdict == "text":
            return await self.client.ask(question, read_comparison, name, whole=True)
        likes = (await self.client.choose(question, ("1", "2"), name))["1"]
        return Comparison(1 + 4 * likes, 5 - 4 * likes, 6 - 5 * likes)

    async def _accepts(self, task: Task, text: str, name: str) -> bool:
        """Return whether the judge accepts a request with the answer."""
        try:
            await self._ask(task, text, "-", name)
        except AnswerRefusedError:
            return False
        return True

    def _question(self, task: Task, first: str, second: str) -> list[Message]:
        if self.tasks.roles:
            answers: list[Message] = [
                {"role": "response_1", "content": first},
                {"role": "response_2", "content": second},
            ]
            principle: Message = {"role": "principle", "content": self.tasks.principle}
            return [*task.prompt, *answers, *([principle] if self.tasks.principle else [])]
        text = conversation(task.prompt)
        form = COMPARE if self.tasks.judge.verdict == "text" else PREFER
        return asked(
            form.format(
                principle=self.tasks.principle, mark=mark(text, first, second), conversation=text, first=first,
                second=second,
            )
        )  # fmt: skip


def _verdict(first: bool, second: bool) -> Comparison:
    """Return the verdict on two answers by whether each is acceptable, without the judge."""
    return Comparison(1 + 2 * first, 1 + 2 * second, 3.5 - 2.5 * (first - second))


def _answer(episode: Episode) -> Answer:
    """Return the last reply of an episode."""
    last = next((m for m in reversed(episode.messages) if m["role"] == "assistant"), None)
    if last is None:
        return Answer("", finished=False)
    return Answer(text_of(last["content"]), last.get("reasoning_content", ""), episode.status is Status.COMPLETED)
