"""Questions about small pictures that are drawn from a seed: the number of shapes of a kind, a number that is written.

The picture is the only source of the answer: the question is the same for all numbers, and every count from 1 to
``most`` is equally frequent, so an answer without a look is right once in ``most`` times.
"""

import io
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from whet.base.extras import extra
from whet.core.content import Part, image_urls, words_of
from whet.core.types import Task
from whet.fetch.images import data_url, fingerprint
from whet.tasks.cases import Case, Kind, unearned
from whet.tasks.scores import FORMAT
from whet.tasks.splits import DrawnTasks, Split, draw_splits, question_key

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

About = Literal["count", "digits"]
Place = tuple[int, int, int]  # centre and half the width of a shape, in pixels

_FORM = "Answer with the number alone."
_COLOURS = ("#c0392b", "#1f618d", "#196f3d", "#7d3c98", "#b9770e", "#1b2631")
_PAPER = ("#ffffff", "#fdf6e3", "#eaf2f8", "#e9f7ef")
_LEAST_CELL = 8  # pixels
_ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
_NUMBER = re.compile(r"[*\s]*([0-9]{1,9})[*.\s]*")


def _circle(draw: "ImageDraw", place: Place, colour: str) -> None:
    x, y, half = place
    draw.ellipse((x - half, y - half, x + half, y + half), fill=colour)


def _square(draw: "ImageDraw", place: Place, colour: str) -> None:
    x, y, half = place
    draw.rectangle((x - half, y - half, x + half, y + half), fill=colour)


def _triangle(draw: "ImageDraw", place: Place, colour: str) -> None:
    x, y, half = place
    draw.polygon(((x - half, y + half), (x + half, y + half), (x, y - half)), fill=colour)


