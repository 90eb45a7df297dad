"""A task that a tiny random model can learn in seconds, and a recipe for it. Used by tests through its dotted path."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config import dump_yaml, load
from whet.core.types import Task
from whet.run.recipe import Recipe
from whet.tasks.base import TaskSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Lowercase(TaskSet):
    """The reward is the share of lower-case letters in the reply."""

    size: int = 12

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(f"toy/{split}/{i}", [{"role": "user", "content": f"{split[1]}{i} write letters"}])
            for i in range(self.size)
        ]

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        share = sum("a" <= letter <= "z" for letter in answer) / max(len(answer), 1)
        return {"reward": share, "correct": float(share > 0.5)}


class Flaky(Lowercase):
    """Grading task ``i`` fails ``failures[i]`` times, then works."""

    failures: dict[str, int]
    met: dict[str, int]

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        self.met[task.uid] = self.met.get(task.uid, 0) + 1
        if self.met[task.uid] <= self.failures.get(task.uid, 0):
            raise ConnectionError("the grader is away")
        return await super().grade(task, answer)


class Hanging(Lowercase):
    """Grading never comes to an end."""

    async def grade(self, task: Task, answer: str) -> dict[str, float]:
        await asyncio.sleep(60)
        return {"reward": 0.0}


def save_tiny_model(folder: Path, build: "Callable[[], PreTrainedModel] | None" = None) -> Path:
    """A random two-layer model (Llama's architecture by default) with its tokenizer, as a folder that recipes name."""
    from tests.tiny import tiny_llama, tiny_tokenizer

    (build or tiny_llama)().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def toy_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe as a mapping; ``rollouts={"retries": 0}`` changes keys of a section."""
    settings: dict[str, Any] = {
        "steps": 4,
        "model": {"path": str(folder)},
        "data": {"type": "tests.toy:Lowercase"},
        "algorithm": {"type": "grpo", "group_size": 4},
        "sampling": {"max_new_tokens": 8, "max_prompt_tokens": 128},
        "rollouts": {"prompts_per_step": 3},
        "optimizer": {"lr": 3e-3},
        "learner": {"matmul_precision": "highest"},
        "generator": {"type": "torch", "dtype": "float32", "max_batch": 16, "max_context": 256},
        "evaluation": {"limit": 4},
        "checkpoints": {"every": 1, "keep_last": 3},
        "sinks": ["jsonl"],
    }
    for section, keys in changes.items():
        settings[section] = settings.get(section, {}) | keys if isinstance(keys, dict) else keys
    return settings


def toy_recipe(folder: Path, **changes: Any) -> Recipe:
    """The same, read as a recipe file is."""
    return read_settings(toy_settings(folder, **changes))


def read_settings(settings: dict[str, Any]) -> Recipe:
    with tempfile.TemporaryDirectory() as scratch:
        return load(Recipe, write_settings(Path(scratch) / "toy.yaml", settings)).value


def write_settings(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def write_recipe(path: Path, recipe: Recipe) -> Path:
    path.write_text(dump_yaml(recipe))
    return path
