"""The in-process generator: equal to transformers, and a completion depends on nothing but its own request."""

import asyncio
import re
import threading
from collections.abc import Callable
from itertools import product

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from tests.contracts.engine_contract import OTHER, PROMPT, LikeliestContract, PausableContract, run, sample_all
from tests.engines.holding import held
from tests.grids import grid, taking_turns
from tests.processes.elsewhere import operations_elsewhere
from tests.tiny import (
    VOCAB,
    tiny_deepseek,
    tiny_gemma,
    tiny_gpt_oss,
    tiny_granite,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_5,
    tiny_qwen3_moe,
    tiny_tokenizer,
)
from tests.weights.collected import load_into
from whet.base.errors import ConfigError, DeadlineError, GeneratorError, RefitError, WhetError
from whet.core.types import Distribution
from whet.engines.base import SamplingParams
from whet.engines.torch import cached_model
from whet.engines.torch.generator import TorchGenerator, TorchGeneratorConfig
from whet.engines.torch.loading import build_engine_model, named_weights

STATES = [tiny_qwen3_5, tiny_granite]  # sampled by transformers' own caches
MODELS = [tiny_llama, tiny_qwen3, tiny_gemma]
EXPERTS = [tiny_qwen3_moe, tiny_deepseek, tiny_gpt_oss]
EVERY = [*MODELS, *STATES]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def make(
    model: Callable[..., PreTrainedModel] = tiny_llama, dtype: str = "float32", seed: int = 0, **settings: object
) -> TorchGenerator:
    built = model(dtype=DTYPES[dtype], seed=seed, initializer_range=0.3)
    config = TorchGeneratorConfig(dtype=dtype, max_context=512, **{"deadline": 60.0, **settings})
    return TorchGenerator(config, built, tiny_tokenizer())


class TestContract(PausableContract, LikeliestContract):
    held = staticmethod(held)

    @pytest.fixture
    def generator(self) -> TorchGenerator:
        return make(max_batch=12)


@pytest.mark.parametrize("generator", taking_turns(STATES, [tiny_qwen3_5]), indirect=True)
class TestContractWithStates(PausableContract, LikeliestContract):
    held = staticmethod(held)

    @pytest.fixture
    def generator(self, request: pytest.FixtureRequest) -> TorchGenerator:
        return make(request.param, max_batch=12)


PROMPTS = [PROMPT, OTHER, [7], list(range(70)), list(range(100, 240))]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *grid(MODELS, ("float32", "float64")),
        (tiny_qwen3_5, "float64"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in product(STATES, ("float32", "float64"))
            if pair != (tiny_qwen3_5, "float64")
        ),
    ],
)
def test_greedy_equals_transformers_token_for_token(model: Callable[..., PreTrainedModel], dtype: str) -> None:
    reference = model(dtype=DTYPES[dtype], initializer_range=0.3)
    reference.set_experts_implementation("eager")  # the others know no float64
    generator = make(model, dtype, max_batch=4)

    async def body() -> None:
        out = await sample_all(generator, [(p, SamplingParams(40, greedy=True)) for p in PROMPTS])
        for prompt, c in zip(PROMPTS, out, strict=True):
            ids = torch.tensor([prompt])
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert c.tokens == expected[0, len(prompt) :].tolist()

    run(generator, body)


@pytest.mark.parametrize("model", taking_turns(EVERY, [*MODELS, tiny_qwen3_5]))
def test_sampled_logprobs_equal_those_of_one_plain_forward(model: Callable[..., PreTrainedModel]) -> None:
    reference = model(initializer_range=0.3)
    generator = make(model)
    temperature = 0.8

    async def body() -> None:
        params = [SamplingParams(70, seed=i, distribution=Distribution(temperature)) for i in range(len(PROMPTS))]
        completions = await sample_all(generator, list(zip(PROMPTS, params, strict=True)))
        for prompt, c in zip(PROMPTS, completions, strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + c.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
            # Scans go another way with one token than with many, always in float32: up to 3.4e-4 on some processors.
            tolerance = 1e-3 if model in STATES else 1e-4
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=tolerance, rtol=0)

    run(generator, body)


