"""Engines in other processes that read images, compared with the learner whose weights they have."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.tiny_vision import Family, asked, picture, save_tiny_vision
from tests.weights.collected import Listed
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.content import image_urls
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.engines.base import Completion, SamplingParams
from whet.engines.config import Deployment, GeneratorConfig
from whet.learner.model import LearnerModel, build_whole
from whet.models.config import ModelConfig
from whet.models.images import of_tower
from whet.models.loading import load_images, load_model_config, load_tokenizer
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

RED, BLUE, FADED = picture("red"), picture("blue", 20, 40), picture((255, 0, 0, 90))
LONG = "Which colour is on the left of the picture, and which one is on the right?"
QUESTIONS: list[list[Message]] = [
    [asked(RED)],
    [asked(BLUE)],
    [asked(FADED)],
    [asked(RED, text=LONG)],
    [asked(BLUE, RED, BLUE, text="Which one is different?")],
    [asked(RED), {"role": "assistant", "content": "red"}, asked(BLUE, text="And this one?")],
    [asked(text="Is this a question?")],
]


class Compared:
    """An engine, and a learner whose weights it has; both of one tiny model."""

    def __init__(self, family: Family, folder: Path, config: Callable[[Path], GeneratorConfig]) -> None:
        """``config``: the settings of the engine for the model in a folder."""
        save_tiny_vision(folder, family, wide=True)  # vLLM's attention on CPUs takes no smaller heads
        self.model = ModelConfig(path=str(folder), vision="trained")
        self.images = load_images(self.model)
        self.renderer = Renderer(load_tokenizer(self.model), images=self.images)
        self.learner: LearnerModel = build_whole(self.model, "float32", False, False, 0, torch.device("cpu")).eval()
        deployment = Deployment(images=self.images)
        self.engine: Any = config(folder).build(load_model_config(self.model), self.renderer.tokenizer, deployment)
        self.sync, self.version = WeightSyncConfig(columns=1000), 0

    async def publish(self) -> dict[str, float]:
        """Send the learner's weights, and return the metrics of the refit."""
        weights = Listed(list(self.learner.model.state_dict().items()))
        sync = EngineSync(self.sync, self.renderer.render_prompt(QUESTIONS[-1]))
        metrics = await sync.load(weights, self.engine, self.version)
        self.version += 1
        return metrics.result()

    def move(self, tower: bool = True) -> None:
        """Change the learner's weights, also the vision ``tower``'s."""
        kept = {} if tower else of_tower(self.learner.model)
        with torch.no_grad():
            for parameter in [p for name, p in self.learner.model.named_parameters() if name not in kept]:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        return [
            (self.renderer.render_prompt(question), SamplingParams(6, seed=seed, images=tuple(image_urls(question))))
            for seed, question in enumerate(QUESTIONS)
        ]

    async def sampled(self) -> list[Completion]:
        return list(await asyncio.gather(*[self.engine.sample(*request, "s") for request in self.requests()]))

    async def streamed(self) -> list[Completion]:
        return [await self.engine.stream(*request, "s", lambda _: None) for request in self.requests()]

    def check(self, completions: list[Completion], tolerance: float = 1e-4) -> None:
        """Compare the log-probs of all answers with the learner's."""
        for ours, done in zip(self.scored(completions), completions, strict=True):
            torch.testing.assert_close(ours, torch.tensor(done.logprobs), rtol=tolerance, atol=tolerance)

    def scored(self, completions: list[Completion]) -> Iterator[torch.Tensor]:
        """Yield the learner's log-probs of each answer."""
        for question, (prompt, _), done in zip(QUESTIONS, self.requests(), completions, strict=True):
            branch = Trajectory([Span(prompt, False), Span(done.tokens, True)], question)
            batch = Batch.from_groups([Group("", Task("", question), [Episode([branch])])])
            with torch.no_grad():
                yield self.learner(batch, frozenset()).logprobs[batch.trained_tokens]
