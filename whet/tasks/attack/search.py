"""Random search for an answer that earns a reward on many tasks: texts are joined, cut and changed, and texts with a
higher mean reward are changed more often. And shrinking of a text: parts are deleted while a condition holds."""

import random
import re
from collections.abc import Awaitable, Callable, Sequence

from whet.core.types import Task
from whet.tasks.cases import question_of

# Parts of a recipe that are replaced by the task's question, or by something in it.
QUESTION, LAST_LINE = "\x02question\x03", "\x02last line\x03"
FIRST_NUMBER, LAST_NUMBER, LARGEST = "\x02first number\x03", "\x02last number\x03", "\x02largest number\x03"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
PARTS = (
    QUESTION, LAST_LINE, FIRST_NUMBER, LAST_NUMBER, LARGEST,
    "\n", " ", "```\n", "```python\n", "\\boxed{", "}", "Answer: ", "Final Answer: [", "]", "{", '"',
    "<answer>", "</answer>", "0", "1", "A", "yes", "the answer is ", "True", "return x", "None", ",", ":", "*", "$",
    "\\", ".", "-",
)  # fmt: skip
_KEPT = 12  # texts that are changed further
Recipe = tuple[str, ...]


def written(recipe: Recipe, task: Task) -> str:
    """Return the answer to a task that a recipe describes."""
    question = question_of(task)
    numbers = _NUMBER.findall(question) or [""]
    replaced = {
        QUESTION: question, LAST_LINE: question.rstrip().rpartition("\n")[2], FIRST_NUMBER: numbers[0],
        LAST_NUMBER: numbers[-1], LARGEST: max(numbers, key=lambda number: float(number or 0)),
    }  # fmt: skip
    return "".join(replaced.get(part, part) for part in recipe)


async def search(
    tasks: Sequence[Task], texts: Sequence[str], reward: Callable[[Task, str], Awaitable[float]], seed: int, rounds: int
) -> tuple[float, Recipe]:
    """Return the highest mean reward over the tasks and its recipe, after ``rounds`` recipes or when ``reward`` raises
    ``StopAsyncIteration``. ``texts`` are answers to begin with. Recipes whose first rewards are low are given up."""
    rng = random.Random(seed)
    pool: list[tuple[float, Recipe]] = []
    best: tuple[float, Recipe] = (float("-inf"), ())
    begin: list[Recipe] = [(text,) for text in texts]
    try:
        for _ in range(rounds):
            recipe = begin.pop() if begin else _changed(rng, [recipe for _, recipe in pool])
            rewards: list[float] = []
            for task in tasks:
                rewards.append(await reward(task, written(recipe, task)))
                if len(rewards) == 2 and pool and max(rewards) < pool[-1][0]:
                    break
            mean = sum(rewards) / len(rewards)
            if len(rewards) == len(tasks):
                best = max(best, (mean, recipe), key=lambda scored: scored[0])
            pool = sorted([*pool, (mean, recipe)], key=lambda scored: -scored[0])[:_KEPT]
    except StopAsyncIteration:
        pass
    return best


def _changed(rng: random.Random, recipes: Sequence[Recipe]) -> Recipe:
    """Return a recipe that is similar to one of the given recipes, more likely to an early one."""
    recipe = list(recipes[min(rng.randrange(len(recipes)), rng.randrange(len(recipes)))])
    for _ in range(rng.randint(1, 3)):
        place = rng.randint(0, len(recipe))
        change = rng.choice(("insert", "insert", "delete", "join", "cut"))
        if change == "insert" or not recipe:
            recipe.insert(place, rng.choice(PARTS))
        elif change == "join":
            recipe += rng.choice(recipes)
        elif change == "delete" or recipe[place % len(recipe)].startswith("\x02"):
            del recipe[place % len(recipe)]
        else:
            text = recipe[place % len(recipe)]
            start = rng.randint(0, len(text))
            recipe[place % len(recipe)] = text[:start] + text[start + rng.randint(1, 8) :]
    return tuple(recipe[:20])


async def shrunk(text: str, holds: Callable[[str], Awaitable[bool]]) -> str:
    """Return a text from which no line, and then no character, can be deleted without breaking the condition. It begins
    with large parts, as delta debugging does (Zeller and Hildebrandt, 2002). ``text`` fulfils the condition."""
    if text and await holds(""):
        return ""
    lines = await _without_parts(text.splitlines(keepends=True), holds)
    return "".join(await _without_parts(list("".join(lines)), holds))


async def _without_parts(parts: list[str], holds: Callable[[str], Awaitable[bool]]) -> list[str]:
    size = max(1, len(parts) // 2)
    while True:
        start, before = 0, len(parts)
        while start < len(parts):
            rest = parts[:start] + parts[start + size :]
            if len(rest) < len(parts) and rest and await holds("".join(rest)):
                parts = rest
            else:
                start += size
        if size == 1 and len(parts) == before:
            return parts
        size = max(1, size // 2)
