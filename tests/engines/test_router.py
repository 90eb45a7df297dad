"""Several replicas behind one generator: the contract, who goes where, and errors that name their replica."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.engine_contract import OTHER, PROMPT, PausableContract, run, sample_all
from tests.engines.holding import held
from tests.engines.test_torch_generator import make
from tests.toy import toy_recipe
from tests.weights.test_in_process import learn_something
from whet.base.errors import GeneratorError, RefitError, WhetError
from whet.engines.base import Completion, SamplingParams
from whet.engines.router import Router
from whet.engines.torch.config import TorchGeneratorConfig
from whet.engines.torch.loading import named_weights
from whet.run.build import build_generator, build_learner, build_renderer, build_sync


def routed(replicas: int = 2, prefix_weight: float = 8.0) -> Router:
    return Router([make(max_batch=12) for _ in range(replicas)], prefix_weight)


class TestContract(PausableContract):
    held = staticmethod(held)

    @pytest.fixture
    def generator(self) -> Router:
        return routed()


def prompt_tokens(router: Router) -> list[int]:
    """Computed by each replica."""
    return [replica.counters.prefill_tokens for replica in router.replicas]


def test_the_samples_of_one_prompt_meet_on_one_replica_and_prompts_spread() -> None:
    router = routed()

    async def body() -> None:
        requests = [((PROMPT, OTHER)[i // 8], SamplingParams(5, seed=i)) for i in range(16)]
        await sample_all(router, requests)
        assert prompt_tokens(router) == [len(PROMPT), len(OTHER)]

    run(router, body)


def test_an_episode_stays_with_its_replica_and_a_later_one_finds_the_prompt() -> None:
    router = routed()

    async def body() -> None:
        first, other = await sample_all(router, [(PROMPT, SamplingParams(4)), (OTHER, SamplingParams(4))])
        await router.sample(PROMPT + first.tokens + [9], SamplingParams(4), "session 0")
        await router.sample(OTHER + other.tokens + [9], SamplingParams(4), "session 1")
        assert (await router.sample(OTHER, SamplingParams(2), "another")).cached == len(OTHER)
        assert prompt_tokens(router) == [len(PROMPT) + 5, len(OTHER) + 5]

    run(router, body)


def test_a_prompt_that_all_want_spills_over_to_idle_replicas() -> None:
    router = routed(3, prefix_weight=10)

    async def body() -> None:
        tasks = [asyncio.create_task(router.sample(PROMPT, SamplingParams(30, seed=i), f"s{i}")) for i in range(12)]
        await asyncio.sleep(0)
        prompt = len(PROMPT)
        assert router.placement.outstanding == [prompt + 5 * 30, prompt + 5 * 30, prompt + 2 * 30]
        await asyncio.gather(*tasks)
        assert router.placement.outstanding == [0, 0, 0]

    run(router, body)


def test_nothing_is_drawn_to_a_replica_by_what_it_knew_under_older_weights() -> None:
    router = routed()

    async def body() -> None:
        await sample_all(router, [(OTHER, SamplingParams(1)), (PROMPT, SamplingParams(1))])
        await router.pause()
        await router.resume(1)
        await router.sample(PROMPT, SamplingParams(1), "session 1")
        assert prompt_tokens(router) == [len(OTHER) + len(PROMPT), len(PROMPT)]

    run(router, body)


def test_an_error_names_its_replica_and_the_others_are_closed() -> None:
    router = routed()

    async def broken(*_: object) -> Completion:
        raise WhetError("the engine died")

    async def body() -> None:
        router.replicas[1].sample = broken  # type: ignore[method-assign]
        good, bad = await asyncio.gather(
            *(router.sample(p, SamplingParams(2), "") for p in (PROMPT, OTHER)), return_exceptions=True
        )
        assert isinstance(good, Completion)
        assert str(bad) == "replica 2 of 2: the engine died"
        assert router.placement.outstanding == [0, 0]

    run(router, body)


def test_every_replica_gets_the_weights_and_proves_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicated = TorchGeneratorConfig(dtype="float32", max_batch=4, max_context=256, replicas=2)

    async def go() -> None:
        plain = toy_recipe(tiny_model)
        recipe = plain.model_copy(update={"generator": replicated})
        renderer = build_renderer(recipe)
        router: Any = build_generator(recipe, renderer)
        learner = await build_learner(recipe, tmp_path, recipe.cluster.build())
        try:
            sync = build_sync(recipe, renderer.render_prompt([{"role": "user", "content": "over the wire"}]))
            await learn_something(learner)
            gathered: list[Any] = []
            gather = learner.begin_weights

            async def counted(sending: Any) -> Any:
                gathered.append(await gather(sending))
                return gathered[-1]

            monkeypatch.setattr(learner, "begin_weights", counted)
            await sync.publish(learner, router, 3)
            assert len(gathered) == 2  # to write them and to prove them, not once for each replica
            assert [one.version for one in router.replicas] == [3, 3]
            one, two = (dict(named_weights(each.engine.model)) for each in router.replicas)
            assert all(one[name].equal(two[name]) for name in one)
            opened = router.replicas[1].engine.open()
            honest = opened.load
            opened.load = lambda named: honest([(n, t + 1) for n, t in named])
            monkeypatch.setattr(router.replicas[1].engine, "open", lambda: opened)
            with pytest.raises(RefitError, match=r"^replica 2 of 2: .*weights differ from"):
                await sync.publish(learner, router, 4)
        finally:
            await router.close()
            await learner.close()

    asyncio.run(go())


def test_a_stream_hands_out_the_tokens_of_its_replica() -> None:
    router, handed_out = routed(), list[int]()

    async def body() -> None:
        params = SamplingParams(20, seed=3)
        whole = await router.stream(PROMPT, params, "s", handed_out.extend)
        assert handed_out == whole.tokens[: len(handed_out)]
        assert len(handed_out) >= 18, "the last ones may come with the completion only"
        assert whole.tokens == (await router.sample(PROMPT, params, "t")).tokens
        assert router.placement.outstanding == [0, 0]

    run(router, body)


class Silent:
    """An engine without streams."""

    stream: Any = None

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)


class DiesInAStream(Silent):
    """An engine that hands out the first tokens, and is lost."""

    async def stream(self, prompt: list[int], params: SamplingParams, session: str, sampled: Any) -> Completion:
        completion = await self.inside.sample(prompt, params, session)
        sampled(completion.tokens[:3])
        sampled(completion.tokens[3:7])
        raise GeneratorError("the engine died")


@pytest.mark.parametrize("streams", [True, False], ids=["to a stream", "to an engine without streams"])
def test_a_stream_continues_at_the_token_at_which_its_replica_was_lost(streams: bool) -> None:
    other: Any = make(max_batch=12)
    router = Router([DiesInAStream(make(max_batch=12)), other if streams else Silent(other)], 8.0)  # type: ignore[list-item]
    pieces = list[list[int]]()

    async def body() -> None:
        whole = await router.stream(PROMPT, SamplingParams(20, seed=3), "s", pieces.append)
        assert pieces[:2] == [whole.tokens[:3], whole.tokens[3:7]]
        tokens = [token for piece in pieces for token in piece]
        assert tokens == whole.tokens[: len(tokens)]
        assert len(tokens) >= 18 if streams else len(tokens) == 7
        assert router.serving == {1}

    run(router, body)
