"""The problem generators of reasoning-gym (arXiv 2505.24760) as a task set, graded by their own scorers.

Some scorers ``eval`` the model's answer. They only get answers that match a screen, a pattern of harmless characters
(digits, operators and brackets, for example), and every scorer runs in a killable worker with a time and a memory
limit. A generator whose code evaluates text is refused unless it has a screen or was reviewed.
"""

import inspect
import math
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal

from pydantic import Field

from whet.base.errors import ConfigError, DataError
from whet.base.extras import extra
from whet.base.seeds import derive_seed
from whet.base.strict_json import JsonObject
from whet.config.issues import did_you_mean
from whet.core.types import Task
from whet.data.split import Tally, distinct
from whet.processes.pool import WorkerLimits
from whet.tasks.base import Environments
from whet.tasks.cases import Case
from whet.tasks.grading import POOLED, GradingPool
from whet.tasks.math.grader import last_boxed
from whet.tasks.prompts import messages
from whet.tasks.scores import NamedScore
from whet.tasks.splits import MAX_SIZE, DrawnTasks, Split, checked_split, question_key

AnswerKind = Literal["boxed", "tag", "last_line", "whole"]
INSTRUCTIONS: dict[AnswerKind, str] = {
    "boxed": "Put the final answer in \\boxed{}.",
    "tag": "Give the final answer between <answer> and </answer>.",
    "last_line": "Give the final answer alone on the last line.",
    "whole": "Reply with the answer only.",
}
MAX_CHARS = 20_000  # longest answer that is scored
_Entries = dict[str, dict[str, Any]]  # reasoning-gym's entries by uid, all of whose fields a scorer may need

_NUMERIC = re.compile(r"[0-9+\-*/().\s]*")
_LISTS = re.compile(r"[A-Za-z0-9_\[\],\s'\"-]*")  # nothing here can call, access an attribute or format
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs|pi"
_SYMBOLIC = re.compile(rf"(?:[0-9+\-*/^()\s]|\.(?=[0-9])|(?<![A-Za-z])(?:[A-Za-z]|{_FUNCTIONS})(?![A-Za-z]))*")
SCREENS = {
    "binary_matrix": _LISTS,
    "countdown": _NUMERIC,
    "intermediate_integration": _SYMBOLIC,
    "n_queens": _LISTS,
    "polynomial_multiplication": _SYMBOLIC,
    "puzzle24": _NUMERIC,
    "simple_integration": _SYMBOLIC,
    "spiral_matrix": _LISTS,
    "string_insertion": _LISTS,
}
# Reviewed: these evaluate text that they generate or ship, never an answer.
TRUSTED = frozenset({"basic_arithmetic", "bitwise_arithmetic", "codeio", "number_sorting", "propositional_logic"})
_EVALUATES = re.compile(r"(?<![\w.])(?:\w+\.)?(?:eval|exec|parse_expr|sympify)\(")
_NO_NUMBER = re.compile(r"(?=.*(?:nan|inf))(?:nan|inf(?:inity)?|[-+()\s0-9.*]|[ij](?![a-z]))*", re.IGNORECASE)


def _uses_its_numbers(answer: str, entry: JsonObject) -> bool:
    return sorted(map(int, re.findall(r"[0-9]+", answer))) == sorted(entry["metadata"]["numbers"])


def _same_word(answer: str, entry: dict[str, object]) -> bool:
    return answer.strip().casefold() == str(entry["answer"]).casefold()


def _same_probability(answer: str, entry: JsonObject) -> bool:
    return abs(Fraction(answer.replace(",", "")) - Fraction(entry["answer"])) <= Fraction(1, 10_000)


def _same_number(answer: str, entry: JsonObject) -> bool:
    return Fraction(answer.replace(",", "").strip(" $")) == Fraction(entry["answer"])


def _same_words(answer: str, entry: JsonObject) -> bool:
    return len(answer.split()) == len(entry["answer"].split())


def _same_length(answer: str, entry: JsonObject) -> bool:
    return len(answer) == len(entry["answer"])


def _same_number_of_words(answer: str, entry: JsonObject) -> bool:
    return answer.count(",") == entry["answer"].count(",")


def _same_units(answer: str, entry: JsonObject) -> bool:
    """Return whether both are days, a time, or days and a time, and nothing else."""
    numbered = (re.sub(r"\d+", "0", text) for text in (answer, entry["answer"]))
    first, second = (re.sub(r"\.0|days?|\s", "", text) for text in numbered)
    return first == second


