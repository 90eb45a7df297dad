"""Frozen adapters next to the trained one in a real vLLM engine: each request is answered under its own, as peft's own
model does, and new weights of the trained one change no other."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed: make install-vllm")

from tests.frozen_adapters import save_adapter
from tests.tiny import tiny_qwen3
from tests.toy import toy_recipe
from tests.vllm_engine import Loop, Parts
from tests.weights.test_in_process import learn_something
from whet.base.errors import ConfigError
from whet.engines.base import Completion, SamplingParams
from whet.engines.vllm.generator import VllmGenerator
from whet.metrics.sinks.jsonl import read_metrics
from whet.run import run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NAMES: tuple[str | None, ...] = (None, "base", "small", "wide")


class Served(Parts):
    """A learner of LoRA, and an engine with two frozen adapters of other ranks and modules."""

    def __init__(self, model: Any, scratch: Path) -> None:
        small = save_adapter(scratch / "small", model, 1, ["q_proj", "down_proj"], rank=2)
        wide = save_adapter(scratch / "wide", model, 2, "all-linear", rank=12)
        self.folders: dict[str, Path] = {"small": small, "wide": wide}
        self.plain = model
        super().__init__(
            model, scratch, model={"lora": {"rank": 4, "alpha": 12.0, "target_modules": ["q_proj", "v_proj"]}},
            generator={"adapters": {name: str(folder) for name, folder in self.folders.items()}},
            weights={"bucket_mb": 1 / 64, "lora": "adapter"},
        )  # fmt: skip

    async def answers(self) -> dict[str | None, list[Completion]]:
        """Return answers under each adapter, all of which are sampled in one batch."""
        asked = [(name, seed) for seed in range(3) for name in NAMES]
        work = [
            self.generator.sample(PROMPT, SamplingParams(12, seed=seed, adapter=name), str(seed))
            for name, seed in asked
        ]
        given: dict[str | None, list[Completion]] = {name: [] for name in NAMES}
        for (name, _), completion in zip(asked, await asyncio.gather(*work), strict=True):
            given[name].append(completion)
        return given

    def log_probs(self, name: str, tokens: list[int]) -> torch.Tensor:
        """Return the log-probs of tokens after the prompt by transformers' model, under peft's adapter."""
        from peft import PeftModel

        model: Any = type(self.plain)(self.plain.config)
        model.load_state_dict(self.plain.state_dict())
        if name != "base":
            model = PeftModel.from_pretrained(model, self.folders[name])
        with torch.no_grad():
            logits = model.eval()(torch.tensor([[*PROMPT, *tokens]])).logits[0].log_softmax(-1)
        return logits[len(PROMPT) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.fixture(scope="module")
def parts(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parts = Served(tiny_qwen3(initializer_range=0.3), tmp_path_factory.mktemp("frozen"))
    yield parts
    parts.close(loop)


def test_each_request_is_answered_under_its_own_adapter_and_new_weights_change_no_other(
    parts: Served, loop: Loop
) -> None:
    async def go() -> None:
        sync = parts.sync()
        await learn_something(parts.learner)
        assert (await parts.publish(sync))["refit/probe_max"] < 1e-3
        before = await parts.answers()
        for name in ("base", "small", "wide"):
            for done in before[name]:
                torch.testing.assert_close(
                    torch.tensor(done.logprobs), parts.log_probs(name, done.tokens), rtol=1e-4, atol=1e-4
                )
        texts = {str(before[name][0].logprobs) for name in NAMES}
        assert len(texts) == len(NAMES)
        await learn_something(parts.learner)
        assert (await parts.publish(sync))["refit/probe_max"] < 1e-3
        after = await parts.answers()
        for name in ("base", "small", "wide"):
            assert [done.tokens for done in after[name]] == [done.tokens for done in before[name]]
            for old, new in zip(before[name], after[name], strict=True):
                assert new.logprobs == pytest.approx(old.logprobs, abs=1e-5)
        assert [done.logprobs for done in after[None]] != [done.logprobs for done in before[None]]

    loop.run(go())


def test_an_engine_with_merged_weights_answers_under_no_adapter(
    parts: Served, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        await parts.publish(parts.sync())
        monkeypatch.setattr(parts.generator, "under_adapter", False)
        with pytest.raises(ConfigError, match="policy:base can't be asked: the engine has the policy merged"):
            await parts.generator.sample(PROMPT, SamplingParams(2, adapter="base"), "s")

    loop.run(go())


@pytest.mark.parametrize("opponent", ["base", "older"])
def test_a_run_plays_against_its_model_under_a_frozen_adapter(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opponent: str
) -> None:
    older = save_adapter(tmp_path / "older", AutoModelForCausalLM.from_pretrained(tiny_model), 3, ["q_proj"], rank=2)
    generator = {"type": "vllm", "dtype": "float32", "cache_gib": 0.1, "threads": 1, "max_context": 1024}
    generator |= {"adapters": {"older": str(older)}}
    recipe = toy_recipe(
        tiny_model, steps=2, rollouts={"prompts_per_step": 12},
        model={"path": str(tiny_model), "lora": {"rank": 4}}, weights={"lora": "adapter"},
        generator=generator, evaluation={"enabled": False}, learner={"max_tokens": 2048},
        sampling={"max_prompt_tokens": 700, "max_new_tokens": 8, "max_turns": 2, "max_observation_tokens": 200},
        data={"type": "nim", "opponent": "model", "server": {"model": f"policy:{opponent}", "max_tokens": 8}},
    )  # fmt: skip
    honest, asked = VllmGenerator._adapter, list[str | None]()

    def adapter(self: VllmGenerator, name: str | None = None) -> Any:
        asked.append(name)
        return honest(self, name)

    monkeypatch.setattr(VllmGenerator, "_adapter", adapter)
    folder = run.start(recipe, tmp_path / "run")
    assert set(asked) == {None, opponent}
    probes = [line["refit/probe_max"] for line in read_metrics(folder / "metrics.jsonl") if "refit/probe_max" in line]
    assert len(probes) == 2
    assert max(probes) < 1e-3