SHAPES: dict[str, Callable[["ImageDraw", Place, str], None]] = {
    "circles": _circle,
    "squares": _square,
    "triangles": _triangle,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """The answer that a picture shows, and the kind of its question."""

    answer: str
    kind: About


class Pictures(DrawnTasks[Seen]):
    """Pictures of shapes to count and of numbers to read, for models with a vision tower."""

    named_scores = FORMAT

    kinds: tuple[About, ...] = Field(default=("count", "digits"), min_length=1)
    """The kinds of questions."""
    size: int = Field(default=48, ge=16, le=512)
    """Width and height of a picture in pixels."""
    most: int = Field(default=4, ge=2, le=20)
    """Most shapes that are counted."""
    others: int = Field(default=2, ge=0, le=20)
    """Most shapes of another kind in the same picture."""
    digits: int = Field(default=2, ge=1, le=6)
    """Digits of a number that is read."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        least = max(_LEAST_CELL * self._cells, _LEAST_CELL * self.digits)
        if self.size < least:
            raise ValueError(f"size must be at least {least} for the shapes and digits of a picture")
        return self

    @property
    def _cells(self) -> int:
        """Return the number of cells in a row; each holds at most one shape."""
        return math.ceil(math.sqrt(self.most + self.others))

    def splits(self) -> dict[Split, list[Task[Seen]]]:
        with extra("images", "data.type=pictures"):
            import PIL.ImageDraw  # noqa: F401
        drawn = draw_splits("pictures", self.seed, self.sizes, self.draw, self.key, "size, most, others or digits")
        return {
            split: [replace(task, uid=f"pictures/{split}/{number}") for number, task in tasks]
            for split, tasks in drawn.items()
        }

    def draw(self, rng: random.Random) -> Task[Seen]:
        """Return a generated task."""
        kind = rng.choice(self.kinds)
        question, answer, url = self._shapes(rng) if kind == "count" else self._number(rng)
        asked = f"{question} {_FORM}"
        content: list[Part] = [{"type": "image", "url": url}, {"type": "text", "text": asked}]
        return Task("", [{"role": "user", "content": content}], Seen(str(answer), kind))

    def key(self, task: Task[Seen]) -> int:
        """Return a number that is equal for two tasks with the same question and picture."""
        words = [words_of(message["content"]) for message in task.prompt]
        return question_key("\n".join([*words, *map(fingerprint, image_urls(task.prompt))]))

    def gold(self, task: Task[Seen]) -> str:
        return task.data.answer

    def stated(self, task: Task[Seen], answer: str) -> str | None:
        """Return the number in the last line of an answer, if it is the only word there."""
        lines = [line for line in answer[-1000:].splitlines() if line.strip()]
        match = _NUMBER.fullmatch(lines[-1]) if lines else None
        return match[1] if match else None

    async def grade(self, task: Task[Seen], answer: str) -> dict[str, float]:
        stated = self.stated(task, answer)
        correct = float(stated == task.data.answer)
        return {"reward": correct, "correct": correct, "format": float(stated is not None)}

    def cases(self) -> Sequence[Case]:
        tasks = self.tasks("train")
        first = {task.data.kind: task for task in reversed(tasks)}
        return [case for task in first.values() for case in self._cases_of(task, tasks)]

    def _cases_of(self, task: Task[Seen], tasks: Sequence[Task[Seen]]) -> Iterator[Case]:
        gold = self.gold(task)
        wrong = str(int(gold) + 1)
        answers: list[tuple[Kind, str, str, float]] = [
            ("good", "the number", gold, 1.0),
            ("good", "with a full stop", f" **{gold}**.\n", 1.0),
            ("good", "after a thought", f"First I saw {wrong} of them.\n\n{gold}", 1.0),
            ("bad", "one more", wrong, 0.0),
            ("bad", "two numbers in one", f"{wrong}{gold}", 0.0),
            ("boundary", "nothing", "", 0.0),
            ("boundary", "in a sentence", f"There are {gold} of them.", 0.0),
            ("boundary", "a leading zero", f"0{gold}", 0.0),
            ("boundary", "not in the last line", f"{gold}\nI am sure.", 0.0),
            ("adversarial", "two numbers", f"{gold} or {wrong}", 0.0),
            ("adversarial", "every number", ", ".join(map(str, range(100))), 0.0),
            ("adversarial", "every number in a line", "\n".join(map(str, range(100, 110))), 0.0),
            ("adversarial", "digits of another script", gold.translate(_ARABIC), 0.0),
            ("adversarial", "an endless number", gold * 10_000, 0.0),
        ]
        yield from (Case(name, task, answer, expected, kind) for kind, name, answer, expected in answers)
        yield from unearned(task, gold, [self.gold(other) for other in tasks[:4]])

    def _shapes(self, rng: random.Random) -> tuple[str, int, str]:
        """Return a question for a count, the answer and the picture."""
        asked, *rest = rng.sample(list(SHAPES), len(SHAPES))
        count, cell = rng.randint(1, self.most), self.size // self._cells
        kinds = [asked] * count + [rng.choice(rest) for _ in range(rng.randint(0, self.others))]
        cells = rng.sample(range(self._cells**2), len(kinds))

        def paint(draw: "ImageDraw") -> None:
            for kind, number in zip(kinds, cells, strict=True):
                half = rng.randint(max(2, cell // 4), max(2, cell // 2 - 2))
                room = max(0, cell // 2 - half - 1)
                x, y = (
                    part * cell + cell // 2 + rng.randint(-room, room)
                    for part in (number % self._cells, number // self._cells)
                )
                SHAPES[kind](draw, (x, y, half), rng.choice(_COLOURS))

        return f"How many {asked} are in the picture?", count, self._picture(rng, paint)

    def _number(self, rng: random.Random) -> tuple[str, int, str]:
        """Return a question for a number, the answer and the picture."""
        from PIL import ImageFont

        number = rng.randint(10 ** (self.digits - 1), 10**self.digits - 1)
        largest = min(0.8 * self.size, 1.5 * self.size / self.digits)
        font = ImageFont.load_default(rng.uniform(0.7, 1.0) * largest)

        def paint(draw: "ImageDraw") -> None:
            left, top, right, bottom = draw.textbbox((0, 0), str(number), font=font)
            x, y = (rng.uniform(0, max(0.0, self.size - extent)) for extent in (right - left, bottom - top))
            draw.text((x - left, y - top), str(number), fill=rng.choice(_COLOURS), font=font)

        return "Which number is in the picture?", number, self._picture(rng, paint)

    def _picture(self, rng: random.Random, paint: Callable[["ImageDraw"], None]) -> str:
        """Return the data URL of a painted picture."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.size, self.size), rng.choice(_PAPER))
        paint(ImageDraw.Draw(image))
        file = io.BytesIO()
        image.save(file, "PNG")
        return data_url(file.getvalue())
