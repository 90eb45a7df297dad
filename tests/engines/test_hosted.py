"""The near side of an engine on another node, without a cluster: what happens around its building."""

import asyncio
import operator
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch

from tests.engines.hosted import HostableConfig
from whet.base.errors import GeneratorError
from whet.cluster.config import RayClusterConfig
from whet.engines.base import Completion, SamplingParams
from whet.engines.config import Deployment
from whet.engines.remote import HostedEngine, RemoteGenerator
from whet.metrics import Metrics


class Far:
    """A service whose engine takes a moment to be built, or can't be."""

    where = "on a node far away"

    def __init__(self, works: bool) -> None:
        self.works, self.calls = works, list[str]()
        self.built = False

    def serve(self, *_: Any) -> "Far":
        return self

    async def call(self, method: str, *_: Any) -> None:
        self.calls.append(method)
        if method == "open":
            await asyncio.sleep(0)
            if not self.works:
                raise GeneratorError("no GPU is free")
            self.built = True
        assert self.built, "called before it was built"

    async def close(self) -> None: ...


def hosted(far: "Far | Near") -> RemoteGenerator:
    return RemoteGenerator(HostableConfig(), cast(Any, None), None, Deployment(cluster=cast(Any, far)))


def test_calls_that_come_at_once_wait_until_the_engine_is_built() -> None:
    async def go() -> None:
        generator = hosted(far := Far(works=True))
        await asyncio.gather(generator.pause(), generator.wake(), generator.resume(1))
        assert far.calls == ["open", "engine.pause", "engine.wake", "engine.resume"]
        await generator.close()

    asyncio.run(go())


def test_each_call_says_why_the_engine_could_not_be_built() -> None:
    async def go() -> None:
        generator = hosted(Far(works=False))
        said = []
        for _ in range(3):
            with pytest.raises(GeneratorError, match="no GPU is free") as caught:
                await generator.pause()
            said.append(str(caught.value))
        assert len(set(said)) == 1
        await generator.close()

    asyncio.run(go())


class Near:
    """A service whose engine is in this process."""

    where = "here"

    def __init__(self, engine: Any) -> None:
        self.host = HostedEngine(HostableConfig(), cast(Any, None))
        self.host.engine = engine

    def serve(self, *_: Any) -> "Near":
        return self

    async def call(self, method: str, *args: Any) -> Any:
        return None if method == "open" else await operator.attrgetter(method)(self.host)(*args)

    async def close(self) -> None: ...


class Counts:
    """An engine that counts, and waits before every piece until it may continue."""

    dtype = torch.float32

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.ended = fails, False
        self.continues = asyncio.Event()
        self.pause = self.resume = self.sleep = self.wake = self.refit = self._nothing

    async def _nothing(self) -> None: ...

    async def stream(self, prompt: list[int], params: SamplingParams, session: str, sampled: Any) -> Completion:
        try:
            for start in range(0, 6, 2):
                await self.continues.wait()
                self.continues.clear()
                sampled([start, start + 1])
            if self.fails:
                raise GeneratorError("the engine died")
            return await self.sample(prompt, params, session)
        finally:
            self.ended = True

    async def sample(self, *_: Any) -> Completion:
        return Completion(list(range(7)), [0.0] * 7, (0, 0), "stop")

    def tally(self) -> Metrics:
        return Metrics().sum("calls", 1)

    async def close(self) -> None: ...


class Silent(Counts):
    stream: Any = None


class Unhindered(Counts):
    async def stream(self, *request: Any) -> Completion:
        self.continues.wait = self._nothing  # type: ignore[method-assign, assignment]
        return await super().stream(*request)


class UnhinderedConfig(HostableConfig):
    def build_replica(self, *_: Any) -> Any:
        return Unhindered()


REQUEST = [1, 2], SamplingParams(7), "s"


def test_an_engine_on_another_node_hands_out_its_tokens_while_it_samples() -> None:
    async def go() -> None:
        engine, pieces = Counts(), list[list[int]]()
        generator = hosted(near := Near(engine))

        def sampled(tokens: list[int]) -> None:
            pieces.append(tokens)
            assert not engine.continues.is_set()
            engine.continues.set()

        engine.continues.set()
        completion = await generator.stream(*REQUEST, sampled)
        assert pieces == [[0, 1], [2, 3], [4, 5]]
        assert completion.tokens == list(range(7))
        assert generator.tally().result() == {"calls": 1.0}
        assert not near.host._streams

    asyncio.run(asyncio.wait_for(go(), 60))


def test_an_engine_on_another_node_that_does_not_stream_hands_out_nothing() -> None:
    async def go() -> None:
        pieces = list[list[int]]()
        completion = await hosted(Near(Silent())).stream(*REQUEST, pieces.append)
        assert (completion.tokens, pieces) == (list(range(7)), [])

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_stream_ends_with_the_error_of_its_engine_and_with_its_reader() -> None:
    async def go() -> None:
        engine = Counts(fails=True)
        generator = hosted(near := Near(engine))
        engine.continues.set()
        with pytest.raises(GeneratorError, match=r"the engine died.*This engine is here"):
            await generator.stream(*REQUEST, lambda _: engine.continues.set())
        near.host.engine = engine = Counts()
        reading = asyncio.ensure_future(generator.stream(*REQUEST, lambda _: None))
        engine.continues.set()
        while engine.continues.is_set():
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        while not engine.ended:
            await asyncio.sleep(0)
        assert not near.host._streams

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_reader_of_a_stream_that_was_cancelled_gets_its_end() -> None:
    async def go() -> None:
        host = Near(engine := Counts()).host
        stream = asyncio.ensure_future(host.stream(1, *REQUEST))
        reader = asyncio.ensure_future(host.handed_out(1))
        await asyncio.sleep(0)
        stream.cancel()
        assert await reader == []
        assert engine.ended
        assert not host._streams

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra 'ray' is not installed")
def test_tokens_come_from_another_process_as_they_were_handed_out() -> None:
    async def go() -> None:
        cluster = RayClusterConfig(cpus_per_rank=0.5).build()
        generator = RemoteGenerator(UnhinderedConfig(), cast(Any, None), None, Deployment(cluster=cluster))
        try:
            for _ in range(2):
                pieces = list[list[int]]()
                assert (await generator.stream(*REQUEST, pieces.append)).tokens == list(range(7))
                assert pieces == [[0, 1], [2, 3], [4, 5]]
        finally:
            await generator.close()

    asyncio.run(asyncio.wait_for(go(), 300))
