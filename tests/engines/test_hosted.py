"""The near side of an engine on another node, without a cluster: what happens around its building."""

import asyncio
from typing import Any, cast

import pytest

from tests.engines.hosted import HostableConfig
from whet.base.errors import GeneratorError
from whet.engines.config import Deployment
from whet.engines.remote import RemoteGenerator


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


def hosted(far: Far) -> RemoteGenerator:
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