QUICK = [*zip(MODELS, ("float32", "bfloat16", "float64"), strict=True), (tiny_qwen3_moe, "float32")]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in QUICK))
        for pair in product([*MODELS, *STATES, *EXPERTS], ("float32", "bfloat16", "float64"))
    ],
)
def test_a_completion_is_the_same_to_the_bit_alone_and_in_any_crowd(
    model: Callable[..., PreTrainedModel], dtype: str
) -> None:
    wide, narrow = make(model, dtype, max_batch=40), make(model, dtype, max_batch=3, prefill_tokens=1)
    filtered = Distribution(temperature=1.2, top_k=50, top_p=0.95)
    requests = [
        (PROMPTS[i % 5], SamplingParams(20 + 13 * (i % 5), seed=i, distribution=filtered if i % 3 else Distribution()))
        for i in range(24)
    ]

    async def body() -> None:
        together = await sample_all(wide, requests)
        backwards = (await sample_all(wide, requests[::-1]))[::-1]
        few = await sample_all(narrow, requests[::4])
        alone = [await wide.sample(*requests[i], "s") for i in (0, 5, 20)]
        group = [requests[0], *((PROMPTS[0], SamplingParams(9, seed=i)) for i in range(15))]
        of_one_prompt = await sample_all(wide, group)
        await narrow.close()
        for other, mine in [
            *zip(backwards, together, strict=True),
            *zip(few, together[::4], strict=True),
            *zip(alone, [together[i] for i in (0, 5, 20)], strict=True),
            (of_one_prompt[0], together[0]),
        ]:
            assert other.tokens == mine.tokens
            assert other.logprobs == mine.logprobs

    run(wide, body)


def test_requests_of_one_tick_share_one_prefill_of_each_prompt() -> None:
    generator = make()

    async def body() -> None:
        await sample_all(generator, [((PROMPT, OTHER)[i % 2], SamplingParams(3, seed=i)) for i in range(16)])
        assert generator.counters.prefill_tokens == len(PROMPT) + len(OTHER)
        assert generator.counters.decode_steps == 2
        assert (await generator.sample(PROMPT, SamplingParams(3), "later")).cached == len(PROMPT)
        assert generator.counters.prefill_tokens == len(PROMPT) + len(OTHER)
        await generator.pause()
        await generator.resume(1)
        assert (await generator.sample(PROMPT, SamplingParams(3), "new weights")).cached == 0
        assert generator.counters.prefill_tokens == 2 * len(PROMPT) + len(OTHER)

    run(generator, body)


def test_a_full_context_ends_the_completion() -> None:
    generator = make()

    async def body() -> None:
        c = await generator.sample([1] * 505, SamplingParams(100), "s")
        assert (len(c.tokens), c.finish_reason) == (7, "length")
        c = await generator.sample([1] * 512, SamplingParams(100), "s")
        assert (c.tokens, c.finish_reason) == ([], "length")

    run(generator, body)


@pytest.mark.parametrize("model", taking_turns([*EVERY, *EXPERTS], [*MODELS, tiny_qwen3_5, tiny_qwen3_moe]))
def test_new_weights_give_what_a_fresh_engine_gives_and_keep_requests_under_way(
    model: Callable[..., PreTrainedModel],
) -> None:
    old, fresh = make(model, seed=0), make(model, seed=1)
    new = model(seed=1, initializer_range=0.3).state_dict()
    request = (PROMPT, SamplingParams(20, seed=4))

    async def body() -> None:
        before = await old.sample(*request, "s")
        with held(old) as in_flight:
            under_way = asyncio.create_task(old.sample(OTHER, SamplingParams(60, seed=4), "s"))
            await in_flight()
            await load_into(old, new.items(), 1)
        after, expected = await old.sample(*request, "s"), await fresh.sample(*request, "s")
        await fresh.close()
        assert before.tokens != after.tokens
        assert (after.tokens, after.logprobs) == (expected.tokens, expected.logprobs)
        assert (await under_way).versions == (0, 1)

    run(old, body)


def test_weights_that_do_not_fit_are_named_and_sampling_is_refused_until_a_complete_set_comes() -> None:
    generator = make()
    good = tiny_llama(seed=3).state_dict()
    bad = dict(good)
    del bad["model.norm.weight"]
    bad["lm_head.weight"] = bad["lm_head.weight"][:5]
    bad["stray.weight"] = torch.zeros(1)

    async def body() -> None:
        with pytest.raises(RefitError) as error:
            await load_into(generator, bad.items())
        for part in ("model.norm.weight: missing", "lm_head.weight: shape [5, 64]", "stray.weight"):
            assert part in str(error.value)
        with pytest.raises(RefitError, match="incomplete"):
            await generator.sample(PROMPT, SamplingParams(2), "s")
        await load_into(generator, good.items())
        assert len((await generator.sample(PROMPT, SamplingParams(2), "s")).tokens) == 2

    run(generator, body)


def test_a_tied_head_may_come_or_not_but_may_not_differ_from_the_embedding() -> None:
    generator = make(tiny_qwen3)
    names = dict(named_weights(generator.engine.model))
    assert "lm_head.weight" not in names
    state = {name: tensor.clone() for name, tensor in tiny_qwen3(seed=5).state_dict().items()}
    assert "lm_head.weight" in state

    async def body() -> None:
        await load_into(generator, state.items())
        assert torch.equal(names["model.embed_tokens.weight"], state["model.embed_tokens.weight"])
        await load_into(generator, ((n, t) for n, t in state.items() if n != "lm_head.weight"))
        state["lm_head.weight"] += 1
        with pytest.raises(RefitError, match=r"differs from model\.embed_tokens\.weight"):
            await load_into(generator, state.items())

    run(generator, body)


