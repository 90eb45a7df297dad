"""A task set: count the letters of a word. In a recipe: ``data.type: my_environment:LetterCount``."""

import random

from whet.core.types import Task
from whet.tasks.base import TaskSet
from whet.tasks.math.grader import compare_numbers, last_boxed

WORDS = ("strawberry", "bookkeeper", "mississippi", "committee", "banana", "parallel", "possession", "raccoon")


class LetterCount(TaskSet):
    seed: int = 0

    def tasks(self, split: str) -> list[Task]:
        pairs = [(word, letter) for word in WORDS for letter in sorted(set(word))]
        random.Random(self.seed).shuffle(pairs)
        chosen = pairs[10:] if split == "train" else pairs[:10]  # the test problems are never trained on
        return [self.task(word, letter) for word, letter in chosen]

    def task(self, word: str, letter: str) -> Task:
        question = f"How often does the letter {letter} occur in {word}? Put the number in \\boxed{{}}."
        return Task(f"letters/{word}/{letter}", [{"role": "user", "content": question}], {"n": word.count(letter)})

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        given = last_boxed(answer)
        correct = given is not None and compare_numbers(given, str(task.data["n"])) is True
        return {"reward": float(correct), "correct": float(correct), "format": float(given is not None)}
