"""Parts of the tests with a real vLLM engine: an event loop that outlives a test, an engine of a tiny model,
and a learner that publishes to one."""

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from tests.tiny import tiny_tokenizer
from tests.toy import toy_recipe
from tests.weights.collected import Listed
from whet.cluster.local import LocalCluster
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.engines.vllm.generator import VllmGenerator
from whet.run.build import build_generator, build_learner, build_renderer, build_sync
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync


class Loop:
    """An event loop in a thread, for engines that outlive a test. ``tests/conftest.py`` has the fixture."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Awaitable[Any], deadline: float = 300) -> Any:
        async def whole() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(whole(), self.loop).result(deadline)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


def make(model: Any, **settings: Any) -> VllmGenerator:
    small = {"dtype": "float32", "max_batch": 12, "max_context": 512, "cache_gib": 0.1, "threads": 1, "deadline": 60.0}
    return VllmGeneratorConfig(**small | settings).build(model.config, tiny_tokenizer())


async def load(model: Any, generator: VllmGenerator) -> None:
    """Give the engine the model's weights, as version 0."""
    weights = Listed(list(model.state_dict().items()))
    await EngineSync(WeightSyncConfig(), [1, 2, 3]).load(weights, generator, 0)


class Parts:
    """A learner of ``model``, an engine and the way between them; ``changes`` are keys of a recipe's sections."""

    def __init__(self, model: Any, scratch: Path, /, **changes: dict[str, Any]) -> None:
        folder = scratch / "model"
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        small = {
            "generator": {"type": "vllm", "dtype": "float32", "cache_gib": 0.1, "threads": 1, "deadline": 120.0},
            "weights": {"bucket_mb": 1 / 16, "columns": 1000},
            "sampling": {"max_prompt_tokens": 200, "temperature": 0.7},
            "optimizer": {"lr": 0.01},
        }
        self.recipe = toy_recipe(
            folder, **{name: small.get(name, {}) | changes.get(name, {}) for name in small | changes}
        )
        self.renderer = build_renderer(self.recipe)
        self.generator: Any = build_generator(self.recipe, self.renderer)
        self.learner: Any = asyncio.run(build_learner(self.recipe, scratch / "learner", LocalCluster()))
        self.text = self.renderer.render_prompt([{"role": "user", "content": "what came over the wire?"}])
        self.version = 0

    def sync(self, **changes: Any) -> Any:
        sync: Any = build_sync(self.recipe, self.text)
        sync.config = sync.config.model_copy(update=changes)  # not before: cuda_ipc is refused where there is no GPU
        return sync

    async def publish(self, sync: Any) -> dict[str, float]:
        self.version += 1
        return (await sync.publish(self.learner, self.generator, self.version)).result()

    def close(self, loop: Loop) -> None:
        loop.run(self.generator.close())
        asyncio.run(self.learner.close())
