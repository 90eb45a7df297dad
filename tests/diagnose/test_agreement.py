"""Generator and learner are compared before the first step, and the likely cause of a disagreement is named."""

import asyncio
import math
from typing import Any

import pytest

from tests.toy import Lowercase, save_tiny_model, toy_recipe
from whet.core.types import Distribution
from whet.diagnose.agreement import Agreement, measure_agreement
from whet.engines.torch.engine_model import OpenEngine
from whet.engines.torch.generator import TorchGenerator


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def found(folder, **changes: Any) -> Agreement:
    return asyncio.run(measure_agreement(toy_recipe(folder, **changes), prompts=2))


def test_parts_that_agree_are_said_to_agree(folder):
    agreement = found(folder)
    assert agreement.agrees
    assert agreement.error == pytest.approx(1.0, abs=1e-4)
    assert agreement.tokens > 0


@pytest.mark.parametrize("name", ["online_dpo", "dapo", "prime"])
def test_no_filter_of_an_algorithm_drops_what_is_compared(folder, monkeypatch, name):
    async def worthless(self, task, answer):
        return {"reward": 0.0}

    monkeypatch.setattr(Lowercase, "grade", worthless)
    recipe = toy_recipe(folder, algorithm={"type": name}, rollouts={"prompts_per_step": 4})
    agreement = asyncio.run(measure_agreement(recipe, prompts=1))
    assert agreement.agrees
    assert agreement.tokens > 0


def reporting(monkeypatch, **changed: Any) -> None:
    """A generator that samples and reports log-probs under another distribution than the requested one."""
    sample = TorchGenerator.sample

    async def other(self, prompt, params, session):
        asked = params.distribution
        told = {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p, "min_p": asked.min_p}
        object.__setattr__(params, "distribution", Distribution(**(told | changed)))
        return await sample(self, prompt, params, session)

    monkeypatch.setattr(TorchGenerator, "sample", other)


def test_another_temperature_is_named(folder, monkeypatch):
    reporting(monkeypatch, temperature=0.5)
    agreement = found(folder, sampling={"temperature": 1.5})
    assert agreement.cause is not None
    assert "fit temperature 0.5, but the recipe samples at 1.5" in agreement.cause


def test_a_truncation_that_the_generator_ignores_is_named(folder, monkeypatch):
    reporting(monkeypatch, top_k=0)
    agreement = found(folder, sampling={"top_k": 3})
    assert agreement.cause is not None
    assert agreement.cause.startswith("truncation")


def test_weights_that_did_not_arrive_are_named(folder, monkeypatch):
    load = OpenEngine.load

    def damaged(self, named):
        load(self, [(name, tensor * 1.5 if "down_proj" in name else tensor) for name, tensor in named])

    monkeypatch.setattr(OpenEngine, "load", damaged)
    agreement = found(folder)
    assert math.isnan(agreement.error)
    assert agreement.cause is not None
    assert "stale or damaged weights" in agreement.cause
    assert "down_proj" in agreement.cause


def test_an_embedding_that_did_not_arrive_is_named(folder, monkeypatch):
    load = OpenEngine.load

    def stale(self, named):
        load(self, [(name, tensor * 0.5 if "lm_head" in name else tensor) for name, tensor in named])

    monkeypatch.setattr(OpenEngine, "load", stale)
    agreement = found(folder)
    assert agreement.cause is not None
    assert agreement.cause.startswith("tied embeddings")


def test_a_generator_that_computes_something_else_is_found(folder, monkeypatch):
    sample = TorchGenerator.sample

    async def biased(self, prompt, params, session):
        completion = await sample(self, prompt, params, session)
        completion.logprobs = [logprob - 1.0 for logprob in completion.logprobs]
        return completion

    monkeypatch.setattr(TorchGenerator, "sample", biased)
    agreement = found(folder)
    assert agreement.cause is not None
    assert agreement.cause.startswith("the models differ")
    assert agreement.error == pytest.approx(math.e, rel=1e-3)
