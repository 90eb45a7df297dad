"""Guessed tokens change no token and no log-prob, to the bit, whatever is guessed and however many are kept."""

import random
import re
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.contracts.engine_contract import OTHER, PROMPT, LikeliestContract, PausableContract
from tests.engines.holding import held
from tests.engines.test_torch_generator import DTYPES, MODELS, STATES
from tests.tiny import tiny_gemma, tiny_llama, tiny_qwen3, tiny_tokenizer
from whet.base.errors import ConfigError
from whet.core.types import Distribution
from whet.engines.base import Completion, SamplingParams
from whet.engines.config import NGram
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.decode_attention import DecodeCache
from whet.engines.torch.decoder import Request
from whet.engines.torch.generator import TorchGenerator
from whet.engines.torch.guesses import Guesser, find

REPEATS = [5, 6, 7, 8, 9, 10] * 8
PROMPTS = [REPEATS, PROMPT, [7] * 5, list(range(70)), REPEATS + OTHER]
FILTERED = Distribution(temperature=0.4, top_k=50, top_p=0.95)


def make(
    model: Callable[..., PreTrainedModel] = tiny_llama, dtype: str = "float32", guess: bool = True, **settings: object
) -> TorchGenerator:
    """An engine of weights so large that sampling repeats itself, and so keeps many guesses."""
    built = model(dtype=DTYPES[dtype], seed=0, initializer_range=0.3)
    options = {"deadline": 60.0, "speculative": NGram(longest=3, shortest=1) if guess else None, **settings}
    return TorchGenerator(TorchGeneratorConfig(dtype=dtype, max_context=512, **options), built, tiny_tokenizer())


def same(ones: Sequence[Completion], others: Sequence[Completion]) -> bool:
    """Return whether completions are equal, but for the weights that sampled them and what was cached."""

    def key(c: Completion) -> tuple[object, ...]:
        return c.tokens, c.logprobs, c.finish_reason, c.likeliest

    return [key(c) for c in ones] == [key(c) for c in others]


class TestContract(PausableContract, LikeliestContract):
    held = staticmethod(held)

    @pytest.fixture
    def generator(self) -> TorchGenerator:
        return make(max_batch=12)


def begin(generator: TorchGenerator, requests: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    made = [generator._request(*request) for request in requests]
    generator._decoder.queue.extend(made)
    return made


def finish(generator: TorchGenerator, requests: list[Request]) -> list[Completion]:
    while generator._decoder.busy:
        generator._decoder.step()
    return [request.completion(0) for request in requests]


def sampled(generator: TorchGenerator, requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """Sample in this thread: no test depends on the clock."""
    return finish(generator, begin(generator, requests))


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair != (tiny_qwen3, "bfloat16")))
        for pair in product(MODELS, ["float32", "bfloat16", "float64"])
    ],
)
def test_tokens_and_log_probs_equal_those_without_guesses_to_the_bit(
    model: Callable[..., PreTrainedModel], dtype: str
) -> None:
    guessing, plain = make(model, dtype, max_batch=11), make(model, dtype, guess=False, max_batch=3)
    requests = [
        (
            PROMPTS[i % 5],
            SamplingParams(15 + 9 * i, seed=i, distribution=FILTERED if i % 2 else Distribution(), greedy=i % 3 == 0),
        )
        for i in range(8)
    ]
    mine, other = sampled(guessing, requests), sampled(plain, requests)
    assert same(mine, other)
    assert same(sampled(guessing, requests[-1:]), other[-1:])
    assert 0 < guessing.counters.kept_guesses <= guessing.counters.guessed_tokens
    assert guessing.counters.sampled_tokens == sum(len(c.tokens) for c in [*mine, mine[-1]])
    assert plain.counters.guessed_tokens == 0


def test_guesses_save_steps_and_are_counted() -> None:
    guessing, plain = make(tiny_qwen3), make(tiny_qwen3, guess=False)  # a tied head likes to say a token again
    request = [(REPEATS, SamplingParams(100, greedy=True))]
    assert same(sampled(guessing, request), sampled(plain, request))
    steps, guessed = guessing.counters.decode_steps, guessing.counters.guessed_tokens
    assert plain.counters.decode_steps == 99
    assert steps < 60
    assert guessing.counters.kept_guesses == 99 - steps
    numbers = guessing.tally().result()
    assert numbers["time/generator/guessed_tokens"] == guessed
    assert numbers["time/generator/kept_share"] == pytest.approx((99 - steps) / guessed)
    assert guessing.tally().result()["time/generator/guessed_tokens"] == 0
    assert "time/generator/guessed_tokens" not in plain.tally().result()


