"""Sampling from prompts with images: the learner's log-probs, whatever is in the cache or sampled at the same time."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.grids import taking_turns
from tests.tiny_vision import FAMILIES, asked, picture, save_tiny_vision
from whet.base.errors import DataError, WhetError
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.content import image_urls
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.engines.base import Completion, SamplingParams
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.loading import build_engine_model
from whet.learner.model import build_whole
from whet.models.config import ModelConfig
from whet.models.loading import load_images, load_model_config, load_tokenizer
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording, Session

DIFFERENT = ("qwen2_5_vl", "qwen3_5", "gemma3", "gemma4")
RED, BLUE = picture("red"), picture("blue", 20, 40)
QUESTIONS: list[list[Message]] = [
    [asked(RED)],
    [asked(BLUE)],
    [asked(RED, text="Which colour is on the left of the picture, and which one is on the right?")],
    [asked(BLUE, RED, BLUE, text="Which one is different?")],
    [asked(text="Is this a question?")],
]


@pytest.fixture(scope="module", params=taking_turns([family for family in FAMILIES if family != "idefics3"], DIFFERENT))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("vision")
    save_tiny_vision(path, request.param)
    return ModelConfig(path=str(path), vision="trained")


def generator_of(model: ModelConfig, *, images: bool = True, **settings: int) -> TorchGenerator:
    config = load_model_config(model)
    weights = build_whole(model, "float32", False, False, 0, torch.device("cpu")).model.state_dict()
    engine = build_engine_model(config, weights, torch.float32, vision=True)
    processor = load_images(model) if images else None
    return TorchGenerator(TorchGeneratorConfig(dtype="float32", **settings), engine, images=processor)


async def sampled(generator: TorchGenerator, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Completion]:
    return list(await asyncio.gather(*[generator.sample(*request) for request in requests]))


def requests_of(renderer: Renderer, repeats: int = 1) -> list[tuple[list[int], SamplingParams]]:
    return [
        (renderer.render_prompt(question), SamplingParams(6, seed=seed, images=tuple(image_urls(question))))
        for question in QUESTIONS
        for seed in range(repeats)
    ]


@pytest.fixture(scope="module")
def renderer(model: ModelConfig) -> Renderer:
    return Renderer(load_tokenizer(model), images=load_images(model))


def test_sampled_log_probs_are_the_learners(model: ModelConfig, renderer: Renderer) -> None:
    requests = requests_of(renderer, repeats=2)
    completions = asyncio.run(sampled(generator_of(model), requests))
    learner = build_whole(model, "float32", False, False, 0, torch.device("cpu")).eval()
    for number, question in enumerate(QUESTIONS):
        pairs = list(zip(requests, completions, strict=True))[2 * number : 2 * number + 2]
        branches = [Trajectory([Span(prompt, False), Span(done.tokens, True)], question) for (prompt, _), done in pairs]
        batch = Batch.from_groups([Group("", Task("", question), [Episode([branch]) for branch in branches])])
        with torch.no_grad():
            ours = learner(batch, frozenset()).logprobs[batch.trained_tokens]
        theirs = torch.tensor([logprob for _, done in pairs for logprob in done.logprobs])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"prefill_tokens": 16, "max_batch": 2}, pytest.param({"prefix_tokens": 0}, marks=pytest.mark.slow)]
)
def test_a_completion_does_not_depend_on_the_cache_or_on_other_requests(
    model: ModelConfig, renderer: Renderer, settings: dict[str, int]
) -> None:
    requests = requests_of(renderer)
    together = asyncio.run(sampled(generator_of(model), requests))

    async def in_turn(generator: TorchGenerator) -> list[Completion]:
        return [await generator.sample(*request) for request in [*requests, *requests]]

    alone = asyncio.run(in_turn(generator_of(model, **settings)))
    for first, then in zip([*together, *together], alone, strict=True):
        assert (first.tokens, first.logprobs) == (then.tokens, then.logprobs)


def test_another_image_gives_another_completion(model: ModelConfig, renderer: Renderer) -> None:
    red, blue, *_ = asyncio.run(sampled(generator_of(model), requests_of(renderer)))
    assert red.logprobs != blue.logprobs


def test_requests_that_cannot_be_served_are_refused(model: ModelConfig, renderer: Renderer) -> None:
    prompt, params = requests_of(renderer)[0]
    with pytest.raises(WhetError, match="the prompt has images, and the model reads none"):
        asyncio.run(generator_of(model, images=False).sample(prompt, params))
    with pytest.raises(WhetError, match="outside the model's 272 tokens"):
        asyncio.run(generator_of(model).sample(prompt, SamplingParams(2)))
    wrong = SamplingParams(2, images=(picture("green"),))
    with pytest.raises(DataError, match="stands for an image that the messages of its conversation don't have"):
        asyncio.run(generator_of(model).sample(prompt, wrong))


class Noting:
    """Replies with one token and remembers what it was given."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def sample(self, prompt: list[int], params: SamplingParams, session: str) -> Completion:
        self.prompts.append(prompt)
        return Completion([5], [-0.5], (0, 0), "stop")


def test_the_text_next_to_an_image_is_shortened_and_the_image_stays(renderer: Renderer) -> None:
    engine: Any = Noting()
    sampling = Sampling(max_prompt_tokens=400, max_new_tokens=8, max_turns=2, max_observation_tokens=150)
    session = Session(Recording(engine, renderer, sampling, "s", seed=1))

    async def talk() -> None:
        await session.reply(first := [asked(RED)])
        await session.reply([*first, session.messages[-1], asked(BLUE, text="a long output " * 500)])

    asyncio.run(talk())
    seen = session.messages[2]["content"]
    assert not isinstance(seen, str)
    assert seen[0] == {"type": "image", "url": BLUE}
    assert re.search(r"long output .*characters left out.* long output", seen[1]["text"], re.DOTALL)
    assert renderer.images is not None
    added = len(engine.prompts[1]) - len(engine.prompts[0]) - 1
    assert 75 < added - len(renderer.images.tokens(BLUE)) <= 150
