"""MultiChallenge (arXiv 2501.17399): conversations of several turns, whose last reply a judge grades by questions with
the answer yes or no. Reads the rows as published, and NeMo Gym's rows with a rubric."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from whet.base.closing import gather_or_cancel
from whet.base.errors import ConfigError, DataError
from whet.base.strict_json import JsonObject
from whet.core.types import Message, Task
from whet.data.messages import Messages
from whet.data.row import Text, read_rows
from whet.tasks.base import AskPolicy, Environments
from whet.tasks.cases import Case, Kind
from whet.tasks.gym.rows import GymRow
from whet.tasks.judges.config import Judge
from whet.tasks.judges.judge import AnswerRefusedError, JudgeClient
from whet.tasks.judges.prompts import CONVERSATION, CRITERION, asked, conversation, mark
from whet.tasks.task_source import SourcedTasks

_VERDICT = re.compile(
    r"[\s*_`]*(?:(?:final )?(?:verdict|answer)[\s*_`]*:)?[\s*_`]*\[\[(YES|NO)\]\][\s*_`.]*", re.IGNORECASE
)
Verdict = Annotated[
    Literal["YES", "NO"], BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
]


class Criterion(BaseModel):
    """A question about the reply, and the answer that passes."""

    model_config = ConfigDict(strict=True)

    question: Text
    pass_criteria: Verdict = "YES"
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class MultiChallengeRow(GymRow):
    """A row of the published columns, or of NeMo Gym: ``responses_create_params`` and ``rubric``."""

    published: Messages | None = Field(default=None, validation_alias="CONVERSATION")
    axis: str | None = Field(default=None, validation_alias="AXIS")
    target_question: Text | None = Field(default=None, validation_alias="TARGET_QUESTION")
    pass_criteria: Verdict = Field(default="YES", validation_alias="PASS_CRITERIA")
    rubric: list[Criterion] = Field(default=[])
    metadata: JsonObject = Field(default={})

    @property
    def conversation(self) -> list[Message] | None:
        return self.published or self.responses_create_params

    def criteria(self) -> list[Criterion]:
        """Return the questions of the row. Raises ``DataError`` for a row that can't be graded."""
        if self.shown(None)[-1]["role"] != "user":
            raise DataError(f"{self.where}: the conversation must end with a message of the user, which is answered")
        if self.rubric:
            return self.rubric
        if self.target_question is None:
            raise DataError(f"{self.where}: there is no question to grade by: TARGET_QUESTION or rubric is missing")
        return [Criterion(question=self.target_question, pass_criteria=self.pass_criteria)]

    @property
    def challenge(self) -> str:
        """Return the kind of challenge, as a part of a score's name; empty if the row has none."""
        named = self.axis or self.metadata.get("challenge") or ""
        return re.sub(r"\W+", "_", str(named).casefold()).strip("_")


@dataclass(frozen=True, slots=True)
class Rubric:
    """The data of a task: what its last reply is graded by."""

    criteria: tuple[Criterion, ...]
    challenge: str  # the kind of challenge, as a part of a score's name; empty if the row has none


class MultiChallenge(SourcedTasks[Rubric]):
    """Conversations of MultiChallenge. The policy writes the last reply, which the judge grades."""

    name: ClassVar[str] = "multichallenge"

    path: str = Field()
    """A JSONL file with the published columns ``QUESTION_ID``, ``AXIS``, ``CONVERSATION``, ``TARGET_QUESTION`` and
    ``PASS_CRITERIA``, or with NeMo Gym's rows."""
    judge: Judge
    """The judge that grades."""
    score: Literal["all", "mean"] = "all"
    """The reward of a row with several questions: 1 if all pass, or the weighted share that passes."""
    show_conversation: bool = False
    """Show the judge the conversation, too, as NeMo Gym does. The published judge sees the reply and the question."""

    @model_validator(mode="after")
    def _writes(self) -> Self:
        if self.judge.verdict == "logprobs":
            raise ValueError(
                "judge.verdict = logprobs reads one token, but this judge gives reasons first; leave it out"
            )
        return self

    def read(self, path: str) -> list[Task[Rubric]]:
        rows = read_rows(path, MultiChallengeRow, self.columns)
        return [Task("", row.shown(self.system), Rubric(tuple(row.criteria()), row.challenge)) for row in rows]

    def draw(self, rng: random.Random) -> Task[Rubric]:
        raise ConfigError("data.path is missing: rows of MultiChallenge are read from a file")

    def answers(self, task: Task[Rubric]) -> Iterator[tuple[Kind, str, str, float]]:
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "spaces", " \n ", 0.0

    def unearned(self, tasks: Sequence[Task[Rubric]]) -> Iterable[Case]:
        """Return no cases, because only the judge knows what an answer is worth."""
        return ()

    def open(self) -> "RubricEnvironments":
        return RubricEnvironments(self)


class RubricEnvironments(Environments[Rubric]):
    """Asks the judge each question. The first question creates the client, in the event loop that asks."""

    def __init__(self, tasks: MultiChallenge) -> None:
        self.tasks = tasks
        self._client: JudgeClient | None = None
        self._policy: AskPolicy | None = None

    @property
    def client(self) -> JudgeClient:
        self._client = self._client or JudgeClient(self.tasks.judge, policy=self._policy)
        return self._client

    def use_policy(self, ask: AskPolicy) -> None:
        self._policy = ask

    async def grade(self, task: Task[Rubric], answer: str) -> dict[str, float]:
        """Return the scores. An answer without a letter or digit earns nothing and is not judged, because it would pass
        each question whose right answer is no. Raises ``JudgeError`` without a verdict."""
        if not re.search(r"\w", answer):
            return self._scores(task, [False] * len(task.data.criteria))
        try:
            passed = await gather_or_cancel(self._passes(task, answer, each) for each in task.data.criteria)
        except AnswerRefusedError:
            return self._scores(task, [False] * len(task.data.criteria)) | {"judge_refused": 1.0}
        return self._scores(task, passed)

    async def _passes(self, task: Task[Rubric], answer: str, criterion: Criterion) -> bool:
        question, before = criterion.question, conversation(task.prompt)
        key = mark(before, answer, question)
        shown = CONVERSATION.format(mark=key, conversation=before) if self.tasks.show_conversation else ""
        text = CRITERION.format(mark=key, conversation=shown, answer=answer, question=question)
        verdict = await self.client.ask(asked(text), read_verdict, f"{task.uid} {key}", whole=True)
        return verdict == criterion.pass_criteria

    def _scores(self, task: Task[Rubric], passed: Sequence[bool]) -> dict[str, float]:
        weights = [criterion.weight for criterion in task.data.criteria]
        share = sum(weight for weight, passes in zip(weights, passed, strict=True) if passes) / sum(weights)
        correct = float(all(passed))
        scores = {"reward": correct if self.tasks.score == "all" else share, "correct": correct, "passed": share}
        challenge = task.data.challenge
        return scores | ({f"passed_{challenge}": correct} if challenge else {})

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def read_verdict(reply: str) -> str | None:
    """Return ``YES`` or ``NO``, if it stands in the last line of a judge's reply, alone or after a label. A verdict
    elsewhere may be a quotation of the answer, so it doesn't count."""
    lines = [line for line in reply.splitlines() if line.strip()]
    match = _VERDICT.fullmatch(lines[-1][:200]) if lines else None
    return match[1].upper() if match else None