def test_a_request_ends_with_its_stop_token_stop_text_or_limit_though_more_was_guessed_and_kept() -> None:
    guessing, plain = make(tiny_qwen3), make(tiny_qwen3, guess=False)
    whole = sampled(plain, [(REPEATS, SamplingParams(60, greedy=True))])[0].tokens
    text = tiny_tokenizer().decode(whole[20:23])
    requests = [(REPEATS, SamplingParams(n, greedy=True)) for n in (1, 2, 22, 43)]
    requests += [
        (REPEATS, SamplingParams(60, greedy=True, stop_token_ids=(token,))) for token in sorted(set(whole))[::4]
    ]
    requests += [(REPEATS, SamplingParams(60, greedy=True, stop=(text,), likeliest=3))]
    requests += [([3] * 500, SamplingParams(60, greedy=True))]  # the context ends first
    for request in requests:
        (mine,) = sampled(guessing, [request])
        assert same([mine], sampled(plain, [request]))
        assert len(mine.tokens) == len(mine.logprobs) <= request[1].max_new_tokens
    assert guessing.counters.kept_guesses > 20


def test_requests_that_join_or_leave_midway_and_turns_with_known_beginnings_equal_those_without_guesses() -> None:
    guessing = make(tiny_gemma, max_batch=6)
    plain = make(tiny_gemma, guess=False, max_batch=2, prefix_tokens=0)
    prompts = PROMPTS[:4]
    for turn in range(3):
        requests = [(p, SamplingParams(9 * i + 20, seed=10 * turn + i)) for i, p in enumerate(prompts)]
        made = []
        (cancelled,) = begin(guessing, [(OTHER, SamplingParams(200))])
        for request in requests:  # each joins when those before it are at different places
            made += begin(guessing, [request])
            for _ in range(4):
                guessing._decoder.step()
        cancelled.cancelled = True
        mine = finish(guessing, made)
        assert same(mine, sampled(plain, requests))
        assert turn == 0 or all(c.cached > 0 for c in mine)
        prompts = [p + c.tokens + [turn] for p, c in zip(prompts, mine, strict=True)]
    assert guessing.counters.kept_guesses > 5


class Prophet(Guesser):
    """Knows what will be sampled, and guesses it, at times with a mistake, at other times not at all."""

    def __init__(self, futures: list[list[int]], prompts: list[list[int]]) -> None:
        super().__init__(NGram())
        self.whole = [prompt + future for prompt, future in zip(prompts, futures, strict=True)]
        self.draw = random.Random(4)

    def guess(self, texts: Sequence[np.ndarray], limits: Sequence[int]) -> list[list[int]]:
        guesses: list[list[int]] = []
        for text, limit in zip(texts, limits, strict=True):
            known = len(text)
            (future,) = (whole[known:] for whole in self.whole if whole[:known] == text.tolist())
            guess = future[: self.draw.choice([0, 0, 1, 2, 5, 9])][:limit]
            if guess and self.draw.random() < 0.4:
                guess[self.draw.randrange(len(guess))] = 1
            guesses.append(guess)
        self._lengths = [1] * len(texts)
        return guesses


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair != (tiny_gemma, "float32")))
        for pair in product(MODELS, ["float32", "bfloat16"])
    ],
)
def test_any_number_of_right_and_wrong_guesses_in_any_rows_changes_nothing(
    model: Callable[..., PreTrainedModel], dtype: str
) -> None:
    guessing, plain = make(model, dtype, max_batch=13), make(model, dtype, guess=False, max_batch=13)
    prompts = [[*PROMPTS[i % 5], i] for i in range(16)]
    requests = [(p, SamplingParams(12 + 4 * i, seed=i, likeliest=2)) for i, p in enumerate(prompts)]
    expected = sampled(plain, requests)
    guessing._decoder.guesser = Prophet([c.tokens for c in expected], prompts)
    assert same(sampled(guessing, requests), expected)
    counters = guessing.counters
    assert 100 < counters.kept_guesses < 0.9 * counters.guessed_tokens
    assert counters.decode_steps < 0.7 * plain.counters.decode_steps


@pytest.mark.parametrize("on_refit", ["recompute", pytest.param("keep", marks=pytest.mark.slow)])
def test_new_weights_in_the_middle_of_an_answer_give_what_they_give_without_guesses(on_refit: str) -> None:
    new = tiny_qwen3(seed=1, initializer_range=0.3).state_dict()

    def renew(generator: TorchGenerator) -> None:
        generator.engine.model.load_state_dict(new)
        generator.engine.weights_changed()
        generator._decoder.forget_prefixes()
        if on_refit == "recompute":
            generator._decoder.readmit()
        generator._decoder.version = 1

    requests = [(REPEATS, SamplingParams(90, seed=i, distribution=FILTERED)) for i in range(3)]
    guessing = make(tiny_qwen3, max_batch=3)
    mine = begin(guessing, requests)
    while len(mine[0].tokens) < 40:
        guessing._decoder.step()
    cuts = [len(request.tokens) for request in mine]
    assert len(set(cuts)) > 1, "no answer is ahead of another: this shows little"
    renew(guessing)
    completions = finish(guessing, mine)
    assert guessing.counters.kept_guesses > 5
    for request, cut, mine_now in zip(requests, cuts, completions, strict=True):
        plain = make(tiny_qwen3, guess=False)
        (alone,) = begin(plain, [request])
        while len(alone.tokens) < cut:
            plain._decoder.step()
        renew(plain)
        assert same(finish(plain, [alone]), [mine_now])
        assert alone.completion(0).versions == mine_now.versions == (0, 1)


