"""Small functions from which toy repositories are made: each with a line that a bug replaces, and arguments to draw."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

Arguments = list[Any]  # JSON values


@dataclass(frozen=True, slots=True)
class Sample:
    """A function: its source, one part of it and the bug that replaces this part."""

    source: str
    right: str
    wrong: str
    draw: Callable[[random.Random], Arguments]

    @property
    def broken(self) -> str:
        """The source with the bug."""
        return self.source.replace(self.right, self.wrong)


_MIRRORED = ("Anna", "Otto", "Level", "civic", "river", "Ada", "noon", "Hannah", "Bob")


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 60) for _ in range(rng.randint(2, 7))]


def _text(rng: random.Random) -> str:
    words = ("Level", "anna", "river", "Otto", "stone", "apple", "under", "civic", "moon", "Ada")
    return " ".join(rng.choice(words) for _ in range(rng.randint(1, 4)))


SAMPLES: Mapping[str, Sample] = {
    "clamp": Sample(
        'def clamp(value, low, high):\n    """Return the value, or the nearest limit."""\n'
        "    return max(low, min(value, high))\n",
        "max(low, min(value, high))", "min(low, max(value, high))",
        lambda rng: [rng.randint(-9, 30), rng.randint(0, 5), rng.randint(6, 20)],
    ),
    "mean": Sample(
        'def mean(numbers):\n    """Return the average of a list of numbers."""\n'
        "    return sum(numbers) / len(numbers)\n",
        "/ len(numbers)", "/ (len(numbers) + 1)", lambda rng: [_numbers(rng)],
    ),
    "median": Sample(
        'def median(numbers):\n    """Return the middle number; of an even count, the mean of the middle two."""\n'
        "    ordered = sorted(numbers)\n    middle = len(ordered) // 2\n    if len(ordered) % 2 == 0:\n"
        "        return (ordered[middle - 1] + ordered[middle]) / 2\n    return ordered[middle]\n",
        "(ordered[middle - 1] + ordered[middle]) / 2", "ordered[middle]", lambda rng: [_numbers(rng)],
    ),
    "count_vowels": Sample(
        'def count_vowels(text):\n    """Return how many of the letters a, e, i, o and u a text has."""\n'
        '    return sum(letter in "aeiou" for letter in text.lower())\n',
        '"aeiou"', '"aeio"', lambda rng: [_text(rng)],
    ),
    "is_palindrome": Sample(
        'def is_palindrome(text):\n    """Return whether a text reads the same backwards, in any case of letters."""\n'
        "    letters = text.lower()\n    return letters == letters[::-1]\n",
        "text.lower()", "text", lambda rng: [rng.choice(_MIRRORED)],
    ),
    "running_total": Sample(
        'def running_total(numbers):\n    """Return the sum up to each number."""\n    total, totals = 0, []\n'
        "    for number in numbers:\n        total += number\n        totals.append(total)\n    return totals\n",
        "totals.append(total)", "totals.append(number)", lambda rng: [_numbers(rng)],
    ),
    "chunks": Sample(
        'def chunks(items, size):\n    """Return the items in lists of a size; the last may be shorter."""\n'
        "    return [items[start:start + size] for start in range(0, len(items), size)]\n",
        "len(items), size", "len(items) - size, size", lambda rng: [_numbers(rng), rng.randint(1, 3)],
    ),
    "unique": Sample(
        'def unique(items):\n    """Return each different item once, in the order of the first."""\n    seen = []\n'
        "    for item in items:\n        if item not in seen:\n            seen.append(item)\n    return seen\n",
        "not in seen", "not in seen[-1:]", lambda rng: [[rng.randint(1, 4) for _ in range(rng.randint(3, 8))]],
    ),
    "largest_gap": Sample(
        'def largest_gap(numbers):\n    """Return the largest distance between two neighbours."""\n'
        "    return max(abs(a - b) for a, b in zip(numbers, numbers[1:]))\n",
        "abs(a - b)", "a - b", lambda rng: [_numbers(rng)],
    ),
    "initials": Sample(
        'def initials(text):\n    """Return the first letters of the words, in capitals."""\n'
        '    return "".join(word[0].upper() for word in text.split())\n',
        "word[0]", "word[-1]", lambda rng: [_text(rng)],
    ),
    "digit_sum": Sample(
        'def digit_sum(number):\n    """Return the sum of the digits of a whole number, with any sign."""\n'
        "    return sum(int(digit) for digit in str(abs(number)))\n",
        "str(abs(number))", "str(number)", lambda rng: [rng.randint(-999, 999)],
    ),
    "longest_word": Sample(
        'def longest_word(text):\n    """Return the longest word of a text, the first of several."""\n'
        "    return max(text.split(), key=len)\n",
        "max(text.split(), key=len)", "max(text.split())", lambda rng: [_text(rng)],
    ),
}  # fmt: skip


def result_of(source: str, name: str, arguments: Arguments) -> object:
    """Return what one of these functions returns; an exception as ``{"raises": NAME}``."""
    try:
        return _function(source, name)(*arguments)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return {"raises": type(error).__name__}


@cache
def _function(source: str, name: str) -> Callable[..., object]:
    """Compiled once: a task set asks for hundreds of results for each task."""
    scope: dict[str, Any] = {}
    exec(source, scope)  # only sources of this file
    function: Callable[..., object] = scope[name]
    return function