# Checks that are missing in the generators' scorers, which accept a constant as right everywhere, or any text after the
# right answer.
CHECKS: dict[str, Callable[[str, JsonObject], bool]] = {
    "coin_flip": _same_probability,
    "game_of_life_halting": _same_word,
    "gsm_symbolic": _same_number,
    "letter_jumble": _same_words,
    "puzzle24": _uses_its_numbers,
    "spell_backward": _same_length,
    "time_intervals": _same_units,
    "word_sorting": _same_number_of_words,
}
SCORES = POOLED | {"score": NamedScore(-math.inf, math.inf), "scorer_error": NamedScore()}


class ReasoningGym(DrawnTasks):
    """Problems of one generator of reasoning-gym, e.g. ``dataset="chain_sum"``, ``settings={"max_terms": 3}``."""

    named_scores = SCORES

    dataset: str
    settings: JsonObject = Field(default={})
    """The generator's settings, except size and seed."""
    train_size: int = Field(default=2000, ge=1, le=MAX_SIZE)
    """Questions to generate. Repeated and held-out questions are dropped."""
    answer: AnswerKind = "tag"
    """The place of the answer in the reply."""
    exact: bool = True
    """Reward only answers that the scorer finds completely right. False: the reward is the scorer's score, and many
    scorers pay for any answer; game_of_life pays 0.97 for an empty board."""
    instruction: str | None = None
    """Appended to the question; None: the instruction that fits ``answer``."""
    system: str | None = None
    limits: WorkerLimits = WorkerLimits()

    def splits(self) -> dict[Split, list[Task]]:
        """Return the tasks of both splits. Raises ``ConfigError`` for an unknown generator or setting."""
        instruction = INSTRUCTIONS[self.answer] if self.instruction is None else self.instruction
        return {
            split: [
                Task(uid, messages(self.system, f"{entry['question']}\n\n{instruction}".strip()))
                for uid, entry in entries.items()
            ]
            for split, entries in self._entries.items()
        }

    def gold(self, task: Task) -> str | None:
        """Return the generator's answer, marked as ``answer`` requires; None without one, or if it can't be marked."""
        answer = str(self.entry(task)[0].get("answer") or "")
        wrapped = {"boxed": f"\\boxed{{{answer}}}", "tag": f"<answer>{answer}</answer>"}.get(self.answer, answer)
        return wrapped if answer and extract(wrapped, self.answer) == answer.strip() else None

    def cases(self) -> Sequence[Case]:
        """Return cases of replies without an answer, because only the generator's scorer knows right answers."""
        task = self.tasks("train")[0]
        empty = [Case("nothing", task, "", 0.0, "boundary"), Case("spaces", task, " \n ", 0.0, "boundary")]
        no_number = {"boxed": "\\boxed{nan}", "tag": "<answer>nan</answer>"}.get(self.answer, "nan")
        empty.append(Case("a constant that is not a number", task, no_number, 0.0, "adversarial"))
        if self.answer in ("tag", "boxed"):
            empty.append(Case("an answer that is not marked", task, "It is 42.", 0.0, "boundary"))
            empty.append(Case("a mark that is not closed", task, "<answer>42 \\boxed{42", 0.0, "adversarial"))
        gold = self.gold(task) or ""
        zeros = re.sub(r"[1-9]", "0", gold)
        if self.exact and zeros != gold and re.search(r"[\[\n]", gold):
            empty.append(Case("a board of zeros", task, zeros, 0.0, "adversarial"))
        return empty

    def open(self) -> "GymGrading":
        return GymGrading(self)

    def entry(self, task: Task) -> tuple[JsonObject, bytes]:
        """Return the arguments of a task's scorer: the generator's entry and its pickled settings."""
        split = checked_split(task.uid.split("/")[-2])
        entry = self._entries[split].get(task.uid)
        if entry is None:
            raise DataError(f"{task.uid!r} is not a task of {self.dataset} with seed {self.seed}")
        return entry, pickle.dumps(self._settings(split))

    @cached_property
    def _entries(self) -> dict[Split, _Entries]:
        check_generator(self.dataset, self.settings)
        test = self._generate("test", {})
        return {"train": self._generate("train", test), "test": test}

    def _generate(self, split: Split, apart_from: _Entries) -> _Entries:
        settings, name = self._settings(split), f"reasoning_gym/{self.dataset}/{split}"
        if not settings["size"]:
            return {}
        generated, tally = _dataset(self.dataset, settings), Tally(name, settings["size"])
        drawn = [(f"{name}/{index}", generated[index]) for index in range(tally.rows)]
        kept = distinct(drawn, lambda drawn: question_key(drawn[1]["question"]), tally, apart_from.items())
        tally.report(len(kept))
        return dict(kept)

    def _settings(self, split: Split) -> JsonObject:
        # 32 bits, because some generators pass the seed to numpy.
        seed = derive_seed(self.seed, "reasoning_gym", self.dataset, split) % 2**32
        return {**self.settings, "size": self.sizes[split], "seed": seed}


