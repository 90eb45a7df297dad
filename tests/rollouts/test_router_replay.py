"""Router replay from end to end: what the generator's routers chose, token by token, is what the learner's take."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.groups import group
from tests.learner.parts import PolicyGradient, cut, save_model, whole, worker
from tests.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from whet.base.errors import ConfigError
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.expert_ids import experts_per_token
from whet.core.types import Episode, Group, Task, Trajectory
from whet.engines.base import Completion, SamplingParams
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.generator import TorchGenerator
from whet.models.config import LoraSettings
from whet.models.moe.routing import RouteRecorder
from whet.rollouts.sampling import Sampling
from whet.rollouts.session import Recording, Session

RENDERER = Renderer(tiny_tokenizer())
CONFIG = {"num_hidden_layers": 3, "num_experts": 8, "initializer_range": 0.3}  # of which two have experts


def generator(dtype: str = "bfloat16", **settings: Any) -> TorchGenerator:
    model = tiny_qwen3_moe(dtype=getattr(torch, dtype), **CONFIG)
    config = TorchGeneratorConfig(dtype=dtype, max_context=512, deadline=60.0, **settings)
    return TorchGenerator(config, model, tiny_tokenizer(), record_experts=True)


async def talk(own: TorchGenerator, seed: int) -> list[Session]:
    """A conversation of three turns, and a branch that continues differently after the first."""
    sampling = Sampling(max_prompt_tokens=200, max_new_tokens=12, max_turns=8, thinking_budget=5 if seed else None)
    recording = Recording(own, RENDERER, sampling, "s", seed)  # type: ignore[arg-type]
    session = Session(recording)
    messages: list[Any] = [{"role": "user", "content": "How much is 3 + 4?"}]
    messages.append((await session.reply(messages)).message)
    branch = session.branch([*messages, {"role": "user", "content": "no"}])
    await branch.reply([*messages, {"role": "user", "content": "no"}])
    for text in ("Why?", "And 4 + 5?"):
        messages.append({"role": "user", "content": text})
        messages.append((await session.reply(messages)).message)
    return recording.branches


@pytest.fixture(scope="module")
def sampled() -> list[Group]:
    async def body() -> list[Group]:
        own = generator(max_batch=3)
        try:
            several = await asyncio.gather(*(talk(own, seed) for seed in range(3)))
        finally:
            await own.close()
        episodes = [
            Episode([Trajectory(line.spans) for line in lines], reward=float(i)) for i, lines in enumerate(several)
        ]
        return [Group("g", Task("t", []), episodes)]

    return asyncio.run(body())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("moe"), tiny_qwen3_moe(**CONFIG))


@pytest.mark.parametrize("prefix_tokens", [0, 8192])
def test_each_input_of_a_completion_has_the_experts_of_one_plain_forward(prefix_tokens: int) -> None:
    """In float64 nothing flips, whether fed as a prompt, token by token, or known from an earlier prompt."""
    prompt = list(range(5, 90))
    own = generator("float64", prefix_tokens=prefix_tokens, max_batch=2)
    own.engine.model.set_experts_implementation("eager")  # the others know no float64

    async def body() -> list[Completion]:
        prompts = [prompt, prompt, [*prompt, 3, 4, 5], prompt[:40]]
        parting = [*prompt[:70], 3, 4, 5]
        try:
            first = [await own.sample(prompts[-1], SamplingParams(1))]
            first += await asyncio.gather(*(own.sample(p, SamplingParams(9, seed=i)) for i, p in enumerate(prompts)))
            return [*first, await own.sample(parting, SamplingParams(2))]
        finally:
            await own.close()

    plain = tiny_qwen3_moe(dtype=torch.float64, **CONFIG)
    plain.set_experts_implementation("eager")
    recorder = RouteRecorder(plain)
    completions = asyncio.run(body())
    parts = [prompt[:40], prompt, prompt, [*prompt, 3, 4, 5], prompt[:40], [*prompt[:70], 3, 4, 5]]
    for before, completion in zip(parts, completions, strict=True):
        assert completion.experts is not None
        tokens = before + completion.tokens
        plain(torch.tensor([tokens]), use_cache=False)
        expected = recorder.take()
        assert completion.experts.shape == (len(tokens), 2, 2)
        assert np.array_equal(np.sort(completion.experts[:-1]), np.sort(expected[:-1]))
        assert (completion.experts[-1] == -1).all(), "the last token was never fed"


def test_a_request_that_is_computed_anew_keeps_the_experts_it_was_sampled_by() -> None:
    own = generator(max_batch=2)
    first = np.zeros((3, 2, 2), np.int16)
    request = own._request([1, 2], SamplingParams(4))
    request.experts = [first]
    request.tokens, request.logprobs = [7], [-1.0]
    own._decoder.queue.append(request)
    while own._decoder.busy:
        own._decoder.step()
    found = request.completion(0).experts
    assert found is not None
    assert np.array_equal(found[:3], first)
    assert (found[3:5] >= 0).all()
    assert len(found) == 6


def test_only_the_last_token_of_a_line_lacks_its_experts(sampled: list[Group]) -> None:
    for trajectory in sampled[0].trajectories:
        ids = experts_per_token(trajectory.spans)
        assert ids is not None
        assert len(ids) == len(trajectory.tokens)
        assert (ids[:-1] >= 0).all()
        assert (ids[-1] == -1).all()


def test_groups_keep_their_experts_on_the_way_through_json(sampled: list[Group]) -> None:
    saved = json.loads(json.dumps([episode.to_json() for episode in sampled[0].episodes]))
    assert [Episode.from_json(one) for one in saved] == sampled[0].episodes


@pytest.mark.parametrize("share", [True, False])
def test_the_learner_takes_each_tokens_experts_wherever_it_is_packed(
    sampled: list[Group], moe: Path, share: bool
) -> None:
    """The oracle: each branch alone, unshared and unpacked, with its experts set by hand."""
    batch = Batch.from_groups(sampled, share_prompts=share).weigh("token")
    learner = worker(moe, precision="float32", follows_routes=True)
    for trajectory, path in zip(sampled[0].trajectories, batch.paths(), strict=True):
        expected = experts_per_token(trajectory.spans)
        assert expected is not None
        assert batch.experts is not None
        own_part = batch.sequence[path] >= 0
        assert torch.equal(batch.experts[path][own_part], torch.from_numpy(expected)[own_part])
    whole_scores = learner.score(whole(batch), {"logprobs"})[0]["logprobs"]
    oracle = oracle_logprobs(moe, batch)
    torch.testing.assert_close(whole_scores, oracle, rtol=1e-4, atol=1e-4)
    assert batch.experts is not None
    packed = torch.zeros(len(batch))
    for micro, said in zip(
        pieces := cut(batch, len(batch) if share else 150), learner.score(pieces, {"logprobs"}), strict=True
    ):
        packed[micro.tokens[micro.batch.trained]] = said["logprobs"][micro.batch.trained]
    torch.testing.assert_close(packed, whole_scores, rtol=1e-4, atol=1e-4)
    recorder = RouteRecorder(learner.model)
    plain = learner.score(whole(replace(batch, experts=None)), {"logprobs"})[0]["logprobs"]
    flipped = np.sort(recorder.take()) != np.sort(batch.experts.numpy())
    assert flipped[batch.experts[:, 0, 0] >= 0].any(), "no router chose otherwise in bfloat16: this shows nothing"
    assert (plain - whole_scores).abs().max() > 1e-3
    shifted = replace(batch, experts=batch.experts.roll(1, 0))
    assert (learner.score(whole(shifted), {"logprobs"})[0]["logprobs"] - whole_scores).abs().max() > 1e-3


def oracle_logprobs(path: Path, batch: Batch) -> torch.Tensor:
    """One plain forward for each sequence, by transformers, its routers overruled token by token."""
    plain = tiny_qwen3_moe(**CONFIG)
    plain.set_experts_implementation("eager")
    now: list[torch.Tensor] = []

    def overrule(number: int) -> Any:
        def hook(router: Any, args: Any, output: Any) -> Any:
            logits, weights, chosen = (x.clone() for x in output)
            for token, ids in enumerate(now[0][:, number].tolist()):
                if ids[0] >= 0:
                    chosen[token] = torch.tensor(ids)
                    weights[token] = torch.softmax(logits[token, ids], dim=0)
            return logits, weights, chosen

        return hook

    for number, layer in enumerate(plain.model.layers[1:]):
        layer.mlp.gate.register_forward_hook(overrule(number))
    found = torch.zeros(len(batch))
    assert batch.experts is not None
    with torch.no_grad():
        for path_of in batch.paths():
            now[:] = [batch.experts[path_of]]
            logits = plain(batch.tokens[path_of][None], use_cache=False).logits[0].log_softmax(-1)
            for at, token in enumerate(path_of.tolist()):
                if batch.trained[token]:
                    found[token] = logits[at - 1, batch.tokens[token]]
    return found


def test_log_probs_are_closer_to_the_generators_with_its_experts(sampled: list[Group], moe: Path) -> None:
    batch = Batch.from_groups(sampled)
    assert batch.rollout_logprobs is not None
    learner = worker(moe, precision="float32", follows_routes=True)
    errors = []
    for one in (batch, replace(batch, experts=None)):
        said = learner.score(whole(one), {"logprobs"})[0]["logprobs"]
        errors.append(float((said - batch.rollout_logprobs)[batch.trained].abs().mean()))
    assert errors[0] < 0.85 * errors[1]


def test_the_reference_and_other_roles_choose_by_themselves(sampled: list[Group], moe: Path) -> None:
    batch = Batch.from_groups(sampled)
    plain = replace(batch, experts=None)
    policy, other = worker(moe, precision="float32", follows_routes=True), worker(moe, precision="float32")
    adapted = worker(moe, precision="float32", follows_routes=True, lora=LoraSettings(rank=2))
    asked = [(policy, "reference_logprobs"), (adapted, "reference_logprobs"), (other, "logprobs")]
    for learner, column in asked:
        one, two = (learner.score(whole(b), {column})[0][column] for b in (batch, plain))
        assert torch.equal(one, two)


def test_a_step_learns_through_the_gate_with_given_experts(sampled: list[Group], moe: Path) -> None:
    batch = Batch.from_groups(sampled).weigh("token")
    learner = worker(moe, precision="float32", follows_routes=True, learner={"activation_checkpointing": True})
    said = learner.score(whole(batch), {"logprobs"})[0]["logprobs"]
    update = learner.update(whole(batch), PolicyGradient())
    torch.testing.assert_close(update.logprobs[0], said)
    gate = dict(learner.model.named_parameters())["model.layers.1.mlp.gate.weight"]
    before = tiny_qwen3_moe(**CONFIG).model.layers[1].mlp.gate.weight
    assert not torch.equal(gate, before)


def test_without_records_nothing_is_laid_out() -> None:
    assert Batch.from_groups([group("a", [1, 2], [[3], [4]])]).experts is None


def test_a_model_without_such_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router_replay is for experts of .*qwen3_moe.* but this model is a llama"):
        TorchGenerator(TorchGeneratorConfig(dtype="float32"), tiny_llama(), record_experts=True)
