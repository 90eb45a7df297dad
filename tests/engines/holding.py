"""Holds requests of the built-in generator in flight: a test that pauses, refits, closes or kills an engine in the
middle of a request must not depend on how fast the engine is."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from whet.engines.torch.decoder import Request
from whet.engines.torch.generator import TorchGenerator

TOKENS = 20  # which each request gets nevertheless, as those do that want fewer


def hold(generator: TorchGenerator, holds: Callable[[], bool], held: Callable[[], object]) -> None:
    """While ``holds``, the engine takes no step if every row has its ``TOKENS`` and no other request could join. It
    calls ``held`` instead."""
    decoder = generator._decoder
    step = decoder.step

    def held_step() -> list[Request]:
        full = len(decoder.rows) == decoder.max_batch or not decoder.queue
        if decoder.rows and full and all(len(row.tokens) >= TOKENS for row in decoder.rows) and holds():
            held()
            time.sleep(0.01)
            return []
        return step()

    decoder.step = held_step  # type: ignore[method-assign]


@contextmanager
def held(generator: Any) -> Iterator[Callable[[], Awaitable[None]]]:
    """Hold the long requests of an engine or, behind a router, of all engines. Yields a function that returns once one
    is held."""
    holding, begun = [True], threading.Event()
    for engine in getattr(generator, "replicas", [generator]):
        hold(engine, lambda: bool(holding), begun.set)
    try:
        yield lambda: until(begun.is_set)
    finally:
        holding.clear()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