def test_room_for_guesses_is_made_in_the_cache_and_wrong_ones_are_overwritten() -> None:
    engine = make().engine
    [(prefix, _)] = engine.prefill([PROMPT])
    tokens, wrong = [11, 22, 33, 44, 55, 66], [9] * 62
    cache, plain = DecodeCache(2, torch.device("cpu")), DecodeCache(2, torch.device("cpu"))
    for rows in (cache, plain):
        rows.join([prefix, prefix])
    expected = []
    for token in tokens:
        expected.append(engine.decode(plain, [[token], [token]]))
        plain.commit([1, 1])
    assert plain.span == 64
    engine.decode(cache, [[*tokens[:3], *wrong], tokens[:1]])
    cache.commit([3, 1])
    assert cache.span == 128
    assert cache.lengths == [3, 1]
    logits = engine.decode(cache, [tokens[3:], tokens[1:2]])
    assert torch.equal(logits[:3], torch.stack([x[0] for x in expected[3:]]))
    assert torch.equal(logits[3], expected[1][1])


def test_the_newest_of_the_longest_repetitions_is_found() -> None:
    draw = random.Random(1)
    for _ in range(500):
        text = [draw.randrange(4) for _ in range(draw.randint(1, 30))]
        longest = draw.randint(1, 5)
        best = (len(text), 0)
        for place in range(1, len(text)):
            length = next((n for n in range(longest, 0, -1) if n <= place and text[place - n : place] == text[-n:]), 0)
            if length and length >= best[1]:
                best = (place, length)
        assert find(np.array(text), longest) == best


def test_guesses_take_spare_rows_only_those_most_often_kept_first_and_only_where_a_turn_pays() -> None:
    texts = [np.array([1, 2, 3, 9, 8, 1, 2, 3]), np.array([4, 5, 6, 4]), np.array([1, 2, 3])]
    guesser = Guesser(NGram(tokens=3, longest=3, shortest=1))
    assert guesser.guess(texts, [10, 10, 10]) == [[9, 8], [5, 6], []]
    guesser.verified([[9, 8], [5, 6], []], [2, 0, 0])
    assert guesser.guess(texts[:1], [10]) == [[9, 8, 1]]
    assert guesser.guess(texts, [2, 0, 10]) == [[9, 8], [], []]
    spare = guesser.guess([texts[1]] * 7 + [texts[0]] * 7, [10] * 14)
    assert spare == [[]] * 7 + [[9], [9]] + [[]] * 5, "two rows are spare"
    assert guesser.guess([texts[0]] * 16, [10] * 16) == [[]] * 16
    assert guesser.guess([texts[0]] + [texts[2]] * 7, [10] * 8) == [[]] * 8, "one row's guesses don't pay for eight"
    for _ in range(30):
        guesser.guess(texts[1:2], [10])
        guesser.verified([[5, 6, 4]], [0])
    assert guesser.guess(texts[1:2], [10]) == [[]], "what is never kept is not guessed"
    assert any(guesser.guess(texts[1:2], [10]) != [[]] for _ in range(500)), "but for a trial now and then"
    fresh = Guesser(NGram(tokens=3, longest=3, shortest=1))
    assert fresh.guess([np.array([1, 2, 1])], [10]) == [[2, 1, 2]], "what repeats itself keeps repeating"
    strict = Guesser(NGram(longest=3, shortest=2))
    assert strict.guess(texts[1:2], [10]) == [[]], "too few tokens are repeated"


def test_models_whose_state_cannot_be_taken_back_are_refused_in_words() -> None:
    for model in STATES:
        config = TorchGeneratorConfig.model_validate({"dtype": "float32", "speculative": "ngram"})
        words = "generator.speculative can't be used with .*: it has layers of type .*can't be taken back; leave"
        assert re.search(words, config.cannot_run(model().config) or "")
        with pytest.raises(ConfigError, match=words):
            config.build(model().config, tiny_tokenizer())
        with pytest.raises(ConfigError, match=words):
            make(model)
        assert TorchGeneratorConfig().cannot_run(model().config) is None
    assert TorchGeneratorConfig.model_validate({"speculative": "ngram"}).cannot_run(tiny_gemma().config) is None
