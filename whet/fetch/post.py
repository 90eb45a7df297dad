"""Requests to servers of others: their answers are bounded, and repeated requests spread out."""

import random
from typing import TYPE_CHECKING

from whet.base.seeds import derive_seed

if TYPE_CHECKING:
    import httpx


async def bounded(response: "httpx.Response", most: int) -> bytes:
    """Return the content of a streamed answer. Raises ``ValueError`` for one of more than ``most`` bytes."""
    content = b""
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > most:
            raise ValueError(f"the answer is longer than {most} bytes")
    return content


def pause(attempt: int, *name: int | str) -> float:
    """Return the seconds to wait before repeat 1, 2 ... of a request: doubling, at most 10, and drawn from the name, so
    that requests which failed together don't come back together."""
    return min(0.2 * 2**attempt, 10.0) * random.Random(derive_seed("pause", *name, attempt)).uniform(0.5, 1.0)
