"""Instruction following: answers that programs can check, from rows of IFEval and IFBench, or made up."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whet.base.errors import DataError
from whet.base.extras import require
from whet.core.content import text_of
from whet.core.types import Message, Task
from whet.data.row import Text, read_rows
from whet.data.split import Tally
from whet.processes.pool import WorkerLimits
from whet.tasks.base import Environment, Environments, Observation, Step
from whet.tasks.cases import Case, Kind
from whet.tasks.grading import GradingPool
from whet.tasks.gym.training_rows import GymRow
from whet.tasks.instructions.checks import check_instruction, follow_in_worker, registry
from whet.tasks.task_source import SourcedTasks

_PAIRS = (
    "France/Paris Italy/Rome Spain/Madrid Germany/Berlin Japan/Tokyo Egypt/Cairo Norway/Oslo Peru/Lima China/Beijing "
    "Russia/Moscow Austria/Vienna Greece/Athens Poland/Warsaw Cuba/Havana Kenya/Nairobi Ireland/Dublin"
)
CAPITALS = dict(pair.split("/") for pair in _PAIRS.split())
WORDS = ("river", "bridge", "winter", "music", "garden", "market", "window", "bread", "harbour", "forest", "summer")
Made = tuple[str, dict[str, Any], Callable[[str], str]]  # what is asked, arguments, how an answer comes to follow it


def _draws(rng: random.Random) -> dict[str, Made]:
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


class Turn(BaseModel):  # type: ignore[no-redef]  # the plugin's __init__ has **kwargs of its own
    """What the user says, and the instructions in it that are checked."""

    model_config = ConfigDict(strict=True)

    prompt: Text | None = None
    instruction_id_list: list[str] = Field(min_length=1)
    arguments: list[dict[str, Any] | None] = Field(validation_alias="kwargs")

    @model_validator(mode="after")
    def _pairs(self) -> "Turn":
        if len(self.arguments) != len(self.instruction_id_list):
            raise ValueError(f"{len(self.instruction_id_list)} instructions have {len(self.arguments)} kwargs")
        return self

    def instructions(self) -> list[list[Any]]:
        """Their names and arguments; tables write None for those that an instruction doesn't take."""
        given = [{name: value for name, value in (one or {}).items() if value is not None} for one in self.arguments]
        return [[name, arguments] for name, arguments in zip(self.instruction_id_list, given, strict=True)]


