"""Images with vLLM: the learner's log-probs, before and after new weights, whatever is in its caches."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.e2e.test_images import losses, recipe_of
from tests.tiny_vision import Family, picture, save_tiny_vision
from tests.vision_engine import Compared
from tests.vllm_engine import Loop
from whet.base.errors import DataError, WhetError
from whet.engines.base import SamplingParams
from whet.engines.vllm.config import WITH_IMAGES, VllmGeneratorConfig
from whet.run import run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def config_of(_: Path, **changes: Any) -> VllmGeneratorConfig:
    settings: dict[str, Any] = {"dtype": "float32", "max_batch": 12, "max_context": 1024, "cache_gib": 0.1}
    return VllmGeneratorConfig(**settings | changes, threads=1, deadline=120.0)


UNREAD = {"qwen3_5": 2, "qwen3_vl_moe": 8}  # weights of which vLLM keeps packed copies: convolutions, experts
IN_BFLOAT16 = "qwen3_5"  # whose linear attention vLLM computes on CPUs in bfloat16 only; the learner's are float32


@pytest.fixture(scope="module", params=[*WITH_IMAGES, "gemma4_small"])
def family(request: pytest.FixtureRequest) -> Family:
    if request.param == IN_BFLOAT16 and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("the instructions of AVX-512 for bfloat16 are missing")
    return request.param


@pytest.fixture(scope="module")
def setting(family: Family, tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[Compared]:
    config = partial(config_of, dtype="bfloat16") if family == IN_BFLOAT16 else config_of
    made = Compared(family, tmp_path_factory.mktemp("vision"), config)
    assert loop.run(made.publish())["refit/unread"] == UNREAD.get(family, 0)
    yield made
    loop.run(made.engine.close())


def test_sampled_log_probs_are_the_learners_also_with_new_weights(
    family: Family, setting: Compared, loop: Loop
) -> None:
    """Features that the old tower has computed are not used again."""
    tolerance = 0.02 if family == IN_BFLOAT16 else 1e-4
    before = loop.run(setting.sampled())
    setting.check(before, tolerance)
    setting.check(loop.run(setting.sampled()), tolerance)  # from the caches
    setting.move()
    loop.run(setting.publish())
    after = loop.run(setting.sampled())
    setting.check(after, tolerance)
    assert after[0].logprobs != before[0].logprobs


def test_requests_that_cannot_be_served_are_refused(setting: Compared, loop: Loop) -> None:
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