@pytest.mark.parametrize("model", EVERY)
def test_a_model_built_from_its_config_equals_the_original(model: Callable[..., PreTrainedModel]) -> None:
    original = model(seed=2)
    built = build_engine_model(original.config, original.state_dict(), torch.float32)
    assert built.config is not original.config  # or swapping the engine's attention would swap the learner's
    tokens = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(built(tokens).logits, original(tokens).logits)


def test_score_decode_equals_a_plain_forward() -> None:
    generator, reference = make(), tiny_llama(initializer_range=0.3)
    tokens = list(range(30, 60))
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(generator.engine.score_decode(PROMPT, tokens)), expected, atol=1e-4, rtol=0)


def test_a_failing_engine_fails_every_request_with_its_error() -> None:
    generator = make(max_batch=2)

    async def body() -> None:
        with torch.no_grad():
            generator.engine.model.get_output_embeddings().weight.fill_(float("nan"))
        tasks = [asyncio.create_task(generator.sample(PROMPT, SamplingParams(9, seed=i), "s")) for i in range(5)]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, WhetError)
            assert "not finite" in str(outcome)
        with pytest.raises(WhetError, match="not finite"):
            await generator.sample(PROMPT, SamplingParams(1), "later")
        with pytest.raises(WhetError, match="not finite"):
            await generator.pause()

    run(generator, body)


def test_an_engine_without_progress_raises_at_its_deadline() -> None:
    generator = make(deadline=0.2)
    release = threading.Event()

    def stuck(*_: object) -> None:
        release.wait(30)

    generator.engine.model.register_forward_pre_hook(stuck)

    async def body() -> None:
        task = asyncio.create_task(generator.sample(PROMPT, SamplingParams(1), "s"))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineError, match="deadline"):
            await task
        with pytest.raises(DeadlineError, match="deadline"):
            await generator.pause()
        release.set()

    run(generator, body)


def test_cancelled_requests_give_up_their_rows() -> None:
    generator, given_up, passes = make(max_batch=1), threading.Event(), []

    def count(*_: object) -> None:
        passes.append(1)
        if len(passes) > 5:
            given_up.wait(60)

    generator.engine.model.register_forward_pre_hook(count)

    async def body() -> None:
        long = asyncio.create_task(generator.sample(OTHER, SamplingParams(400), "s"))
        queued = asyncio.create_task(generator.sample(OTHER, SamplingParams(400), "s"))
        while len(passes) <= 5:
            await asyncio.sleep(0.01)
        long.cancel()
        queued.cancel()
        await asyncio.sleep(0)  # the cancellations arrive
        given_up.set()
        await generator.sample(PROMPT, SamplingParams(2), "s")
        assert generator.counters.sampled_tokens < 300

    run(generator, body)


def bytes_of(generator: TorchGenerator) -> int:
    """Return the bytes of weights and of cached prompts."""
    tensors = [*generator.engine.model.state_dict().values(), *(linear._packed for linear in generator.engine.linears)]
    tensors += [entry.logits for entry in generator._decoder.prefix_cache._entries.values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None and not tensor.is_mkldnn)


@pytest.mark.parametrize(("model", "dtype"), grid([*EVERY, tiny_qwen3_moe], ["float32", "bfloat16"]))
def test_asleep_before_new_weights_it_holds_none(model: Callable[..., PreTrainedModel], dtype: str) -> None:
    generator = make(model, dtype)
    weights = [(name, tensor.clone()) for name, tensor in named_weights(generator.engine.model)]

    async def body() -> None:
        before = await generator.sample(PROMPT, SamplingParams(20), "s")
        await generator.sleep()
        assert bytes_of(generator) > 0
        await generator.wake()
        await generator.sleep(new_weights=True)
        assert bytes_of(generator) == 0
        assert all(linear._packed is None for linear in generator.engine.linears)
        waiting = asyncio.create_task(generator.sample(PROMPT, SamplingParams(20), "s"))
        with pytest.raises(WhetError, match="it needs new ones"):
            await generator.wake()
        await generator.wake(new_weights=True)
        await load_into(generator, weights, 1)
        after = await waiting
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)

    run(generator, body)


