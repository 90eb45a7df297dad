"""Published benchmarks by name: the task set of each, and where its rows are."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whet.base.errors import ConfigError, DataError
from whet.base.files import expanded
from whet.base.strict_json import JsonObject
from whet.config.issues import did_you_mean
from whet.fetch.download import cache_folder, offline
from whet.tasks.base import TASK_SETS, TaskSet
from whet.tasks.choice.task_set import MultipleChoice
from whet.tasks.code.task_set import Code
from whet.tasks.instructions.task_set import InstructionFollowing
from whet.tasks.math.dataset import GSM8K, Math


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark. All its rows are in the split ``train`` of its task set, because nothing is held out."""

    about: str
    file: str  # in the folder of benchmarks
    hub: str  # the same rows on the Hugging Face Hub
    make: Callable[..., TaskSet]
    columns: dict[str, str] | None = None  # of the Hub's rows, where the file has other names

    def task_set(self) -> TaskSet:
        """Return the task set over the file or, if it is missing, over the Hub's rows."""
        local = folder() / self.file
        settings: JsonObject = {"test_size": 0}
        if local.is_file():
            return self.make(path=str(local), **settings)
        if offline():
            raise ConfigError(f"{self.about}: its rows must lie in {local}, one JSON object a line, as in {self.hub}")
        task_set = self.make(path=self.hub, **settings, **({"columns": self.columns} if self.columns else {}))
        try:
            task_set.tasks("train")
        except DataError as error:
            raise DataError(
                f"{self.about}: {local} does not exist, and its rows can't come from the Hub: {error}"
            ) from None
        return task_set


BENCHMARKS = {
    "aime24": Benchmark("AIME 2024", "aime24.jsonl", "hf:HuggingFaceH4/aime_2024:train", Math),
    "aime25": Benchmark("AIME 2025", "aime25.jsonl", "hf:MathArena/aime_2025:train", Math),
    "math-500": Benchmark("MATH-500", "math-500.jsonl", "hf:HuggingFaceH4/MATH-500:test", Math),
    "gsm8k": Benchmark("GSM8K, test", "gsm8k.jsonl", "hf:openai/gsm8k:main:test", GSM8K),
    "ifeval": Benchmark("IFEval", "ifeval.jsonl", "hf:google/IFEval:train", InstructionFollowing),
    "mmlu-stem": Benchmark(
        "MMLU, STEM subjects", "mmlu-stem.jsonl", "hf:TIGER-Lab/MMLU-STEM:test", MultipleChoice, {"options": "choices"}
    ),
    "humaneval": Benchmark("HumanEval", "humaneval.jsonl", "hf:openai/openai_humaneval:test", Code),
    "mbpp": Benchmark("MBPP, test", "mbpp.jsonl", "hf:google-research-datasets/mbpp:full:test", Code),
}


def folder() -> Path:
    """Return the folder of the benchmarks' files: ``$WHET_BENCHMARKS``, by default ``~/.cache/whet/benchmarks``."""
    chosen = os.environ.get("WHET_BENCHMARKS")
    return expanded(chosen) if chosen else cache_folder().parent / "benchmarks"


def benchmark(name: str) -> TaskSet:
    """Return the task set of a benchmark. Raises ``ConfigError`` for an unknown name."""
    if name not in BENCHMARKS:
        raise ConfigError(
            f"no benchmark or task set is called {name!r}.{did_you_mean(name, {*BENCHMARKS, *TASK_SETS})} "
            f"Benchmarks: {', '.join(BENCHMARKS)}. Task sets: {', '.join(sorted(TASK_SETS))}"
        )
    return BENCHMARKS[name].task_set()
