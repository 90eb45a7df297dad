"""Images with vLLM: the learner's log-probs, before and after new weights, whatever is in its caches."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.e2e.test_images import losses, recipe_of
from tests.tiny_vision import Family, asked, picture, save_tiny_vision
from tests.vllm_engine import Loop
from tests.weights.collected import Listed
from whet.base.errors import DataError, WhetError
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.content import image_urls
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.engines.base import Completion, SamplingParams
from whet.engines.config import Deployment
from whet.engines.vllm.config import VllmGeneratorConfig
from whet.learner.model import LearnerModel, build_whole
from whet.models.config import ModelConfig
from whet.models.loading import load_images, load_model_config, load_tokenizer
from whet.run import run
from whet.weights.config import WeightSyncConfig
from whet.weights.engine import EngineSync

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RED, BLUE = picture("red"), picture("blue", 20, 40)
LONG = "Which colour is on the left of the picture, and which one is on the right?"
QUESTIONS: list[list[Message]] = [
    [asked(RED)],
    [asked(BLUE)],
    [asked(RED, text=LONG)],
    [asked(BLUE, RED, BLUE, text="Which one is different?")],
    [asked(RED), {"role": "assistant", "content": "red"}, asked(BLUE, text="And this one?")],
    [asked(text="Is this a question?")],
]


class Setting:
    """An engine, and a learner whose weights it has; both of one tiny model."""

    def __init__(self, family: Family, folder: Path) -> None:
        save_tiny_vision(folder, family, wide=True)  # vLLM's attention on CPUs takes no smaller heads
        self.model = ModelConfig(path=str(folder), vision="trained")
        self.images = load_images(self.model)
        self.renderer = Renderer(load_tokenizer(self.model), images=self.images)
        self.learner: LearnerModel = build_whole(self.model, "float32", False, False, 0, torch.device("cpu")).eval()
        settings: dict[str, Any] = {"dtype": "float32", "max_batch": 12, "max_context": 1024, "cache_gib": 0.1}
        config = VllmGeneratorConfig(**settings, threads=1, deadline=120.0)
        deployment = Deployment(images=self.images)
        self.engine: Any = config.build(load_model_config(self.model), self.renderer.tokenizer, deployment)
        self.version = 0

    async def publish(self) -> None:
        """Send the learner's weights; all that is compared must have arrived."""
        weights = Listed(list(self.learner.model.state_dict().items()))
        sync = EngineSync(WeightSyncConfig(columns=1000), self.renderer.render_prompt(QUESTIONS[-1]))
        metrics = await sync.load(weights, self.engine, self.version)
        assert metrics.result()["refit/unread"] == 0
        self.version += 1

    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        return [
            (self.renderer.render_prompt(question), SamplingParams(6, seed=seed, images=tuple(image_urls(question))))
            for seed, question in enumerate(QUESTIONS)
        ]

    async def sampled(self) -> list[Completion]:
        return list(await asyncio.gather(*[self.engine.sample(*request, "s") for request in self.requests()]))

    def check(self, completions: list[Completion]) -> None:
        """Compare the log-probs of all answers with the learner's."""
        for question, (prompt, _), done in zip(QUESTIONS, self.requests(), completions, strict=True):
            branch = Trajectory([Span(prompt, False), Span(done.tokens, True)], question)
            batch = Batch.from_groups([Group("", Task("", question), [Episode([branch])])])
            with torch.no_grad():
                ours = self.learner(batch, frozenset()).logprobs[batch.trained_tokens]
            torch.testing.assert_close(ours, torch.tensor(done.logprobs), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[Setting]:
    made = Setting(request.param, tmp_path_factory.mktemp("vision"))
    loop.run(made.publish())
    yield made
    loop.run(made.engine.close())


def test_sampled_log_probs_are_the_learners_also_with_new_weights(setting: Setting, loop: Loop) -> None:
    """Features that the old tower has computed are not used again."""
    before = loop.run(setting.sampled())
    setting.check(before)
    setting.check(loop.run(setting.sampled()))  # from the caches
    with torch.no_grad():
        for parameter in setting.learner.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    loop.run(setting.publish())
    after = loop.run(setting.sampled())
    setting.check(after)
    assert after[0].logprobs != before[0].logprobs


def test_requests_that_cannot_be_served_are_refused(setting: Setting, loop: Loop) -> None:
    prompt, params = setting.requests()[0]
    with pytest.raises(DataError, match="stands for an image that the messages of its conversation don't have"):
        loop.run(setting.engine.sample(prompt, replace(params, images=(picture("green"),)), "s"))
    with pytest.raises(WhetError, match="outside the model's"):
        loop.run(setting.engine.sample(prompt, SamplingParams(2), "s"))


def test_a_run_learns_on_images_that_it_sampled_with_the_learners_log_probs(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path / "model", "qwen2_5_vl", wide=True)
    generator = {"type": "vllm", "dtype": "float32", "cache_gib": 0.1, "threads": 1, "max_context": 1024}
    recipe = recipe_of(tmp_path / "model", steps=2, generator=generator, rollouts={"prompts_per_step": 4})
    lines = [line for line in losses(run.start(recipe, tmp_path / "run")) if "gradient_norm" in line]
    assert len(lines) == 2
    assert all(0 <= line["refit/probe_mean"] < 1e-3 for line in lines)
    assert all(line["mismatch/token_mult_prob_error"] < 1.01 for line in lines)