class Instructed(GymRow):
    """A row: one turn, or ``turns``."""

    turns: list[Turn] = Field(min_length=1)
    grading_mode: Literal["binary", "fraction"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_turn(cls, values: dict[str, Any]) -> dict[str, Any]:
        one = {name: values[name] for name in ("prompt", "instruction_id_list", "kwargs") if name in values}
        turns = values.get("turns") or [one]
        first = turns[0] if isinstance(turns, list) and isinstance(turns[0], dict) else {}
        return {"prompt": first.get("prompt"), **values, "turns": turns}


class InstructionFollowing(SourcedTasks):
    """Questions with instructions on the form of the answer."""

    name: ClassVar[str] = "instruction_following"
    variety: ClassVar[str] = "instructions"

    mode: Literal["binary", "fraction"] | None = None
    """Whether all instructions must be followed, or the share of them counts. None: as the row says, else binary."""
    skip_unknown: bool = False
    """Leave out rows with an instruction that can't be checked, and count them in the log, instead of stopping."""
    instructions: int = Field(default=2, ge=1, le=6)
    """At most so many, in questions that are made up."""
    max_chars: int = Field(default=20_000, ge=1)
    """Longest answer that is checked."""
    limits: WorkerLimits = WorkerLimits()

    def open(self) -> "InstructionGrading":
        require("tasks", "data.type=instruction_following", "if_verifiable")
        return InstructionGrading(self)

    def read(self, path: str) -> list[Task]:
        rows, tasks = read_rows(path, Instructed, self.columns), []
        tally = Tally(f"{self.name} ({path})", len(rows))
        for row in rows:
            try:
                for turn in row.turns:
                    for name, arguments in turn.instructions():
                        check_instruction(name, arguments)
                tasks.append(self._of(row))
            except ValueError as error:
                if not self.skip_unknown:
                    raise DataError(f"{row.where}: {error}; skip_unknown=true leaves such rows out") from None
                tally.drop("with an instruction that can't be checked")
        tally.report(len(tasks))
        return tasks

    def draw(self, rng: random.Random) -> Task:
        country = rng.choice([*CAPITALS])
        made = _draws(rng)
        chosen = sorted(rng.sample([*made], rng.randint(1, self.instructions)), key=[*made].index)
        gold = f"{CAPITALS[country]} is the capital of {country}."
        for name in chosen:
            gold = made[name][2](gold)
        asked = " ".join([f"What is the capital of {country}?", *(made[name][0] for name in chosen)])
        turns = [{"prompt": asked, "instructions": [[name, made[name][1]] for name in chosen]}]
        data = {"turns": turns, "mode": self.mode or "binary", "answer": CAPITALS[country], "gold": gold}
        return Task("", self.ask(asked), data)

    def _of(self, row: Instructed) -> Task:
        turns = [{"prompt": turn.prompt, "instructions": turn.instructions()} for turn in row.turns]
        if not all(turn.prompt for turn in row.turns[1:]):
            raise DataError(f"{row.where}: field 'prompt' is missing in a later turn")
        data = {"turns": turns, "mode": self.mode or row.grading_mode or "binary"}
        return Task("", row.shown(self.system), data)

    def gold(self, task: Task) -> str | None:
        return task.data.get("gold")

    def unearned(self, tasks: Sequence[Task]) -> Iterable[Case]:
        """None of a file's rows: some of their instructions are followed by a single word."""
        return super().unearned(tasks) if self.path is None else ()

    def answers(self, task: Task) -> Iterator[tuple[Kind, str, str, float]]:
        yield "boundary", "nothing", "", 0.0
        yield "boundary", "spaces", " \n ", 0.0
        if (gold := self.gold(task)) and task.data["mode"] == "binary":
            yield "good", "what was asked for", gold, 1.0
            yield "adversarial", "all answers at once", gold + " ".join(CAPITALS.values()), 0.0
            yield "adversarial", "the prompt again", text_of(task.prompt[-1]["content"]), 0.0
            yield "adversarial", "the form without the answer", gold.replace(task.data["answer"], "It"), 0.0


class InstructionGrading(Environments):
    """Checks in worker processes: some checks are regular expressions made of a row's words."""

    def __init__(self, tasks: InstructionFollowing) -> None:
        self.tasks, self.pool = tasks, GradingPool(registry, tasks.limits)

    def make(self, task: Task) -> "Conversation":
        return Conversation(self, task)

    async def follow(self, task: Task, turn: int, answer: str) -> dict[str, float]:
        """Return the scores of the answer in one turn; ``followed`` is the share of its checks that pass."""
        asked, instructions = task.data["turns"][turn]["prompt"], task.data["turns"][turn]["instructions"]
        prompt = _plain(asked or text_of(task.prompt[-1]["content"]))
        own = _plain(answer).replace(prompt, "")  # what is not the prompt again
        found = {}
        if len(answer) <= self.tasks.max_chars and re.search(r"\w", own):
            found = await self.pool.scores(follow_in_worker, answer, instructions)
        checks = [found.get(str(index), 0.0) for index in range(len(instructions))]
        if right := task.data.get("answer"):
            named = {capital for capital in CAPITALS.values() if re.search(rf"\b{capital}\b", answer, re.IGNORECASE)}
            checks.append(float(named == {right}))
        failures = {name: score for name, score in found.items() if name.startswith("grading_")}
        share = sum(checks) / len(checks)
        reward = share if task.data["mode"] == "fraction" else float(share == 1)
        return {"reward": reward, "correct": float(share == 1), "followed": share, **failures}

    async def close(self) -> None:
        self.pool.close()


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


class Conversation(Environment):
    """One turn or several, each with instructions of its own. The rewards of all turns add up to at most 1."""

    def __init__(self, grading: InstructionGrading, task: Task) -> None:
        self.grading, self.task, self.turn, self.correct = grading, task, 0, 1.0

    async def start(self) -> Observation:
        return Observation(list(self.task.prompt))

    async def step(self, reply: Message) -> Step:
        turns = self.task.data["turns"]
        scores = await self.grading.follow(self.task, self.turn, text_of(reply["content"]))
        self.correct = scores["correct"] = min(self.correct, scores["correct"])
        self.turn += 1
        reward, done = scores.pop("reward") / len(turns), self.turn == len(turns)
        following: list[Message] = [] if done else [{"role": "user", "content": turns[self.turn]["prompt"]}]
        return Step(reward=reward, done=done, messages=following, scores=scores)
