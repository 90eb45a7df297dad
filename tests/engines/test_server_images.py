"""Images for engines on servers, against doubles of vLLM's and SGLang's (``server_double``)."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_images import losses, recipe_of
from tests.engines.server_double import doubles
from tests.tiny_vision import Family, picture, save_tiny_vision
from tests.vision_engine import Compared
from tests.vllm_engine import Loop
from whet.base.errors import ConfigError, DataError, WhetError
from whet.engines.base import SamplingParams
from whet.engines.config import Deployment
from whet.engines.server.client import Client, Sampled
from whet.engines.server.config import RemoteConfig
from whet.engines.server.sglang_api import SglangApi
from whet.models.config import ModelConfig
from whet.models.loading import load_images, load_model_config
from whet.run import run


class ServerWithImages:
    """The tests, for a server of a tiny model of a ``family``."""

    family: Family
    serve: Callable[[Path], AbstractContextManager[list[Any]]]
    """Starts a server for the model in a folder."""
    protocol = "vllm"
    trained = True
    """Also the vision tower gets new weights."""
    dtype = "float32"
    tolerance = 1e-4

    @pytest.fixture(scope="class")
    @classmethod
    def setting(cls, tmp_path_factory: pytest.TempPathFactory, loop: Loop) -> Iterator[Compared]:
        with ExitStack() as stack:

            def config(folder: Path) -> RemoteConfig:
                (server,) = stack.enter_context(cls.serve(folder))
                settings: dict[str, Any] = {"dtype": cls.dtype, "max_context": 512, "protocol": cls.protocol}
                return RemoteConfig(urls=[server.url], folder=folder, **settings)

            made = Compared(cls.family, tmp_path_factory.mktemp("vision"), config)
            loop.run(made.publish())
            yield made
            loop.run(made.engine.close())

    def test_sampled_log_probs_are_the_learners_also_with_new_weights(self, setting: Compared, loop: Loop) -> None:
        """Features that the old tower has computed are not used again."""
        before = loop.run(setting.sampled())
        setting.check(before, self.tolerance)
        setting.check(loop.run(setting.streamed()), self.tolerance)  # from the caches
        setting.move(self.trained)
        loop.run(setting.publish())
        after = loop.run(setting.sampled())
        setting.check(after, self.tolerance)
        assert after[0].logprobs != before[0].logprobs

    def test_requests_that_cannot_be_served_are_refused(self, setting: Compared, loop: Loop) -> None:
        prompt, params = setting.requests()[0]
        with pytest.raises(DataError, match="stands for an image that the messages of its conversation don't have"):
            loop.run(setting.engine.sample(prompt, replace(params, images=(picture("green"),)), "s"))
        with pytest.raises(WhetError, match="outside the model's"):
            loop.run(setting.engine.sample(prompt, SamplingParams(2), "s"))


class TestQwen(ServerWithImages):
    family = "qwen2_5_vl"
    serve = partial(doubles, "vllm")


@pytest.mark.slow
class TestSmolVlm(ServerWithImages):
    family = "smolvlm"
    serve = partial(doubles, "vllm")


@pytest.mark.slow
class TestSglang(ServerWithImages):
    family = "qwen3_vl"
    serve = partial(doubles, "sglang")
    protocol = "sglang"
    trained = False


def learned(model: Path, server: Any, folder: Path, protocol: str = "vllm") -> list[Any]:
    """Return the metrics of the steps of a run that samples on a server."""
    generator = {"type": "remote", "urls": [server.url], "folder": str(folder), "max_context": 512}
    generator["protocol"] = protocol
    vision: Any = "trained" if protocol == "vllm" else "frozen"
    recipe = recipe_of(model, vision, steps=2, generator=generator, rollouts={"prompts_per_step": 4})
    return [line for line in losses(run.start(recipe, folder / "run")) if "gradient_norm" in line]


@pytest.mark.parametrize("protocol", [pytest.param("vllm", marks=pytest.mark.slow), "sglang"])
def test_a_run_learns_on_images_that_a_server_sampled_from(tmp_path: Path, protocol: str) -> None:
    save_tiny_vision(tmp_path / "model", "qwen3_vl")
    with doubles(protocol, tmp_path / "model") as (server,):
        lines = learned(tmp_path / "model", server, tmp_path, protocol)
    assert len(lines) == 2
    assert all(0 <= line["refit/probe_mean"] < 1e-4 for line in lines)
    assert all(line["mismatch/token_mult_prob_error"] < 1.001 for line in lines)


def test_models_that_servers_may_read_in_another_way_are_refused(tmp_path: Path) -> None:
    reasons: dict[Family, str] = {
        "qwen3_vl_moe": "compute with wrong experts of qwen3_vl_moe once they load new weights",
        "gemma3": "an image has 16 tokens, and",
    }
    for family, reason in reasons.items():
        save_tiny_vision(tmp_path / family, family)
        model = ModelConfig(path=str(tmp_path / family), vision="frozen")
        parts = load_model_config(model), None, Deployment(images=load_images(model))
        config = RemoteConfig(urls=["http://127.0.0.1:1"], dtype="float32", protocol="sglang")
        with pytest.raises(ConfigError, match=f"sglang reads images with qwen2_5_vl, qwen3_vl, not with {family}"):
            config.build(*parts)
        with pytest.raises(ConfigError, match=reason):
            config.model_copy(update={"protocol": "vllm"}).build(*parts)


@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_says_by_a_stream_too_how_it_reads_a_prompt(incremental: bool) -> None:
    class Events(Client):
        async def follow(self, path: str, body: Any, begin: Callable[[], Callable[[Any], None]]) -> Any:
            receive, rows = begin(), [[-0.5, 7, None], [-0.25, 8, None]]
            for end in (1, 2):
                shown = rows[end - 1 : end] if incremental else rows[:end]
                facts = {"output_token_logprobs": shown, "completion_tokens": end, "weight_version": "v"}
                facts["finish_reason"] = {"type": "length"} if end == 2 else None
                receive({"meta_info": facts, "prompt_token_ids": [3, 9, 9]})

    async def ask() -> Sampled:
        params = SamplingParams(2, images=(picture("red"),))
        return await SglangApi(Events("http://127.0.0.1:1", None, 1.0), None).generate(
            [3, 9], params, 2, None, lambda _: None
        )

    done = asyncio.run(ask())
    assert (done.tokens, done.read) == ([7, 8], [3, 9, 9])
