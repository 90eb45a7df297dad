"""Multiple choice: rows of MMLU and of NeMo Gym's mcqa, or generated questions."""

import random
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from whet.base.errors import DataError
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.core.content import text_of
from whet.core.types import Task
from whet.data.row import Text, read_rows
from whet.data.split import Tally
from whet.tasks.cases import Case, Kind, unearned
from whet.tasks.choice.grader import Mode, chosen, compiled
from whet.tasks.gym.rows import GymRow
from whet.tasks.scores import FORMAT, NamedScore
from whet.tasks.splits import question_key
from whet.tasks.task_source import SourcedTasks

KINDS = {
    "metal": "iron copper gold silver zinc nickel aluminium sodium titanium calcium",
    "gas": "oxygen hydrogen helium nitrogen neon argon methane chlorine ozone xenon",
    "planet": "Venus Mars Jupiter Saturn Uranus Neptune Earth",
    "insect": "ant bee wasp beetle butterfly moth mosquito grasshopper termite dragonfly",
    "bird": "eagle sparrow owl penguin robin parrot swan pigeon ostrich raven",
    "tree": "oak maple birch willow spruce elm cedar larch beech poplar",
    "organ of the body": "heart liver kidney lung stomach brain spleen pancreas bladder skin",
    "unit of measurement": "metre kilogram litre ampere volt kelvin joule watt pascal newton",
}
_GYM_MODES: dict[str, Mode] = {
    "strict_single_letter_boxed": "boxed",
    "lenient_boxed": "lenient",
    "lenient_answer_colon": "line",
    "lenient_answer_colon_md": "line",
}
# Found in an option that refers to other options.
_REFERS = re.compile(r"\b(above|below|both|neither|none|all of)\b|\b[A-H] (and|or) [A-H]\b|\([a-h]\)", re.IGNORECASE)


def _lettered(options: object) -> object:
    """Return the options by letter, from a list of texts or Gym's list of objects with one letter each."""
    if isinstance(options, list) and all(isinstance(option, str | None) for option in options):
        return dict(zip(string.ascii_uppercase, options, strict=False))
    if isinstance(options, list) and all(isinstance(option, dict) for option in options):
        pairs = [(letter.upper(), text) for option in options for letter, text in option.items() if text is not None]
        if len(pairs) != len(dict(pairs)):
            raise ValueError("must have different letters")
        return dict(pairs)
    return options


class Choice(GymRow):
    """A row: ``question``, ``options`` and the ``answer``, a letter or the index of an option."""

    question: Text | None = None
    options: Annotated[dict[str, str | None], BeforeValidator(_lettered)]
    answer: str | int = Field(validation_alias=AliasChoices("answer", "expected_answer"))
    grading_mode: Literal[tuple(_GYM_MODES)] | None = None  # type: ignore[valid-type]
    template_metadata: JsonObject | None = None

    @model_validator(mode="after")
    def _can_be_graded(self) -> "Choice":
        letters = list(self.options)
        if isinstance(self.answer, int) and 0 <= self.answer < len(letters):
            self.answer = letters[self.answer]
        if self.answer not in letters or len(letters) < 2 or not set(letters) <= set(string.ascii_uppercase):
            raise ValueError(f"answer {self.answer!r} must be one of at least two options, which are {letters}")
        if self.question is None and self.responses_create_params is None:
            raise ValueError("field 'question' is missing")
        return self


@dataclass(frozen=True, slots=True)
class Lettered:
    """A question, its options by letter, and the right letter."""

    question: str
    options: dict[str, str]
    answer: str
    mode: Mode
    pattern: str | None  # of the mode regex


