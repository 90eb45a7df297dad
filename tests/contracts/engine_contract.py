"""The contracts of engines. A test class for each engine inherits these tests.

The subclass defines the fixture ``generator``: usable inside ``asyncio.run``, with the byte tokenizer of ``tests.tiny``
and a context of at least 128 tokens. Tests of exact numbers, which not every engine promises, are in the subclass.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import exp
from typing import Any, ClassVar

import pytest

from tests.tiny import VOCAB, tiny_tokenizer
from whet.base.errors import WhetError
from whet.core.types import Distribution
from whet.engines.base import Completion, Engine, PausableEngine, SamplingParams

PROMPT = list(b"two and two is")
OTHER = list(b"a quite different and somewhat longer prompt than the first")


def run(generator: Engine[Any], body: Callable[[], Awaitable[object]]) -> object:
    async def run_and_close() -> object:
        try:
            return await asyncio.wait_for(body(), 120)
        finally:
            await generator.close()

    return asyncio.run(run_and_close())


async def sample_all(generator: Engine[Any], requests: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    return await asyncio.gather(*(generator.sample(p, s, f"session {i}") for i, (p, s) in enumerate(requests)))


class EngineContract:
    def run(self, generator: Engine[Any], body: Callable[[], Awaitable[object]]) -> object:
        """Run a test's body. Subclasses may keep an engine that starts slowly in a separate event loop."""
        return run(generator, body)

    @staticmethod
    def held(generator: Any) -> AbstractContextManager[Callable[[], Awaitable[None]]]:
        """Keep long requests in flight meanwhile, in engines that tests can hold. Gives a function that returns once
        one is in flight."""
        return nullcontext(partial(asyncio.sleep, 0.01))

    def test_a_completion_has_one_logprob_per_token_and_stops_at_its_limit(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            for limit in (1, 2, 9):
                c = await generator.sample(PROMPT, SamplingParams(limit, seed=3), "s")
                assert len(c.tokens) == len(c.logprobs) == limit
                assert c.finish_reason == "length"
                assert all(x <= 0 for x in c.logprobs)

        self.run(generator, body)

    def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            seeds = [5, 5, 6, 7]
            out = await sample_all(generator, [(PROMPT, SamplingParams(24, seed=seed)) for seed in seeds])
            again = await generator.sample(PROMPT, SamplingParams(24, seed=5), "later")
            assert out[0].tokens == out[1].tokens == again.tokens
            assert len({tuple(c.tokens) for c in out}) == 3

        self.run(generator, body)

    def test_greedy_does_not_depend_on_the_seed_or_the_temperature(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            hot = SamplingParams(12, seed=2, greedy=True, distribution=Distribution(temperature=3.0))
            out = await sample_all(generator, [(PROMPT, SamplingParams(12, seed=1, greedy=True)), (PROMPT, hot)])
            assert out[0].tokens == out[1].tokens

        self.run(generator, body)

    def test_if_only_one_token_can_be_sampled_its_log_prob_is_zero(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            only = SamplingParams(12, seed=2, distribution=Distribution(temperature=0.7, top_k=1))
            sure = SamplingParams(12, seed=3, distribution=Distribution(temperature=0.7, min_p=1.0))
            out = await sample_all(generator, [(PROMPT, p) for p in (only, sure, SamplingParams(12, greedy=True))])
            assert out[0].tokens == out[1].tokens == out[2].tokens
            assert max(map(abs, out[0].logprobs + out[1].logprobs)) < 1e-6
            assert min(out[2].logprobs) < -1e-3

        self.run(generator, body)

    def test_invalid_requests_are_errors_and_a_full_context_gives_no_tokens(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            with pytest.raises(WhetError, match="empty prompt"):
                await generator.sample([], SamplingParams(3), "s")
            with pytest.raises(WhetError, match="outside"):
                await generator.sample([VOCAB], SamplingParams(3), "s")
            with pytest.raises(WhetError, match="greedy"):
                await generator.sample(PROMPT, SamplingParams(3, distribution=Distribution(temperature=0.0)), "s")
            c = await generator.sample([1] * 100_000, SamplingParams(3), "s")
            assert (c.tokens, c.finish_reason) == ([], "length")

        self.run(generator, body)

    def test_a_stop_token_ends_the_completion_and_is_kept(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            free = await generator.sample(PROMPT, SamplingParams(24, seed=4), "s")
            stop = free.tokens[10]
            c = await generator.sample(PROMPT, SamplingParams(24, seed=4, stop_token_ids=(stop, 1)), "s")
            first = min(free.tokens.index(t) for t in (stop, 1) if t in free.tokens)
            assert c.tokens == free.tokens[: first + 1]
            assert c.finish_reason == "stop"

        self.run(generator, body)

    def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            tokenizer = tiny_tokenizer()
            d = Distribution(top_k=8)
            for seed in range(64):  # a completion whose tokens 6 to 8 are characters of one byte
                free = await generator.sample(PROMPT, SamplingParams(16, seed=seed, distribution=d), "s")
                stop = tokenizer.decode(free.tokens[6:9])
                if stop.isascii() and len(stop) == 3 and stop.isprintable():
                    break
            c = await generator.sample(PROMPT, SamplingParams(16, seed=seed, distribution=d, stop=("\0\0", stop)), "s")
            assert c.finish_reason == "stop"
            assert len(c.tokens) <= 9
            assert c.tokens == free.tokens[: len(c.tokens)]
            assert tokenizer.decode(c.tokens).endswith(stop)

        self.run(generator, body)

    def test_more_requests_than_fit_at_once_are_all_answered(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            requests = [((PROMPT, OTHER)[i % 2], SamplingParams(1 + i % 7, seed=i)) for i in range(40)]
            out = await sample_all(generator, requests)
            assert [len(c.tokens) for c in out] == [p.max_new_tokens for _, p in requests]

        self.run(generator, body)

    def test_cancelling_a_request_does_not_affect_others(self, generator: Engine[Any]) -> None:
        async def body() -> None:
            alone = await generator.sample(PROMPT, SamplingParams(30, seed=1), "a")
            with self.held(generator) as in_flight:
                cancelled = asyncio.create_task(generator.sample(OTHER, SamplingParams(60, seed=2), "b"))
                other = asyncio.create_task(generator.sample(PROMPT, SamplingParams(30, seed=1), "c"))
                await in_flight()
                cancelled.cancel()
            assert (await other).tokens == alone.tokens
            with pytest.raises(asyncio.CancelledError):
                await cancelled

        self.run(generator, body)


class PausableContract(EngineContract):
    """The contract of engines that also pause."""

    long: ClassVar[int] = 100  # tokens of a request that is in flight; more in engines that tests can't hold

    def test_requests_in_flight_survive_a_pause_and_report_both_versions(self, generator: PausableEngine[Any]) -> None:
        async def body() -> None:
            await generator.pause()
            await generator.resume(3)
            with self.held(generator) as in_flight:
                task = asyncio.create_task(generator.sample(PROMPT, SamplingParams(self.long, seed=1), "s"))
                await in_flight()
                before = await generator.sample(PROMPT, SamplingParams(2, seed=1), "short")
                await generator.pause()
            assert not task.done()
            await asyncio.sleep(0.05)
            assert not task.done()
            await generator.resume(4)
            after = await generator.sample(PROMPT, SamplingParams(2, seed=1), "short")
            assert before.versions == (3, 3)
            assert (await task).versions == (3, 4)
            assert after.versions == (4, 4)

        self.run(generator, body)


class LikeliestContract:
    """The contract of engines whose settings don't refuse ``likeliest`` and ``among``."""

    run: Callable[[Any, Callable[[], Awaitable[object]]], object]

    def test_log_probs_of_other_tokens_are_of_the_distribution_that_the_token_was_sampled_from(
        self, generator: Engine[Any]
    ) -> None:
        async def body() -> None:
            c = await generator.sample(PROMPT, SamplingParams(3, seed=4, likeliest=VOCAB), "s")
            assert len(c.likeliest) == len(c.tokens) == 3
            for token, logprob, of_all in zip(c.tokens, c.logprobs, c.likeliest, strict=True):
                assert len(of_all) >= VOCAB
                assert sum(map(exp, of_all.values())) == pytest.approx(1.0, abs=1e-4)
                assert of_all[token] == pytest.approx(logprob, abs=1e-4)

        self.run(generator, body)

    def test_log_probs_of_chosen_tokens_are_given_however_unlikely_and_change_no_other_request(
        self, generator: Engine[Any]
    ) -> None:
        async def body() -> None:
            plain, whole = SamplingParams(12, seed=1), SamplingParams(1, seed=2, likeliest=VOCAB)
            alone, of_all = await sample_all(generator, [(PROMPT, plain), (OTHER, whole)])
            unlikely = sorted(of_all.likeliest[0], key=of_all.likeliest[0].__getitem__)[:30]
            asked = SamplingParams(1, seed=2, among=tuple(unlikely))
            together, few = await sample_all(generator, [(PROMPT, plain), (OTHER, asked)])
            assert set(few.likeliest[0]) == set(unlikely)
            assert all(
                few.likeliest[0][token] == pytest.approx(of_all.likeliest[0][token], abs=1e-3) for token in unlikely
            )
            assert (together.tokens, len(together.logprobs), together.likeliest) == (alone.tokens, 12, [])
            assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-4)

        self.run(generator, body)