def test_closing_returns_what_was_sampled_so_far_as_aborted() -> None:
    generator = make()

    async def body() -> None:
        with held(generator) as in_flight:
            task = asyncio.create_task(generator.sample(PROMPT, SamplingParams(400), "s"))
            await in_flight()
            await generator.close()
        c = await task
        assert c.finish_reason == "aborted"
        assert 0 < len(c.tokens) < 400
        with pytest.raises(WhetError, match="closed"):
            await generator.sample(PROMPT, SamplingParams(1), "s")

    run(generator, body)


def test_requests_that_cannot_be_met_say_why() -> None:
    model = tiny_llama()
    without = TorchGenerator(TorchGeneratorConfig(dtype="float32"), model)
    params = SamplingParams(3)

    async def body() -> None:
        with pytest.raises(ConfigError, match="tokenizer"):
            await without.sample(PROMPT, SamplingParams(3, stop=("x",)), "s")
        with pytest.raises(WhetError, match="empty prompt"):
            await without.sample([], params, "s")
        with pytest.raises(WhetError, match="outside"):
            await without.sample([VOCAB], params, "s")
        with pytest.raises(ConfigError, match="greedy"):
            await without.sample(PROMPT, SamplingParams(3, distribution=Distribution(temperature=0.0)), "s")

    run(without, body)
    with pytest.raises(ConfigError, match="dtype"):
        TorchGenerator(TorchGeneratorConfig(dtype="bfloat16"), tiny_llama())


def test_a_model_whose_cache_is_not_exact_is_refused_in_words_before_weights_are_there() -> None:
    from transformers import AutoModelForCausalLM, RwkvConfig

    rwkv = AutoModelForCausalLM.from_config(RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2))
    words = "cannot run rwkv: transformers cannot replace its attention .* is not listed as continuing exactly"
    assert re.search(words, TorchGeneratorConfig().cannot_run(rwkv.config) or "")
    with pytest.raises(ConfigError, match=words):
        TorchGenerator(TorchGeneratorConfig(dtype="float32"), rwkv)
    hybrid = tiny_llama()
    assert isinstance(hybrid.config, LlamaConfig)
    hybrid.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="cannot run llama: it has layers of type linear_attention"):
        TorchGenerator(TorchGeneratorConfig(dtype="float32"), hybrid)


def test_that_a_model_is_sampled_slower_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    cached_model._warn_once.cache_clear()
    for _ in range(2):
        make(tiny_granite)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the torch generator samples GraniteMoeHybridForCausalLM with transformers' own cache, which is slower"
    ]


@pytest.mark.parametrize(
    ("on_refit", "model"),
    [
        ("recompute", tiny_llama),
        ("recompute", tiny_qwen3_5),
        pytest.param("recompute", tiny_granite, marks=pytest.mark.slow),
        ("keep", tiny_llama),
        *(pytest.param("keep", model, marks=pytest.mark.slow) for model in STATES),
    ],
)
def test_keys_of_requests_under_way_are_computed_anew_under_new_weights_or_kept(
    on_refit: str, model: Callable[..., PreTrainedModel]
) -> None:
    generator, reference = make(model, on_refit=on_refit, max_batch=3), model(seed=1, initializer_range=0.3)

    async def body() -> None:
        with held(generator):
            tasks = [asyncio.create_task(generator.sample(OTHER, SamplingParams(80, seed=i), "s")) for i in range(5)]
            await generator.sample(PROMPT, SamplingParams(2), "s")
            await load_into(generator, reference.state_dict().items(), 1)
        for c in await asyncio.gather(*tasks):
            assert c.versions[1] == 1
            with torch.no_grad():
                logits = reference(torch.tensor([OTHER + c.tokens]), use_cache=False).logits[0, len(OTHER) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
            new = torch.isclose(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
            assert new[-30:].all() == (on_refit == "recompute" or c.versions[0] == 1)

    run(generator, body)


def test_the_cache_of_requests_under_way_is_emptied_on_the_compute_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = make()

    async def body() -> None:
        def ask(token: int, limit: int) -> asyncio.Task[object]:
            return asyncio.create_task(generator.sample([token] * 5, SamplingParams(limit, seed=limit), "s"))

        with held(generator):
            # the row of the last prompt takes the second's number, so that rows leave in another order than prompts
            first, ends, third, last = [ask(*request) for request in ((7, 400), (8, 2), (8, 400), (9, 400))]
            await ends
            await generator.pause()
        with operations_elsewhere(monkeypatch) as found:
            await generator.resume(1)
        assert not found
        await asyncio.gather(first, third, last)

    run(generator, body)


def test_an_engine_without_memory_says_what_takes_less() -> None:
    generator = make()
    generator.engine.model.register_forward_pre_hook(lambda *_: torch.empty(2**50))
    with pytest.raises(GeneratorError, match=r"is out of memory \(tried to allocate .* lower generator.max_batch"):
        run(generator, lambda: generator.sample(PROMPT, SamplingParams(4)))