class MultipleChoice(SourcedTasks[Lettered]):
    """Questions with options, one of them right."""

    named_scores = FORMAT | {"grading_timeout": NamedScore()}

    name: ClassVar[str] = "multiple_choice"
    variety: ClassVar[str] = "choices"

    prompt: str = "{question}\n\n{options}\n\nPut the letter of the right answer in \\boxed{}."
    """The user message, with ``{question}`` and ``{options}``. Rows of Gym have their own."""
    mode: Mode | None = None
    """The way the letter is read. None: the row's, else ``boxed``."""
    pattern: str | None = None
    """With ``mode: regex``, the regular expression whose last match is the letter."""
    shuffle: bool = False
    """Shuffle the options, by the seed. Options that refer to each other ("both", "none of these") and rows with their
    own prompt keep their order."""
    choices: int = Field(default=4, ge=2, le=8)
    """Options of a generated question."""

    @model_validator(mode="after")
    def _pattern_for_regex(self) -> "MultipleChoice":
        if (self.mode == "regex") != (self.pattern is not None):
            raise ValueError("mode: regex needs a pattern, and a pattern needs mode: regex")
        return self

    def key(self, task: Task[Lettered]) -> int:
        return question_key("\n".join([task.data.question, *sorted(task.data.options.values())]))

    def read(self, path: str) -> list[Task[Lettered]]:
        rows = read_rows(path, Choice, self.columns, nan_is_null=True)
        whole = [row for row in rows if None not in row.options.values()]
        tally = Tally(f"{self.name} ({path})", len(rows))
        tally.drop("with an option that is missing", len(rows) - len(whole))
        tally.report(len(whole))
        return [self._of(row) for row in whole]

    def draw(self, rng: random.Random) -> Task[Lettered]:
        kind, *others = rng.sample(list(KINDS), self.choices)
        names = [rng.choice(KINDS[each].split()) for each in (kind, *others)]
        shown = rng.sample(names, len(names))
        letters = dict(zip(string.ascii_uppercase, shown, strict=False))
        article = "an" if kind[0] in "aeio" else "a"
        right = string.ascii_uppercase[shown.index(names[0])]
        return self._task(f"Which of these is {article} {kind}?", letters, right, self.mode or "boxed", self.pattern)

    def gold(self, task: Task[Lettered]) -> str | None:
        """Return a right answer; None with a pattern, because the texts that it matches are not known."""
        return None if task.data.mode == "regex" else _marked(task.data.answer, task.data.mode)

    def answers(self, task: Task[Lettered]) -> Iterator[tuple[Kind, str, str, float]]:
        letters, right, mode = task.data.options, task.data.answer, task.data.mode
        wrong = next(letter for letter in letters if letter != right)
        yield "boundary", "nothing", "", 0.0
        if mode == "regex":
            return
        yield "good", "the letter", _marked(right, mode), 1.0
        yield "good", "the last of two letters", f"{_marked(wrong, mode)}\nNo:\n{_marked(right, mode)}", 1.0
        yield "bad", "another letter", _marked(wrong, mode), 0.0
        yield "boundary", "a letter without an option", _marked("Z", mode), 0.0
        yield "adversarial", "two letters", _marked(f"{right}, {wrong}", mode), 0.0
        yield "adversarial", "all letters", _marked("/".join(letters), mode), 0.0
        yield "adversarial", "a word that begins so", _marked(f"{right}nyway", mode), 0.0

    def unearned(self, tasks: Sequence[Task[Lettered]]) -> Iterable[Case]:
        task = tasks[0]
        wrong = next(other for other in task.data.options if other != task.data.answer)
        constant = _marked(wrong, task.data.mode)
        return () if task.data.mode == "regex" else unearned(task, self.gold(task), [constant])

    def stated(self, task: Task[Lettered], answer: str) -> str | None:
        try:
            return chosen(answer, task.data.options, task.data.mode, task.data.pattern)
        except TimeoutError:
            return None

    async def grade(self, task: Task[Lettered], answer: str) -> dict[str, float]:
        try:
            letter = chosen(answer, task.data.options, task.data.mode, task.data.pattern)
        except TimeoutError:
            return {"reward": 0.0, "correct": 0.0, "format": 0.0, "grading_timeout": 1.0}
        correct = float(letter == task.data.answer)
        return {"reward": correct, "correct": correct, "format": float(letter is not None)}

    def _of(self, row: Choice) -> Task[Lettered]:
        mode, pattern = self.mode, self.pattern
        if mode is None:
            pattern = (row.template_metadata or {}).get("output_regex")
            mode = "regex" if pattern else _GYM_MODES.get(row.grading_mode or "", "boxed")
        try:
            compiled(pattern or "")
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from None
        letters = {letter: text for letter, text in row.options.items() if text is not None}
        answer, conversation = str(row.answer), row.conversation
        if conversation is None and self.shuffle and not any(_REFERS.search(text) for text in letters.values()):
            order = random.Random(derive_seed(self.seed, "options", row.question or "")).sample(
                [*letters], len(letters)
            )
            answer = [*letters][order.index(answer)]
            letters = dict(zip(letters, [letters[letter] for letter in order], strict=True))
        question = row.question or "\n".join(text_of(message["content"]) for message in conversation or [])
        task = self._task(question, letters, answer, mode, pattern)
        return task if conversation is None else replace(task, prompt=conversation)

    def _task(
        self, question: str, letters: dict[str, str], answer: str, mode: Mode, pattern: str | None
    ) -> Task[Lettered]:
        listed = "\n".join(f"{letter}: {text}" for letter, text in letters.items())
        asked = self.prompt.replace("{options}", listed).replace("{question}", question)
        return Task("", self.ask(asked), Lettered(question, letters, answer, mode, pattern))


def _marked(answer: str, mode: Mode) -> str:
    return f"Answer: {answer}" if mode == "line" else f"\\boxed{{{answer}}}"