class GymGrading(Environments):
    """Grades by the generator's scorer, in worker processes."""

    named_scores = SCORES

    def __init__(self, taskset: ReasoningGym) -> None:
        self.taskset, self.pool = taskset, GradingPool(prepare, taskset.limits)

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        """Return ``score``, the scorer's; ``correct``, 1 for a score of at least 1; ``reward``, one of the two;
        and ``format``, 1 if the reply has an answer that can be scored."""
        dataset = self.taskset.dataset
        entry, settings = self.taskset.entry(task)
        given, screen = extract(answer, self.taskset.answer), SCREENS.get(dataset)
        if given is None or _NO_NUMBER.fullmatch(given) or (screen and not screen.fullmatch(given)):
            return {"reward": 0.0, "correct": 0.0, "score": 0.0, "format": 0.0}
        scores = await self.pool.scores(score_in_worker, dataset, settings, given, entry)
        return scores | {"reward": scores.get("correct" if self.taskset.exact else "score", 0.0)}

    async def close(self) -> None:
        self.pool.close()


def extract(reply: str, kind: AnswerKind) -> str | None:
    """Return the answer in a reply, stripped; None if it is missing or too long."""
    answer: str | None
    if kind == "boxed":
        answer = last_boxed(reply)
    elif kind == "tag":
        _, tag, rest = reply.rpartition("<answer>")
        answer = rest.partition("</answer>")[0] if tag and "</answer>" in rest else None
    else:
        answer = reply if kind == "whole" else (reply.strip().splitlines() or [""])[-1]
    answer = (answer or "").strip()
    return answer if 0 < len(answer) <= MAX_CHARS else None


def check_generator(name: str, settings: JsonObject) -> None:
    """Raise ``ConfigError`` unless the generator exists, has the settings, and is safe to score a model's answers."""
    generators = _generators()
    if name not in generators:
        raise ConfigError(f"data.dataset: reasoning_gym has no dataset {name!r}.{did_you_mean(name, generators)}")
    kind, config = generators[name]
    allowed = [field for field in config.__dataclass_fields__ if field not in ("size", "seed")]
    for key in settings:
        if key not in allowed:
            raise ConfigError(
                f"data.settings: reasoning_gym dataset {name!r} has no setting {key!r}; it has: {', '.join(allowed)} "
                "(for size and seed, set data.train_size, data.test_size and data.seed)"
            )
    evaluates = _EVALUATES.search(inspect.getsource(sys.modules[kind.__module__]))
    if name == "composite" or (evaluates and name not in SCREENS and name not in TRUSTED):
        raise ConfigError(
            f"reasoning_gym dataset {name!r} may run a model's answer as code, and there is no screen for it in "
            "whet/tasks/adapters/reasoning_gym.py; choose another dataset"
        )


def prepare() -> None:
    """Import reasoning-gym, in a new worker."""
    _generators()


def score_in_worker(name: str, config: bytes, answer: str, entry: JsonObject) -> dict[str, float]:
    """Return the scores of an answer, by the generator's own scorer."""
    dataset = _cached_dataset(name, config)
    try:
        if name in CHECKS and not CHECKS[name](answer, entry):
            return {"correct": 0.0, "score": 0.0, "format": 1.0}
        score = float(dataset.score_answer(answer=answer, entry=entry))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):  # some scorers fail on odd answers
        return {"correct": 0.0, "score": 0.0, "format": 0.0, "scorer_error": 1.0}
    return {"score": score, "correct": float(score >= 1), "format": 1.0}


@lru_cache(maxsize=8)
def _cached_dataset(name: str, config: bytes) -> Any:
    return _dataset(name, pickle.loads(config))


def _dataset(name: str, settings: dict[str, object]) -> Any:
    from reasoning_gym.factory import create_dataset

    _generators()
    try:
        return create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as problem:
        raise ConfigError(f"reasoning_gym dataset {name!r} rejects its settings {settings}: {problem}") from problem


def _generators() -> dict[str, tuple[type, Any]]:
    with extra("tasks", "data.type=reasoning_gym"):
        import reasoning_gym  # registers the generators
    return dict(reasoning_gym.factory.DATASETS)
