"""Instruction following: instructions that a program can check, from rows of IFEval and IFBench, or generated."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whet.base.errors import DataError
from whet.base.extras import require
from whet.base.strict_json import JsonObject
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.data.row import Text, read_rows
from whet.data.split import Tally
from whet.processes.pool import WorkerLimits
from whet.tasks.base import Environment, Environments, Observation, Step
from whet.tasks.cases import Case, Kind
from whet.tasks.grading import POOLED, GradingPool
from whet.tasks.gym.rows import GymRow
from whet.tasks.instructions.checks import check_instruction, follow_in_worker, registry
from whet.tasks.scores import NamedScore
from whet.tasks.task_source import SourcedTasks

_PAIRS = (
    "France/Paris Italy/Rome Spain/Madrid Germany/Berlin Japan/Tokyo Egypt/Cairo Norway/Oslo Peru/Lima China/Beijing "
    "Russia/Moscow Austria/Vienna Greece/Athens Poland/Warsaw Cuba/Havana Kenya/Nairobi Ireland/Dublin"
)
CAPITALS = dict(pair.split("/") for pair in _PAIRS.split())
WORDS = ("river", "bridge", "winter", "music", "garden", "market", "window", "bread", "harbour", "forest", "summer")
Mode = Literal["binary", "fraction"]
Instruction = tuple[str, dict[str, Any], Callable[[str], str]]  # request, arguments, and a change that fulfils it


def _draws(rng: random.Random) -> dict[str, Instruction]:
    count, word, few = rng.randint(12, 25), rng.choice(WORDS), rng.randint(2, 4)
    return {
        "length_constraints:number_words": (
            f"Answer with at least {count} words.",
            {"num_words": count, "relation": "at least"},
            lambda answer: answer + " It is well known" * count,
        ),
        "keywords:existence": (f"Use the word {word}.", {"keywords": [word]}, lambda answer: f"{answer} A {word}."),
        "detectable_format:title": ("Begin with a title in <<double angle brackets>>.", {}, "<<Title>>\n{}".format),
        "detectable_format:number_bullet_lists": (
            f"Give exactly {few} bullet points, lines that begin with *.",
            {"num_bullets": few},
            lambda answer: answer + "\n* A point." * few,
        ),
        "startend:end_checker": (
            f"End with the words: that is the {word}",
            {"end_phrase": f"that is the {word}"},
            lambda answer: f"{answer}\nthat is the {word}",
        ),
        "startend:quotation": ("Put the whole answer in double quotation marks.", {}, '"{}"'.format),
    }


ToCheck = tuple[str, JsonObject]
"""The name and the arguments of an instruction."""


class Turn(BaseModel):  # type: ignore[no-redef]  # the plugin's __init__ also has **kwargs
    """A user message, and the instructions in it that are checked."""

    model_config = ConfigDict(strict=True)

    prompt: Text | None = None
    instruction_id_list: list[str] = Field(min_length=1)
    arguments: list[JsonObject | None] = Field(validation_alias="kwargs")

    @model_validator(mode="after")
    def _pairs(self) -> "Turn":
        if len(self.arguments) != len(self.instruction_id_list):
            raise ValueError(
                f"'instruction_id_list' has {len(self.instruction_id_list)} items and 'kwargs' {len(self.arguments)}; "
                "there must be one for each instruction"
            )
        return self

    def checked(self) -> "CheckedTurn":
        """Return the turn as a task has it."""
        return CheckedTurn(self.prompt, self.instructions())

    def instructions(self) -> list[ToCheck]:
        """Return name and arguments of each instruction. Tables have None for arguments that it doesn't take."""
        return [
            (name, {argument: value for argument, value in (arguments or {}).items() if value is not None})
            for name, arguments in zip(self.instruction_id_list, self.arguments, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class CheckedTurn:
    """A user message; None: the end of the task's prompt. And the instructions that are checked."""

    prompt: str | None
    instructions: list[ToCheck]


@dataclass(frozen=True, slots=True)
class Instructed:
    """The turns of a task, and the right answer to a generated question."""

    turns: list[CheckedTurn]
    mode: Mode
    answer: str | None = None
    gold: str | None = None  # a reply with this answer that follows all instructions


class InstructionRow(GymRow):
    """A row: the fields of one turn, or a list ``turns``."""

    json_columns = ("turns", "instruction_id_list", "kwargs")

    turns: list[Turn] = Field(min_length=1)
    grading_mode: Mode | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_turn(cls, values: dict[str, object]) -> dict[str, object]:
        turn = {name: values[name] for name in ("prompt", "instruction_id_list", "kwargs") if name in values}
        turns = values.get("turns") or [turn]
        first = turns[0] if isinstance(turns, list) and isinstance(turns[0], dict) else {}
        return {"prompt": first.get("prompt"), **values, "turns": turns}


class InstructionFollowing(SourcedTasks[Instructed]):
    """Questions with instructions on the form of the answer."""

    named_scores = POOLED | {"followed": NamedScore()}

    name: ClassVar[str] = "instruction_following"
    variety: ClassVar[str] = "instructions"

    mode: Mode | None = None
    """``binary``: 1 if all instructions are followed. ``fraction``: the share that is followed. None: the row's mode,
    else binary."""
    skip_unknown: bool = False
    """Drop rows with an instruction that can't be checked, and log their number, instead of stopping."""
    instructions: int = Field(default=2, ge=1, le=6)
    """Most instructions of a generated question."""
    max_chars: int = Field(default=20_000, ge=1)
    """Longest answer that is checked, in characters."""
    limits: WorkerLimits = WorkerLimits()

    def open(self) -> "InstructionGrading":
        require("tasks", "data.type=instruction_following", "if_verifiable")
        return InstructionGrading(self)

    def read(self, path: str) -> list[Task[Instructed]]:
        rows, tasks = read_rows(path, InstructionRow, self.columns), []
        tally = Tally(f"{self.name} ({path})", len(rows))
        for row in rows:
            try:
                for turn in row.turns:
                    for name, arguments in turn.instructions():
                        check_instruction(name, arguments)
                tasks.append(self._of(row))
            except ValueError as error:
                if not self.skip_unknown:
                    raise DataError(f"{row.where}: {error}; data.skip_unknown=true drops such rows") from None
                tally.drop("with an instruction that can't be checked")
        tally.report(len(tasks))
        return tasks

    def draw(self, rng: random.Random) -> Task[Instructed]:
        country = rng.choice([*CAPITALS])
        drawn = _draws(rng)
        chosen = sorted(rng.sample([*drawn], rng.randint(1, self.instructions)), key=[*drawn].index)
        gold = f"{CAPITALS[country]} is the capital of {country}."
        for name in chosen:
            gold = drawn[name][2](gold)
        asked = " ".join([f"What is the capital of {country}?", *(drawn[name][0] for name in chosen)])
        turns = [CheckedTurn(asked, [(name, drawn[name][1]) for name in chosen])]
        return Task("", self.ask(asked), Instructed(turns, self.mode or "binary", CAPITALS[country], gold))

    def _of(self, row: InstructionRow) -> Task[Instructed]:
        if not all(turn.prompt for turn in row.turns[1:]):
            raise DataError(f"{row.where}: field 'prompt' is missing in a turn after the first")
        mode = self.mode or row.grading_mode or "binary"
        return Task("", row.shown(self.system), Instructed([turn.checked() for turn in row.turns], mode))

    def gold(self, task: Task[Instructed]) -> str | None:
        return task.data.gold

    def unearned(self, tasks: Sequence[Task[Instructed]]) -> Iterable[Case]:
        """Return no cases for the rows of a file, because a single word may follow their instructions."""
        return super().unearned(tasks) if self.path is None else ()

    def answers(self, task: Task[Instructed]) -> Iterator[tuple[Kind, str, str, float]]:
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "spaces", " \n ", 0.0
        right = task.data.answer
        if right and (gold := self.gold(task)) and task.data.mode == "binary":
            yield "good", "the right answer in the right form", gold, 1.0
            yield "adversarial", "all answers at once", gold + " ".join(CAPITALS.values()), 0.0
            yield "adversarial", "the prompt again", text_of(task.prompt[-1]["content"]), 0.0
            yield "adversarial", "the form without the answer", gold.replace(right, "It"), 0.0


class InstructionGrading(Environments[Instructed]):
    """Checks in worker processes, because some checks use regular expressions made of a row's words."""

    def __init__(self, tasks: InstructionFollowing) -> None:
        self.tasks, self.pool = tasks, GradingPool(registry, tasks.limits)

    def make(self, task: Task[Instructed]) -> "Conversation":
        return Conversation(self, task)

    async def follow(self, task: Task[Instructed], turn: int, answer: str) -> dict[str, float]:
        """Return the scores of the answer in one turn. ``followed`` is the share of its checks that pass."""
        instructions = task.data.turns[turn].instructions
        prompt = _plain(task.data.turns[turn].prompt or text_of(task.prompt[-1]["content"]))
        without_prompt = _plain(answer).replace(prompt, "")  # an answer must not only repeat the prompt
        results = {}
        if len(answer) <= self.tasks.max_chars and re.search(r"\w", without_prompt):
            results = await self.pool.scores(follow_in_worker, answer, instructions)
        checks = [results.get(str(index), 0.0) for index in range(len(instructions))]
        if right := task.data.answer:
            named = {capital for capital in CAPITALS.values() if re.search(rf"\b{capital}\b", answer, re.IGNORECASE)}
            checks.append(float(named == {right}))
        failures = {name: score for name, score in results.items() if name.startswith("grading_")}
        share = sum(checks) / len(checks)
        reward = share if task.data.mode == "fraction" else float(share == 1)
        return {"reward": reward, "correct": float(share == 1), "followed": share, **failures}

    async def close(self) -> None:
        self.pool.close()


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


class Conversation(Environment):
    """An episode of one or more turns, each with its own instructions. The rewards of all turns add up to at most 1."""

    def __init__(self, grading: InstructionGrading, task: Task[Instructed]) -> None:
        self.grading, self.task, self.turn, self.correct = grading, task, 0, 1.0

    async def start(self) -> Observation:
        return Observation(list(self.task.prompt))

    async def step(self, reply: Message) -> Step:
        turns = self.task.data.turns
        scores = await self.grading.follow(self.task, self.turn, text_of(reply["content"]))
        self.correct = scores["correct"] = min(self.correct, scores["correct"])
        self.turn += 1
        reward, done = scores.pop("reward") / len(turns), self.turn == len(turns)
        following: list[Message] = [] if done else [{"role": "user", "content": turns[self.turn].prompt or ""}]
        return Step(reward=reward, done=done, messages=following, scores=scores)
